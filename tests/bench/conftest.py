"""Shared by these tests: a small shape, and a session on a small workload."""

from __future__ import annotations

import pytest
import torch

from sluice.bench import session as sessions
from sluice.bench.check import Answer
from sluice.layers.qwen import preset
from sluice.testing.workload import describe, parse_size


@pytest.fixture
def small():
    """A workload of few heads (1/3 of 128): ``small("decode", "N=2")``."""

    def make(op, size, dtype=torch.float32, model="Qwen3.5-27B", tp=16, **options):
        return describe(op, preset(model, tp), parse_size(size), dtype, **options)

    return make


@pytest.fixture
def judge(small, monkeypatch):
    """A provider's verdict on a small workload, with two sets of inputs."""
    monkeypatch.setattr(sessions, "MOST_SETS", 2)

    def check(name, op, size, dtype=torch.float32, **options):
        workload = small(op, size, dtype, **options)
        inputs = workload.case.inputs(dtype)
        answer = Answer.of(workload, inputs, dtype)
        session = sessions.Session(name, "cpu", 1)
        verdict = session.check(workload, dtype, (inputs, answer))
        session.release()
        return verdict

    return check
