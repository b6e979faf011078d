"""The Triton kernels of prefill compile for GPUs that are not here, as calls use them."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import sluice
from sluice.backends.triton import interpreted, prefill
from sluice.backends.triton.arguments import KernelCall
from tests.gpu.cross import SHARED, compile_for, gpu_like, resources, sass, specs_of

pytestmark = [
    pytest.mark.skipif(interpreted(), reason="the interpreter does not compile"),
    pytest.mark.slow,
]

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
    "prefill_key_kernel": 288,
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
) -> Any:
    """A prefill of 2,048 tokens."""
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
}


def launches(name: str, target: str) -> list[KernelCall]:
    cut, made = CALLS[name]
    with gpu_like(target) as device:
        (spec,) = specs_of(made, device)
        if cut is None:
            return prefill.launches(spec).calls
        return prefill.planned_launches(spec, PLANS[target][cut]).calls


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_kernel_of_prefill_compiles_and_fits(target, name, monkeypatch):
    if target == "gfx942":  # what these are where torch is AMD's
        monkeypatch.setattr(prefill, "EXACT", "ieee")
        monkeypatch.setattr(prefill, "STAGES", 1)
    for launch in launches(name, target):
        used, kernel = resources(compile_for(launch, target)), launch.kernel.name
        allowed = SPILLS | (SPILLS_HARD if launch.arguments.get("HARD") else {})
        allowed |= SPILLS_256 if name.startswith("keys of 256") else {}
        if launch.arguments.get("HARD") and launch.arguments["BLOCK_V"] == 64 and "256" in name:
            allowed |= SPILLS_256_HARD
        assert used.spills <= allowed.get(kernel, 32), f"{kernel}: {used}"
        assert used.shared <= 1024 * SHARED[target], f"{kernel}: {used}"


def inner_loops(code: str) -> list[str]:
    """The bodies of the innermost machine-code loops that contain products."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", code, flags=re.MULTILINE)
    at = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    jumps = [(i, re.search(r"\bBRA\b.* 0x([0-9a-f]+)", line)) for i, (_, line) in enumerate(lines)]
    back = [(at[int(to[1], 16)], i) for i, to in jumps if to and at[int(to[1], 16)] < i]
    inner = [(a, b) for a, b in back if not any(a <= c and d < b for c, d in back)]
    bodies = ["\n".join(line for _, line in lines[a : b + 1]) for a, b in inner]
    return [body for body in bodies if "HGMMA" in body]


@pytest.mark.parametrize(("name", "spills", "shared"), [("narrow", 0, 8), ("split", 16, 4)])
def test_the_loops_of_the_serial_half(name, spills, shared):
    """Hopper's loop for usual chunks, and the two where some are hard: what is kept in registers.

    Every product but Vᵀ's has its left operand there. Of 128 value columns some addresses do not
    fit in beside the state; they are spilled, and come back off the chain of products.
    """
    for serial in launches(name, "sm_90"):
        kernel = serial.kernel.name
        if kernel not in ("prefill_state_kernel", "prefill_segments_kernel"):
            continue
        hard = serial.arguments["HARD"]
        loops = inner_loops(sass(compile_for(serial, "sm_90")))
        assert len(loops) == 1 + hard
        for loop in loops:
            found = len(re.findall(r"\b(?:LDL|STL)\b", loop))
            assert found <= (44 if hard else spills), kernel
            products = re.findall(r"HGMMA\S+ R\d+, (R\d+|gdesc)", loop)
            assert products.count("gdesc") == shared, kernel
        if hard:
            usual, more = sorted(len(re.findall("HGMMA", loop)) for loop in loops)
            assert usual < more, "hard chunks add Vd's second term"
