"""A layer of the vLLM plug-in with pages as vLLM has them; no vLLM is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sluice import ops
from sluice.integrations.vllm import batch, serve
from sluice.layers.qwen import QwenShape
from sluice.testing.compare import tolerance

PAGES = 40
TOLERANCE = 10 * tolerance(torch.float32, device="cpu")  # conv, recurrence and norm in a row


class Engine:
    """A layer with vLLM's pages, ``drafts`` extra columns in the conv state, all full of NaN.

    ``dtype`` is that of everything but the recurrent states and what makes the gates.
    """

    def __init__(
        self,
        order: str = "split",
        drafts: int = 0,
        dim_first: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
        batch_invariant: bool = False,
    ) -> None:
        self.random = torch.Generator().manual_seed(0)
        s = self.shape = QwenShape(
            "test", 16, 2, 4, 1, (0,), head_k_dim=16, head_v_dim=8, order=order
        )
        self.drafts, self.dtype = drafts, dtype
        L, D = s.conv_width - 1 + drafts, s.conv_channels
        conv = (D, L) if dim_first else (L, D)
        words = L * D + s.num_v_heads * s.head_v_dim * s.head_k_dim
        page = torch.full((PAGES, words + 16), float("nan"))
        pages = page[:, : L * D].view(dtype)[:, : L * D].view(PAGES, *conv)
        state = page[:, L * D : words].view(PAGES, s.num_v_heads, s.head_v_dim, s.head_k_dim)
        self.page = page
        self.layer = serve.Layer(
            s,
            (self.draw(D, s.conv_width) / 2).to(dtype),
            self.draw(s.num_v_heads),
            self.draw(s.num_v_heads),
            (1 + self.draw(s.head_v_dim) / 10).to(dtype),
            pages if dim_first else pages.transpose(1, 2),
            state,
            batch_invariant,
        )

    def draw(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.random)

    def inputs(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        s = self.shape
        sizes = s.conv_channels + s.value_dim, 2 * s.num_v_heads
        qkvz, ba = (self.draw(n, size).to(self.dtype) for size in sizes)
        return qkvz, ba

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
        out = torch.zeros(qkvz.shape[0], s.num_v_heads, s.head_v_dim, dtype=self.dtype)
        serve.run(ops, self.layer, batch.read(metadata), qkvz, ba, out)
        return out


def cat(*parts) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def part(x, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x[0][start:stop], x[1][start:stop]


def made_metadata(**given) -> SimpleNamespace:
    """Nothing but what is given, as vLLM's dataclass has it."""
    fields = dict.fromkeys(
        (
            "has_initial_state", "spec_query_start_loc", "non_spec_query_start_loc",
            "spec_state_indices_tensor", "non_spec_state_indices_tensor", "spec_sequence_masks",
            "spec_token_indx", "non_spec_token_indx", "num_accepted_tokens", "checkpoint",
        )
    )  # fmt: skip
    counts = dict.fromkeys(("num_prefills", "num_decodes", "num_decode_tokens"), 0)
    return SimpleNamespace(**{**fields, **counts, "num_spec_decodes": 0, **given})


def prompt_batch(slots, lengths, known, decodes: int = 0, **more) -> SimpleNamespace:
    borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    return made_metadata(
        num_prefills=len(slots) - decodes,
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_actual_tokens=int(borders[-1]),
        non_spec_query_start_loc=borders,
        non_spec_state_indices_tensor=torch.tensor(slots, dtype=torch.int32),
        has_initial_state=torch.tensor(known),
        **more,
    )


def decode_batch(slots) -> SimpleNamespace:
    n = len(slots)
    return made_metadata(
        num_decodes=n,
        num_decode_tokens=n,
        num_actual_tokens=n,
        non_spec_query_start_loc=torch.arange(n + 1, dtype=torch.int32),
        non_spec_state_indices_tensor=torch.tensor(slots, dtype=torch.int32),
    )


def draft_batch(slots, lengths, accepted, **more) -> SimpleNamespace:
    borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    return made_metadata(
        **{
            "num_spec_decodes": len(slots),
            "num_actual_tokens": int(borders[-1]),
            "spec_query_start_loc": borders,
            "spec_state_indices_tensor": torch.tensor(slots, dtype=torch.int32),
            "spec_sequence_masks": torch.ones(len(slots), dtype=torch.bool),
            "num_accepted_tokens": torch.tensor(accepted, dtype=torch.int32),
            **more,
        }
    )
