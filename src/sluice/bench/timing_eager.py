"""Timing of eager calls on a GPU, by the host's clock.

A replayed graph (``timing_gpu.py``) shows the time of the kernels alone. A program that calls
eagerly also spends the host's time on every call:

host   until the call returns, without waiting for the device
wall   per call of a train of calls, from the first call until every result is there: the larger of
       the host's and the device's time, as a program feels it that calls layer after layer

The host's time is that of short bursts. The device is idle before each burst, and a burst holds so
few calls that the launch queue never fills: a full queue would make the host wait for the device.
The calls are those that were checked. They take the sets of inputs in turn, as a graph does, and
allocate their outputs, as a user's call does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from sluice.bench.providers.base import Call

BURST = 4  # calls, or fewer where these take longer than a block may
TRAIN = 16  # calls, or fewer likewise: the start on an idle device is a small part of it


class Timer:
    """Times eager calls of one workload; ``block`` is called once per round."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.next = 0

    def block(self, seconds: float) -> dict[str, list[float]]:
        """Seconds per call, of the host in each burst and of both in each train.

        Each takes half of ``seconds`` and has at least one sample. One more call goes first and is
        not counted: another provider has just used the caches and the cores.
        """
        half = seconds / 2
        most = max(1, int(half / max(self._wall(1), 1e-9)))
        host = _repeat(lambda: self._host(min(BURST, most)), half)
        return {"host": host, "wall": _repeat(lambda: self._wall(min(TRAIN, most)), half)}

    def _host(self, count: int) -> float:
        """Seconds of the host per call, in one burst."""
        runs = [self._turn() for _ in range(count)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        for run in runs:
            run()
        seconds = (time.perf_counter() - start) / count
        torch.cuda.synchronize()
        return seconds

    def _wall(self, count: int) -> float:
        """Seconds per call of a train, from an idle device until every result is there."""
        runs = [self._turn() for _ in range(count)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        for run in runs:
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    def _turn(self) -> Callable[[], Any]:
        """The call on the next set of inputs."""
        run = self.calls[self.next % len(self.calls)].run
        self.next += 1
        return run


def _repeat(measure: Callable[[], float], seconds: float) -> list[float]:
    """Measure for so many seconds, and once at least."""
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while not samples or time.perf_counter() < end:
        samples.append(measure())
    return samples
