"""GPU timing on a simulated device: capturing records calls, replaying runs them."""

from __future__ import annotations

import contextlib

import pytest
import torch

from sluice.bench import session as session_module
from sluice.bench import timing_gpu
from sluice.bench.check import Answer
from sluice.bench.providers.base import Call
from sluice.bench.session import Session

MICROSECONDS = 10.0  # what every call takes


class Device:
    """A clock, and the graph that is being captured."""

    def __init__(self):
        self.now, self.graph = 0.0, None

    def launch(self, work):
        """Run or record a call, like a kernel launch."""
        if self.graph is not None:
            self.graph.work.append(work)
            return
        self.now += MICROSECONDS
        work()


@pytest.fixture
def device(monkeypatch):
    it = Device()

    class Event:
        def __init__(self, enable_timing):
            self.at = 0.0

        def record(self):
            self.at = it.now

        def elapsed_time(self, other):
            return (other.at - self.at) * 1e-3

    class Graph:
        def __init__(self):
            self.work = []

        def replay(self):
            for work in self.work:
                it.launch(work)

    @contextlib.contextmanager
    def capture(graph, stream, capture_error_mode):
        it.graph = graph
        try:
            yield
        finally:
            it.graph = None

    class Stream:
        def wait_stream(self, other):
            pass

    for name, value in {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
        "Stream": Stream,
        "current_stream": lambda: None,
        "synchronize": lambda *args: None,
        "_sleep": lambda cycles: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return it


def doubling(device, count=3, recorded=True):
    """Calls that double their input and count; if not ``recorded``, on a stream of their own."""

    def make():
        x, counter = torch.ones(4), torch.zeros(1)

        def run():
            y = torch.empty(4)

            def work():
                torch.mul(x, 2.0, out=y)
                counter.add_(1)

            if recorded or device.graph is None:
                device.launch(work)
            return y, counter

        return Call(run, lambda r: {"y": r[0], "state": r[1]}, mutable=(counter,))

    return [make() for _ in range(count)]


def test_a_graph_holds_every_set_and_enough_work(device):
    timer = timing_gpu.Timer(doubling(device))
    timer.warm_up()
    assert timer.method == "graph"
    assert timer.per_graph % 3 == 0
    assert timer.per_graph * MICROSECONDS * 1e-6 >= timing_gpu.LEAST_GRAPH_SECONDS
    samples = timer.block(0.0, 7, 1.0)
    assert len(samples) == 7
    assert samples == pytest.approx([MICROSECONDS * 1e-6] * 7)
    assert len(timer.block(0.01, 1, 1.0)) > 7  # the requested seconds
    assert len(timer.block(9.0, 1, 0.002)) < 7  # and the limit


def test_what_is_replayed_begins_from_the_state_it_is_given(device):
    timer = timing_gpu.Timer(doubling(device))
    before = [x.clone() for x in timer.calls[0].mutable]
    timer.warm_up()
    y, counter = timer.replayed(before)
    assert torch.equal(y, torch.full((4,), 2.0))
    assert counter.item() == 1.0
    timer.close()
    assert timer.graph is None


def test_a_graph_that_recorded_nothing_is_found_out(device):
    timer = timing_gpu.Timer(doubling(device, recorded=False))
    timer.warm_up()
    y, counter = timer.replayed([torch.zeros(1)])
    assert torch.isnan(y).all()
    assert counter.item() == 0.0


def test_a_session_falls_back_to_events_where_a_replay_is_not_right(device):
    session = Session("torch", "cpu", 1)
    calls = doubling(device, recorded=False)
    session.timer = timing_gpu.Timer(calls)
    session.timer.warm_up()
    answer = Answer({"y": torch.full((4,), 2.0, dtype=torch.float64)}, {"y": 1e-5})
    session._check_replay(answer, calls[0], [torch.zeros(1)])
    assert session.timer.method == "events"
    assert "a replayed graph is not right" in session.timer.why_not
    assert session.timer.block(0.0, 3, 1.0) == pytest.approx([MICROSECONDS * 1e-6] * 7)


def test_what_cannot_be_captured_is_timed_by_events(device):
    def run():
        if device.graph is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        device.launch(lambda: None)

    timer = timing_gpu.Timer([Call(run, dict)] * 2)
    timer.warm_up()
    assert timer.method == "events"
    assert "not permitted" in timer.why_not
    assert timer.replayed([]) is None
    samples = timer.block(0.0, 20, 1.0)
    assert len(samples) >= 20
    assert samples == pytest.approx([MICROSECONDS * 1e-6] * len(samples))


def test_graphs_can_be_switched_off(device):
    timer = timing_gpu.Timer(doubling(device), graphs=False)
    timer.warm_up()
    assert timer.method == "events"


# ------------------------------------------------------------------------------------- later calls


def forgetful(device):
    """A call that works once: later ones launch nothing and return the buffer of the first."""
    y, counter = torch.empty(4), torch.zeros(1)
    todo = [1]

    def run():
        if todo:
            todo.pop()
            device.launch(lambda: (y.fill_(2.0), counter.add_(1)))
        return y, counter

    return Call(run, lambda r: {"y": r[0], "state": r[1]}, mutable=(counter,))


def test_a_later_call_begins_from_the_state_it_is_given(device):
    timer = timing_gpu.Timer(doubling(device))
    before = [x.clone() for x in timer.calls[0].mutable]
    timer.warm_up()
    y, counter = timer.repeated(before)
    assert torch.equal(y, torch.full((4,), 2.0))
    assert counter.item() == 1.0


def test_a_later_call_that_does_nothing_is_found_out(device):
    timer = timing_gpu.Timer([forgetful(device)], graphs=False)
    timer.warm_up()
    y, counter = timer.repeated([torch.zeros(1)])
    assert torch.isnan(y).all()
    assert counter.item() == 0.0


@pytest.mark.parametrize("right", [True, False])
def test_a_row_whose_later_calls_are_wrong_is_not_timed(right, device, small, monkeypatch):
    """Only a later call can be wrong here: the first one is right in both cases."""
    monkeypatch.setattr(session_module, "MOST_SETS", 2)
    monkeypatch.setattr(session_module.timing_cpu, "Timer", timing_gpu.Timer)
    make = (lambda device: doubling(device, 1)[0]) if right else forgetful
    session = Session("torch", "cpu", 1)
    monkeypatch.setattr(session.provider, "prepare", lambda job: make(device))
    exact = {"y": torch.full((4,), 2.0), "state": torch.ones(1)}
    answer = Answer({n: x.double() for n, x in exact.items()}, dict.fromkeys(exact, 1e-5))
    verdict = session.check(small("decode", "N=1"), torch.float32, ({"x": torch.ones(4)}, answer))
    assert verdict["status"] == ("ok" if right else "wrong"), verdict["reason"]
    assert (session.timer is not None) == right


def test_a_session_times_eager_calls_without_gradients(device):
    session = Session("torch", "cpu", 1)
    graded = []
    call = Call(lambda: graded.append(torch.is_grad_enabled()), dict)
    session.timer = timing_gpu.Timer([call])
    found = session.eager(0.001)
    assert set(found) == {"host", "wall"}
    assert all(x >= 0 for samples in found.values() for x in samples)
    assert set(graded) == {False}
    session.release()
    assert session.timer is None
