"""Load in short: results and memory. Times are for ``make load`` on a machine that is quiet."""

from __future__ import annotations

import pytest
import torch

from sluice import calls
from sluice.state_pool import StatePool
from tests.load import pool, shapes
from tests.load.measure import LIMIT, Times
from tests.suite import DEVICE


@pytest.mark.slow
def test_eight_threads_in_one_pool_have_the_bits_of_one_and_take_no_more_memory():
    seen, memory = pool.serve(6.0, device=DEVICE)
    assert not seen.faults
    assert seen.scripts > 50
    assert memory.growth <= LIMIT, str(memory)


def test_calls_of_changing_shapes_take_no_more_memory():
    _, memory = shapes.changing(4_000, 200, DEVICE)
    assert memory.growth <= LIMIT, str(memory)


@pytest.mark.parametrize(("size", "anew"), [(64, 0), (65, 0.05), (72, 0.2), (128, 0.6)])
def test_more_shapes_in_turn_than_are_kept_bind_anew_what_does_not_fit(size, anew, monkeypatch):
    """No cliff: one shape more than there is room for does not push out all others."""
    monkeypatch.setattr(calls.BINDINGS, "most", 64)
    right = shapes.Views(DEVICE).norm(0).clone()
    _, found = shapes.walk(size, 20 * size, DEVICE)
    assert len(calls.BINDINGS) == 64
    assert 1 - 64 / size <= found <= anew
    assert torch.equal(shapes.Views(DEVICE).norm(0), right)


def test_shapes_that_change_with_every_call_are_exact():
    shapes.mixed(60, DEVICE)


def test_a_pool_that_gives_a_slot_to_two_threads_is_seen(monkeypatch):
    """The load can fail."""
    right, given = StatePool.allocate, []

    def wrong(self, n=1):
        if len(given) % 5 == 4:
            given.append(given[-1])
        else:
            given.append(right(self, n))
        return given[-1]

    monkeypatch.setattr(StatePool, "allocate", wrong)
    monkeypatch.setattr(pool, "SCRIPTS", 4)
    seen, _ = pool.serve(2.0, device=DEVICE)
    assert seen.faults


def test_latencies_are_counted_to_within_one_percent_in_the_same_memory():
    one, other = Times(), Times()
    for i in range(1, 1001):
        (one if i % 2 else other).add(i * 1e-5)
    before = len(one.counts)
    one.take(other)
    for share in (0.5, 0.99, 0.999):
        assert one.quantile(share) == pytest.approx(share * 1e-2, rel=0.012)
    assert (one.number, one.longest, len(one.counts)) == (1000, 1e-2, before)
