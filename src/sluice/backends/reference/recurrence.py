"""The recurrence of docs/contract.md, one token at a time, for all sequences and heads at once.

    S <- exp(g) S                 (C1) decay first
    d  = beta (v - S^T k)         (C2) against the decayed state
    S <- S + k d^T                (C3)
    o  = S^T q                    (C4) with the updated state

S is [N, HV, K, V]. Sums are written as products and reductions, not as matrix products, so that a
row's bits do not depend on the rows and heads beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice.backends.reference import rows
from sluice.backends.reference.pointwise import sigmoid, softplus
from sluice.contract.spec import DeltaSpec

L2_EPS = 1e-6


class Tokens(NamedTuple):
    """A call's tokens, ready for the recurrence: float32 (or float64), gates activated."""

    q: Tensor  # [N, T, HQ, K], normalised and scaled
    k: Tensor  # [N, T, HK, K], normalised
    v: Tensor  # [N, T, HV, V]
    g: Tensor | None  # [N, T, HV] or [N, T, HV, K]
    beta: Tensor | None  # [N, T, HV]

    def span(self, start: int, stop: int) -> Tokens:
        """The tokens of one packed sequence."""
        return Tokens(*(None if x is None else x[:, start:stop] for x in self))  # type: ignore[arg-type]


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + eps): a sum, not a mean; eps inside the root."""
    x = x.contiguous()  # or the order of the sum would follow the strides
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """g = -exp(A_log) softplus(a + dt_bias), in the dtype of ``a``."""
    rate = A_log.to(a.dtype).exp()
    rate = rate.unsqueeze(-1) if a.dim() == 4 else rate  # per key: one rate a head
    return -rate * softplus(a if dt_bias is None else a + dt_bias.to(a.dtype))


def write_strength(b: Tensor, neg_eigval: bool) -> Tensor:
    """beta = sigmoid(b), doubled when negative eigenvalues are wanted."""
    return sigmoid(b) * (2 if neg_eigval else 1)


def prepare(p: DeltaSpec, t: Any) -> Tokens:
    """Cast, normalise, scale, and activate raw gates."""
    dtype = rows.compute_dtype(p.dtype)
    q, k, v = t.q.to(dtype), t.k.to(dtype), t.v.to(dtype)
    if p.normalize_qk:
        q, k = l2_normalize(q), l2_normalize(k)
    g = None if t.g is None else t.g.to(dtype)
    beta = None if t.beta is None else t.beta.to(dtype)
    if t.A_log is not None:
        assert g is not None
        g = log_decay(g, t.A_log, t.dt_bias)
        beta = None if beta is None else write_strength(beta, p.neg_eigval)
    return Tokens(q * p.q_scale, k, v, g, beta)


def decayed(S: Tensor, g: Tensor | None) -> Tensor:
    """(C1). ``g`` is [N, HV] or [N, HV, K]."""
    if g is None:
        return S
    return S * g.exp().view(*g.shape, *[1] * (4 - g.dim()))


def update(S: Tensor, k: Tensor, d: Tensor) -> Tensor:
    """(C3). ``k`` is [N, HV, K], ``d`` [N, HV, V]."""
    return S + k.unsqueeze(-1) * d.unsqueeze(-2)


def over_value_heads(x: Tensor, HV: int) -> Tensor:
    """[N, H, K] -> [N, HV, K]: value head h uses head h // (HV / H)."""
    return x.repeat_interleave(HV // x.shape[1], dim=1)


def recur(
    x: Tokens, S: Tensor, o: Tensor, after: Callable[[int, Tensor], None] | None = None
) -> tuple[Tensor, Tensor]:
    """Run all tokens of ``x`` from state ``S``; write ``o``; return the state and the d of (C2).

    ``after(n, S)`` is called with the state after n tokens.
    """
    N, T, HV, V = x.v.shape
    HQ, K = x.q.shape[2:]
    HO = max(HQ, HV)
    ds = x.v.new_empty(N, T, HV, V)
    for t in range(T):
        k, v = over_value_heads(x.k[:, t], HV), x.v[:, t]
        S = decayed(S, None if x.g is None else x.g[:, t])
        d = v
        if x.beta is not None:
            d = x.beta[:, t].unsqueeze(-1) * (v - (S * k.unsqueeze(-1)).sum(-2))
        S = update(S, k, d)
        q = x.q[:, t] if HQ > HV else over_value_heads(x.q[:, t], HV)
        q = q.view(N, HV, HO // HV, K)  # several query heads may read one state
        o[:, t] = (S.unsqueeze(2) * q.unsqueeze(-1)).sum(-2).view(N, HO, V)
        ds[:, t] = d
        if after is not None:
            after(t + 1, S)
    return S, ds
