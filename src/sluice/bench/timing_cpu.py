"""Timing on a CPU: a host clock around each call, with the sets of inputs in turn."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sluice.bench.providers.base import Call

DEFAULT_CACHE = 32 << 20
METHOD = "host clock"


def cache_bytes() -> int:
    """The last-level cache of the first core, as Linux reports it."""
    found = [DEFAULT_CACHE]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        if text.rstrip("KM").isdigit():
            found.append(int(text.rstrip("KM")) * unit)
    return max(found[1:] or found)


class Timer:
    """Times the calls of one workload; ``block`` is called once per round."""

    method = METHOD

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.next = 0

    def warm_up(self) -> None:
        """Call every set once, which touches its memory and compiles what is needed."""
        for call in self.calls:
            call.run()

    def replayed(self, before: list[Any]) -> Any:
        """Nothing is replayed on a CPU: the timed calls are the checked ones."""
        return None

    repeated = replayed

    def block(self, seconds: float, least: int, most_seconds: float) -> list[float]:
        """Seconds of each call, for ``seconds`` and at least ``least`` calls.

        It ends after ``most_seconds`` in any case. The first call is not counted: another provider
        has just used the caches and the cores.
        """
        calls, clock = self.calls, time.perf_counter
        samples: list[float] = []
        begin = clock()
        calls[self.next % len(calls)].run()
        while True:
            self.next += 1
            run = calls[self.next % len(calls)].run
            start = clock()
            run()
            end = clock()
            samples.append(end - start)
            spent = end - begin
            if (spent >= seconds and len(samples) >= least) or spent >= most_seconds:
                return samples

    def close(self) -> None:
        self.calls = []
