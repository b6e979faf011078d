"""Prefill with sequences cut into segments by a given plan, against the oracle.

Plans cut long sequences only; here short ones are cut, so that two to six segments, tails of one
token, empty and packed rows, unknown states and discarded rows meet them.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from sluice.testing import cases
from tests.suite import DEVICE, backends, run_or_skip

pytest.importorskip("triton")

BY_NAME = {case.name.split("/")[-1]: case for case, _ in cases.pairs("prefill")}
NAMES = ("gated_delta", "raw", "packed", "packed_moved", "new_rows", "padded_rows", "state_kv")
SEGMENTS = (64, 128) if DEVICE == "cuda" else (64,)
CUT = [name for name in ("hopper", "triton") if name in backends("prefill")]


def plan(backend: str, segment: int) -> Any:
    module = importlib.import_module(f"sluice.backends.{backend}.prefill")
    rest = (64,) if backend == "hopper" else (32, 4, 2)
    return module, module.Plan(segment, *rest)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("segment", SEGMENTS)
@pytest.mark.parametrize("backend", CUT)
def test_a_cut_sequence_matches_the_oracle(backend, segment, name, monkeypatch):
    case = BY_NAME[name].with_(Hk=1, Hv=1)
    case = case.with_(K=128, V=128) if backend == "hopper" else case
    module, chosen = plan(backend, segment)
    monkeypatch.setattr(module, "plan", lambda p, processors: chosen)
    inputs = case.inputs(torch.float16, DEVICE)
    expected = case.expected(inputs)
    case.check(run_or_skip(case, inputs, backend), expected)
