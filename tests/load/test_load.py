"""Load in short: results and memory. Times are for ``make load`` on a machine that is quiet."""

from __future__ import annotations

import functools

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


def test_more_shapes_than_bindings_are_kept_are_served_and_forgotten(monkeypatch):
    """At the bound the binding that was not used for longest goes: a call of it is bound anew."""
    monkeypatch.setattr(calls, "_bind", functools.lru_cache(maxsize=64)(calls._bind.__wrapped__))
    views = shapes.Views(DEVICE)
    first = views.norm(0).clone()
    shapes.timed(views.norm, list(range(1, 80)), DEVICE, Times())
    info = calls._bind.cache_info()
    assert (info.currsize, info.misses) == (64, 80)
    assert torch.equal(views.norm(0), first)
    assert calls._bind.cache_info().misses == 81


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
