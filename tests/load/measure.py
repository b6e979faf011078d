"""Memory of the process and of the device, and latencies."""

from __future__ import annotations

import gc
import math
import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import torch

LIMIT = 0.01
"""How much memory may grow after the warm-up."""


def memory(device: str = "cpu") -> int:
    """Bytes of the process in memory; on a GPU, those that torch has taken there."""
    if device != "cpu":
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Memory:
    """Samples, the first of which is taken after the warm-up."""

    device: str = "cpu"
    samples: list[int] = field(default_factory=list)

    def sample(self) -> None:
        gc.collect()
        self.samples.append(memory(self.device))

    @property
    def growth(self) -> float:
        """The last sample over the first, less 1."""
        return self.samples[-1] / self.samples[0] - 1.0

    def __str__(self) -> str:
        found = (self.samples[0], self.samples[-1], max(self.samples))
        first, last, most = (x / 2**20 for x in found)
        grown = f"{last:.1f} at the end ({self.growth:+.2%}), {most:.1f} at most"
        return f"{first:.1f} MiB after the warm-up, {grown}"


class Times:
    """Latencies, counted in steps of 1%: they take the same memory however many there are."""

    SHORTEST, STEP, STEPS = 1e-8, math.log(1.01), 2600  # up to half an hour

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.counts = array("q", bytes(8 * self.STEPS))
        self.number, self.total, self.longest = 0, 0.0, 0.0

    def add(self, seconds: float) -> None:
        step = int(math.log(max(seconds / self.SHORTEST, 1.0)) / self.STEP)
        self.counts[min(step, self.STEPS - 1)] += 1
        self.number, self.total = self.number + 1, self.total + seconds
        self.longest = max(self.longest, seconds)

    def take(self, other: Times) -> None:
        """Count those of another, too."""
        for step, count in enumerate(other.counts):
            self.counts[step] += count
        self.number, self.total = self.number + other.number, self.total + other.total
        self.longest = max(self.longest, other.longest)

    def quantile(self, share: float) -> float:
        """As many of the calls took no longer, to within 1%."""
        passed = 0
        for step, count in enumerate(self.counts):
            passed += count
            if passed > share * self.number:
                return self.SHORTEST * math.exp((step + 0.5) * self.STEP)
        return self.longest

    def __str__(self) -> str:
        median, p99, p999 = (self.quantile(q) for q in (0.5, 0.99, 0.999))
        return (
            f"median {median * 1e6:.0f} us, 99% {p99 * 1e6:.0f}, 99.9% {p999 * 1e6:.0f} "
            f"({p999 / median:.1f} x), longest {self.longest * 1e6:.0f}, {self.number:,} calls"
        )
