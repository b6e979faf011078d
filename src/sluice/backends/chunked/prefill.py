"""Chunked prefill in plain torch, docs/kernels/chunked.md.

Per chunk of C tokens, with γ the cumulative log decay in the chunk and γ_C its last value:

    D  = (I + strictLower(diag(beta) KKg))⁻¹ diag(beta) (V - e^γ K S)
    O  = e^γ Q S + QKg D
    S <- e^γ_C S + (e^(γ_C - γ) K)ᵀ D

KKg = G ∘ K Kᵀ and QKg = G ∘ Q Kᵀ, with G_ij = e^(γ_i - γ_j) for i >= j, else 0; for decay per key
they are (K20). Only these differences are exponentiated: they are never positive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sluice.backends.reference import rows
from sluice.backends.reference.prefill import Checkpointer, sequences, stored
from sluice.backends.reference.recurrence import Tokens
from sluice.contract.chunk_length import CHUNK
from sluice.contract.spec import DeltaSpec

CHUNKS = {"none": CHUNK, "head": CHUNK, "key": 16}
"""Tokens per chunk, by decay. With decay per key, G is a [C, C, K] tensor: a chunk is short."""


def prefill(p: DeltaSpec, t: Any) -> None:
    """Serve ``prefill``."""
    C = CHUNKS[p.decay]
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
    """One chunk: the outputs [N, C, HO, V] and the state after it. Differentiable."""
    C, HV = x.v.shape[1:3]
    q, k, v = x.q.transpose(1, 2), x.k.transpose(1, 2), x.v.transpose(1, 2)
    HQ, HK = q.shape[1], k.shape[1]
    gamma = torch.zeros(1, 1, C, 1, dtype=v.dtype, device=v.device)
    if x.g is not None:
        gamma = x.g.transpose(1, 2).cumsum(2)
        gamma = gamma.unsqueeze(-1) if gamma.dim() == 3 else gamma  # [N, HV, C, 1 or K]
    gamma_C = gamma[:, :, -1:]
    k_v = k.repeat_interleave(HV // HK, dim=1)  # [N, HV, C, K]

    d = v
    if x.beta is not None:
        beta = x.beta.transpose(1, 2).unsqueeze(-1)
        lower = beta * _decayed_product(k, k, gamma, HV, strict=True)
        w = beta * (v - (gamma.exp() * k_v) @ S)
        d = torch.linalg.solve_triangular(lower, w, upper=False, unitriangular=True)
    if HQ <= HV:
        q_v = q.repeat_interleave(HV // HQ, dim=1)
        out = (gamma.exp() * q_v) @ S + _decayed_product(q, k, gamma, HV, strict=False) @ d
    else:  # several query heads read one state
        parts = []
        for q_v in q.unflatten(1, (HV, HQ // HV)).unbind(2):
            qkg = _decayed_product(q_v, k, gamma, HV, strict=False)
            parts.append((gamma.exp() * q_v) @ S + qkg @ d)
        out = torch.stack(parts, dim=2).flatten(1, 2)
    k_out = (gamma_C - gamma).exp() * k_v
    S = gamma_C.exp().transpose(-1, -2) * S + k_out.transpose(-1, -2) @ d
    return out.transpose(1, 2), S


def _decayed_product(x: Tensor, k: Tensor, gamma: Tensor, HV: int, *, strict: bool) -> Tensor:
    """[N, HV, C, C]: Σ_c x_ic k_jc e^(γ_ic - γ_jc) below the diagonal (with it unless strict).

    With decay per head the product is made once per group of value heads and decayed afterwards.
    """
    C = gamma.shape[2]
    mask = torch.ones(C, C, dtype=torch.bool, device=gamma.device).tril(-1 if strict else 0)
    if gamma.shape[-1] == 1:
        heads = max(x.shape[1], k.shape[1])
        x, k = (y.repeat_interleave(heads // y.shape[1], dim=1) for y in (x, k))
        product = (x @ k.transpose(-1, -2)).repeat_interleave(HV // heads, dim=1)
        difference = gamma - gamma.transpose(-1, -2)
        return product * _masked_exp(difference, mask)
    x, k = (y.repeat_interleave(HV // y.shape[1], dim=1) for y in (x, k))
    difference = gamma.unsqueeze(3) - gamma.unsqueeze(2)  # [N, HV, C, C, K]
    decay = _masked_exp(difference, mask.unsqueeze(-1))
    return (x.unsqueeze(3) * k.unsqueeze(2) * decay).sum(-1)


def _masked_exp(difference: Tensor, mask: Tensor) -> Tensor:
    """exp where ``mask``, 0 elsewhere; what is masked out is never exponentiated."""
    return difference.masked_fill(~mask, float("-inf")).exp()
