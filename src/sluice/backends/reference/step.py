"""A whole layer's decode after its input projections: conv, split, norm, gates, rule, gated norm.

Nothing is rounded between the parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sluice.backends.reference import rows
from sluice.backends.reference.conv import convolve, rolled
from sluice.backends.reference.norm import gated_norm
from sluice.backends.reference.recurrence import (
    Tokens,
    l2_normalize,
    log_decay,
    recur,
    write_strength,
)
from sluice.contract.spec import StepSpec


def step(p: StepSpec, t: Any) -> None:
    """Serve ``step``."""
    dtype = rows.compute_dtype(p.dtype)
    x, z, b, a = (y.to(dtype) for y in split(p, t))
    window = rows.read_rows(t.conv_state, p, t, dtype)
    bias = None if t.conv_bias is None else t.conv_bias.to(dtype)
    y = convolve(window, x.mT, t.conv_weight.to(dtype), bias, p.conv_silu).mT

    q, k, v = y.split([p.HK * p.K, p.HK * p.K, p.HV * p.V], dim=-1)
    q, k = q.unflatten(-1, (p.HK, p.K)), k.unflatten(-1, (p.HK, p.K))
    if p.normalize_qk:
        q, k = l2_normalize(q), l2_normalize(k)
    v = v.unflatten(-1, (p.HV, p.V))
    g, beta = log_decay(a, t.A_log, t.dt_bias), write_strength(b, p.neg_eigval)

    S = rows.read_rows(t.state, p, t, dtype)
    S = S.transpose(-1, -2).contiguous() if p.state_layout == "vk" else S
    o = torch.empty_like(v)
    S, _ = recur(Tokens(q * p.q_scale, k, v, g, beta), S, o)
    weight = t.norm_weight.to(dtype)
    out = gated_norm(o, z.unflatten(-1, (p.HV, p.V)), weight, float(p.eps), p.gate_activation)
    dead = rows.padded(p, t).view(-1, 1, 1)
    t.out.copy_(torch.where(dead, out.new_zeros(()), out.flatten(-2)))
    rows.write_rows(t.state, p, t, S.transpose(-1, -2) if p.state_layout == "vk" else S)
    rows.write_rows(t.conv_state, p, t, rolled(window, x.mT, p.T))


def split(p: StepSpec, t: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv [N, T, D] in the order [Q | K | V], z [N, T, HV V], b and a [N, T, HV].

    Interleaved (Qwen3-Next): per key head [q | k | r v | r z] and [r b | r a].
    """
    r = p.HV // p.HK
    if p.order == "split":
        qkv, z = (t.qkv, t.z) if t.z is not None else t.qkv.split([p.D, p.HV * p.V], dim=-1)
        b, a = (t.b, t.a) if t.a is not None else t.b.split([p.HV, p.HV], dim=-1)
        return qkv, z, b, a
    groups = t.qkv.unflatten(-1, (p.HK, 2 * p.K + 2 * r * p.V))
    q, k, v, z = groups.split([p.K, p.K, r * p.V, r * p.V], dim=-1)
    b, a = t.b.unflatten(-1, (p.HK, 2 * r)).split([r, r], dim=-1)
    flat = [y.flatten(-2) for y in (q, k, v)]
    return torch.cat(flat, dim=-1), z.flatten(-2), b.flatten(-2), a.flatten(-2)
