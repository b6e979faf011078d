"""Chunked prefill in plain torch, docs/kernels/chunked.md.

Per chunk of C tokens, with gc the in-chunk cumulative log decay and gl its last value:

    M  = strictLower(diag(beta) (Kd K~^T))     decays folded into the product
    Vd = (I + M)^-1 diag(beta) (V - e^gc K S)
    O  = e^gc Q S + lower(Qd K~^T) Vd
    S <- e^gl S + (e^(gl - gc) K)^T Vd

Only differences gc_i - gc_j with i >= j are exponentiated: they are never positive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sluice.backends.reference import rows
from sluice.backends.reference.prefill import Checkpointer, sequences, stored
from sluice.backends.reference.recurrence import Tokens
from sluice.contract.spec import DeltaSpec

CHUNK = {"none": 64, "head": 64, "key": 16}
"""Tokens a chunk. With per-key decay the pairwise decays are a [C, C, K] tensor: a short chunk."""


def prefill(p: DeltaSpec, t: Any) -> None:
    """Serve ``prefill``."""
    C = CHUNK[p.decay]
    S = sequences(p, t, lambda x, S, o, after: chunks(x, S, o, after, C))
    rows.write_rows(t.state, p, t, stored(p, S))


def chunks(x: Tokens, S: Tensor, o: Tensor, after: Checkpointer | None, C: int) -> Tensor:
    """All tokens of ``x`` from state ``S`` [N, HV, K, V]; chunks also end where ``after`` wants."""
    T = x.v.shape[1]
    cuts = {T} if after is None else {T, *after.positions(T)}
    start = 0
    for stop in sorted(cuts):
        while start < stop:
            end = min(start + C, stop)
            o[:, start:end], S = chunk(x.span(start, end), S)
            start = end
        if after is not None and stop > 0:
            after(stop, S)
    return S


def chunk(x: Tokens, S: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk: the outputs [N, C, HO, V] and the state behind it. Differentiable."""
    C, HV = x.v.shape[1:3]
    q, k, v = x.q.transpose(1, 2), x.k.transpose(1, 2), x.v.transpose(1, 2)
    HQ, HK = q.shape[1], k.shape[1]
    gc = torch.zeros(1, 1, C, 1, dtype=v.dtype, device=v.device)
    if x.g is not None:
        gc = x.g.transpose(1, 2).cumsum(2)
        gc = gc.unsqueeze(-1) if gc.dim() == 3 else gc  # [N, HV, C, 1 or K]
    gl = gc[:, :, -1:]
    k_v = k.repeat_interleave(HV // HK, dim=1)  # [N, HV, C, K]

    Vd = v
    if x.beta is not None:
        beta = x.beta.transpose(1, 2).unsqueeze(-1)
        M = beta * _decayed_product(k, k, gc, HV, strict=True)
        W = beta * (v - (gc.exp() * k_v) @ S)
        Vd = torch.linalg.solve_triangular(M, W, upper=False, unitriangular=True)
    if HQ <= HV:
        q_v, groups = q.repeat_interleave(HV // HQ, dim=1), 1
        out = (gc.exp() * q_v) @ S + _decayed_product(q, k, gc, HV, strict=False) @ Vd
    else:  # several query heads read one state: handle them as more rows of the same head
        groups = HQ // HV
        parts = []
        for q_v in q.unflatten(1, (HV, groups)).unbind(2):
            P = _decayed_product(q_v, k, gc, HV, strict=False)
            parts.append((gc.exp() * q_v) @ S + P @ Vd)
        out = torch.stack(parts, dim=2).flatten(1, 2)
    S = gl.exp().transpose(-1, -2) * S + ((gl - gc).exp() * k_v).transpose(-1, -2) @ Vd
    return out.transpose(1, 2), S


def _decayed_product(x: Tensor, k: Tensor, gc: Tensor, HV: int, *, strict: bool) -> Tensor:
    """[N, HV, C, C]: sum_c x_ic k_jc exp(gc_ic - gc_jc) below the diagonal (with it unless strict).

    With per-head decay the product is made once per group of heads and decayed afterwards.
    """
    C = gc.shape[2]
    mask = torch.ones(C, C, dtype=torch.bool, device=gc.device).tril(-1 if strict else 0)
    if gc.shape[-1] == 1:
        heads = max(x.shape[1], k.shape[1])
        x, k = (y.repeat_interleave(heads // y.shape[1], dim=1) for y in (x, k))
        product = (x @ k.transpose(-1, -2)).repeat_interleave(HV // heads, dim=1)
        difference = gc - gc.transpose(-1, -2)
        return product * _masked_exp(difference, mask)
    x, k = (y.repeat_interleave(HV // y.shape[1], dim=1) for y in (x, k))
    difference = gc.unsqueeze(3) - gc.unsqueeze(2)  # [N, HV, C, C, K]
    decay = _masked_exp(difference, mask.unsqueeze(-1))
    return (x.unsqueeze(3) * k.unsqueeze(2) * decay).sum(-1)


def _masked_exp(difference: Tensor, mask: Tensor) -> Tensor:
    """exp where ``mask``, 0 elsewhere; what is masked out is never exponentiated."""
    return difference.masked_fill(~mask, float("-inf")).exp()
