"""Speculative decoding as vLLM keeps it: one state for each draft token.

The recurrent state after token t goes to slot t of the sequence, by one ``decode`` for each token.
The conv window lies in slot 0, at a column that depends on how many tokens were accepted: it is
read there, the convolution leaves it frozen, and afterwards the page holds
``[window without its oldest column | this step's inputs]`` from its first column on.

No value is read on the host, so a graph can be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sluice.integrations.vllm.batch import PAD, Drafts

if TYPE_CHECKING:
    from sluice.integrations.vllm.serve import Layer


def run(ops: Any, layer: Layer, d: Drafts, qkv: Tensor, b: Tensor, a: Tensor, o: Tensor) -> None:
    """Outputs o [tokens, HV, V] of packed tokens; both states follow every draft token."""
    N, T = d.slots.shape
    device = qkv.device
    real = d.slots[:, 0] > PAD
    lengths = d.cu_seqlens.diff()
    # dense [N, T]; a shorter sequence repeats other tokens, whose results go nowhere
    steps = torch.arange(T, device=device)
    at = (d.cu_seqlens[:-1, None] + steps).clamp(max=qkv.shape[0] - 1)
    x = qkv[at]
    kept = (d.accepted.long() - 1).clamp(0, T - 1)
    window = _roll(layer, d.slots[:, 0], kept, real, x)
    rows = torch.arange(N, device=device, dtype=d.slots.dtype)
    tokens = ops.conv_qkv(
        x,
        layer.conv_weight,
        a=a[at],
        b=b[at],
        state=window.transpose(1, 2),
        slots=torch.where(real, rows, -1),
        freeze=True,
        **layer.heads(),
    )
    read = d.slots.gather(1, kept[:, None]).squeeze(1)
    dense = torch.empty(N, T, *o.shape[1:], dtype=o.dtype, device=device)
    for t in range(T):
        live = real & (t < lengths)
        ops.decode(
            *(y[:, t : t + 1] for y in tokens),
            state=layer.state,
            slots=torch.where(live, read, PAD),
            write_slots=torch.where(live, d.slots[:, t], PAD),
            pad_slot=PAD,
            out=dense[:, t : t + 1],
        )
        read = d.slots[:, t]
    _pack(dense, d.cu_seqlens, o)


def _roll(layer: Layer, slots: Tensor, kept: Tensor, real: Tensor, x: Tensor) -> Tensor:
    """The window [N, W - 1, D] each sequence continues from; moves the pages on to this step."""
    W, T = layer.shape.conv_width, x.shape[1]
    pages = layer.conv_state.transpose(1, 2)  # [P, L, D]
    slots = slots.long()
    before = pages[slots]
    columns = kept[:, None] + torch.arange(W - 1, device=x.device)
    window = before.gather(1, columns[:, :, None].expand(-1, -1, before.shape[2]))
    after = torch.cat([window[:, 1:], x.to(before.dtype), before[:, W - 2 + T :]], dim=1)
    pages[slots] = torch.where(real[:, None, None], after, before)  # padding: slot 0 as it was
    return window


def _pack(dense: Tensor, cu_seqlens: Tensor, o: Tensor) -> None:
    """Outputs [N, T, ..] to packed tokens; tokens behind the last border get zeros."""
    N, T = dense.shape[:2]
    token = torch.arange(o.shape[0], device=o.device, dtype=cu_seqlens.dtype)
    row = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True).clamp(max=N - 1)
    step = (token - cu_seqlens[row]).clamp(0, T - 1)
    inside = (token < cu_seqlens[-1])[:, None, None]
    o.copy_(torch.where(inside, dense[row, step], 0))
