"""A slot that one stream frees and another gets: on a GPU, and with streams made up here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sluice import stream_order
from sluice.state_pool import PoolGeometry, StatePool

GEOMETRY = PoolGeometry(layers=2, num_v_heads=2, conv_channels=32, head_k_dim=8, head_v_dim=8)


class Stream:
    """Notes what it is told to wait for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: list[str] = []

    def record_event(self) -> tuple[Stream, int]:
        return self, len(self.queue)

    def wait_event(self, event: tuple[Stream, int]) -> None:
        stream, place = event
        self.queue.append(f"after {place} of {stream.name}")


@pytest.fixture
def now(monkeypatch):
    """Which of two streams is the current one."""
    state = SimpleNamespace(first=Stream("first"), second=Stream("second"), capturing=False)
    state.stream = state.first
    made: Any = SimpleNamespace(
        current_stream=lambda device: state.stream,
        is_current_stream_capturing=lambda: state.capturing,
    )
    monkeypatch.setattr(stream_order, "torch", SimpleNamespace(cuda=made))
    return state


def pool() -> StatePool:
    made = StatePool(GEOMETRY, 4)
    made._book._freed = stream_order.Freed(torch.device("cuda", 0))
    return made


@pytest.mark.parametrize("again", ["allocate", "claim", "fork", "restore"])
def test_a_stream_waits_for_the_one_that_freed_a_slot(now, again):
    one = pool()
    mine, other = one.allocate(2)
    saved = one.snapshot(mine)
    now.first.queue.append("a call")
    one.free(mine)
    now.first.queue.append("a call of somebody else")
    now.stream = now.second
    ways = {
        "allocate": one.allocate,
        "claim": lambda: one.claim([mine]),
        "fork": lambda: one.fork(other),
        "restore": lambda: one.restore(saved),
    }
    (slot,) = ways[again]()
    assert slot == mine
    assert now.second.queue == ["after 1 of first"]
    one.free(slot)
    one.allocate()
    assert now.second.queue == ["after 1 of first"], "its own work comes before anyway"


def test_slots_of_a_failed_call_are_freed_like_others(now):
    one = pool()
    now.first.queue.append("a call")
    with pytest.raises(RuntimeError, match="no memory"), one._book.taking("allocate", 2):
        raise RuntimeError("no memory")
    now.stream = now.second
    one.allocate(2)
    assert now.second.queue == ["after 1 of first"] * 2


def test_one_stream_waits_for_nothing_and_a_graph_has_no_events_from_outside(now):
    one = pool()
    for _ in range(3):
        one.free(one.allocate(2))
    assert now.first.queue == []
    now.stream, now.capturing = now.second, True
    one.free(one.allocate(2))
    assert now.second.queue == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_late_write_of_another_stream_does_not_reach_the_next_owner():
    one = StatePool(GEOMETRY, 4, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        mine = one.allocate()
        for _ in range(50):
            busy = busy @ busy
        one.recurrent[:, mine[0]].fill_(7.0)
        one.free(mine)
    assert not first.query(), "the first stream is done too early for this test"
    with torch.cuda.stream(second):
        assert one.allocate() == mine
        found = one.recurrent[:, mine[0]].clone()
    torch.cuda.synchronize()
    assert not found.any()
    assert not one.recurrent[:, mine[0]].any()
