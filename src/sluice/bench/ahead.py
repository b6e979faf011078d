"""The work before the first row is timed: inputs, expected outputs, and all compilation.

Each provider has a process, and all of them compile at the same time. Helper processes compile for
providers whose kernels are cached on disk. Meanwhile this process draws the inputs and runs the
oracle. None of this runs while something is timed.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sluice.bench.check import Answer, moved
from sluice.bench.providers import provider
from sluice.bench.worker import Worker, WorkerError
from sluice.testing.workload import Workload

if TYPE_CHECKING:
    from sluice.bench.run import Options

MEMORY_FOLDER = Path("/dev/shm")
ROOM = 24 << 30  # bytes: with so many free in memory, files are kept there
LEAST_ROOM = 6 << 30  # with fewer free, no file is made ahead
LOOK_AHEAD = 3  # workloads whose inputs are drawn ahead
SHARE = 0.45  # of a run's time may pass before the first row, or what the rows leave
ROW_SECONDS = 2.5  # left for the rows of each workload, with nothing to compile
TUNING = 0.3  # of the time before the first row goes into tuning


class Draws:
    """Inputs of the workloads, drawn ahead of time if the device is not the host.

    The host draws the numbers, and a long prompt has a billion of them.
    """

    def __init__(self, workloads: list[Workload], options: Options) -> None:
        self.dtype, self.device = options.dtype, torch.device(options.device)
        self.left = list(workloads)
        self.pool = ThreadPoolExecutor(LOOK_AHEAD) if self.device.type != "cpu" else None
        self.ahead: dict[str, Future[dict[str, Any]]] = {}

    def take(self, workload: Workload) -> dict[str, Any]:
        """The inputs of this workload, on the device; starts drawing the next ones."""
        self.left = [w for w in self.left if w.name != workload.name]
        if self.pool is None:
            with one_thread():
                return workload.case.inputs(self.dtype, self.device)
        drawn = self.ahead.pop(workload.name, None)
        for following in self.left[:LOOK_AHEAD]:
            if following.name not in self.ahead:
                draw = self.pool.submit(following.case.inputs, self.dtype)
                self.ahead[following.name] = draw
        inputs = drawn.result() if drawn else workload.case.inputs(self.dtype)
        there: dict[str, Any] = moved(inputs, self.device)
        return there

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)


class Sources:
    """Inputs and answer of each workload: in memory for this process, in a file for others."""

    def __init__(self, workloads: list[Workload], options: Options) -> None:
        self.options = options
        self.draws = Draws(workloads, options)
        self.folder = tempfile.TemporaryDirectory(
            prefix="sluice-bench-", dir=_place(), ignore_cleanup_errors=True
        )
        self.made: dict[str, str] = {}

    def take(self, workload: Workload) -> Any:
        """The source for a session's ``check``: made now, unless it was made ahead."""
        if workload.name in self.made:
            return self.made[workload.name]
        inputs = self.draws.take(workload)
        if not self.options.isolate:
            return inputs, answer(workload, inputs, self.options.dtype)
        path = Path(self.folder.name) / f"{len(self.made)}.pt"
        save(workload, inputs, self.options.dtype, path)
        self.made[workload.name] = str(path)
        return str(path)

    def drop(self, workload: Workload) -> None:
        """Delete a workload's source: it is not needed again."""
        path = self.made.get(workload.name)
        if path is not None:
            Path(path).unlink(missing_ok=True)

    @property
    def room(self) -> bool:
        return shutil.disk_usage(self.folder.name).free > LEAST_ROOM

    def close(self) -> None:
        self.draws.close()
        self.folder.cleanup()


def save(workload: Workload, inputs: dict[str, Any], dtype: torch.dtype, path: Path) -> None:
    """Write inputs and the oracle's answer to a file that several processes can read."""
    kept = {"inputs": inputs, "answer": answer(workload, inputs, dtype).save()}
    with _unsummed():
        torch.save(moved(kept, torch.device("cpu")), path)
    del kept
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # frees the oracle's float64 memory for others


def answer(workload: Workload, inputs: dict[str, Any], dtype: torch.dtype) -> Answer:
    with one_thread():
        return Answer.of(workload, inputs, dtype)


def spread(workloads: list[Workload]) -> list[Workload]:
    """The first of each kind, then the second of each, so that every helper has work at once."""
    count: Counter[Any] = Counter()
    turns = []
    for workload in workloads:
        case = workload.case
        kind = (workload.op, workload.heads, case.state_dtype, workload.variant, case.N == 1)
        turns.append(count[kind])
        count[kind] += 1
    return [w for _, w in sorted(zip(turns, workloads, strict=True), key=lambda x: x[0])]


def compile_all(
    workloads: list[Workload],
    runners: dict[str, Any],
    sources: Sources,
    options: Options,
    until: float,
    note: Callable[[str, Workload, float], None],
) -> dict[str, float]:
    """Let every provider run every workload once, in parallel; returns the seconds of each part.

    ``note`` gets the seconds of each first call. After ``until`` nothing more is started, and the
    rest compiles when its turn comes. A part of the time is reserved for tuning.
    """
    times = [time.monotonic()]
    tuning = any(provider(name).tunes for name in runners)
    soon = until - (until - times[0]) * (TUNING if tuning else 0.0)
    crew = Crew(runners, options, soon, workloads)
    try:
        for workload in spread(workloads):
            if time.monotonic() > soon or not sources.room:
                break
            try:
                source = sources.take(workload)
            except torch.cuda.OutOfMemoryError:  # too many at once: the rest waits for its turn
                torch.cuda.empty_cache()
                break
            crew.send(workload, source)
        times.append(time.monotonic())
        crew.wait(note)
    finally:
        crew.close()
    times.append(time.monotonic())
    crew.tune(until, note)
    times.append(time.monotonic())
    parts = ("inputs_s", "kernels_s", "tuning_s")
    return {name: round(b - a, 1) for name, a, b in zip(parts, times, times[1:], strict=False)}


class Crew:
    """Which process compiles what: runners for themselves, helpers for kernels cached on disk.

    Helpers share the directory that the provider compiles into. They also compile the kernels that
    a provider tunes. The provider's runner tunes last and alone, at one workload per choice.
    """

    def __init__(
        self, runners: dict[str, Any], options: Options, until: float, workloads: list[Workload]
    ) -> None:
        self.options, self.runners, self.until = options, runners, until
        self.helpers: dict[tuple[str, Any], Any] = {}
        self.sent: list[tuple[str, Any, Workload]] = []
        self.late: list[tuple[str, Workload, Any]] = []
        self.tuned = {name: tuned(name, workloads) for name in runners}

    def send(self, workload: Workload, source: Any) -> None:
        """Send the workload to the processes that compile it, without waiting."""
        for name, runner in self.runners.items():
            kind = provider(name)
            if not kind.compiles:
                continue
            if workload.op in kind.tunes:
                if workload.name not in self.tuned[name]:
                    continue
                self.late.append((name, workload, source))
            who = self._helper(name, workload)
            how = "compile"
            if who is None and workload.op not in kind.tunes:
                who, how = runner, "prime"
            if who is not None:
                with contextlib.suppress(WorkerError):
                    who.send(how, workload, self.options.dtype, source, self.until)
                    self.sent.append((name, who, workload))

    def _helper(self, name: str, workload: Workload) -> Any:
        """The helper that compiles the workload, started on first use."""
        group = provider(name).helper(workload)
        if group is None or ":" in name:
            return None
        if (name, group) not in self.helpers:
            paths, caches = self.options.paths.get(name, []), self.runners[name].caches
            self.helpers[name, group] = Worker(name, self.options.device, 1, paths, caches=caches)
        return self.helpers[name, group]

    def tune(self, until: float, note: Callable[[str, Workload, float], None]) -> None:
        """Tune the providers one after the other, once all other work is done.

        The largest workload comes first, as when an engine warms up: kernels that several operators
        share are then chosen where their times differ most.
        """
        gone: set[str] = set()
        for name, workload, source in sorted(self.late, key=lambda x: -x[1].size.tokens):
            if name in gone:
                continue
            runner = self.runners[name]
            try:
                runner.send("prime", workload, self.options.dtype, source, until)
                seconds, fatal = runner.receive(self.options.timeout)
            except WorkerError:
                seconds, fatal = None, True
            if seconds is not None:
                note(name, workload, seconds)
            if fatal:
                gone.add(name)
                again(runner)

    def wait(self, note: Callable[[str, Workload, float], None]) -> None:
        """Wait until all have answered. A late helper is stopped; a runner has its timeout."""
        gone: set[int] = set()
        broken: dict[str, Any] = {}
        for name, who, workload in self.sent:
            if id(who) in gone:
                continue
            helps = who is not self.runners[name]
            left = max(1.0, self.until - time.monotonic()) if helps else self.options.timeout
            try:
                seconds, fatal = who.receive(left)
            except WorkerError:
                seconds, fatal = None, True
                gone.add(id(who))
            if fatal and not helps:
                broken[name] = who
            if seconds is not None:
                note(name, workload, seconds)
        for runner in broken.values():
            again(runner)

    def close(self) -> None:
        """End all helpers at once, because each takes a while to end."""
        with ThreadPoolExecutor(max(1, len(self.helpers))) as pool:
            for helper in self.helpers.values():
                pool.submit(helper.close)


def tuned(name: str, workloads: list[Workload]) -> set[str]:
    """Names of the workloads at which a provider tunes: one per set of equal kernels."""
    kind, same = provider(name), defaultdict(list)
    for workload in workloads:
        if workload.op in kind.tunes:
            same[kind.kernels(workload)].append(workload)
    return {kind.tuned_at(group).name for group in same.values()}


def again(runner: Any, graphs: bool = True) -> None:
    """Start a new process for the next workload; it has to import the library again."""
    runner.restart(graphs)
    with contextlib.suppress(WorkerError):
        runner.send("start")
        runner.receive(120)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread for the oracle's small steps: on a busy machine threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _unsummed() -> Iterator[None]:
    """Write files without checksums, which cost more than the writes; files live for minutes."""
    option = getattr(torch.serialization, "set_crc32_options", None)
    if option is None:
        yield
        return
    before = torch.serialization.get_crc32_options()
    option(False)
    try:
        yield
    finally:
        option(before)


def _place() -> str | None:
    """A folder in memory if there is room, else the usual temporary one."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(MEMORY_FOLDER).free > ROOM:
            return str(MEMORY_FOLDER)
    return None
