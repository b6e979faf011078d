"""The kernels of Triton's prefill as calls launch them, and what they may spill."""

from __future__ import annotations

import functools
from typing import Any

import torch

import sluice
from sluice.backends.triton import prefill, prefill_key
from sluice.backends.triton.arguments import KernelCall
from tests.gpu.cross import gpu_like, specs_of

HEADS, K = (2, 4), 128
PLANS = {
    "sm_90": {
        "narrow": prefill.Plan(0, 64, 8, 3),
        "split": prefill.Plan(1216, 128, 8, 3),
        "16 columns": prefill.Plan(0, 16, 4, 2),
    },
    "gfx942": {
        "narrow": prefill.Plan(0, 32, 4, 1),
        "split": prefill.Plan(1216, 32, 4, 1),
        "16 columns": prefill.Plan(0, 16, 4, 1),
    },
}
SPILLS = {
    "prefill_inverse_kernel": 160,
    "prefill_state_kernel": 224,
    "prefill_segments_kernel": 16,
    "prefill_key_kernel": 376,  # with Triton 3.9 and head counts at launch; 344 as constants
    "prefill_key_chunks_kernel": 48,
    "prefill_key_states_kernel": 48,
}
SPILLS_HARD = {"prefill_state_kernel": 656, "prefill_segments_kernel": 104}
SPILLS_256 = {"prefill_inverse_kernel": 704, "prefill_state_kernel": 800}
SPILLS_256_HARD = {"prefill_state_kernel": 928}
"""Bytes of stack per thread: in general; in kernels for programs with hard chunks (mostly between
their two loops, see below); with keys of 256, twice the width that registers suffice for; and with
such keys in 64 columns on Hopper, in the kernel for hard chunks."""


def call(
    rule: str = "gated_delta",
    per_key: bool = False,
    raw: bool = False,
    K: int = K,
    dtype: torch.dtype = torch.bfloat16,
    kept: bool = False,
) -> Any:
    """A prefill of 2,048 tokens; ``kept``: with a checkpoint."""
    HK, HV = HEADS
    zeros = functools.partial(torch.zeros, device="meta")
    tokens = functools.partial(zeros, 1, 2048, dtype=dtype)
    gates = (HV, K) if per_key else (HV,)
    options: dict[str, Any] = {"state": zeros(1, HV, K, K)}
    if "gated" in rule:
        options["g"] = zeros(1, 2048, *gates)
    if "delta" in rule:
        options["beta"] = zeros(1, 2048, HV)
    if raw:
        options |= {"A_log": zeros(HV), "dt_bias": zeros(*gates)}
    if kept:
        slots = zeros(1, 1, dtype=torch.int64)
        options["checkpoints"] = sluice.Checkpoints(slots, positions=slots)
    return sluice.prefill(tokens(HK, K), tokens(HK, K), tokens(HV, K), **options)


CALLS = {
    "narrow": ("narrow", functools.partial(call, raw=True)),
    "split": ("split", call),
    "split, float16": ("split", functools.partial(call, dtype=torch.float16)),
    "split, no beta": ("split", functools.partial(call, "gated")),
    "keys of 256": (None, functools.partial(call, raw=True, K=256)),
    "keys of 256, 16 columns": ("16 columns", functools.partial(call, raw=True, K=256)),
    "per key": (None, functools.partial(call, per_key=True)),
    "per key, raw": (None, functools.partial(call, per_key=True, raw=True)),
    "per key, no beta": (None, functools.partial(call, "gated", per_key=True)),
    "per key, pieces": ("pieces", functools.partial(call, per_key=True)),
}


def launches(name: str, target: str) -> list[KernelCall]:
    cut, made = CALLS[name]
    with gpu_like(target) as device:
        (spec,) = specs_of(made, device)
        if cut is None:
            return prefill.launches(spec).calls
        if cut == "pieces":  # as GPUs other than Hopper's
            return prefill_key.in_pieces(spec).calls
        return prefill.planned_launches(spec, PLANS[target][cut]).calls
