"""The backward of the convolutions, docs/contract.md (C5), (C11).

With z_t = bias + Σ_w weight_w x_(t − W + 1 + w) and y = act(z):

    dz = act'(z) dy
    dx_s = Σ_w weight_w dz_(s + W − 1 − w),   dweight_w = Σ_t dz_t x_(t − W + 1 + w)

Inputs before a sequence are its window, which gets its gradient in the same way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sluice.backends.reference import backward, rows
from sluice.backends.reference.conv import convolve
from sluice.backends.reference.pointwise import sigmoid
from sluice.backends.reference.recurrence import log_decay, write_strength

GATES = ("a", "b", "dg", "dbeta")


def causal_conv1d_backward(p: Any, t: Any) -> None:
    """Serve the backward of ``causal_conv1d``."""
    spans, t = backward.without_tail(t, p.T, ("x", "dy"), ("dx",))
    dtype = rows.compute_dtype(p.dtype)

    def given(rows_of: slice, start: int, stop: int, z: Tensor) -> Tensor:
        if t.dy is None:
            return torch.zeros_like(z)
        return t.dy[rows_of if not p.varlen else slice(None), start:stop].mT.to(dtype)

    _through(p, t, spans, given, t.dwindow)


def conv_qkv_backward(p: Any, t: Any) -> None:
    """Serve the backward of ``conv_qkv``."""
    names = ("x", "dq", "dk", "dv", *GATES)
    spans, t = backward.without_tail(t, p.T, names, ("dx", "da", "db"))
    dtype, KK = rows.compute_dtype(p.dtype), p.HK * p.K

    def given(rows_of: slice, start: int, stop: int, z: Tensor) -> Tensor:
        dq, dk, dv = (x[:, start:stop].to(dtype) for x in (t.dq, t.dk, t.dv))
        if p.normalize_qk:
            y = z * sigmoid(z) if p.silu else z
            q, k = (x.mT.unflatten(-1, (p.HK, p.K)) for x in y[:, : 2 * KK].split(KK, dim=1))
            dq, dk = backward.l2_backward(q, dq), backward.l2_backward(k, dk)
        return torch.cat([x.flatten(2) for x in (dq, dk, dv)], dim=-1).mT

    _through(p, t, spans, given, None)
    g = beta = dg = dbeta = None
    if t.a is not None:
        g, dg = log_decay(t.a.to(dtype), t.A_log, t.dt_bias), t.dg.to(dtype)
    if t.b is not None:
        beta, dbeta = write_strength(t.b.to(dtype), p.neg_eigval), t.dbeta.to(dtype)
    backward.gates(t, g, beta, dg, dbeta, 2.0 if p.neg_eigval else 1.0, ("a", "b"))


def _through(p: Any, t: Any, spans: Any, given: Any, dwindow: Tensor | None) -> None:
    """Write dx, dweight, dbias and dstate; ``given`` returns dy [n, D, T] of some sequences."""
    dtype, W, L = rows.compute_dtype(p.dtype), p.W, p.L
    weight, bias = t.weight.to(dtype), None if t.bias is None else t.bias.to(dtype)
    dweight, dbias = torch.zeros_like(weight), weight.new_zeros(p.D)
    for states, start, stop in spans:
        x = t.x[:, start:stop].mT.to(dtype)
        window = x.new_zeros(x.shape[0], p.D, L) if t.state is None else t.state[states].to(dtype)
        z = convolve(window, x, weight, bias, False)
        dz = given(states, start, stop, z)
        if p.silu:
            gate = sigmoid(z)
            dz = dz * gate * (1 + z * (1 - gate))
        line = torch.cat([window, x], dim=-1)
        dline, n, before = torch.zeros_like(line), stop - start, L - W + 1
        for w in range(W):
            at = slice(before + w, before + w + n)
            dline[..., at] += weight[:, w : w + 1] * dz
            dweight[:, w] += (dz * line[..., at]).sum((0, 2))
        dbias += dz.sum((0, 2))
        if dwindow is not None:
            dline[..., n:] += dwindow[states].to(dtype)
        t.dx[:, start:stop] = dline[..., L:].mT.to(t.dx.dtype)
        if t.dstate is not None:
            t.dstate[states] = dline[..., :L].to(t.dstate.dtype)
    t.dweight.copy_(dweight)
    if t.dbias is not None:
        t.dbias.copy_(dbias)
