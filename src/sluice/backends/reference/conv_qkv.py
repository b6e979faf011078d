"""Convolution, split into q, k, v, l2 norm and gates."""

from __future__ import annotations

from typing import Any

import torch

from sluice.backends.reference import rows
from sluice.backends.reference.conv import convolved
from sluice.backends.reference.recurrence import l2_normalize, log_decay, write_strength
from sluice.contract.spec import ConvQkvSpec


def conv_qkv(p: ConvQkvSpec, t: Any) -> None:
    """Serve ``conv_qkv``."""
    dtype = rows.compute_dtype(p.dtype)
    live = rows.live_tokens(p, t)
    y = convolved(p, t)
    q, k, v = y.split([p.HK * p.K, p.HK * p.K, p.HV * p.V], dim=-1)
    q, k = q.unflatten(-1, (p.HK, p.K)), k.unflatten(-1, (p.HK, p.K))
    if p.normalize_qk:
        q, k = l2_normalize(q), l2_normalize(k)
    t.q.copy_(q)
    t.k.copy_(k)
    t.v.copy_(v.unflatten(-1, (p.HV, p.V)))
    if t.a is not None and t.g is not None:
        assert t.A_log is not None
        t.g.copy_(torch.where(live, log_decay(t.a.to(dtype), t.A_log, t.dt_bias), 0))
    if t.b is not None and t.beta is not None:
        t.beta.copy_(torch.where(live, write_strength(t.b.to(dtype), p.neg_eigval), 0))
