"""Timing on a GPU: graphs if possible, else events; an empty graph fails the check."""

from __future__ import annotations

import statistics

import pytest
import torch

from sluice.bench import floors, timing_gpu
from sluice.bench.check import Answer
from sluice.bench.providers.base import Call
from sluice.bench.session import Session

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def calls(count=4, size=1 << 20):
    xs = [torch.ones(size, device="cuda") for _ in range(count)]
    return [Call(lambda x=x: x * 2.0, lambda y: {"y": y}) for x in xs]


def test_a_graph_is_replayed_and_gives_the_result():
    timer = timing_gpu.Timer(calls())
    timer.warm_up()
    assert timer.method == "graph"
    assert timer.per_graph >= 4
    assert torch.all(timer.replayed([]) == 2.0)
    samples = timer.block(0.01, 5, 1.0)
    assert len(samples) >= 5
    assert 0 < min(samples) < 1e-3
    timer.close()


def test_a_call_that_synchronises_is_timed_by_events():
    x = torch.ones(1 << 20, device="cuda")
    timer = timing_gpu.Timer([Call(lambda: float((x * 2).sum()), dict)] * 2)
    timer.warm_up()
    assert timer.method == "events"
    assert timer.why_not
    assert timer.replayed([]) is None
    assert len(timer.block(0.0, 6, 1.0)) >= 6


def test_an_eager_call_returns_before_its_result_is_there():
    timer = timing_gpu.Timer(calls(size=1 << 26))
    found = timer.eager.block(0.05)
    host, wall = (statistics.median(found[name]) for name in ("host", "wall"))
    assert 0 < host < wall < 0.01
    timer.close()


def test_sluice_is_right_when_replayed(small):
    workload = small("decode", "N=4", torch.bfloat16)
    inputs = workload.case.inputs(torch.bfloat16, "cuda")
    answer = Answer.of(workload, inputs, torch.bfloat16)
    session = Session("sluice", "cuda", 1)
    session.start()
    verdict = session.check(workload, torch.bfloat16, (inputs, answer))
    assert verdict["status"] == "ok", verdict["reason"]
    assert session.time(0.01, 3, 1.0)
    assert all(session.eager(0.01).values())
    session.release()


def test_a_copy_does_not_beat_the_memory():
    measured = floors.measure(torch.device("cuda"), torch.bfloat16, quick=True)
    assert 1e11 < measured.bandwidth < 2e13
    assert measured.matrix["bfloat16"] > 1e13
