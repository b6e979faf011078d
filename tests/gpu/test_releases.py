"""One variant of each GPU kernel compiles and fits: quick enough for a second release of Triton.

``make test`` runs this file with the oldest release too. The installed one compiles every variant
(test_cross_compile.py, test_prefill_compile.py, test_hopper.py).

python -m tests.gpu.test_releases [sm_90 sm_120]      prints registers, stack, shared memory
"""
# ruff: noqa: T201

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import sluice.backends
from sluice.backends import cuda_driver
from sluice.backends import triton as portable
from sluice.backends.triton import compiler, interpreted, launch, prefill, variants
from sluice.backends.triton.arguments import KernelCall
from tests.gpu import gluon_kernels, gradient_kernels, prefill_kernels
from tests.gpu.calls import by_name
from tests.gpu.cross import (
    DEVICE,
    SHARED,
    TARGETS,
    compile_for,
    gpu_like,
    kernel_calls,
    resources,
    specs_of,
)
from tests.gpu.passes import first_pass

pytestmark = pytest.mark.skipif(interpreted(), reason="the interpreter does not compile")

BACKENDS = Path(sluice.backends.__file__).parent
CALLS = (
    "decode, fp32 state",
    "commit, fp32 state",
    "step, fp32 state",
    "conv",
    "conv of one token",
    "conv_qkv",
    "conv_qkv, checkpoints",
    "norm",
)
"""Of tests/gpu/calls.py."""
PREFILLS = ("narrow", "split", "per key", "per key, pieces")
"""Of tests/gpu/prefill_kernels.py."""
GLUON = (
    "chunks, raw gates and norm",
    "chunks, a value head per key head, raw gates and norm",
    "states, 64 columns",
    "states, 128 columns",
    "segments' effects",
)
"""Of tests/gpu/gluon_kernels.py; these compile for sm_90 alone."""
NVIDIA = [target for target in TARGETS if target.startswith("sm")]
SPILLS = {**prefill_kernels.SPILLS, "step_kernel": 160}
SPILLS_ELSEWHERE = {
    "prefill_inverse_kernel": 80,
    "prefill_state_kernel": 40,  # sm_120 with Triton 3.9; elsewhere 0
    "prefill_key_chunks_kernel": 48,
    "prefill_key_states_kernel": 48,
    "step_kernel": 160,
}
"""Bytes of stack per thread: on Hopper, 64 where a kernel is not named; on other GPUs, 8 there."""


@functools.cache
def launched(target: str) -> dict[str, KernelCall]:
    """A launch of each kernel, by its name."""
    found: dict[str, KernelCall] = {}
    for name in CALLS:
        with gpu_like(target) as device:
            for call in kernel_calls(by_name(name).run, device):
                found.setdefault(call.kernel.name, call)
    for name in PREFILLS:
        for call in prefill_calls(name, target):
            if not call.arguments.get("HARD"):
                found.setdefault(call.kernel.name, call)
    for call in first_pass(portable, target):
        found.setdefault(call.kernel.name, call)
    return found


def prefill_calls(name: str, target: str) -> Iterator[KernelCall]:
    if target in prefill_kernels.PLANS:
        yield from prefill_kernels.launches(name, target)
        return
    with gpu_like(target) as device:
        (spec,) = specs_of(prefill_kernels.CALLS[name][1], device)
        for launches in prefill.all_launches(spec):
            yield from launches.calls


def kernels_of(backend: str) -> set[str]:
    """Every kernel in a backend's files; those of the backward are test_backward_compile.py's, and
    test_hopper_gradients.py's."""
    files = (BACKENDS / backend / "kernels").glob("*.py")
    files = (path for path in files if not re.search("backward|gradients|^parts$", path.stem))
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in files)
    functions = (node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef))
    return {f.name for f in functions if f.name.endswith("_kernel") and not f.name.startswith("_")}


KERNELS = sorted(kernels_of("triton"))
HOPPER_ALONE = {"prefill_key_kernel"}
PAIRS = [(t, k) for t in NVIDIA for k in KERNELS if t == "sm_90" or k not in HOPPER_ALONE]


def test_a_launch_of_every_kernel_is_here():
    assert set(KERNELS) == set(launched("sm_90"))
    assert set(KERNELS) - HOPPER_ALONE == set(launched("sm_80"))
    assert kernels_of("hopper") == {gluon_kernels.KERNELS[name][0].name for name in GLUON}


@pytest.mark.parametrize("target", NVIDIA)
def test_every_launch_says_whether_products_and_sums_are_fused(target):
    """Triton's default changes with 3.10; the bits must not."""
    for call in launched(target).values():
        assert isinstance(call.options["enable_fp_fusion"], bool), call.kernel.name
    for name in GLUON:
        assert gluon_kernels.kernel_call(name).options["enable_fp_fusion"] is True


def allowed(target: str, kernel: str) -> int:
    return SPILLS.get(kernel, 64) if target == "sm_90" else SPILLS_ELSEWHERE.get(kernel, 8)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "kernel"), PAIRS)
def test_a_kernel_compiles_without_a_warning_and_fits(target, kernel):
    used = resources(compile_for(launched(target)[kernel], target))
    assert used.spills <= allowed(target, kernel), used
    assert used.shared <= 1024 * SHARED[target], used


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_120"])
def test_where_two_programs_share_an_sm_hard_chunks_do_not_spill(target):
    calls = prefill_calls("narrow", target)
    hard = next(call for call in calls if call.arguments.get("HARD"))
    used = resources(compile_for(hard, target))
    assert (hard.arguments["BLOCK_V"], hard.options["num_warps"]) == (32, 8)
    assert used.spills <= 8, used
    assert used.shared <= 1024 * SHARED[target], used


@pytest.mark.slow
@pytest.mark.parametrize("name", GLUON)
def test_a_gluon_kernel_compiles_without_a_warning_and_fits(name):
    compiled = compile_for(gluon_kernels.kernel_call(name), "sm_90")
    used = resources(compiled)
    assert used.spills <= gluon_kernels.SPILLS.get(name, 64), used
    assert used.shared <= 1024 * SHARED["sm_90"], used
    assert gluon_kernels.hurried(compiled.asm["ptx"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gluon_kernel_of_gradients_compiles_without_a_warning_and_fits(dtype):
    """In float16 no chunk is hard."""
    call = gradient_kernels.kernel_call(gradient_kernels.USUAL, dtype)
    used = resources(compile_for(call, "sm_90"))
    assert used.spills <= gradient_kernels.SPILLS[str(gradient_kernels.USUAL)], used
    assert used.shared <= 1024 * SHARED["sm_90"], used


BYTES = {"matrix": 128, "pointer": 8, "q": 8, "i": 4, "f": 4}


def parameter_bytes(ptx: str) -> list[int]:
    """The size of each parameter of a compiled kernel."""
    given = re.search(r"\.entry \w+\((.*?)\)", ptx, flags=re.DOTALL)[1]
    found = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+) [^,\[]*(?:\[(\d+)\])?", given)
    assert len(found) == given.count(".param ")
    return [int(bits) // 8 * int(many or 1) for bits, many in found]


@pytest.mark.slow
def test_a_compiled_kernel_takes_the_parameters_that_a_launch_gives(monkeypatch):
    """What a release adds behind a kernel's own parameters is known, and nothing else came."""
    monkeypatch.setattr(cuda_driver, "load", lambda *_: 0)
    monkeypatch.setattr(cuda_driver, "Layout", list)
    for call in (launched("sm_90")["decode_kernel"], gluon_kernels.kernel_call(GLUON[0])):
        compiled = compile_for(call, "sm_90")
        code = launch._load(variants.variant(call), compiler.machine_code(compiled), DEVICE)
        assert parameter_bytes(compiled.asm["ptx"]) == [BYTES[kind] for kind in code.layout]


def main() -> None:
    for target in sys.argv[1:] or NVIDIA:
        calls = dict(launched(target))
        if target == "sm_90":
            calls |= {name: gluon_kernels.kernel_call(name) for name in GLUON}
        print(f"\n{target:42} registers  stack  shared")
        for name, call in calls.items():
            used = resources(compile_for(call, target))
            print(f"{name:42} {used.registers:9} {used.spills:6} {used.shared:7}")


if __name__ == "__main__":
    main()
