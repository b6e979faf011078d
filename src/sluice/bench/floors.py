"""The limits of this machine, measured in the same run: how fast it copies and multiplies.

A floor is the time of a plain copy that moves as many bytes, or of a matrix product of as many
operations, whichever is longer. As in the timed calls, the data of a copy is not in the cache.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from sluice.bench import timing_cpu, timing_gpu
from sluice.bench.providers.base import Call

SIZES = {
    "cpu": tuple(1 << n for n in (16, 18, 20, 22, 24, 26, 28)),
    "cuda": tuple(1 << n for n in (18, 20, 22, 24, 26, 28, 30)),
}
MATRIX = {"cpu": 1536, "cuda": 8192}


class Floors:
    """Seconds of a copy by its bytes, and operations per second of a matrix product."""

    def __init__(self, copies: list[tuple[int, float]], matrix: dict[str, float]) -> None:
        self.copies = sorted(copies)
        self.matrix = matrix

    def copy_seconds(self, nbytes: float) -> float:
        """Seconds to move ``nbytes`` (read plus written), interpolated between measured sizes."""
        first, last = self.copies[0], self.copies[-1]
        if nbytes <= first[0]:
            return first[1]
        if nbytes >= last[0]:
            return last[1] * nbytes / last[0]
        for (b0, t0), (b1, t1) in zip(self.copies, self.copies[1:], strict=False):
            if nbytes <= b1:
                return t0 + (t1 - t0) * (nbytes - b0) / (b1 - b0)
        raise AssertionError("unreachable: sizes are sorted")

    def seconds(self, nbytes: float, flops: float, dtype: str) -> tuple[float, str]:
        """The floor of a workload, and its kind: "memory" or "compute"."""
        memory = self.copy_seconds(nbytes)
        rate = self.matrix.get(dtype, 0.0)
        compute = flops / rate if rate else 0.0
        return (memory, "memory") if memory >= compute else (compute, "compute")

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the largest copy."""
        nbytes, seconds = self.copies[-1]
        return nbytes / seconds

    def to_json(self) -> dict[str, Any]:
        copies = [{"bytes": b, "seconds": t} for b, t in self.copies]
        return {"copy": copies, "matrix_flops_per_s": self.matrix}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Floors:
        copies = [(int(x["bytes"]), float(x["seconds"])) for x in data["copy"]]
        return cls(copies, {k: float(v) for k, v in data["matrix_flops_per_s"].items()})


def measure(device: torch.device, dtype: torch.dtype, quick: bool = False) -> Floors:
    """Measure both on ``device``; a few seconds, less when ``quick``."""
    sizes = SIZES[device.type][:: 2 if quick else 1]
    if sizes[-1] != SIZES[device.type][-1]:
        sizes = (*sizes, SIZES[device.type][-1])
    copies = [(size, _copy(device, size, quick)) for size in sizes]
    name = str(dtype).split(".")[1]
    return Floors(copies, {name: _matrix(device, dtype, quick)})


def _copy(device: torch.device, nbytes: int, quick: bool) -> float:
    """Seconds of a copy or an update in place, whichever is faster; each moves ``nbytes``."""
    cuda = device.type == "cuda"
    cache = timing_gpu.l2_bytes(device) if cuda else timing_cpu.cache_bytes()
    sets = max(2, min(2048, math.ceil(3 * cache / nbytes)))
    half = max(1, nbytes // 2 // 4)
    sources = [torch.ones(half, device=device) for _ in range(sets)]
    targets = [torch.ones(half, device=device) for _ in range(sets)]

    def copier(a: torch.Tensor, b: torch.Tensor) -> Callable[[], Any]:
        return lambda: b.copy_(a)

    def updater(a: torch.Tensor) -> Callable[[], Any]:
        return lambda: a.mul_(1.0)

    copies = [copier(a, b) for a, b in zip(sources, targets, strict=True)]
    updates = [updater(a) for a in (*sources, *targets)]
    return min(_median(device, copies, quick), _median(device, updates, quick))


def _matrix(device: torch.device, dtype: torch.dtype, quick: bool) -> float:
    """Operations per second of a square product in ``dtype``."""
    n = MATRIX[device.type] // (2 if quick and device.type == "cuda" else 1)
    a, b, c = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
    seconds = _median(device, [lambda: torch.mm(a, b, out=c)], quick)
    return 2.0 * n**3 / seconds


def _median(device: torch.device, runs: list[Callable[[], Any]], quick: bool) -> float:
    calls = [Call(run, dict) for run in runs]
    timer: Any = timing_gpu.Timer(calls) if device.type == "cuda" else timing_cpu.Timer(calls)
    timer.warm_up()
    begin, samples = time.perf_counter(), []
    while len(samples) < 9 or time.perf_counter() - begin < (0.1 if quick else 0.3):
        samples += timer.block(0.02, 3, 1.0)
    timer.close()
    return statistics.median(samples)
