"""One provider in one process: it is found, it runs a workload, it is judged, then it is timed.

``Session`` is used directly where all providers share a process (a CPU run: they take turns on the
same cores), and behind ``worker.Worker`` where each has its own (a GPU run: one that crashes takes
no other with it). Every method returns plain values.
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
from sluice.testing.benchmarks import Workload

MOST_SETS = 64
CACHES = 3  # sets of inputs together are this many times the last-level cache
WARM_UP_SECONDS = 1.0  # a slow call is not warmed up longer: it leaves no cache as it was
MEMORY = {"cpu": 1 << 30, "cuda": 12 << 30}  # and no more than this


@dataclass
class Verdict:
    """What came of one workload before any timing; ``status`` "ok" is the only one that is timed.

    refused   the library has no way to do this work
    wrong     it ran, and its output is not the oracle's
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
    fatal: bool = False  # the process is of no more use


class Session:
    """The provider ``name`` on a device."""

    def __init__(self, name: str, device: str, threads: int, graphs: bool = True) -> None:
        self.provider = provider(name)
        self.device = torch.device(device)
        self.threads, self.graphs = threads, graphs
        self.timer: Any = None
        self.unmeasured = False  # whether kernels were chosen here without measuring them

    def start(self) -> dict[str, Any]:
        """Import the library; how long it took, or why it cannot be used."""
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
        """Run once, judge, get ready to be timed. ``source`` is inputs and answer, or a file."""
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
        except Exception as error:  # a peer may raise anything, and the others go on
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
        errors = answer.judge(workload, call.outputs(result))
        del result
        again, _ = self._once(call)

        sets = max(2, min(self._sets(inputs), int(WARM_UP_SECONDS / again) + 1))
        calls = [call, *(prepared() for _ in range(sets - 1))]
        if self.device.type == "cuda":
            self.timer = timing_gpu.Timer(calls, self.graphs)
        else:
            self.timer = timing_cpu.Timer(calls)
        self.timer.warm_up()
        self._check_replay(workload, answer, call, before)
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
        """Seconds of one call by the host's clock, and its result."""
        self._wait()
        begin = time.perf_counter()
        result = call.run()
        self._wait()
        return time.perf_counter() - begin, result

    def _check_replay(self, workload: Workload, answer: Answer, call: Call, before: Any) -> None:
        """What is replayed must be right as well; where it is not, events are used instead."""
        replayed = self.timer.replayed(before)
        if replayed is None:
            return
        try:
            answer.judge(workload, call.outputs(replayed))
        except AssertionError as error:
            self.timer.use_events(f"a replayed graph is not right: {_line(error)}")

    def prime(
        self, workload: Workload, dtype: torch.dtype, source: Any, until: float
    ) -> tuple[float | None, bool]:
        """Run once, for what is compiled on the way: seconds, and whether the process is done for.

        None for the seconds where it did not run, which is not judged here. After ``until``, a
        time of the machine's steady clock, nothing is begun.
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
        except Exception:  # whatever it is, it will be found and said when its turn comes
            seconds = None
        broken = self._broken()
        if self.device.type == "cuda" and not broken:
            torch.cuda.empty_cache()
        return seconds, broken

    def compile(
        self, workload: Workload, dtype: torch.dtype, source: Any, until: float
    ) -> tuple[float | None, bool]:
        """As ``prime``, for another process to find on disk: nothing is chosen by measuring.

        What was chosen instead stays here: none of it is on disk, and nothing is timed here later.
        """
        self.unmeasured = True
        with _unmeasured():
            return self.prime(workload, dtype, source, until)

    def _load(self, source: Any, answer: bool = True) -> tuple[dict[str, Any], Any]:
        """Inputs and, if wanted, the answer; of a file, no more is read than that."""
        if not isinstance(source, str):
            inputs, known = source
            return inputs, known
        kept = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
        inputs = moved(kept["inputs"], self.device)
        return inputs, Answer(**moved(kept["answer"], self.device)) if answer else None

    def _sets(self, inputs: dict[str, Any]) -> int:
        """How many sets it takes for each to be out of the cache when its turn comes."""
        kind, size = self.device.type, max(1, nbytes(inputs))
        cache = timing_cpu.cache_bytes() if kind == "cpu" else timing_gpu.l2_bytes(self.device)
        wanted = math.ceil(CACHES * cache / size)
        return max(2, min(wanted, MOST_SETS, MEMORY[kind] // size))

    def time(self, seconds: float, least: int, most_seconds: float) -> list[float]:
        """One round: seconds of each call."""
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.timer.block(seconds, least, most_seconds)

    def release(self) -> None:
        """Let go of the workload's memory."""
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
    """Triton's tuner runs each form of a kernel once and times none: others need the device.

    Timing takes a tenth of a second for each, compiling it less than half of one. The tuner would
    keep these times, all of them 0, in a file if a library asks for it, as FLA does, and whoever
    tunes next would take the first form: here it neither writes that file nor reads one.
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
    """Until ``after`` ends; what this version of a library has not is left alone."""
    if hasattr(owner, name):
        after.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


def _line(error: BaseException) -> str:
    """The first line of a message that says something."""
    lines = [x.strip() for x in str(error).splitlines() if x.strip()]
    return without_places(lines[0])[:300] if lines else type(error).__name__


def without_places(text: str) -> str:
    """A message with the names of files in it, and not where they lie on this machine.

    >>> without_places("no 'x' in 'y' (/opt/lib/python/y/z.py)")
    "no 'x' in 'y' (z.py)"
    """
    return re.sub(r"(?<![\w.:/])(?:/[\w.+@-]+)+/([\w.+@-]+)", r"\1", text)
