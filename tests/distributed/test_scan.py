"""The scan over many ranks, each a thread: what a rank holds in the end, and what it sends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest

from sluice.distributed.scan import scanned
from sluice.distributed.transition import join
from sluice.testing import inputs
from sluice.testing.compare import FLOAT32_CPU, assert_within

V, K = 6, 5


class Thread:
    """A rank as far as a scan knows one."""

    def __init__(self, rank, size, boxes):
        self.rank, self.size, self.boxes, self.steps, self.sent = rank, size, boxes, 0, 0

    def swap(self, name, to, came):
        for rank, x in to.items():
            self.boxes[self.rank, rank].put(x.clone())
        for rank, x in came.items():
            x.copy_(self.boxes[rank, self.rank].get(timeout=30))
        self.steps += 1
        self.sent += len(to)


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 16, 17, 20])
def test_a_scan_joins_all_earlier_ranks(size, delta):
    """As one chain does; rank 0 begins the sequence, so its transition is zero."""
    rows = V + (K if delta else 1)
    messages = inputs.normal(inputs.generator(size), size, 2, 3, rows, K).float() / 2
    messages[0, :, :, V:] = 0
    boxes = {(a, b): Queue() for a in range(size) for b in range(size)}
    ranks = [Thread(rank, size, boxes) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(lambda r: scanned(r, messages[r.rank], V, delta), ranks))
    assert bool((found[0] == 0).all())
    for rank in range(1, size):
        exact = join(messages.double(), tuple(range(rank)), V, delta)
        assert_within(found[rank], exact, FLOAT32_CPU, name=f"rank {rank}")
    steps = {1: 0, 2: 1, 3: 1, 4: 1, 5: 2, 8: 2, 16: 2, 17: 3, 20: 3}[size]
    assert {rank.steps for rank in ranks} == {steps}
    assert max(rank.sent for rank in ranks) <= 3 * steps
