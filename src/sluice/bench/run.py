"""A whole run: find the providers, check their results, time them.

For each workload, inputs are drawn once and the oracle runs once. Every provider runs on copies of
these inputs and is checked. Those that passed are timed in turn, one block each, round after round.
On a GPU everything is compiled and answered before the first row (``ahead.py``).
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from sluice.bench import floors, machine
from sluice.bench.ahead import ROW_SECONDS, SHARE, Sources, again, compile_all, spread
from sluice.bench.peer_environment import for_peers
from sluice.bench.providers import MODULES, PEERS, STANDING
from sluice.bench.results import Results, Row, Times, describe_workload
from sluice.bench.worker import Local, Worker, WorkerError
from sluice.neighbours import Neighbours
from sluice.testing.workload import Workload

Say = Callable[[str], None]
SLOW_SECONDS = 5.0  # results name a first call that takes longer
START_SECONDS = 120.0  # allowed for importing a library: torch alone takes ten on a busy machine


@dataclass
class Options:
    """How to run; the defaults are those of a full run on a CPU."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    providers: tuple[str, ...] = ("sluice", *PEERS)
    threads: int = 1
    isolate: bool = False  # each provider in its own process
    ahead: bool = False  # compile and answer everything before the first row
    first_calls: bool = True
    first_ops: tuple[str, ...] = ("decode", "prefill")  # whose first call is timed on a CPU
    rounds: int = 5
    seconds: float = 1.0  # of timing, per row
    eager_seconds: float = 0.0  # of timing eager calls, per row; 0 on a CPU, where all are eager
    least: int = 20  # samples per row, unless they take more than most_seconds
    most_seconds: float = 20.0
    timeout: float = 300.0  # of one check, which may compile
    time_limit: float | None = None  # of the whole run; the rest is listed as skipped
    quick: bool = False
    paths: dict[str, list[str]] = field(default_factory=dict)
    note: str = ""


def run(
    workloads: list[Workload],
    options: Options,
    say: Say,
    keep: Callable[[Results], None] | None = None,
) -> Results:
    """Measure; ``say`` gets the name of each step, ``keep`` the results after each."""
    begin = time.monotonic()
    device = torch.device(options.device)
    for_peers()
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
    sources: Sources | None = None
    made: dict[str, Any] = {}
    try:
        say("floors")
        measured = floors.measure(device, options.dtype, options.quick)
        results.floors = measured.to_json()
        say("providers")
        _begin(options, results, runners)
        ahead = options.ahead and options.isolate
        sources = Sources(spread(workloads) if ahead else workloads, options)
        if ahead:
            say("inputs, answers and kernels")
            made = {"ahead": _ahead(workloads, runners, sources, options, results, begin)}
        neighbours = Neighbours()
        for workload in workloads:
            say(workload.name)
            spent = time.monotonic() - begin
            if options.time_limit is not None and spent > options.time_limit:
                _skip(
                    workload, runners, results, f"the run's {options.time_limit:.0f} s were spent"
                )
                continue
            rows = _measure(workload, sources, runners, options, results)
            _judge_floors(workload, rows, measured, results)
            results.rows += rows
            if keep is not None:
                about = _about(options, time.monotonic() - begin)
                results.run = {**about, **made, "unfinished": True}
                keep(results)
        if not options.isolate:  # else the providers' processes would count as neighbours
            results.machine["others"] = neighbours.share()
        if options.first_calls and not options.isolate:
            left = (options.time_limit or float("inf")) - (time.monotonic() - begin)
            results.first_calls = _first_calls(workloads, runners, options, left, say)
    finally:
        for runner in runners.values():
            runner.close()
        if sources is not None:
            sources.close()
        torch.set_num_threads(before)
    if device.type == "cuda":
        results.machine["clocks_after"] = machine.clocks()
    results.run = {**_about(options, time.monotonic() - begin), **made}
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


def _begin(options: Options, results: Results, runners: dict[str, Any]) -> None:
    """Start every provider, in ``runners`` from then on; leave out those that are missing."""
    for name in options.providers:
        if options.isolate:
            paths = options.paths.get(name, [])
            cold, caches = options.first_calls, None
            if name.partition(":")[2] in STANDING and "sluice" in runners:
                cold, caches = False, runners["sluice"].caches  # mostly the same kernels
            runner: Any = Worker(name, options.device, options.threads, paths, cold, caches)
        else:
            runner = Local(name, options.device, options.threads)
        runners[name] = runner
        try:
            runner.send("start")
        except WorkerError:
            continue  # receive() reports the error
    for name, runner in list(runners.items()):
        try:
            found = runner.receive(max(options.timeout, START_SECONDS))
        except WorkerError as error:
            title = name if name in MODULES else "sluice"
            found = {"name": name, "title": title, "missing": str(error), "install": ""}
            found |= {"peer": not name.startswith("sluice"), "version": None, "import_s": None}
        results.providers.append(found)
        if found["missing"] is not None:
            runners.pop(name).close()


def _ahead(
    workloads: list[Workload],
    runners: dict[str, Any],
    sources: Sources,
    options: Options,
    results: Results,
    begin: float,
) -> dict[str, Any]:
    """Before the first row: compile, draw inputs and run the oracle, in a share of the time.

    Returns how the time was spent, and the first calls that took long.
    """
    whole = options.time_limit or 3 * options.timeout
    until = begin + max(whole * SHARE, whole - ROW_SECONDS * len(workloads))

    slow: list[tuple[str, str, float]] = []

    def note(name: str, workload: Workload, seconds: float) -> None:
        if options.first_calls:
            _note_first_call(name, workload, seconds, results)
        if seconds > SLOW_SECONDS:
            slow.append((name, workload.name, round(seconds, 1)))

    spent = compile_all(workloads, runners, sources, options, until, note)
    return {**spent, "slow": slow}


def _measure(
    workload: Workload,
    sources: Sources,
    runners: dict[str, Any],
    options: Options,
    results: Results,
) -> list[Row]:
    rows = {name: Row(workload.name, name, "error") for name in runners}
    ready = _check(workload, sources.take(workload), runners, rows, options, results)
    sources.drop(workload)
    samples: dict[str, list[float]] = {name: [] for name in ready}
    eager: dict[str, dict[str, list[float]]] = {name: {"host": [], "wall": []} for name in ready}
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
                if options.eager_seconds:
                    runners[name].send("eager", options.eager_seconds / rounds)
                    for kind, found in runners[name].receive(options.timeout).items():
                        eager[name][kind] += found
            except Exception as error:  # a provider that passed the check may still fail later
                rows[name].status, rows[name].reason = "error", str(error)[:300]
                del samples[name]
                _broken(runners[name])
    for name, found in samples.items():
        rows[name].set_samples(found)
        if options.eager_seconds:
            rows[name].host = Times.of(eager[name]["host"])
            rows[name].eager = Times.of(eager[name]["wall"])
    for name in ready:
        _ask(runners[name], "release", options)
    return list(rows.values())


def _check(
    workload: Workload,
    source: Any,
    runners: dict[str, Any],
    rows: dict[str, Row],
    options: Options,
    results: Results,
) -> list[str]:
    """The providers whose results are right, to be timed. Separate processes run in parallel."""
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
            again(runner)
            continue
        row.status, row.reason, row.detail = (verdict[k] for k in ("status", "reason", "detail"))
        row.errors, row.method, row.sets = (verdict[k] for k in ("errors", "method", "sets"))
        row.converted, row.check_s = tuple(verdict["converted"]), verdict["check_s"]
        if verdict["fatal"]:
            _broken(runner)
        elif row.ok:
            ready.append(name)
            if options.isolate and options.first_calls:
                _note_first_call(name, workload, verdict["first_call_s"], results)
    return ready


def _note_first_call(name: str, workload: Workload, seconds: float, results: Results) -> None:
    """Note the first call of an operator in a process that started with empty caches."""
    seen = {(x["provider"], x["op"]) for x in results.first_calls}
    if (name, workload.op) in seen:
        return
    alone = not any(provider == name for provider, _ in seen)
    imported = results.provider(name)["import_s"] if alone else 0.0
    results.first_calls.append(_first(name, workload, imported, seconds))


def _first_calls(
    workloads: list[Workload], runners: dict[str, Any], options: Options, left: float, say: Say
) -> list[dict[str, Any]]:
    """Time import and first call of each provider in a new process with empty caches.

    No process starts after ``left`` seconds.
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
    with contextlib.closing(
        Sources(workloads, Options(**{**vars(options), "isolate": True}))
    ) as sources:
        for workload, name in itertools.product(smallest.values(), runners):
            if time.monotonic() > end:
                break
            say(f"first call of {name}")
            paths = options.paths.get(name, [])
            with contextlib.closing(
                Worker(name, options.device, options.threads, paths, cold=True)
            ) as worker:
                begun = _ask(worker, "start", options)
                source = sources.take(workload)
                verdict = _ask(worker, "check", options, workload, options.dtype, source)
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
    """Make a request; if it fails, only its answer is lost."""
    try:
        runner.send(method, *arguments)
        return runner.receive(options.timeout)
    except WorkerError:
        again(runner)
        return None


def _broken(runner: Any) -> None:
    """Start a new process after a fatal error; the second time without graphs."""
    runner.broken += 1
    again(runner, graphs=runner.broken < 2)
