"""Eager calls on a simulated machine: a host that launches, and a device with a queue."""

from __future__ import annotations

import pytest
import torch

from sluice.bench import timing_eager
from sluice.bench.providers.base import Call

HOST, KERNEL = 10e-6, 70e-6  # seconds of one call


class Machine:
    """The host's clock, and when the device will have done what is queued."""

    def __init__(self):
        self.now = self.done = 0.0
        self.host, self.kernel = HOST, KERNEL
        self.queued, self.depths = 0, set()
        self.sets = []

    def launch(self, n):
        """A call on set ``n``: the host works, then the device does, after what is queued."""
        self.now += self.host
        self.done = max(self.done, self.now) + self.kernel
        self.queued += 1
        self.sets.append(n)

    def synchronize(self):
        self.now = max(self.now, self.done)
        self.depths.add(self.queued)
        self.queued = 0

    def perf_counter(self):
        return self.now


@pytest.fixture
def machine(monkeypatch):
    it = Machine()
    monkeypatch.setattr(torch.cuda, "synchronize", it.synchronize)
    monkeypatch.setattr(timing_eager.time, "perf_counter", it.perf_counter)
    return it


def timer(machine, sets=3):
    return timing_eager.Timer([Call(lambda n=n: machine.launch(n), dict) for n in range(sets)])


def wall(host, kernel, calls=timing_eager.TRAIN):
    """A train of calls takes the larger of both times each, and the smaller one once."""
    return max(host, kernel) + min(host, kernel) / calls


@pytest.mark.parametrize(("host", "kernel"), [(HOST, KERNEL), (KERNEL, HOST)])
def test_the_host_does_not_wait_and_the_wall_clock_does(machine, host, kernel):
    machine.host, machine.kernel = host, kernel
    found = timer(machine).block(0.1)
    assert found["host"] == pytest.approx([host] * len(found["host"]))
    assert found["wall"] == pytest.approx([wall(host, kernel)] * len(found["wall"]))
    assert min(map(len, found.values())) > 40
    assert machine.now < 0.102  # the seconds that were given


def test_what_an_earlier_call_left_on_the_device_is_nobodys_time(machine):
    machine.done = 0.5
    found = timer(machine).block(0.01)
    assert found["wall"] == pytest.approx([wall(HOST, KERNEL)] * len(found["wall"]))
    assert max(machine.depths) == timing_eager.TRAIN  # calls do not seem long because of it
    assert machine.queued == 0  # and nothing is left for the next


def test_the_queue_holds_a_burst_or_a_train_and_no_more(machine):
    timer(machine).block(0.1)
    assert machine.depths == {0, 1, timing_eager.BURST, timing_eager.TRAIN}


def test_every_set_has_its_turn_and_a_block_goes_on_where_one_ended(machine):
    it = timer(machine, sets=7)
    it.block(0.01)
    it.block(0.01)
    assert machine.sets == [n % 7 for n in range(len(machine.sets))]


@pytest.mark.parametrize(
    ("kernel", "together", "calls"), [(1.0, 1, 3), (0.02, 1, 3), (0.004, 2, 9)]
)
def test_a_long_call_is_made_a_few_times_only(machine, kernel, together, calls):
    machine.kernel = kernel
    found = timer(machine).block(0.024)
    assert len(machine.sets) == calls
    expected = wall(HOST, kernel, together)
    assert found["wall"] == pytest.approx([expected] * len(found["wall"]))
    assert found["host"] == pytest.approx([HOST] * len(found["host"]))
