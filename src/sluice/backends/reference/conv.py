"""Depthwise causal convolution with a rolling window of raw inputs, docs/contract.md (C5).

    y_t = act(bias + sum_w weight_w x_(t - W + 1 + w))

The window [N, D, L] holds the last L raw inputs, oldest first; inputs before a sequence's start
come from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sluice.backends.reference import rows
from sluice.backends.reference.pointwise import silu
from sluice.contract.problem import ConvProblem, StateAddressing
from sluice.contract.tensors import ConvQkvTensors, ConvTensors, Rows


def causal_conv1d(p: ConvProblem, t: ConvTensors) -> None:
    """Serve ``causal_conv1d``."""
    t.out.copy_(convolved(p, t))


def convolved(p: ConvProblem, t: ConvTensors | ConvQkvTensors) -> Tensor:
    """y [B, T, D] in the arithmetic's dtype; rolls the state and writes checkpoints."""
    dtype = rows.compute_dtype(p.dtype)
    x = t.x.mT.to(dtype)  # [B, D, T]
    weight, bias = t.weight.to(dtype), None if t.bias is None else t.bias.to(dtype)
    if t.state is None:
        window = x.new_zeros(p.N, p.D, p.W - 1)
    else:
        window = window_of(t.state, p.rows, t.rows, p.N, dtype)
    dead = rows.padded(p.rows, t.rows, p.N, x.device).view(-1, 1, 1)

    if not p.varlen:
        y = convolve(window, x, weight, bias, p.activation)
        y = torch.where(dead, y.new_zeros(()), y)
        _store(p, t, window, x, slice(None))
        return y.mT
    y = torch.zeros_like(x)
    for i, (a, b) in enumerate(rows.spans(t.rows)):
        one = slice(i, i + 1)
        part = convolve(window[one], x[..., a:b], weight, bias, p.activation)
        y[..., a:b] = torch.where(dead[one], y.new_zeros(()), part)
        _store(p, t, window[one], x[..., a:b], one)
    return y.mT


def convolve(
    window: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """(C5) for x [N, D, T] after a window [N, D, L >= W - 1]."""
    W, T = weight.shape[1], x.shape[-1]
    inputs = torch.cat([window[..., window.shape[-1] - (W - 1) :], x], dim=-1)
    y = x.new_zeros(()) if bias is None else bias.unsqueeze(-1)
    for w in range(W):
        y = y + weight[:, w : w + 1] * inputs[..., w : w + T]
    return silu(y) if activation == "silu" else y


def window_of(state: Tensor, a: StateAddressing, r: Rows, N: int, dtype: torch.dtype) -> Tensor:
    """Each sequence's window [N, D, L], zeros where it starts anew."""
    return rows.read_rows(state, a, r, N, dtype)


def rolled(window: Tensor, x: Tensor, count: Tensor | int) -> Tensor:
    """The window after ``count`` (a number, or one a row) of the tokens x [N, D, T]."""
    L = window.shape[-1]
    inputs = torch.cat([window, x], dim=-1)
    if isinstance(count, int):
        return inputs[..., count : count + L]
    index = count.long().view(-1, 1, 1) + torch.arange(L, device=x.device)
    return inputs.gather(-1, index.expand(*window.shape[:2], L))


def _store(
    p: ConvProblem, t: ConvTensors | ConvQkvTensors, window: Tensor, x: Tensor, pick: slice
) -> None:
    """Write the window after the last token, and at checkpoints."""
    if t.state is None or p.freeze:
        return
    T = x.shape[-1]
    r = Rows(*(None if y is None else y[pick] for y in t.rows[:3]))
    if r.slots is None and r.write_slots is None and pick != slice(None):
        r = r._replace(slots=torch.arange(p.N, device=x.device)[pick])
    if t.checkpoint_slots is not None:
        slots = t.checkpoint_slots[pick]
        live = (slots > p.rows.pad_slot) & ~rows.padded(p.rows, t.rows, p.N, x.device)[
            pick
        ].unsqueeze(1)
        if t.checkpoint_positions is None:
            for j in range(min(slots.shape[1], T // p.checkpoint_every)):
                after = rolled(window, x, (j + 1) * p.checkpoint_every)
                rows.scatter(t.state, slots[:, j], live[:, j], after)
        else:
            positions = t.checkpoint_positions[pick]
            for j in range(slots.shape[1]):
                after = rolled(window, x, positions[:, j].clamp(0, T))
                rows.scatter(t.state, slots[:, j], live[:, j], after)
    rows.write_rows(t.state, p.rows, r, rolled(window, x, T))
