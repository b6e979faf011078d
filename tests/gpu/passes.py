"""Prefill in two passes, as a sequence over ranks needs it, for GPUs that are absent."""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from sluice.contract.spec import PassSpec
from sluice.ops.transitions import RESUME, Passes, transitions
from tests.gpu.cross import bound, gpu_like, specs_of

HK, HV, K = 2, 4, 128


def specs(segment: int = 1024) -> list[PassSpec]:
    """Both passes over 4,000 tokens."""
    zeros = functools.partial(torch.zeros, device="meta")
    q, k, v, out = (zeros(1, 4000, H, K, dtype=torch.bfloat16) for H in (HK, HK, HV, HV))
    gates, state = (zeros(1, 4000, HV), zeros(1, 4000, HV)), zeros(1, HV, K, K)
    both = Passes(q, k, v, *gates, state, segment, out)
    return specs_of(lambda: (transitions(both), both._call(RESUME, zeros(0, dtype=torch.uint8))))


def first_pass(package: ModuleType, target: str, segment: int = 1024):
    """The launches of the first pass."""
    with gpu_like(target):
        return bound(specs(segment)[0], package).calls
