"""Memory of the process and of the device, and latencies."""

from __future__ import annotations

import gc
import os
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


def quantiles(times: list[float]) -> str:
    """Median, 99th and 99.9th percentile, the largest, and what the issue asks for."""
    ordered = sorted(times)
    median, p99, p999 = (ordered[int(len(ordered) * q)] for q in (0.5, 0.99, 0.999))
    most = ordered[-1]
    return (
        f"median {median * 1e6:.0f} us, 99% {p99 * 1e6:.0f}, 99.9% {p999 * 1e6:.0f} "
        f"({p999 / median:.1f} x), longest {most * 1e6:.0f}, {len(ordered):,} calls"
    )
