"""A run that is interrupted ends the processes it began, which removes their folders."""

from __future__ import annotations

import pytest
from tests.bench.sample import sample

from sluice.bench import plan, run


class Spy:
    """A worker, or the inputs of workers: says whether it was closed."""

    made: list[Spy]

    def __init__(self, name, *_, **__):
        if name == "torch":
            raise KeyboardInterrupt
        self.closed = False
        self.made.append(self)

    def send(self, *_): ...

    def take(self, _): ...

    def close(self):
        self.closed = True


@pytest.fixture
def spies(monkeypatch):
    monkeypatch.setattr(Spy, "made", [], raising=False)
    monkeypatch.setattr(run, "Worker", Spy)
    monkeypatch.setattr(run, "Sources", Spy)
    return Spy


def test_an_interrupt_between_two_workers_leaves_none(spies, monkeypatch):
    monkeypatch.setattr(run.floors, "measure", lambda *_: sample().measured_floors())
    options = run.Options(providers=("sluice", "torch"), isolate=True)
    with pytest.raises(KeyboardInterrupt):
        run.run([], options, lambda _: None)
    assert [spy.closed for spy in spies.made] == [True]


def test_an_interrupt_of_a_first_call_leaves_no_worker_and_no_inputs(spies, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_ask", interrupt)
    workloads = plan.workloads("cpu-quick", plan.Wanted(ops=("decode",)), run.Options().dtype)
    with pytest.raises(KeyboardInterrupt):
        run._first_calls(workloads, {"sluice": None}, run.Options(), 60.0, lambda _: None)
    assert [spy.closed for spy in spies.made] == [True, True]
