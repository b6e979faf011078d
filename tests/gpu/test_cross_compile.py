"""Every kernel compiles for GPUs that are not here, with production's constants, and fits.

python -m tests.gpu.test_cross_compile [sm_80 sm_90 sm_100 sm_120]      prints the table
"""
# ruff: noqa: T201

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

pytest.importorskip("triton")

from sluice.backends.triton import interpreted
from sluice.model_calls import ModelCall
from tests.gpu.calls import NAMES, by_name, production
from tests.gpu.cross import (
    TARGETS,
    compile_for,
    gpu_like,
    instructions,
    kernel_calls,
    resources,
)

pytestmark = [
    pytest.mark.skipif(interpreted(), reason="the interpreter does not compile"),
    pytest.mark.slow,
]


EVERYTHING = ("sm_90", "sm_80", "sm_100", "gfx942")
"""Targets that every variant is compiled for; test_releases.py compiles some for the others."""
EACH_KERNEL = {
    "decode, fp32 state", "commit, fp32 state", "step, fp32 state", "conv", "conv of one token",
    "conv_qkv", "norm",
}  # fmt: skip
"""For gfx942, which test_releases.py does not compile for."""


def pairs() -> Iterator[Any]:
    """(target, call). A usual run has every call for sm_90 and for one target in turn.

    The turns move on by one with the state's dtype, so that each target meets both dtypes, both
    layouts, one and several tokens, and drafts. test_releases.py has each kernel, test_kv.py each
    size of a state for every target. ``--long`` runs the whole product.
    """
    for target in EVERYTHING:
        for i, name in enumerate(NAMES):
            turn = EVERYTHING[1 + (i + i // 6) % 3]
            here = target in ("sm_90", turn) or name == "verify, fp32 state"
            here |= target == "gfx942" and name in EACH_KERNEL
            marks = () if here else pytest.mark.long
            yield pytest.param(target, name, marks=marks, id=f"{target}-{name}")


def allowed(name: str, target: str) -> int:
    """Bytes of stack that a thread may use (registers on AMD).

    ``step`` holds a whole state in registers: it may spill some addresses, and a state of 256 × 256
    does not fit. The others spill nothing, or almost nothing.
    """
    if not name.startswith("step"):
        return 32
    if "256" in name:
        return 2048
    return 256 if target == "gfx942" else 160


def compiled(target: str, calls: Iterable[ModelCall]) -> Iterator[tuple[str, str, Any]]:
    """(call, kernel, its machine code) of all launches of the calls."""
    with gpu_like(target) as device:
        for call in calls:
            for launched in kernel_calls(call.run, device):
                yield call.name, launched.kernel.name, compile_for(launched, target)


@pytest.mark.parametrize(("target", "name"), list(pairs()))
def test_a_kernel_compiles_and_fits(target, name):
    """No spills beyond the stated ones, and no more shared memory than the smallest GPU has."""
    found = list(compiled(target, [by_name(name)]))
    assert found
    for _, kernel, code in found:
        used = resources(code)
        assert used.spills <= allowed(name, target), f"{kernel} for {target}: {used}"
        assert used.shared <= 64 * 1024, f"{kernel} for {target}: {used}"


def main() -> None:
    for target in sys.argv[1:] or TARGETS:
        print(f"\n{target:42} registers  stack  shared  instructions")
        for name, kernel, code in compiled(target, production()):
            used, length = resources(code), instructions(code)
            row = f"{used.registers:9} {used.spills:6} {used.shared:7} {length or '-':>13}"
            print(f"{name + ': ' + kernel.removesuffix('_kernel'):42} {row}")


if __name__ == "__main__":
    main()
