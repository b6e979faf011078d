"""Programs of hopper_state_kernel with many items, one after another, in the emulator. No GPU.

An item is a block of value columns of a head, for one sequence or a segment of one.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import sluice
from sluice.backends import triton as backend
from sluice.backends.hopper import prefill
from sluice.ops.transitions import Passes, resume, transitions
from sluice.testing import cases, compare, inputs
from tests.gpu.cross import gpu_like
from tests.gpu.emulator import machine
from tests.gpu.emulator.driver import emulated
from tests.gpu.gluon_kernels import spec
from tests.gpu.passes import specs as pass_specs

MISSING = "kernels are not compiled there" if backend.interpreted() else machine.missing()
emulates = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
RAGGED = {
    "Hk": 1, "Hv": 2, "K": 128, "V": 128, "lengths": (0, 130, 65, 1, 64), "tail": 5,
    "padded": (2,), "new": (0, 3), "moved": True,
}  # fmt: skip
BATCH = {"Hk": 1, "Hv": 2, "K": 128, "V": 128}


def made(monkeypatch, name, plan, more):
    """A case of the contract by a plan: its results, and the launches of the state kernel."""
    case = cases.CASES[name].with_(**more)
    inputs = case.inputs(torch.bfloat16, "cpu")
    expected = case.expected(inputs)
    monkeypatch.setattr(prefill, "best_plan", lambda p, processors: plan)
    with emulated("sm_90") as driver:
        found = case.run(sluice, inputs, backend="hopper")
        case.check(found, expected)
    return found, [x for x in driver.launched if x.kernel == "hopper_state_kernel"]


CALLS = {
    "ragged": ("prefill/packed", (0, 128), RAGGED),
    "checkpoints inside": ("prefill/checkpoints_positions", (0, 128), BATCH),
    "split": ("prefill/packed", (64, 128), {**RAGGED, "Hv": 1, "lengths": (0, 130, 65)}),
    "ragged, 64 columns": ("prefill/packed", (0, 64), RAGGED),
    "hard chunks": ("prefill/identical_keys", (0, 128), {**BATCH, "batch": 3}),
    "checkpoints between chunks": ("prefill/checkpoints_packed", (0, 128), BATCH),
}
FEW = list(CALLS)[:3]


def same_by(name, monkeypatch, numbers):
    case, cut, more = CALLS[name]
    alone, launched = made(monkeypatch, case, prefill.Plan(*cut, programs=0), more)
    assert all(x.programs == x.arguments["number"] > 3 for x in launched)
    for programs in numbers:
        found, launched = made(monkeypatch, case, prefill.Plan(*cut, programs=programs), more)
        assert {x.programs for x in launched} == {programs}
        for key, x in found.items():
            compare.assert_same_bits(x, alone[key], f"{key} by {programs} programs")


@emulates
@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_a_program_with_many_items_has_the_bits_of_programs_with_one(name, monkeypatch):
    """Sequences of many lengths, one of them empty, one without a slot; tokens of no sequence.

    The two passes of a split sequence take their items from the same counter.
    """
    same_by(name, monkeypatch, (1,))


@emulates
@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
def test_any_number_of_programs_has_the_same_bits(name, monkeypatch):
    """``test_a_program_with_many_items_has_the_bits_of_programs_with_one`` runs the first three."""
    same_by(name, monkeypatch, (1, 3))


def passes_by(processors, monkeypatch):
    """Both passes of a piece of a sequence, the second one twice, on a GPU of so many SMs."""
    monkeypatch.setattr("tests.gpu.emulator.driver.PROCESSORS", {"sm_90": processors})
    gen = inputs.generator(7)
    q, k = (inputs.keys(gen, 1, 150, 1, 128).bfloat16() for _ in range(2))
    v = inputs.normal(gen, 1, 150, 2, 128).bfloat16()
    g, beta = (inputs.normal(gen, 1, 150, 2).float() for _ in range(2))
    before, out = inputs.recurrent_state(gen, 1, 2, 128, 128).float(), torch.empty_like(v)
    state = torch.empty_like(before)
    both = Passes(q, k, v, -g.abs(), beta.sigmoid(), state, 64, out, backend="hopper")
    found = {}
    with emulated("sm_90") as driver:
        found["map"], kept = transitions(both)
        for time in ("first", "again"):
            both.state.copy_(before)
            resume(both, kept)
            found |= {f"o, {time}": out.clone(), f"state, {time}": both.state.clone()}
    return found, [x for x in driver.launched if x.kernel == "hopper_state_kernel"]


@emulates
@pytest.mark.slow
def test_a_second_pass_takes_items_from_the_counter_that_the_first_has_left(monkeypatch):
    """The parallel half, which sets the counter, is launched in the first pass alone."""
    found, launched = passes_by(1, monkeypatch)
    assert len(launched) == 3
    assert all(x.programs == 1 < x.arguments["number"] for x in launched)
    alone, _ = passes_by(132, monkeypatch)
    for key, x in found.items():
        compare.assert_same_bits(x, alone[key], key)
        compare.assert_same_bits(x, alone[key.replace("again", "first")], key)


MANY = (*(0,) * 20, 3, *(0,) * 17, 66, 1, *(0,) * 30)


@emulates
@pytest.mark.slow
def test_a_warp_finds_its_sequence_among_many(monkeypatch):
    """In both halves: there is one value head per key head, so a warp makes the chunks, too."""
    assert len(MANY) > 64
    more = {"Hk": 1, "Hv": 1, "K": 128, "V": 128, "lengths": MANY, "tail": 2}
    with_many = made(monkeypatch, "prefill/packed", prefill.Plan(0, 128), more)
    assert with_many[1]


@pytest.mark.parametrize("processors", [132, 78])
def test_there_are_no_more_programs_than_processors(processors, monkeypatch):
    monkeypatch.setattr("tests.gpu.cross.PROCESSORS", {"sm_90": processors})
    with gpu_like("sm_90"):
        for HV in (32, 64):
            for plan in prefill.all_plans():
                for call in prefill.planned_launches(spec(HV=HV), plan).calls:
                    if call.kernel == prefill.STATE:
                        number = call.arguments["number"]
                        assert call.programs == min(number, processors)
            by_item = prefill.planned_launches(spec(HV=HV), prefill.Plan(0, 128, programs=0))
            assert by_item.calls[-1].programs == by_item.calls[-1].arguments["number"]


def test_the_parallel_half_sets_the_counter_that_items_are_taken_from():
    """Also in the first of two passes; the second finds the counter as the first has left it."""
    with gpu_like("sm_90"):
        chunks, states = prefill.planned_launches(spec(), prefill.Plan(0, 128)).calls
        first = prefill.workspace(pass_specs()[0], prefill.Binding(pass_specs()[0]))
    assert chunks.arguments["taken_ptr"] == states.arguments["taken_ptr"]
    assert first.taken.source == states.arguments["taken_ptr"].source
