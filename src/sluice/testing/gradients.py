"""Exact gradients: autograd through the recurrence, token by token, in float64.

Each function takes tensors of any float dtype and returns float64 tensors that autograd can follow
back to them. Like the oracle, this file imports nothing that it judges.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

EXACT = torch.float64
NORM_EPS = 1e-6


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    neg_eigval: bool = False,
    initial_state: Tensor | None = None,
    state_layout: str = "vk",
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``prefill`` in its functional form, [B, T, ..]: the outputs and the final states."""
    q, k, v, g, beta, A_log, dt_bias, S = (
        None if x is None else x.to(EXACT)
        for x in (q, k, v, g, beta, A_log, dt_bias, initial_state)
    )
    T = q.shape[1]
    if cu_seqlens is not None:  # what lies after the last sequence is not looked at
        end = int(cu_seqlens[-1])
        q, k, v, g, beta = (None if x is None else x[:, :end] for x in (q, k, v, g, beta))
    (B, _, HQ, K), HK, (HV, V) = q.shape, k.shape[2], v.shape[2:]
    if A_log is not None:
        a = g if dt_bias is None else g + dt_bias
        rate = A_log.exp()
        g = -(rate[:, None] if g.dim() == 4 else rate) * torch.nn.functional.softplus(a)
        beta = None if beta is None else beta.sigmoid() * (2 if neg_eigval else 1)
    if normalize_qk:
        q, k = (x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for x in (q, k))
    q = q * (K**-0.5 if scale is None else scale)
    k = k.repeat_interleave(HV // HK, dim=2)
    q = q.repeat_interleave(max(1, HV // HQ), dim=2).unflatten(2, (HV, -1))  # [B, T, HV, G, K]
    decay = None if g is None else (g if g.dim() == 4 else g.unsqueeze(-1)).exp().unsqueeze(-1)
    spans = [(slice(b, b + 1), b, 0, T) for b in range(B)]
    if cu_seqlens is not None:
        pairs = pairwise(cu_seqlens.tolist())
        spans = [(slice(i, i + 1), 0, a, b) for i, (a, b) in enumerate(pairs)]
    if S is None:
        S = v.new_zeros(len(spans), HV, K, V)
    elif state_layout == "vk":
        S = S.mT
    rows: list[list[Tensor]] = [[] for _ in range(B)]
    finals = []
    for one, row, start, stop in spans:
        state = S[one][0]
        for t in range(start, stop):
            state = state if decay is None else decay[row, t] * state
            d = v[row, t]
            if beta is not None:
                d = beta[row, t, :, None] * (d - (k[row, t].unsqueeze(1) @ state).squeeze(1))
            state = state + k[row, t].unsqueeze(-1) * d.unsqueeze(1)
            rows[row].append(q[row, t] @ state)
        finals.append(state)
    for row in rows:
        row.extend([v.new_zeros(HV, q.shape[3], V)] * (T - len(row)))
    empty = v.new_zeros(0, HV, q.shape[3], V)
    o = torch.stack([torch.stack(row) if row else empty for row in rows]) if rows else empty[None]
    final = torch.stack(finals) if finals else S
    return o.flatten(2, 3), final.mT if state_layout == "vk" else final


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``causal_conv1d`` in its functional form, [B, T, D]: y and the final windows."""
    x, weight, bias, window = (
        None if y is None else y.to(EXACT) for y in (x, weight, bias, initial_state)
    )
    (B, T, D), W = x.shape, weight.shape[1]
    spans = [(b, 0, T) for b in range(B)]
    if cu_seqlens is not None:
        spans = [(0, a, b) for a, b in pairwise(cu_seqlens.tolist())]
    ys: list[list[Tensor]] = [[] for _ in range(B)]
    windows = []
    for i, (row, start, stop) in enumerate(spans):
        before = x.new_zeros(D, W - 1) if window is None else window[i]
        line, L = torch.cat([before, x[row, start:stop].mT], dim=1), before.shape[1]
        for t in range(stop - start):
            y = (line[:, t + L - W + 1 : t + L + 1] * weight).sum(1)
            y = y if bias is None else y + bias
            ys[row].append(torch.nn.functional.silu(y) if activation == "silu" else y)
        windows.append(line[:, stop - start :])
    for row in ys:
        row.extend([x.new_zeros(D)] * (T - len(row)))
    return torch.stack([torch.stack(row) for row in ys]), torch.stack(windows)


def norm(x: Tensor, z: Tensor, weight: Tensor, *, eps: float, activation: str) -> Tensor:
    """``rms_norm_gated``."""
    x, z, weight = x.to(EXACT), z.to(EXACT), weight.to(EXACT)
    gate = torch.nn.functional.silu(z) if activation == "silu" else z.sigmoid()
    return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gate


def gradients(outputs: Any, inputs: Any, seed: int = 0) -> list[Tensor]:
    """Gradients of a fixed random sum of the outputs by all inputs, in float64."""
    gen = torch.Generator().manual_seed(seed)
    loss = torch.zeros((), dtype=EXACT)
    for y in outputs:
        weight = torch.randn(y.shape, generator=gen, dtype=EXACT).to(y.dtype)
        loss = loss + (y.cpu().to(EXACT) * weight.to(EXACT)).sum()
    found = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return [x.to(EXACT) for x in found]
