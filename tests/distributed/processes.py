"""Real processes for tests: run a function on every rank of a gloo group, and collect the results.

Processes are forked from a server that has imported torch once, so a group of four starts in a
fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import sluice
from sluice.testing.inputs import nan_empty

_context: Any = None


class Outcome(NamedTuple):
    """One rank's result or failure; ``seconds`` count from when all had started."""

    value: Any = None
    error: str = ""
    kind: str = ""
    seconds: float = 0.0


def on_ranks(
    function: Callable[..., Any],
    size: int,
    folder: Path,
    *arguments: Any,
    limit: float = 120.0,
    lost: int | None = None,
) -> list[Outcome | None]:
    """Run ``function(rank, *arguments)`` on ``size`` processes; None for one that died silently.

    Processes that still run after ``limit`` seconds are killed, and the test fails. Rank ``lost``
    is not waited for.
    """
    context = _forkserver()
    answers = context.Queue()
    store = folder / f"store-{time.monotonic_ns()}"
    work = [
        context.Process(
            target=_run, args=(function, rank, size, str(store), answers, arguments), daemon=True
        )
        for rank in range(size)
    ]
    for process in work:
        process.start()
    outcomes: list[Outcome | None] = [None] * size
    end = time.monotonic() + limit
    while time.monotonic() < end:
        try:
            rank, outcome = answers.get(timeout=0.2)
            outcomes[rank] = outcome
        except queue.Empty:
            if not any(process.is_alive() for rank, process in enumerate(work) if rank != lost):
                break
    stuck = [rank for rank, process in enumerate(work) if process.is_alive() and rank != lost]
    for process in work:
        process.kill()
        process.join()
    assert not stuck, f"ranks {stuck} were still running after {limit} s: {outcomes}"
    return outcomes


def values(outcomes: list[Outcome | None]) -> list[Any]:
    """Every rank's value; fails with the tracebacks of ranks without one."""
    failed = [
        f"rank {rank}: {'died' if outcome is None else outcome.error}"
        for rank, outcome in enumerate(outcomes)
        if outcome is None or outcome.error
    ]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes if outcome is not None]


def _forkserver() -> Any:
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        # torch._dynamo: operations on meta tensors import it
        _context.set_forkserver_preload(["torch._dynamo", "sluice.distributed"])
    return _context


def _run(
    function: Callable[..., Any],
    rank: int,
    size: int,
    store: str,
    answers: Any,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    start = time.perf_counter()
    try:
        # not the compiled backend: ranks that start together would all compile it
        with nan_empty(), torch.no_grad(), sluice.use_backend("reference"):
            outcome = Outcome(function(rank, *arguments))
    except BaseException as error:
        text = traceback.format_exc()
        outcome = Outcome(error=text, kind=type(error).__name__)
    answers.put((rank, outcome._replace(seconds=time.perf_counter() - start)))
    answers.close()
    answers.join_thread()
