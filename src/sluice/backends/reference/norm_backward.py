"""The backward of the gated norm, docs/contract.md (C6).

With x̂ = ρ x, ρ = (mean x² + eps)^-1/2, and y = weight x̂ act(z):

    dx̂ = weight act(z) dy,   dx = ρ (dx̂ − x̂ mean(x̂ dx̂))
    dz = weight x̂ act'(z) dy,   dweight = Σ x̂ act(z) dy
"""

from __future__ import annotations

from typing import Any

import torch

from sluice.backends.reference import rows
from sluice.backends.reference.pointwise import sigmoid


def rms_norm_gated_backward(p: Any, t: Any) -> None:
    """Serve the backward of ``rms_norm_gated``."""
    dtype = rows.compute_dtype(p.dtype)
    x, z, dy, weight = (y.to(dtype) for y in (t.x, t.z, t.dy, t.weight))
    rho = torch.rsqrt(x.square().mean(-1, keepdim=True) + float(p.eps))
    ready, gate = rho * x, sigmoid(z)
    act, slope = gate, gate * (1 - gate)
    if p.activation == "silu":
        act, slope = z * gate, gate * (1 + z * (1 - gate))
    by = weight * act * dy
    t.dx.copy_(rho * (by - ready * (ready * by).mean(-1, keepdim=True)))
    t.dz.copy_(weight * ready * slope * dy)
    t.dweight.copy_((ready * act * dy).flatten(0, -2).sum(0) if x.dim() > 1 else ready * act * dy)
