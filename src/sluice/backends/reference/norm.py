"""Gated RMSNorm: norm first, gate after, docs/contract.md (C6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sluice.backends.reference import rows
from sluice.backends.reference.pointwise import sigmoid, silu
from sluice.contract.spec import NormSpec


def rms_norm_gated(p: NormSpec, t: Any) -> None:
    """Serve ``rms_norm_gated``."""
    dtype = rows.compute_dtype(p.dtype)
    t.out.copy_(
        gated_norm(t.x.to(dtype), t.z.to(dtype), t.weight.to(dtype), float(p.eps), p.activation)
    )


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """weight · x / sqrt(mean x^2 + eps) · act(z), in the dtype of the arguments."""
    x = x.contiguous()  # or the order of the mean would follow the strides
    y = weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y * (silu if activation == "silu" else sigmoid)(z)
