"""Every operator on a busy machine, against what a fair share of the cores gives.

    PYTHONPATH=src python benchmarks/cpu_busy.py [neighbour workers requests]

- neighbour: another process keeps one of the cores busy. Two threads beside it are due one core and
  a half.
- workers: the process has two ``DataLoader`` workers that compute all the time. Its threads are due
  one core.
- requests: eight Python threads call an operator again and again. All together are due the rate of
  one thread that calls alone.

With ``t1`` and ``t2`` the times of a call with one and with two threads on an idle machine, a share
of ``s`` cores gives ``t1 / s``, but nothing below ``t2``. Times are means, because a thread that is
put aside for milliseconds shows in no median. The goal is 1.5 times the share's time.
"""
# ruff: noqa: T201

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import torch
from cpu_goals import operators, with_threads
from cpu_host import BUSY
from cpu_targets import Bursts, Run, run_lines
from torch.utils.data import DataLoader, IterableDataset

BOUND, ROUNDS, SECONDS, REQUESTS = 1.5, 3, 0.12, 8


def means(sides: dict[str, Run], alone: bool) -> dict[str, float]:
    """Microseconds per call."""
    return Bursts(sides, ROUNDS, SECONDS, alone).means()


def alone() -> dict[str, tuple[Run, float, float]]:
    """For every operator: the call, and its times with one and with two threads."""
    found, threads = {}, torch.get_num_threads()
    for name, run in operators():
        times = means({str(n): with_threads(run, n) for n in (1, 2)}, alone=True)
        found[name] = run, times["1"], times["2"]
    torch.set_num_threads(threads)
    return found


def report(title: str, name: str, took: float, fair: float, times: str) -> None:
    kept = "ok  " if took <= BOUND * fair else "MISS"
    ratio = f"{took / fair:.2f} (<= {BOUND})"
    print(f"{title}, {name:24}{kept} {ratio}  {took:.1f}, fair share {fair:.1f}; alone {times}")


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process that keeps one core busy."""
    with subprocess.Popen([sys.executable, "-c", BUSY]) as other:
        time.sleep(0.5)
        try:
            yield
        finally:
            other.kill()


class Batches(IterableDataset):
    """Batches that take a worker's time and are soon handed over."""

    def __iter__(self) -> Iterator[float]:
        x = torch.randn(256, 256)
        while True:
            for _ in range(200):
                x = torch.tanh(x @ x)
            yield float(x.sum())


@contextmanager
def two_workers() -> Iterator[None]:
    """Two workers of this process, whose batches a thread takes as they come."""
    batches = iter(DataLoader(Batches(), batch_size=None, num_workers=2))
    next(batches)
    ended = threading.Event()

    def take() -> None:
        while not ended.is_set():
            next(batches)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def beside(title: str, cores: float, company: object) -> None:
    known = alone()
    with company:  # type: ignore[attr-defined]
        for name, (run, one, two) in known.items():
            took = means({"now": run}, alone=False)["now"]
            report(title, name, took, max(one / cores, two), f"{one:.1f} and {two:.1f}")


def neighbour() -> None:
    beside("neighbour", 1.5, busy_core())


def workers() -> None:
    beside("workers", 1.0, two_workers())


def rate(shares: list[list[Run]]) -> float:
    """Microseconds per call, of threads that make these calls in turn, all at once."""
    calls, ended = [0] * len(shares), threading.Event()

    def work(i: int) -> None:
        for run in cycle(shares[i]):
            if ended.is_set():
                return
            run()
            calls[i] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(shares))]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    time.sleep(3 * SECONDS)
    ended.set()
    for thread in threads:
        thread.join()
    return 1e6 * (time.perf_counter() - begin) / sum(calls)


def requests() -> None:
    """Every thread has tensors of its own; the one that calls alone takes those of all in turn."""
    for same in zip(*(operators() for _ in range(REQUESTS)), strict=True):
        name, runs = same[0][0], [run for _, run in same]
        for run in runs:
            run()
        one, many = [], []
        for _ in range(ROUNDS):
            one.append(rate([runs]))
            many.append(rate([[run] for run in runs]))
        fair = statistics.median(one)
        report("requests", name, statistics.median(many), fair, f"{fair:.1f}")


def main() -> None:
    run_lines({f.__name__: f for f in (neighbour, workers, requests)}, "means")


if __name__ == "__main__":
    main()
