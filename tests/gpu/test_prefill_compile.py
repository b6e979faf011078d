"""The Triton kernels of prefill compile for GPUs that are not here, as calls use them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from sluice.backends.triton import interpreted, prefill
from tests.gpu.cross import (
    SHARED,
    compile_for,
    gpu_like,
    loops,
    resources,
    sass,
    specs_of,
    stack_accesses,
)
from tests.gpu.prefill_kernels import (
    CALLS,
    SPILLS,
    SPILLS_256,
    SPILLS_256_HARD,
    SPILLS_HARD,
    call,
    launches,
)

pytestmark = [
    pytest.mark.skipif(interpreted(), reason="the interpreter does not compile"),
    pytest.mark.slow,
]


AMD = {
    "narrow", "split, float16", "keys of 256", "keys of 256, 16 columns", "per key, no beta",
}  # fmt: skip
"""Every option of CALLS and every plan, each in one of them; Hopper compiles all of CALLS."""


def pairs() -> Iterator[Any]:
    """(target, call); ``--long`` runs the whole product."""
    for name in CALLS:
        yield pytest.param("sm_90", name, id=f"sm_90-{name}")
    for name in CALLS:
        marks = () if name in AMD else pytest.mark.long
        yield pytest.param("gfx942", name, marks=marks, id=f"gfx942-{name}")


@pytest.mark.parametrize(("target", "name"), list(pairs()))
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
    bodies = loops(code)
    inner = [x for x in bodies if not any(y != x and y in x for y in bodies)]
    return [body for body in inner if "HGMMA" in body]


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
        found = inner_loops(sass(compile_for(serial, "sm_90")))
        assert len(found) == 1 + hard
        for loop in found:
            assert stack_accesses(loop) <= (44 if hard else spills), kernel
            products = re.findall(r"HGMMA\S+ R\d+, (R\d+|gdesc)", loop)
            assert products.count("gdesc") == shared, kernel
        if hard:
            usual, more = sorted(len(re.findall("HGMMA", loop)) for loop in found)
            assert usual < more, "hard chunks add Vd's second term"


@pytest.mark.parametrize("kept", [False, True], ids=["plain", "with a checkpoint"])
def test_in_float32_the_compiler_fuses_no_sum_of_the_state(kept):
    """Which sums it fuses depends on the rest of the kernel: with a checkpoint on other ones than
    without, so the same tokens would leave other bits."""
    with gpu_like("sm_90") as device:
        (spec,) = specs_of(functools.partial(call, dtype=torch.float32, K=32, kept=kept), device)
        serial = [c for c in prefill.launches(spec).calls if "HARD" in c.arguments]
        assert serial
        for made in serial:
            code = sass(compile_for(made, "sm_90"))
            assert "FMUL" in code
            assert "FFMA" not in code
