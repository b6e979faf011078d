"""The threads that run a kernel, and how they share its tasks.

Threads come from the OpenMP runtime in the process (torch brings one), entered through
``GOMP_parallel``: about a microsecond per launch, no second pool beside torch's, and safe to call
from several Python threads at once. Where no runtime is loaded, plain Python threads serve.

Every thread calls the kernel with the same block. It begins with its own part of the tasks, the
same part in every call so that a core finds in its cache what it wrote last time, and then helps
with the parts of others. No result depends on the number of threads.

A team is as large as torch's teams are, also where there are fewer tasks: OpenMP ends threads that
a smaller team leaves out, and torch's next operator would have to make them anew.

**A busy neighbour.** ``GOMP_parallel`` returns when every thread of the team has come back, also
one that the operating system has put aside for another process and that has no task left. So the
calling thread measures what a call takes, with a team and alone, and keeps a balance of the time
that teams save and lose. When the balance is negative, teams are halved for a pause, after which
larger ones are tried. Calls whose work is long keep the whole team.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any

from sluice import torch_private
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.memory import (
    call_int,
    call_parallel,
    call_worker,
    fetch_add,
    nanoseconds,
    write_int,
)
from sluice.backends.cpu.struct_view import struct_view

COUNTER_BYTES = 64
"""Every counter has a cache line of its own."""

LONG_DELAY = 100_000
"""Nanoseconds: a team that takes so much longer than one thread has lost time."""
LONG_WORK = 8_000_000
"""Nanoseconds of one thread: a call with more work neither has smaller teams nor is judged. A team
saves it more than it can lose while a thread is put aside once."""
MOST_SAVED = 50_000_000
"""Nanoseconds: the balance does not exceed this, so that a neighbour who comes is soon noticed."""
CREDIT = 8_000_000
"""Nanoseconds: what the balance begins with. Threads that slept need some milliseconds to wake on
busy cores; only after that do they save time."""
PAUSE_PER_LOSS = 16
"""A pause is at least this many times as long as the loss before it, which so costs 1/16 of the
time at most. It doubles each time that larger teams do not go well for as long as the last one."""
LONGEST_PAUSE = 1_000_000_000
"""Nanoseconds."""

crowd = struct_view("crowd", "limit until pause saved")
"""What is known of busy neighbours: how large teams are (0: no limit), until when, how long that
pause is, and the balance."""
CROWD = (ctypes.c_int64 * 4)(0, 0, 0, CREDIT)
"""The one record of the process. Threads write it without a lock: at worst a limit is lost."""
CROWD_ADDRESS = ctypes.addressof(CROWD)

DONE, SUSPICIOUS, ASK_PYTHON = 0, 1, 2
"""What ``run_tasks`` and the entry of ``launch.py`` return."""


def _runtime(*libraries: str | None) -> Any:
    """The first of these libraries, with all it was linked with, that has OpenMP's threads."""
    for name in libraries:
        with contextlib.suppress(AttributeError, OSError, TypeError):
            library = ctypes.CDLL(name)
            if library.GOMP_parallel and library.omp_get_thread_num:
                return library
    return None


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


# As torch's own calls are resolved: among the symbols of the process, then among those of what
# torch was linked with. Wheels for ARM make no OpenMP symbol visible to the process.
_openmp = _runtime(None, torch_private.extension_file())
parallel = 0 if _openmp is None else _address(_openmp.GOMP_parallel)
"""The address of ``GOMP_parallel``, 0 without a runtime."""
identify = 0 if _openmp is None else _address(_openmp.omp_get_thread_num)
"""The address of a function that numbers the threads of a team, 0 without a runtime."""
clock = _address(ctypes.CDLL(None).clock_gettime)
"""The address of ``clock_gettime``."""


def python_threads(function: Callable[[int], Any], where: int, count: int) -> None:
    """Let ``count`` Python threads call a kernel, this one included."""
    others = [threading.Thread(target=function, args=(where,)) for _ in range(count - 1)]
    for thread in others:
        thread.start()
    function(where)
    for thread in others:
        thread.join()


# -- what the calling thread does ---------------------------------------------------------------


@jit
def run_tasks(p, block):
    """Let threads call the worker until all tasks are done."""
    begin = nanoseconds(p.clock)
    team = _team_now(p, begin)
    p.threads = min(team, p.tasks)
    for i in range(p.threads + 1):
        write_int(p.counters + COUNTER_BYTES * i, 0)
    if p.threads == 1:
        call_worker(p.worker, block)
        p.alone = _usual(p.alone, nanoseconds(p.clock) - begin)
        return DONE
    if p.parallel == 0:
        return ASK_PYTHON
    p.done_at = begin
    call_parallel(p.parallel, p.worker, block, team)
    _judge(p, team, begin, nanoseconds(p.clock))
    return DONE


@jit
def _team_now(p, now):
    """How many threads this call's team has: torch's number, or fewer in a pause."""
    c, alone = crowd(p.crowd), _time_alone(p)
    if c.limit == 0 or p.team <= c.limit or alone == 0 or alone > LONG_WORK:
        return p.team
    return c.limit if now < c.until else min(p.team, 2 * c.limit)


@jit
def _usual(before, now):
    """What a call takes if nothing delays it: the least so far, and slowly more if need be."""
    return now if before == 0 else min(now, before + before // 16)


@jit
def _time_alone(p):
    """How long calls like this take one thread: measured, or estimated, or 0 if it is the first."""
    return p.alone if p.alone != 0 else p.work


@jit
def _judge(p, team, begin, end):
    """Count what a team saved or lost, and set or lift the limit."""
    p.work = _usual(p.work, (p.done_at - begin) * p.threads)
    c, alone = crowd(p.crowd), _time_alone(p)
    if alone > LONG_WORK:
        return
    saved = alone - (end - begin)
    if saved > -LONG_DELAY:
        saved = max(saved, 0)
    c.saved = min(c.saved + saved, MOST_SAVED)
    if c.saved < 0:
        pause = PAUSE_PER_LOSS * (CREDIT - c.saved)
        if begin - c.until < c.pause:
            pause = max(pause, 2 * c.pause)
        c.pause = min(pause, LONGEST_PAUSE)
        c.until = end + c.pause
        c.limit = max(team // 2, 1)
        c.saved = CREDIT
    elif c.limit != 0 and team > c.limit:
        c.limit = team if team < p.team else 0


# -- what each thread does ----------------------------------------------------------------------


@jit
def tasks_of(p):
    """The tasks of the calling thread: its own part's, then what others have left."""
    own = _first_part(p)
    for other in range(p.threads if own < p.threads else 0):
        part = (own + other) % p.threads
        task = _claim(p, part)
        while task >= 0:
            yield task
            task = _claim(p, part)
    if own == 0 and p.threads > 1:  # the first of the team is the thread that made the call
        p.done_at = nanoseconds(p.clock)


@jit
def _first_part(p):
    """The part of the tasks that this thread begins with."""
    if p.threads == 1:
        return 0
    if p.identify != 0:
        return call_int(p.identify)
    return fetch_add(p.counters + COUNTER_BYTES * p.threads)


@jit
def _claim(p, part):
    """The next task of a part of all tasks, -1 when there is none left."""
    begin, end = part * p.tasks // p.threads, (part + 1) * p.tasks // p.threads
    task = begin + fetch_add(p.counters + COUNTER_BYTES * part)
    return task if task < end else -1
