"""Sequences by themselves: float64, no slots, no batches. What the pool must agree with.

The recurrence of docs/contract.md (C1) to (C4) over all rows of a call at once, token by token;
``test_runs.py`` holds it to ``sluice.testing.oracle``. A row shorter than others has zeros behind
its tokens: a key of zeros and a log decay of zero leave its state as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EXACT = torch.float64


@dataclass
class Sequence:
    """One sequence: its state in float64, its window in the pool's own bits, its slot."""

    name: str
    slot: int
    S: Tensor  # [layers, Hv, K, V] float64
    window: Tensor  # [layers, D, L], the conv state's dtype
    dirty: bool = False  # its row holds anything: the first call must say has_state=False
    tokens: int = 0


def convolve(
    window: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """(C5) for ``x [.., T, D]`` after ``window [.., D, L]``: y, and [window | x] for (C11).

    All [R, ..]; weights are [R, D, W]. The second result has the window's dtype and bits.
    """
    T, W = x.shape[-2], weight.shape[-1]
    inputs = x.mT
    stream = torch.cat([window, inputs.to(window.dtype)], -1)
    if T == 0:
        return x.double(), stream
    seen = torch.cat([window[..., window.shape[-1] - W + 1 :].double(), inputs.double()], -1)
    parts = seen.unfold(-1, W, 1)[..., :T, :]  # [R, D, T, W]
    y = (parts * weight.double()[..., None, :]).sum(-1)
    if bias is not None:
        y = y + bias.double()[..., None]
    if silu:
        y = y * y.sigmoid()
    return y.mT, stream


def normalised(x: Tensor) -> Tensor:
    """(C7)"""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, neg_eigval: bool
) -> tuple[Tensor, Tensor]:
    """(C8), (C9) for a, b [R, T, Hv] and weights [R, Hv]."""
    g = -A_log.double().exp()[:, None] * torch.nn.functional.softplus(
        a.double() + dt_bias.double()[:, None]
    )
    return g, b.double().sigmoid() * (2.0 if neg_eigval else 1.0)


def recurrence(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Outputs [R, T, Hv, V], and the states before the first token and after each.

    S [R, Hv, K, V]; q, k [R, T, Hk, K]; v [R, T, Hv, V]; g, beta [R, T, Hv]: all float64.
    """
    R, T, Hv, V = v.shape
    K, r = q.shape[3], Hv // q.shape[2]
    q = q * K**-0.5
    q, k = (x.repeat_interleave(r, 2) if r > 1 else x for x in (q, k))
    decay = g.exp().reshape(R, T, Hv, 1, 1).unbind(1)
    rows = [x.unsqueeze(3).unbind(1) for x in (q, k, v)]
    strength = beta.reshape(R, T, Hv, 1, 1).unbind(1)
    states, outputs = [S], []
    for q_t, k_t, v_t, decay_t, beta_t in zip(*rows, decay, strength, strict=True):
        S = S * decay_t
        d = beta_t * (v_t - k_t @ S)
        S = S + k_t.mT * d
        outputs.append(q_t @ S)
        states.append(S)
    o = torch.stack(outputs, 1) if outputs else v.new_zeros(R, 0, Hv, 1, V)
    return o.squeeze(3), states


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str) -> Tensor:
    """(C6) over the last dimension."""
    z = z.double()
    act = z.sigmoid() * (z if gate == "silu" else 1.0)
    normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return weight.double() * normed * act
