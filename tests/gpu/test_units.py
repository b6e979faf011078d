"""Programs of the parallel half with many units, one after another, in the emulator. No GPU.

A unit is a chunk of one or two key heads, or the tail of a checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import sluice
from sluice.backends import hopper
from sluice.backends import triton as backend
from sluice.backends.hopper import prefill
from sluice.backends.triton import prefill as portable
from sluice.testing import cases, compare
from tests.gpu.cross import bound, compile_for, gpu_like
from tests.gpu.emulator.driver import emulated
from tests.gpu.gluon_kernels import packed, spec
from tests.gpu.passes import specs as pass_specs
from tests.gpu.test_items import BATCH, MANY, RAGGED, emulates

ONE = {"K": 128, "V": 128}
CALLS = {
    "two key heads": ("prefill/packed_raw", {**RAGGED, "Hk": 2, "Hv": 4}),
    "one warp": ("prefill/packed_raw", {**RAGGED, "Hk": 2, "Hv": 2}),
    "eight value heads": ("prefill/packed", {**RAGGED, "Hv": 8}),
    "many sequences": ("prefill/packed", {**ONE, "Hk": 1, "Hv": 2, "lengths": MANY, "tail": 2}),
    "many, one warp": ("prefill/packed", {**ONE, "Hk": 1, "Hv": 1, "lengths": MANY, "tail": 2}),
    "tails": ("prefill/checkpoints_positions", BATCH),
    "tails, one warp": ("prefill/checkpoints_positions", {**BATCH, "Hv": 1}),
    "hard chunks": ("prefill/identical_keys", {**BATCH, "batch": 3}),
    "hard chunks, one warp": ("prefill/identical_keys", {**BATCH, "Hv": 1, "batch": 3}),
}
FEW = list(CALLS)[:6]
PLANS = [*prefill.all_plans(), prefill.Plan(0, 128, once=True), prefill.Plan(1024, 64, early=False)]


def made(monkeypatch, name, plan):
    """The results of a call by a plan, and the programs of its parallel half."""
    case, more = CALLS[name]
    case = cases.CASES[case].with_(**more)
    inputs = case.inputs(torch.bfloat16, "cpu")
    expected = case.expected(inputs)
    monkeypatch.setattr(prefill, "best_plan", lambda p, processors: plan)
    with emulated("sm_90") as driver:
        found = case.run(sluice, inputs, backend="hopper")
        case.check(found, expected)
    return found, [x.programs for x in driver.launched if "chunks" in x.kernel]


def same_by(name, monkeypatch, numbers):
    alone, (units,) = made(monkeypatch, name, prefill.Plan(0, 128, once=True))
    assert units > 3
    for programs in numbers:
        for prefetch in (True, False):
            plan = prefill.Plan(0, 128, chunk_programs=programs, prefetch=prefetch)
            found, launched = made(monkeypatch, name, plan)
            assert launched == [programs or units]
            for key, x in found.items():
                compare.assert_same_bits(x, alone[key], f"{key} by {programs} programs")


@emulates
@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_a_program_with_many_units_has_the_bits_of_programs_with_one(name, monkeypatch):
    """Sequences of many lengths, some of them empty; tokens of no sequence."""
    same_by(name, monkeypatch, (1,))


@emulates
@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
def test_any_number_of_programs_has_the_same_bits(name, monkeypatch):
    same_by(name, monkeypatch, (0, 1, 3))


def test_no_more_programs_than_fit_on_the_chip():
    """Each with as much to do as any other; where units have many gaps, with one unit each."""
    for HV, most in ((16, 12), (32, 4), (64, 4)):
        with gpu_like("sm_90"):
            (call, *_) = prefill.planned_launches(spec(HV=HV), prefill.Plan(0, 128)).calls
            assert call.programs == most * 132
            assert prefill.chunk_programs(spec(HV=HV), prefill.Plan(0, 128), 100) == 100
    for tokens, programs in ((64, 10**6), (4096, 4 * 132)):
        with gpu_like("sm_90"):
            p = packed(40, tokens, 32)
            assert prefill.chunk_programs(p, prefill.Plan(0, 128), 10**6) == programs


def early_and_before():
    """Each kernel that reads inputs before its wait, and the one launched before it."""
    with gpu_like("sm_90"):
        made = [prefill.planned_launches(spec(HV=HV), p) for HV in (16, 32) for p in PLANS]
        first, second = pass_specs()
        made.append(bound(first, hopper))
        kept = second.kept._replace(shape=(made[-1]._workspace_bytes,))
        made.append(bound(replace(second, kept=kept), hopper))
    for launches in made:
        for before, call in zip([None, *launches.calls], launches.calls, strict=False):
            if call.arguments.get("EARLY"):
                yield before, call


def test_before_a_kernel_that_reads_early_comes_one_of_the_same_call():
    """Of a kernel of someone else's nothing is known, and the inputs may be what it makes."""
    found = list(early_and_before())
    assert len(found) > 2 * len(PLANS)
    for before, call in found:
        assert call.kernel == prefill.STATE
        assert before is not None


@pytest.mark.slow
@pytest.mark.skipif(backend.interpreted(), reason="the interpreter does not compile")
def test_a_kernel_before_one_that_reads_early_waits_and_then_allows_it():
    """When the next kernel starts, all before this one have ended: nothing may come between."""
    seen = {before.kernel: before for before, _ in early_and_before()}
    assert {prefill.CHUNKS, prefill.CHUNKS_WARP, portable.PREFILL_JOIN} <= set(seen)
    for call in seen.values():
        ptx = compile_for(call, "sm_90").asm["ptx"]
        wait, allow = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
        assert ptx.count(wait) == ptx.count(allow) == 1
        first = ptx[: ptx.index(allow)]
        assert wait in first
        for access in ("ld.global", "st.global", "cp.async", "red.", "atom."):
            assert access not in first.partition(wait)[0]
