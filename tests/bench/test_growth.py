"""benchmarks/gpu_growth.py checks what it prints, in both of its modes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import sluice

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_growth.py"


@pytest.fixture(scope="module")
def growth():
    spec = importlib.util.spec_from_file_location("gpu_growth", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_line_for_each_length_with_and_without_batch_invariant(growth, capsys):
    assert growth.measure([40, 90], (1, 2), "cpu", exact=40, tail=30) == []
    lines = capsys.readouterr().out.splitlines()[1:]
    found = [line.split()[:2] for line in lines]
    assert found == [["False", "40"], ["True", "40"], ["False", "90"], ["True", "90"]]
    assert all(float(line.split()[-1]) < 1e-5 for line in lines)


def _last(o, state):
    o[:, -1] += 1.0
    return o, state


def _early(o, state):
    if o.shape[1] == 90:
        o[:, 3] += 1.0
    return o, state


def _forgetful(o, state):
    return o, state * 1.01 if o.shape[1] == 90 else state


@pytest.mark.parametrize("exact", [90, 40])
@pytest.mark.parametrize("spoil", [_last, _early, _forgetful])
def test_a_wrong_output_is_found(growth, exact, spoil, monkeypatch):
    """A wrong token at the end, a wrong early token of the whole prompt only, and a wrong state."""
    args = growth.inputs(90, (1, 2), "cpu", torch.float32)
    assert growth.check(args, exact, 30, {}) < 1e-5
    inner = sluice.prefill

    def prefill(*positional, **options):
        o, state = inner(*positional, **options)
        return spoil(o.clone(), state.clone())

    monkeypatch.setattr(sluice, "prefill", prefill)
    with pytest.raises(AssertionError, match="relative error"):
        growth.check(args, exact, 30, {})
