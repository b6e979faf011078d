"""The Triton kernels of prefill compile for GPUs that are not here, as calls use them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import sluice
from sluice.backends.triton import interpreted, prefill
from tests.gpu.cross import TARGETS, Launch, captured, compile_for, resources

pytestmark = [
    pytest.mark.skipif(interpreted(), reason="the interpreter does not compile"),
    pytest.mark.slow,
]

HEADS, K = (2, 4), 128
SPLIT = prefill.Plan(2048, 32, 4, 3)
NARROW = prefill.Plan(0, 16, 4, 3)
FULL = prefill.Plan(0, 32, 4, 2)
SPILLS = {"prefill_inverse_kernel": 160, "prefill_state_kernel": 160, "prefill_key_kernel": 288}
SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}
"""Shared memory of a program, kB."""


def call(rule: str = "gated_delta", per_key: bool = False, raw: bool = False, K: int = K) -> Any:
    """A prefill of 2,048 tokens."""
    HK, HV = HEADS
    tokens = functools.partial(torch.zeros, 1, 2048, dtype=torch.bfloat16)
    gates = (HV, K) if per_key else (HV,)
    options: dict[str, Any] = {"state": torch.zeros(1, HV, K, K)}
    if "gated" in rule:
        options["g"] = torch.zeros(1, 2048, *gates)
    if "delta" in rule:
        options["beta"] = torch.zeros(1, 2048, HV)
    if raw:
        options |= {"A_log": torch.zeros(HV), "dt_bias": torch.zeros(*gates)}
    return sluice.prefill(tokens(HK, K), tokens(HK, K), tokens(HV, K), **options)


CALLS = {
    "narrow": (NARROW, functools.partial(call, raw=True)),
    "full": (FULL, functools.partial(call, raw=True)),
    "split": (SPLIT, call),
    "split, no beta": (SPLIT, functools.partial(call, "gated")),
    "keys of 256": (None, functools.partial(call, raw=True, K=256)),
    "per key": (None, functools.partial(call, per_key=True)),
    "per key, raw": (None, functools.partial(call, per_key=True, raw=True)),
    "per key, no beta": (None, functools.partial(call, "gated", per_key=True)),
}


def launches(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    plan, made = CALLS[name]
    if plan is not None:
        plan = plan._replace(stages=1) if target == "gfx942" else plan
        monkeypatch.setattr(prefill, "plan", lambda p, processors: plan)
    return captured(made)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_kernel_of_prefill_compiles_and_fits(target, name, monkeypatch):
    if target == "gfx942":  # what these are where torch is AMD's
        monkeypatch.setattr(prefill, "EXACT", "ieee")
        monkeypatch.setattr(prefill, "STAGES", 1)
    for launch in launches(name, target, monkeypatch):
        used = resources(compile_for(launch, TARGETS[target]))
        assert used.spills <= SPILLS.get(launch.name, 32), f"{launch.name}: {used}"
        assert used.shared <= 1024 * SHARED[target], f"{launch.name}: {used}"
