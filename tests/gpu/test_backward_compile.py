"""The Triton kernels of the backward compile for GPUs that are not here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import sluice
from sluice.backends import hopper
from sluice.backends import triton as portable
from sluice.backends.hopper import prefill_backward as hopper_backward
from sluice.backends.triton import interpreted, prefill_backward
from sluice.backends.triton.arguments import KernelCall
from sluice.backends.triton.variants import variant
from tests.gpu.cross import (
    SHARED,
    backward_specs_of,
    bound,
    compile_for,
    gpu_like,
    resources,
    translate_for,
)
from tests.training import hopper_calls, layer_calls
from tests.training.calls import Call
from tests.training.triton_calls import (
    HARD,
    HARD_KEYS,
    KEYS,
    KINDS,
    SPLIT,
    WIDE,
    WIDE_KEYS,
    WIDE_SPLIT,
)

pytestmark = [
    pytest.mark.skipif(interpreted(), reason="the interpreter does not compile"),
    pytest.mark.slow,
]
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
SPILLS = {
    "backward_states_kernel": 0,
    "backward_states_kernel, hard": 328,  # with Triton 3.9; 320 with 3.6
    "backward_walk_kernel": 64,  # with Triton 3.6; 32 with 3.9
    "backward_walk_kernel, hard": 384,  # with Triton 3.9; 376 with 3.6
    "backward_lows_kernel": 0,
    "backward_pairs_kernel": 64,
    "backward_queries_kernel": 96,
    "backward_keys_kernel": 536,
    "backward_inverse_kernel": 48,  # with Triton 3.9; 32 with 3.6
    "backward_hard_inverse_kernel": 368,  # where it looks for hard chunks; 128 where all are
    "hopper_walk_kernel, hard": 232,  # with Triton 3.9; 216 with 3.6
    "hopper_gradients_kernel": 232,
}
SPILLS_ELSEWHERE = {
    "backward_states_kernel, hard": 48,
    "backward_walk_kernel, hard": 88,
    "backward_hard_inverse_kernel": 344,
    "backward_inverse_kernel": 32,
    "backward_keys_kernel": 32,
    "backward_walk_kernel": 8,
}
"""Bytes of stack per thread on Hopper, 32 where a kernel is not named, and on sm_89, 0 there."""
USUAL = Call("usual", B=1, T=2048, K=128, V=128)
FROM_ZERO = USUAL.of(name="from zero", state=False)
PER_KEY = USUAL.of(name="per key", decay="key")


def prefill(call: Call, dtype: torch.dtype) -> tuple[Any, None, Any]:
    leaves, options = call.make(dtype)
    o, final = sluice.prefill(**leaves, **options)
    return leaves, None, (o, final) if call.state else o


def every() -> Iterator[tuple[str, Callable[[], Any]]]:
    """What tests/training runs on a GPU, by name."""
    half = [KINDS[0], KINDS[4], KINDS[5], *HARD, *KEYS[:2], *HARD_KEYS, *WIDE, *WIDE_KEYS]
    exact = [*KINDS, *HARD, *KEYS, *HARD_KEYS, *WIDE[:3], *WIDE_KEYS]
    of_dtype = {FLOAT32: exact, BFLOAT16: half, FLOAT16: [*WIDE, *WIDE_KEYS]}
    for dtype, calls in of_dtype.items():
        for call in calls:
            yield f"{call}, {dtype}", partial(prefill, call, dtype)
    yield from layer_calls.every((FLOAT32, BFLOAT16))


def split() -> Iterator[Callable[[], Any]]:
    """What it runs with every sequence split."""
    for call in SPLIT:
        yield partial(prefill, call, FLOAT32)
    for call in (*SPLIT, *WIDE_SPLIT):
        yield partial(prefill, call, BFLOAT16)


def launches(
    target: str, *calls: Callable[[], Any], segment: int | None = None, package: Any = portable
) -> list[KernelCall]:
    """What these calls launch in backward on such a GPU; of launches of one variant the first."""
    module = prefill_backward if package is portable else hopper_backward
    found: dict[Any, KernelCall] = {}
    with gpu_like(target) as device:
        for call in calls:
            for spec in backward_specs_of(call, device):
                made = bound(spec, package)
                if segment is not None:
                    plan = module.plan_of(spec)._replace(segment=segment)
                    made = module.planned_launches(spec, plan)
                for launch in made.calls:
                    found.setdefault(variant(launch), launch)
    return list(found.values())


def test_the_compiler_understands_every_kernel_of_the_tests():
    """Triton's interpreter runs a branch alone; the compiler looks at both sides.

    A branch that no call takes must not even be looked at: ``if ptr is not None`` around it, or the
    kernel compiles only where the pointer is given. The front end finds that in no time, so every
    variant goes through it; ``--long`` compiles them all.
    """
    seen = launches("sm_90", *(call for _, call in every()))
    seen += launches("sm_90", *split(), segment=64)
    assert any(launch.arguments.get("EFFECT") for launch in seen)
    for launch in seen:
        translate_for(launch, "sm_90")


def test_the_compiler_understands_every_kernel_of_hoppers_tests():
    """As above; tests/training/test_hopper.py runs them, on a GPU or in the emulator."""
    calls = [*hopper_calls.KINDS, *hopper_calls.HARD[:1]]
    half = [partial(prefill, call, dtype) for call in calls for dtype in (BFLOAT16, FLOAT16)]
    seen = launches("sm_90", *half, package=hopper)
    seen += launches("sm_90", *half, package=hopper, segment=64)
    assert any(launch.arguments.get("EFFECT") for launch in seen)
    for launch in seen:
        if "hopper" in launch.kernel.name:
            translate_for(launch, "sm_90")


@pytest.mark.long
@pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in every()])
def test_every_kernel_of_the_tests_compiles_and_fits(call):
    """Met in ``make test`` by the front end above, and by the two calls below."""
    for launch in launches("sm_90", call):
        used = resources(compile_for(launch, "sm_90"))
        assert used.shared <= 1024 * SHARED["sm_90"], f"{launch.kernel.name}: {used}"


def local(call: Callable[[], Any], target: str = "sm_90", package: Any = portable) -> KernelCall:
    """The launch that says which chunks are hard."""
    made = launches(target, call, package=package)
    (found,) = (x for x in made if x.kernel.name == "backward_local_kernel")
    return found


@pytest.mark.parametrize("package", [portable, hopper], ids=["triton", "hopper"])
@pytest.mark.parametrize(
    ("change", "used", "hard"),
    [
        ({}, 1, False),
        ({"HV": 2}, 1, True),
        ({"state": True}, 1, True),
        ({}, 2, True),
    ],
    ids=["neither", "few heads", "initial state", "final state"],
)
def test_what_makes_all_chunks_hard(package, change, used, hard):
    """A state that is given, or a gradient of the final one: either must be known, or exactness is
    lost; and neither may be made of nothing, or training is slower."""

    def run():
        leaves, options = FROM_ZERO.of(**change).make(BFLOAT16)
        return leaves, None, sluice.prefill(**leaves, **options)[:used]

    assert local(run, package=package).arguments["ALL_HARD"] == hard


@pytest.mark.parametrize("state", [False, True], ids=["some hard", "all hard"])
def test_only_hard_chunks_pay_for_two_terms(state):
    """Bg is made once where all chunks are hard; only launches for hard chunks read low terms."""
    made = launches("sm_90", partial(prefill, FROM_ZERO.of(state=state), BFLOAT16))
    names = [launch.kernel.name for launch in made]
    assert ("backward_inverse_kernel" in names) != state
    assert "backward_hard_inverse_kernel" in names
    for launch in made:
        if "HARD" in launch.arguments:
            hard = launch.arguments["HARD"]
            assert (launch.arguments["b_low_ptr"] is not None) == hard, launch.kernel.name


@pytest.mark.parametrize("call", [USUAL, PER_KEY], ids=str)
@pytest.mark.parametrize("target", ["sm_90", "sm_89"])
def test_the_kernels_fit(target, call):
    fit(target, launches(target, partial(prefill, call, BFLOAT16)))


@pytest.mark.parametrize("target", ["sm_90", "sm_89"])
def test_the_kernels_that_find_hard_chunks_fit(target):
    """``test_the_kernels_fit`` has states, so there they look for none."""
    made = launches(target, partial(prefill, FROM_ZERO, BFLOAT16))
    fit(target, [x for x in made if re.search("local|inverse", x.kernel.name)])


@pytest.mark.parametrize("segment", [0, 1024], ids=["whole", "split"])
def test_hoppers_kernels_fit(segment):
    made = launches("sm_90", partial(prefill, USUAL, BFLOAT16), segment=segment, package=hopper)
    fit("sm_90", [launch for launch in made if "hopper" in launch.kernel.name])


def fit(target: str, made: list[KernelCall]) -> None:
    assert made
    for launch in made:
        used, kernel = resources(compile_for(launch, target)), launch.kernel.name
        assert used.shared <= 1024 * SHARED[target], f"{kernel}: {used}"
        kernel += ", hard" if launch.arguments.get("HARD") else ""
        allowed = SPILLS.get(kernel, 32) if target == "sm_90" else SPILLS_ELSEWHERE.get(kernel, 0)
        assert used.spills <= allowed, f"{kernel}: {used}"


def test_no_operand_is_the_transpose_of_what_a_product_made():
    """Triton 3.4 to 3.7.0 compiles such products wrongly for Hopper (FLA 640, 984).

    And no program with such products has two warpgroups: Triton up to 3.8 lets one overwrite what
    the other's products still read (triton-lang/triton 11047).
    """
    turned = re.compile(r"tt\.trans .*: tensor<\w*x(f32|f16|bf16),")
    for launch in launches("sm_90", partial(prefill, USUAL, BFLOAT16)):
        code = compile_for(launch, "sm_90").asm["ttgir"]
        if "warp_group_dot" in code:
            assert not turned.search(code), launch.kernel.name
            assert "#ttg.linear" not in code, launch.kernel.name
            assert launch.options["num_warps"] == 4, launch.kernel.name


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_no_product_with_decay_per_key_needs_more_than_a_warp(target):
    """Few rows keep these kernels clear of what compilers do to the larger products."""
    code = []
    for launch in launches(target, partial(prefill, PER_KEY, BFLOAT16)):
        if "channels" not in launch.kernel.name:  # has no products, and takes long to compile
            code.append(compile_for(launch, target).asm["ptx"])
    assert any("mma.sync" in x for x in code)
    assert not any("wgmma" in x or "tcgen05" in x for x in code)
