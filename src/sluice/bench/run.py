"""A run from one end to the other: who is there, what is right, how long it takes.

For each workload inputs are drawn once and the oracle is asked once. Every provider runs on copies
of those inputs and is judged; those that passed then take turns, a block each, round after round.
"""

from __future__ import annotations

import contextlib
import datetime
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sluice import settings
from sluice.bench import floors, machine
from sluice.bench.check import Answer
from sluice.bench.providers import MODULES, PEERS, provider
from sluice.bench.results import Results, Row, describe_workload
from sluice.bench.worker import Local, Worker, WorkerError
from sluice.testing.benchmarks import Workload

Say = Callable[[str], None]
HOST = ("cu_seqlens_cpu",)  # inputs that stay on the host


@dataclass
class Options:
    """How to run; the defaults are those of a full run on a CPU."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    providers: tuple[str, ...] = ("sluice", *PEERS)
    threads: int = 1
    isolate: bool = False  # each provider in a process of its own
    first_calls: bool = True
    first_ops: tuple[str, ...] = ("decode", "prefill")  # whose first call is measured, on a CPU
    rounds: int = 5
    seconds: float = 1.0  # timed, of each row
    least: int = 20  # samples of each row, unless that takes more than most_seconds
    most_seconds: float = 20.0
    timeout: float = 300.0  # for one check, which may compile
    time_limit: float | None = None  # for the whole run; what is left is listed as skipped
    quick: bool = False
    paths: dict[str, list[str]] = field(default_factory=dict)
    note: str = ""


def run(
    workloads: list[Workload],
    options: Options,
    say: Say,
    keep: Callable[[Results], None] | None = None,
) -> Results:
    """Measure; ``say`` is told each step as it begins, ``keep`` gets what there is after each."""
    begin = time.monotonic()
    device = torch.device(options.device)
    settings.for_peers()
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    results = Results(
        machine=machine.conditions(device, options.threads),
        workloads=[describe_workload(w, options.dtype) for w in workloads],
        providers=[],
        rows=[],
        floors={},
    )
    runners: dict[str, Any] = {}
    primers: list[Worker] = []
    draws: Draws | None = None
    try:
        say("floors")
        measured = floors.measure(device, options.dtype, options.quick)
        results.floors = measured.to_json()
        say("providers")
        runners = _begin(options, results)
        primers = _prime(workloads, runners, options)
        draws = Draws(workloads, options)
        neighbours = machine.Neighbours()
        for workload in workloads:
            say(workload.name)
            spent = time.monotonic() - begin
            if options.time_limit is not None and spent > options.time_limit:
                _skip(
                    workload, runners, results, f"the run's {options.time_limit:.0f} s were spent"
                )
                continue
            rows = _measure(workload, draws.take(workload), runners, options, results)
            _judge_floors(workload, rows, measured, results)
            results.rows += rows
            if keep is not None:
                results.run = {**_about(options, time.monotonic() - begin), "unfinished": True}
                keep(results)
        if not options.isolate:  # the processes of providers would count as others
            results.machine["others"] = neighbours.share()
        if options.first_calls and not options.isolate:
            left = (options.time_limit or float("inf")) - (time.monotonic() - begin)
            results.first_calls = _first_calls(workloads, runners, options, left, say)
    finally:
        for runner in (*runners.values(), *primers):
            runner.close()
        if draws is not None:
            draws.close()
        torch.set_num_threads(before)
    if device.type == "cuda":
        results.machine["clocks_after"] = machine.clocks()
    results.run = _about(options, time.monotonic() - begin)
    return results


def _about(options: Options, seconds: float) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    return {
        "date": now.isoformat(),
        "commit": machine.commit(),
        "seconds": round(seconds, 1),
        "rounds": options.rounds,
        "quick": options.quick,
        "processes": "one for each provider" if options.isolate else "one for all",
        "note": options.note,
    }


def _begin(options: Options, results: Results) -> dict[str, Any]:
    """Start every provider; those that are not there are listed, and left out."""
    runners: dict[str, Any] = {}
    for name in options.providers:
        if options.isolate:
            paths = options.paths.get(name, [])
            cold = options.first_calls
            runner: Any = Worker(name, options.device, options.threads, paths, cold)
        else:
            runner = Local(name, options.device, options.threads)
        runners[name] = runner
        try:
            runner.send("start")
        except WorkerError:
            continue  # its answer will say so
    for name, runner in list(runners.items()):
        try:
            found = runner.receive(options.timeout)
        except WorkerError as error:
            title = name if name in MODULES else "sluice"
            found = {"name": name, "title": title, "missing": str(error), "install": ""}
            found |= {"peer": not name.startswith("sluice"), "version": None, "import_s": None}
        results.providers.append(found)
        if found["missing"] is not None:
            runners.pop(name).close()
    return runners


class Draws:
    """Inputs of the workloads, drawn one ahead of their turn where the device is not the host.

    Numbers come from the host, and a long prompt has a billion of them.
    """

    def __init__(self, workloads: list[Workload], options: Options) -> None:
        self.dtype, self.device = options.dtype, torch.device(options.device)
        self.following = dict(zip([w.name for w in workloads], workloads[1:], strict=False))
        self.pool = ThreadPoolExecutor(1) if self.device.type != "cpu" else None
        self.ahead: dict[str, Future[dict[str, Any]]] = {}

    def take(self, workload: Workload) -> dict[str, Any]:
        """The inputs of this workload, on the device; those of the next are begun."""
        if self.pool is None:
            with _one_thread():
                return workload.case.inputs(self.dtype, self.device)
        drawn = self.ahead.pop(workload.name, None)
        inputs = drawn.result() if drawn else workload.case.inputs(self.dtype)
        following = self.following.get(workload.name)
        if following is not None:
            self.ahead[following.name] = self.pool.submit(following.case.inputs, self.dtype)
        return {name: _on(name, x, self.device) for name, x in inputs.items()}

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """For the oracle's small steps: on a busy machine two threads wait for each other at each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _on(name: str, value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_on(name, x, device) for x in value)
    movable = isinstance(value, torch.Tensor) and name not in HOST
    return value.to(device) if movable else value


def _prime(workloads: list[Workload], runners: dict[str, Any], options: Options) -> list[Worker]:
    """Processes that compile ahead for whoever takes over a minute to: one for each further shape.

    They share the directory that the provider compiles into, and are asked for nothing else.
    """
    primers: list[Worker] = []
    if not options.isolate:
        return primers
    for name, runner in runners.items():
        if not provider(name).compiles_long:
            continue
        by_heads: dict[Any, list[Workload]] = {}
        for workload in workloads:
            if hasattr(provider(name), f"_{workload.op}"):
                by_heads.setdefault(workload.heads, []).append(workload)
        for ahead in list(by_heads.values())[1:]:
            paths = options.paths.get(name, [])
            primer = Worker(name, options.device, 1, paths, caches=runner.caches)
            primers.append(primer)
            for workload in ahead:
                primer.send("prime", workload, options.dtype)
    return primers


def _measure(
    workload: Workload,
    inputs: dict[str, Any],
    runners: dict[str, Any],
    options: Options,
    results: Results,
) -> list[Row]:
    rows = {name: Row(workload.name, name, "error") for name in runners}
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        source = _source(workload, inputs, options, Path(folder))
        del inputs
        ready = _check(workload, source, runners, rows, options, results)
    del source
    samples: dict[str, list[float]] = {name: [] for name in ready}
    rounds = options.rounds
    least = -(-options.least // rounds)
    for n in range(rounds):
        turn = ready[n % len(ready) :] + ready[: n % len(ready)] if ready else []
        for name in turn:
            if name not in samples:
                continue
            block = (options.seconds / rounds, least, options.most_seconds / rounds)
            try:
                runners[name].send("time", *block)
                samples[name] += runners[name].receive(options.timeout)
            except Exception as error:  # what passed the check may still fail when repeated
                rows[name].status, rows[name].reason = "error", str(error)[:300]
                del samples[name]
                _restart(runners[name], graphs=False)
    for name, found in samples.items():
        rows[name].set_samples(found)
    for name in ready:
        _ask(runners[name], "release", options)
    return list(rows.values())


def _source(workload: Workload, inputs: dict[str, Any], options: Options, folder: Path) -> Any:
    """Inputs and answer: as they are for this process, as a file for others."""
    with _one_thread():
        answer = Answer.of(workload, inputs, options.dtype)
    if not options.isolate:
        return inputs, answer
    host = {name: inputs[name] for name in HOST if name in inputs}
    path = folder / "inputs.pt"
    torch.save({"inputs": inputs, "answer": answer.save(), "host": host}, path)
    return str(path)


def _check(
    workload: Workload,
    source: Any,
    runners: dict[str, Any],
    rows: dict[str, Row],
    options: Options,
    results: Results,
) -> list[str]:
    """Who is right, and so may be timed. Processes of their own compile at the same time."""
    for name, runner in runners.items():
        try:
            runner.send("check", workload, options.dtype, source)
        except WorkerError as error:
            rows[name].reason = str(error)
    ready = []
    for name, runner in runners.items():
        row = rows[name]
        try:
            verdict = runner.receive(options.timeout)
        except WorkerError as error:
            row.reason = row.reason or str(error)
            _restart(runner)
            continue
        row.status, row.reason, row.detail = (verdict[k] for k in ("status", "reason", "detail"))
        row.errors, row.method, row.sets = (verdict[k] for k in ("errors", "method", "sets"))
        row.converted = tuple(verdict["converted"])
        if verdict["fatal"]:
            _restart(runner, graphs=False)
        elif row.ok:
            ready.append(name)
            if options.isolate and options.first_calls:
                _note_first_call(name, workload, verdict["first_call_s"], results)
    return ready


def _note_first_call(name: str, workload: Workload, seconds: float, results: Results) -> None:
    """The first call of an operator in a process that began with empty caches."""
    seen = {(x["provider"], x["op"]) for x in results.first_calls}
    if (name, workload.op) in seen:
        return
    alone = not any(provider == name for provider, _ in seen)
    imported = results.provider(name)["import_s"] if alone else 0.0
    results.first_calls.append(_first(name, workload, imported, seconds))


def _first_calls(
    workloads: list[Workload], runners: dict[str, Any], options: Options, left: float, say: Say
) -> list[dict[str, Any]]:
    """In a fresh process with empty caches for each provider: import, then the first call.

    None is begun once ``left`` seconds are over.
    """
    end = time.monotonic() + left
    found: list[dict[str, Any]] = []
    smallest: dict[str, Workload] = {}
    for workload in workloads:
        known = smallest.get(workload.op)
        if workload.op in options.first_ops and (
            known is None or workload.size.tokens < known.size.tokens
        ):
            smallest[workload.op] = workload
    apart = Options(**{**vars(options), "isolate": True})
    for workload in smallest.values():
        with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
            inputs = workload.case.inputs(options.dtype, options.device)
            source = _source(workload, inputs, apart, Path(folder))
            for name in runners:
                if time.monotonic() > end:
                    return found
                say(f"first call of {name}")
                paths = options.paths.get(name, [])
                worker = Worker(name, options.device, options.threads, paths, cold=True)
                begun = _ask(worker, "start", options)
                verdict = _ask(worker, "check", options, workload, options.dtype, source)
                worker.close()
                if begun and verdict and verdict["status"] == "ok":
                    seconds = verdict["first_call_s"]
                    found.append(_first(name, workload, begun["import_s"], seconds))
    return found


def _first(name: str, workload: Workload, imported: float, call: float) -> dict[str, Any]:
    first = {"provider": name, "op": workload.op, "workload": workload.name}
    return {**first, "import_s": imported, "call_s": call}


def _judge_floors(
    workload: Workload, rows: list[Row], measured: floors.Floors, results: Results
) -> None:
    known = next(w for w in results.workloads if w["name"] == workload.name)
    floor, bound = measured.seconds(known["bytes"], known["flops"], known["dtype"])
    for row in rows:
        row.floor_s, row.bound = floor, bound


def _skip(workload: Workload, runners: dict[str, Any], results: Results, why: str) -> None:
    results.rows += [Row(workload.name, name, "skipped", why) for name in runners]


def _ask(runner: Any, method: str, options: Options, *arguments: Any) -> Any:
    """A request whose failure costs nothing but the answer."""
    try:
        runner.send(method, *arguments)
        return runner.receive(options.timeout)
    except WorkerError:
        _restart(runner)
        return None


def _restart(runner: Any, graphs: bool = True) -> None:
    """A new process for the next workload. It has to import the library again."""
    runner.restart(graphs)
    try:
        runner.send("start")
        runner.receive(120)
    except WorkerError:
        return
