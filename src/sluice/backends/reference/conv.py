"""Depthwise causal convolution with a rolling window of raw inputs, docs/contract.md (C5).

    y_t = act(bias + sum_w weight_w x_(t - W + 1 + w))

The window [N, D, L] holds the last L raw inputs, oldest first; inputs before a sequence's start
come from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sluice.backends.reference import rows
from sluice.backends.reference.pointwise import silu
from sluice.contract.spec import ConvQkvSpec, ConvSpec


def causal_conv1d(p: ConvSpec | ConvQkvSpec, t: Any) -> None:
    """Serve ``causal_conv1d``."""
    t.out.copy_(convolved(p, t))


def convolved(p: ConvSpec | ConvQkvSpec, t: Any) -> Tensor:
    """y [B, T, D] in the arithmetic's dtype; rolls the state and writes checkpoints."""
    dtype = rows.compute_dtype(p.dtype)
    x = t.x.mT.to(dtype)  # [B, D, T]
    weight, bias = t.weight.to(dtype), None if t.bias is None else t.bias.to(dtype)
    if t.state is None:
        window = x.new_zeros(p.N, p.D, p.W - 1)
    else:
        window = rows.read_rows(t.state, p, t, dtype)
        if t.window_start is not None:
            window = _from_column(window, t.window_start, p.W - 1)
    dead = rows.padded(p, t).view(-1, 1, 1)

    if not p.varlen:
        y = convolve(window, x, weight, bias, p.silu)
        y = torch.where(dead, y.new_zeros(()), y)
        _store(p, t, window, x)
        return y.mT
    y = torch.zeros_like(x)
    for i, (a, b) in enumerate(rows.spans(t)):
        one = slice(i, i + 1)
        part = convolve(window[one], x[..., a:b], weight, bias, p.silu)
        y[..., a:b] = torch.where(dead[one], y.new_zeros(()), part)
        _store(p, t, window[one], x[..., a:b], i)
    return y.mT


def convolve(
    window: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activate: bool
) -> Tensor:
    """(C5) for x [N, D, T] after a window [N, D, L >= W - 1]."""
    W, T = weight.shape[1], x.shape[-1]
    inputs = torch.cat([window[..., window.shape[-1] - (W - 1) :], x], dim=-1)
    y = x.new_zeros(()) if bias is None else bias.unsqueeze(-1)
    for w in range(W):
        y = y + weight[:, w : w + 1] * inputs[..., w : w + T]
    return silu(y) if activate else y


def rolled(window: Tensor, x: Tensor, count: Tensor | int) -> Tensor:
    """The window after ``count`` (a number, or one per row) of the tokens x [N, D, T]."""
    L = window.shape[-1]
    inputs = torch.cat([window, x], dim=-1)
    if isinstance(count, int):
        return inputs[..., count : count + L]
    index = count.long().view(-1, 1, 1) + torch.arange(L, device=x.device)
    return inputs.gather(-1, index.expand(*window.shape[:2], L))


def _from_column(state: Tensor, start: Tensor, width: int) -> Tensor:
    """Each row's window of ``width`` columns. A start outside of the state is moved inside."""
    start = start.long().clamp(0, state.shape[-1] - width)
    index = start.view(-1, 1, 1) + torch.arange(width, device=state.device)
    return state.gather(-1, index.expand(*state.shape[:2], width))


def _store(p: ConvSpec | ConvQkvSpec, t: Any, window: Tensor, x: Tensor, first: int = 0) -> None:
    """Write the windows of sequences ``first`` and on: after the last token, and at checkpoints."""
    if t.state is None or p.freeze:
        return
    T, pick = x.shape[-1], slice(first, first + x.shape[0])
    if t.window_start is not None:  # (C12): left-aligned, and the columns after it stay
        kept = torch.cat([window, x], dim=-1)[..., min(T, 1) :]
        rows.write_rows(t.state[..., : kept.shape[-1]], p, t, kept, first)
        return
    if t.checkpoint_slots is not None:
        slots = t.checkpoint_slots[pick]
        live = (slots > p.pad_slot) & ~rows.padded(p, t)[pick].unsqueeze(1)
        if t.checkpoint_positions is None:
            for j in range(min(slots.shape[1], T // p.checkpoint_every)):
                after = rolled(window, x, (j + 1) * p.checkpoint_every)
                rows.scatter(t.state, slots[:, j], live[:, j], after)
        else:
            positions = t.checkpoint_positions[pick]
            for j in range(slots.shape[1]):
                after = rolled(window, x, positions[:, j].clamp(0, T))
                rows.scatter(t.state, slots[:, j], live[:, j], after)
    rows.write_rows(t.state, p, t, rolled(window, x, T), first)
