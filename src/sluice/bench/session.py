"""One provider in one process: import it, run a workload, check the result, time it.

In a CPU run all providers share a process and take turns on the same cores, each with a
``Session``. In a GPU run each ``Session`` has a process of its own (``worker.Worker``), so that a
crash affects no other provider. Every method returns plain values.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from sluice.bench import timing_cpu, timing_gpu
from sluice.bench.check import Answer, copied, moved, nbytes
from sluice.bench.providers import provider
from sluice.bench.providers.base import Call, Job, RefusalError, load
from sluice.testing.workload import Workload

MOST_SETS = 64
CACHES = 3  # all sets of inputs are this many times the last-level cache
WARM_UP_SECONDS = 1.0  # at most, over all sets: a slow call replaces the cache anyway
MEMORY = {"cpu": 1 << 30, "cuda": 12 << 30}  # at most, of all sets


@dataclass
class Verdict:
    """The outcome of one workload before timing; only ``status`` "ok" is timed.

    refused   the library cannot do this work
    wrong     it ran, but its output differs from the oracle's
    error     it raised, or its process died
    """

    status: str
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    converted: tuple[str, ...] = ()
    detail: str = ""
    first_call_s: float | None = None
    method: str = ""
    sets: int = 0
    check_s: float | None = None
    fatal: bool = False  # the process cannot be used any more


class Session:
    """The provider ``name`` on a device."""

    def __init__(self, name: str, device: str, threads: int, graphs: bool = True) -> None:
        self.provider = provider(name)
        self.device = torch.device(device)
        self.threads, self.graphs = threads, graphs
        self.timer: Any = None
        self.unmeasured = False  # whether kernels were chosen without measuring them

    def start(self) -> dict[str, Any]:
        """Import the library; returns the seconds, or why it cannot be used."""
        p = self.provider
        found: dict[str, Any] = {"name": p.name, "title": p.title, "install": p.install}
        found |= {"peer": p.is_peer, "missing": None, "version": None, "import_s": None}
        if self.device.type not in p.devices:
            return found | {"missing": f"runs on {', '.join(p.devices)} only"}
        if self.device.type == "cuda":
            torch.cuda.init()
            torch.zeros(1, device=self.device)
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reason = p.missing()
        if reason is not None:
            return found | {"missing": without_places(reason)}
        seconds = time.perf_counter() - begin
        return found | {"version": p.version(), "import_s": seconds}

    def check(self, workload: Workload, dtype: torch.dtype, source: Any) -> dict[str, Any]:
        """Run once, check, and prepare timing. ``source`` is inputs and answer, or a file."""
        begin = time.perf_counter()
        self.release()
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                verdict = self._check(workload, dtype, source)
        except RefusalError as error:
            verdict = Verdict("refused", _line(error))
        except AssertionError as error:
            verdict = Verdict("wrong", _line(error)) if str(error) else Verdict("error", "assert")
        except Exception as error:  # a peer may raise anything; the others continue
            verdict = Verdict("error", f"{type(error).__name__}: {_line(error)}")
        if verdict.status != "ok":
            self.release()
        verdict.fatal = verdict.fatal or self._broken()
        verdict.check_s = round(time.perf_counter() - begin, 3)
        return asdict(verdict)

    def _check(self, workload: Workload, dtype: torch.dtype, source: Any) -> Verdict:
        if self.unmeasured:
            raise RuntimeError(
                "this process chose kernels without measuring them: it only compiles"
            )
        inputs, answer = self._load(source)
        shared: dict[str, Any] = {}

        def prepared() -> Call:
            job = Job(workload, dtype, self.device, copied(inputs), self.threads, shared)
            return self.provider.prepare(job)

        call = prepared()
        before = [x.clone() for x in call.mutable]
        first, result = self._once(call)  # compiles
        errors = answer.judge(call.outputs(result))
        del result
        again, _ = self._once(call)

        sets = max(2, min(self._sets(inputs), int(WARM_UP_SECONDS / again) + 1))
        calls = [call, *(prepared() for _ in range(sets - 1))]
        if self.device.type == "cuda":
            self.timer = timing_gpu.Timer(calls, self.graphs)
        else:
            self.timer = timing_cpu.Timer(calls)
        self.timer.warm_up()
        self._check_repeat(answer, call, before)
        self._check_replay(answer, call, before)
        return Verdict(
            "ok",
            getattr(self.timer, "why_not", ""),
            errors,
            call.converted,
            call.detail,
            first,
            self.timer.method,
            sets,
        )

    def _once(self, call: Call) -> tuple[float, Any]:
        """The seconds of one call by the host's clock, and its result."""
        self._wait()
        begin = time.perf_counter()
        result = call.run()
        self._wait()
        return time.perf_counter() - begin, result

    def _check_repeat(self, answer: Answer, call: Call, before: Any) -> None:
        """Check a later call too, because later calls are timed; if it is wrong, so is the row."""
        repeated = self.timer.repeated(before)
        if repeated is not None:
            answer.judge(call.outputs(repeated))

    def _check_replay(self, answer: Answer, call: Call, before: Any) -> None:
        """Check the replayed graph too; if it is wrong, use events instead."""
        replayed = self.timer.replayed(before)
        if replayed is None:
            return
        try:
            answer.judge(call.outputs(replayed))
        except AssertionError as error:
            self.timer.use_events(f"a replayed graph is not right: {_line(error)}")

    def prime(
        self, workload: Workload, dtype: torch.dtype, source: Any, until: float
    ) -> tuple[float | None, bool]:
        """Run once in order to compile; returns the seconds, and whether the process is broken.

        The seconds are None if it did not run; nothing is checked. After ``until``, by the
        machine's monotonic clock, nothing is started.
        """
        if time.monotonic() > until:
            return None, False
        seconds = None
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                inputs = self._load(source, answer=False)[0]
                job = Job(workload, dtype, self.device, inputs, self.threads)
                seconds, _ = self._once(self.provider.prepare(job))
        except Exception:  # the check will find and report it
            seconds = None
        broken = self._broken()
        if self.device.type == "cuda" and not broken:
            torch.cuda.empty_cache()
        return seconds, broken

    def compile(
        self, workload: Workload, dtype: torch.dtype, source: Any, until: float
    ) -> tuple[float | None, bool]:
        """As ``prime``, but only fills the disk cache for another process: nothing is tuned.

        Choices made without tuning stay in this process, which never times anything.
        """
        self.unmeasured = True
        with _unmeasured():
            return self.prime(workload, dtype, source, until)

    def _load(self, source: Any, answer: bool = True) -> tuple[dict[str, Any], Any]:
        """Inputs and, if wanted, the answer; reads no more of a file than that."""
        if not isinstance(source, str):
            inputs, known = source
            return inputs, known
        kept = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
        inputs = moved(kept["inputs"], self.device)
        return inputs, Answer(**moved(kept["answer"], self.device)) if answer else None

    def _sets(self, inputs: dict[str, Any]) -> int:
        """How many sets of inputs it takes for each to have left the cache at its turn."""
        kind, size = self.device.type, max(1, nbytes(inputs))
        cache = timing_cpu.cache_bytes() if kind == "cpu" else timing_gpu.l2_bytes(self.device)
        wanted = math.ceil(CACHES * cache / size)
        return max(2, min(wanted, MOST_SETS, MEMORY[kind] // size))

    def time(self, seconds: float, least: int, most_seconds: float) -> list[float]:
        """Time one round; returns the seconds of each call."""
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.timer.block(seconds, least, most_seconds)

    def eager(self, seconds: float) -> dict[str, list[float]]:
        """Time eager calls in one round: seconds per call, of the host and by wall clock."""
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.timer.eager.block(seconds)

    def release(self) -> None:
        """Free the workload's memory."""
        if self.timer is not None:
            self.timer.close()
            self.timer = None
            if self.device.type == "cuda":
                with contextlib.suppress(RuntimeError):
                    torch.cuda.empty_cache()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _broken(self) -> bool:
        """Whether an error has left the device's context unusable."""
        try:
            self._wait()
        except RuntimeError:
            return True
        return False


@contextlib.contextmanager
def _unmeasured() -> Iterator[None]:
    """Make Triton's tuner run each form of a kernel once without timing it.

    Timing takes a tenth of a second per form and needs the device, which others use; compiling
    takes less than half a second. A library may ask the tuner to store its times in a file, as FLA
    does. The times here are all 0, so the next process would take the first form. Therefore the
    tuner neither writes nor reads this file here.
    """

    def once(call: Any, *_: Any, quantiles: Any = None, **__: Any) -> Any:
        call()
        return 0.0 if quantiles is None else [0.0 for _ in quantiles]

    def nowhere(_: Any, key: Any, forms: Any, tune: Callable[[], None]) -> bool:
        tune()
        return False  # found nothing

    with contextlib.ExitStack() as after:
        with contextlib.suppress(ImportError):
            _replace(after, load("triton.testing"), "do_bench", once)
            _replace(after, load("triton.runtime.autotuner").Autotuner, "check_disk_cache", nowhere)
        yield


def _replace(after: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Replace an attribute until ``after`` ends, if this version of the library has it."""
    if hasattr(owner, name):
        after.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


def _line(error: BaseException) -> str:
    """The first line of a message that is not empty."""
    lines = [x.strip() for x in str(error).splitlines() if x.strip()]
    return without_places(lines[0])[:300] if lines else type(error).__name__


def without_places(text: str) -> str:
    """A message in which paths are cut to file names.

    >>> without_places("no 'x' in 'y' (/opt/lib/python/y/z.py)")
    "no 'x' in 'y' (z.py)"
    """
    return re.sub(r"(?<![\w.:/])(?:/[\w.+@-]+)+/([\w.+@-]+)", r"\1", text)
