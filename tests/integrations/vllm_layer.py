"""A layer of the vLLM plug-in with pages as vLLM has them; no vLLM is needed."""

from __future__ import annotations

from typing import Any

import torch

from sluice import ops
from sluice.integrations.vllm import batch, serve
from sluice.layers.qwen import QwenShape
from sluice.testing.compare import tolerance

PAGES = 40
TOLERANCE = 10 * tolerance(torch.float32, device="cpu")  # conv, recurrence and norm in a row


class Engine:
    """A layer with vLLM's pages, ``drafts`` extra columns in the conv state, all full of NaN."""

    def __init__(self, order: str = "split", drafts: int = 0, dim_first: bool = False) -> None:
        self.random = torch.Generator().manual_seed(0)
        s = self.shape = QwenShape(
            "test", 16, 2, 4, 1, (0,), head_k_dim=16, head_v_dim=8, order=order
        )
        self.drafts = drafts
        L, D = s.conv_width - 1 + drafts, s.conv_channels
        conv = (D, L) if dim_first else (L, D)
        words = L * D + s.num_v_heads * s.head_v_dim * s.head_k_dim
        page = torch.full((PAGES, words + 16), float("nan"))
        pages = page[:, : L * D].view(PAGES, *conv)
        state = page[:, L * D : words].view(PAGES, s.num_v_heads, s.head_v_dim, s.head_k_dim)
        self.page = page
        self.layer = serve.Layer(
            s,
            self.draw(D, s.conv_width) / 2,
            self.draw(s.num_v_heads),
            self.draw(s.num_v_heads),
            1 + self.draw(s.head_v_dim) / 10,
            pages if dim_first else pages.transpose(1, 2),
            state,
            False,
        )

    def draw(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.random)

    def inputs(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        s = self.shape
        return self.draw(n, s.conv_channels + s.value_dim), self.draw(n, 2 * s.num_v_heads)

    def alone(self, qkvz: torch.Tensor, ba: torch.Tensor) -> torch.Tensor:
        """One sequence from its first token."""
        s, w = self.shape, self.layer
        qkv, z, b, a = serve.split(s, qkvz, ba)
        q, k, v, g, beta = ops.conv_qkv(qkv[None], w.conv_weight, a=a[None], b=b[None], **w.heads())
        o, _ = ops.prefill(q, k, v, g, beta)
        out = torch.empty_like(o[0])
        serve.norm(ops, w, o[0], z, out)
        return out

    def run(self, metadata: Any, qkvz: torch.Tensor, ba: torch.Tensor) -> torch.Tensor:
        s = self.shape
        out = torch.zeros(qkvz.shape[0], s.num_v_heads, s.head_v_dim)
        serve.run(ops, self.layer, batch.read(metadata), qkvz, ba, out)
        return out


def cat(*parts) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def part(x, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x[0][start:stop], x[1][start:stop]
