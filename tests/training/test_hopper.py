"""Hopper's backward of prefill: on a Hopper GPU, or as compiled in the emulator
(``pytest -p tests.gpu.emulator.plugin --emulate sm_90 tests/training/test_hopper.py``)."""

from __future__ import annotations

import pytest
import torch

from sluice import calls
from sluice.backends.hopper import prefill_backward
from sluice.testing.compare import assert_same_bits
from tests.suite import backends
from tests.training.hopper_calls import FEW_PROGRAMS, HARD, KINDS, OF_DTYPE, SPLIT, USUAL
from tests.training.kernel_calls import backward_of, check, drawn

pytestmark = [
    pytest.mark.filterwarnings("ignore::sluice.SlowPathWarning"),
    pytest.mark.skipif("hopper" not in backends("prefill_backward"), reason="no Hopper GPU here"),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize("call", [*KINDS, *HARD], ids=str)
def test_gradients(call, dtype):
    check(call, dtype, "hopper")


@pytest.mark.parametrize(("call", "dtype"), OF_DTYPE, ids=str)
def test_gradients_that_nearly_cancel(call, dtype):
    check(call, dtype, "hopper")


@DTYPES
@pytest.mark.parametrize("call", SPLIT, ids=str)
def test_gradients_of_split_sequences(call, dtype, monkeypatch):
    whole = prefill_backward.plan_of
    monkeypatch.setattr(prefill_backward, "plan_of", lambda p: whole(p)._replace(segment=128))
    calls.forget()
    check(call, dtype, "hopper")
    calls.forget()


@pytest.mark.parametrize("call", FEW_PROGRAMS, ids=str)
def test_gradients_by_few_programs(call, monkeypatch):
    """A program of the last kernel goes from chunk to chunk."""
    whole = prefill_backward.plan_of
    monkeypatch.setattr(prefill_backward, "plan_of", lambda p: whole(p)._replace(programs=2))
    calls.forget()
    check(call, torch.bfloat16, "hopper")
    calls.forget()


def test_the_same_bits_each_time():
    leaves, options, _, do, dfinal = drawn(USUAL, torch.bfloat16)
    first = backward_of(leaves, options, do, dfinal, "hopper")
    again = backward_of(leaves, options, do, dfinal, "hopper")
    for name, x in first.items():
        assert_same_bits(again[name], x, name)
