"""Prefill with sequences cut into segments by a given plan, against the oracle.

By default only long sequences are cut. Here short ones are, so that cuts meet two to six segments,
tails of one token, empty and packed rows, new states and rows that are not kept.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from sluice import calls
from sluice.layers import QwenShape
from sluice.model_calls import ModelCalls
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


@pytest.fixture
def bound_anew() -> Iterator[Callable[[], None]]:
    """A function after which calls are bound anew; so they are after the test."""
    yield calls.forget
    calls.forget()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("segment", SEGMENTS)
@pytest.mark.parametrize("backend", CUT)
def test_a_cut_sequence_matches_the_oracle(backend, segment, name, monkeypatch, bound_anew):
    case = BY_NAME[name].with_(Hk=1, Hv=1)
    case = case.with_(K=128, V=128) if backend == "hopper" else case
    module, chosen = plan(backend, segment)
    monkeypatch.setattr(module, "best_plan", lambda spec, processors: chosen)
    bound_anew()
    inputs = case.inputs(torch.float16, DEVICE)
    expected = case.expected(inputs)
    case.check(run_or_skip(case, inputs, backend), expected)


def spec(N: int, tokens: int, HV: int, *, batch_invariant: bool = False) -> Any:
    """A packed call of N sequences of equal length."""
    shape = QwenShape("", 64, HV // 2, HV, 4, (0,))
    made = ModelCalls(shape).call("prefill", "", N, tokens, True).spec(torch.device("cpu"))
    return replace(made, batch_invariant=batch_invariant)


@pytest.mark.parametrize("HV", [4, 8, 32, 64])
@pytest.mark.parametrize("N", [1, 3, 8])
@pytest.mark.parametrize("tokens", [64, 2048, 8192, 131072])
def test_a_plan_of_triton_splits_into_whole_chunks_or_not_at_all(tokens, N, HV):
    """Segments are whole chunks, and long enough to keep the workspace small."""
    from sluice.backends.triton import prefill

    plan = prefill.best_plan(spec(N, tokens, HV), 132)
    assert plan.segment % prefill.CHUNK == 0
    if plan.segment:
        assert plan.segment < tokens
        workspace = (tokens * N // plan.segment + N) * prefill.STATE_TOKENS
        assert workspace <= prefill.ROOM * tokens * N, "all in all 1.5 times v"
    assert prefill.best_plan(spec(N, tokens, HV, batch_invariant=True), 132).segment == 0


def test_a_plan_of_triton_follows_from_its_model(monkeypatch):
    """Eight heads leave most of 132 SMs idle; 8 x 64 heads fill them, with wide programs."""
    from sluice.backends.triton import gpu, prefill

    monkeypatch.setattr(gpu, "has_wgmma", lambda device: True)
    assert prefill.best_plan(spec(1, 32768, 8), 132).segment > 0
    assert prefill.best_plan(spec(1, 1024, 64), 132) == prefill.Plan(0, 64, 8, prefill.STAGES)
    assert prefill.best_plan(spec(8, 4096, 64), 132) == prefill.Plan(0, 128, 8, prefill.STAGES)
    alone = prefill.best_plan(spec(1, 512, 4, batch_invariant=True), 132)
    assert alone == prefill.best_plan(spec(8, 4096, 64, batch_invariant=True), 132)
