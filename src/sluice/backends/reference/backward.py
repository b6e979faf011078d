"""The chain rule around the recurrence, in closed form: l2 norm, scale, gates (C7) to (C9).

    x̂ = ρ x, ρ = (Σ x² + ε)^-1/2:          dx = ρ (dx̂ − x̂ (x̂ · dx̂))
    g = −e^A softplus(a + b):              da = −e^A σ(a + b) dg,  db = Σ da,  dA = Σ g dg
    beta = c σ(b):                         db = beta (1 − σ(b)) dbeta

Custom operators run below autograd, so nothing here relies on it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice.backends.reference import rows
from sluice.backends.reference.pointwise import sigmoid
from sluice.backends.reference.recurrence import L2_EPS, Tokens, prepare


class Inputs(NamedTuple):
    """A backward call, ready for the recurrence: all in the arithmetic's dtype."""

    x: Tokens
    S: Tensor  # [N, HV, K, V], initial states
    do: Tensor  # [B, T, HO, V]
    dfinal: Tensor  # [N, HV, K, V]
    spans: list[tuple[slice, int, int]]
    """Which states and tokens run together: all rows, or one packed sequence each."""


class Gradients(NamedTuple):
    """What the recurrence's backward gives: by q (as it is read), k, v, g, beta, initial states."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    S: Tensor


def inputs(p: Any, t: Any) -> tuple[Any, Inputs]:
    """The tensors without a packed tail, and what the recurrence takes of them."""
    dtype = rows.compute_dtype(p.dtype)
    spans, t = without_tail(
        t, p.T, ("q", "k", "v", "g", "beta", "do"), ("dq", "dk", "dv", "dg", "dbeta")
    )
    x = prepare(p, t)
    B, T, HV, V = x.v.shape
    size = (p.N, HV, p.K, V)
    S = x.v.new_zeros(size) if t.state is None else _kv(p, t.state.to(dtype))
    dS = x.v.new_zeros(size) if t.dfinal is None else _kv(p, t.dfinal.to(dtype))
    do = x.v.new_zeros(B, T, p.HO, V) if t.do is None else t.do.to(dtype)
    return t, Inputs(x, S, do, dS, spans)


def store(p: Any, t: Any, x: Tokens, d: Gradients) -> None:
    """Write the gradients of the call's own inputs."""
    for made, raw, by in ((t.dq, t.q, d.q * p.q_scale), (t.dk, t.k, d.k)):
        made.copy_(l2_backward(raw.to(by.dtype), by) if p.normalize_qk else by)
    t.dv.copy_(d.v)
    gates(t, x.g, x.beta, d.g, d.beta, p.beta_scale)
    if t.dstate is not None:
        t.dstate.copy_(_kv(p, d.S))


def gates(
    t: Any,
    g: Tensor | None,
    beta: Tensor | None,
    dg: Any,
    dbeta: Any,
    factor: float,
    raw: tuple[str, str] = ("g", "beta"),
) -> None:
    """Write the gradients of the gates, raw or ready; ``raw`` names the projections."""
    a = getattr(t, raw[0])
    made_a, made_b = (getattr(t, f"d{name}") for name in raw)
    if made_a is not None:
        if t.A_log is not None:
            da, dA, ddt = decay_backward(a.to(dg.dtype), t.A_log, t.dt_bias, g, dg)
            t.dA_log.copy_(dA)
            if t.ddt_bias is not None:
                t.ddt_bias.copy_(ddt)
            dg = da
        made_a.copy_(dg)
    if made_b is not None:
        if t.A_log is not None or raw[1] == "b":
            dbeta = dbeta * beta * (1 - beta / factor)
        made_b.copy_(dbeta)


def l2_backward(x: Tensor, d: Tensor) -> Tensor:
    """The gradient by x, from the one by x̂."""
    rho = torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
    ready = rho * x
    return rho * (d - ready * (ready * d).sum(-1, keepdim=True))


def decay_backward(
    a: Tensor, A_log: Tensor, dt_bias: Tensor | None, g: Any, dg: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by a, A_log and dt_bias, from the one by g [B, T, HV] or [B, T, HV, K]."""
    rate = A_log.to(a.dtype).exp()
    rate = rate.unsqueeze(-1) if a.dim() == 4 else rate
    da = -rate * sigmoid(a if dt_bias is None else a + dt_bias.to(a.dtype)) * dg
    dA = (dg * g).flatten(0, 1).sum(0)
    return da, dA.sum(-1) if a.dim() == 4 else dA, da.flatten(0, 1).sum(0)


def without_tail(
    t: Any, T: int, tokens: tuple[str, ...], made: tuple[str, ...]
) -> tuple[list[tuple[slice, int, int]], Any]:
    """The spans of sequences, and the tensors without tokens that belong to none.

    What is read there may be anything, so it is not computed with; gradients there are zeros.
    """
    if t.cu_seqlens is None:
        return [(slice(None), 0, T)], t
    source = t.cu_seqlens if t.cu_seqlens_cpu is None else t.cu_seqlens_cpu
    bounds = source.tolist()
    end = bounds[-1]
    for name in made:
        if getattr(t, name) is not None:
            getattr(t, name)[:, end:].zero_()
    found = {name: getattr(t, name) for name in (*tokens, *made)}
    t = t._replace(**{name: x[:, :end] for name, x in found.items() if x is not None})
    pairs = enumerate(pairwise(bounds))
    return [(slice(i, i + 1), start, stop) for i, (start, stop) in pairs], t


def _kv(p: Any, S: Tensor) -> Tensor:
    """From the caller's layout to [.., K, V], or back."""
    return S.transpose(-1, -2) if p.state_layout == "vk" else S
