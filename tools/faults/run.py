"""Put every fault in, one at a time, and see which test notices: ``make faults``.

Each worker has a copy of the tree. For a fault it changes one file of the copy, runs the fault's
tests, and puts the file back. A fault that no test notices has SURVIVED, and the exit status is 1.
What was found is kept in build/faults/, so that a run that was stopped goes on where it was, as
long as neither the sources nor the files of its tests have changed.

    python tools/faults/run.py                    all
    python tools/faults/run.py --sample 30        some, drawn by the date
    python tools/faults/run.py --only pool --again
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

from faults import ROOT, TIMED_OUT, Fault, read, record, sample

BUILD = ROOT / "build" / "faults"
RESULTS = BUILD / "results.jsonl"
KERNELS = BUILD / "kernels"
"""Compiled CPU kernels of the sources as they are."""
LIMIT = 300
"""Seconds for the tests of one fault."""
CPU_SOURCES = "src/sluice/backends/cpu/"


class Outcome(NamedTuple):
    """What the tests of one fault said."""

    id: str
    caught: bool
    by: str  # the test that failed, or what else happened
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sample", type=int, help="so many, drawn by --seed")
    parser.add_argument("--seed", default=str(datetime.date.today()), help="the date by default")
    parser.add_argument("--only", default="", help="ids that begin with one of these, with commas")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--again", action="store_true", help="also those that were run before")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin none after so long")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds for a fault's tests")
    parser.add_argument("--record", action="store_true", help="write down which tests noticed")
    given = parser.parse_args()
    wanted = [f for f in read() if any(f.id.startswith(t) for t in given.only.split(","))]
    if absent := [] if _has_gpu() else [f.id for f in wanted if f.gpu]:
        print(f"left out without a GPU: {', '.join(absent)}")
        wanted = [f for f in wanted if not f.gpu]
    if given.sample is not None:
        wanted = sample(wanted, given.sample, given.seed)
        print(f"{len(wanted)} faults, --seed {given.seed}", flush=True)
    _take_kernels()
    sources = _digest(path for path in _files() if path.startswith("src/"))
    keys = {f.id: _key(f, sources) for f in wanted}
    kept_before = {} if given.again else _kept()
    outcomes = {f.id: kept_before[keys[f.id]] for f in wanted if keys[f.id] in kept_before}
    todo = [f for f in wanted if f.id not in outcomes]
    rows = {f.id: ",".join(map(str, f.row)) for f in wanted}
    for outcome in outcomes.values():
        _say(outcome, rows[outcome.id])
    start = time.monotonic()
    with RESULTS.open("a") as kept, _workers(max(1, min(given.workers, len(todo)))) as workers:
        for worker in workers:
            worker.limit = given.limit
        for fault, outcome in _run_all(todo, workers, start + given.seconds):
            if outcome is not None:
                _say(outcome, rows[fault.id])
                outcomes[fault.id] = outcome
                kept.write(json.dumps({"key": keys[fault.id], **outcome._asdict()}) + "\n")
                kept.flush()
        told = [f for f in wanted if f.id in outcomes and outcomes[f.id].caught]
        untold = _fail_without_faults(told, outcomes, workers[0])
    if given.record:
        record({f.id: outcomes[f.id].by for f in told if f.id not in untold})
    for name in untold:
        print(f"{name}: {outcomes[name].by} fails without the fault, too")
    survived = [name for name, outcome in outcomes.items() if not outcome.caught]
    bad, left = len(untold) + len(survived), len(wanted) - len(outcomes)
    took = time.monotonic() - start
    more = f"; {left} not tried" if left else ""
    print(f"{len(outcomes)} faults, {len(outcomes) - bad} caught, {bad} not; {took:.0f} s{more}")
    for name in survived:
        _say(outcomes[name], rows[name])
    return 1 if bad else 0


def _say(outcome: Outcome, row: str) -> None:
    verdict = f"caught by {outcome.by}" if outcome.caught else f"SURVIVED ({outcome.by})"
    print(f"{row:>5}  {outcome.id:<44} {outcome.seconds:5.1f} s  {verdict}", flush=True)


def _take_kernels() -> None:
    """Take over CPU kernels that the suite has compiled: their names say what they were made of."""
    KERNELS.mkdir(parents=True, exist_ok=True)
    for path in (ROOT / CPU_SOURCES / "__pycache__").glob("*.kernel"):
        if not (KERNELS / path.name).exists():
            shutil.copy2(path, KERNELS)


def _has_gpu() -> bool:
    ask = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", ask], check=False).returncode == 0


def _digest(paths: Iterable[str]) -> str:
    """Equal for files of equal names and contents."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.encode() + b"\0" + (ROOT / path).read_bytes())
    return digest.hexdigest()


def _key(fault: Fault, sources: str) -> str:
    """What a fault's outcome depends on: itself, the sources, and the files of its tests."""
    tests = _digest(sorted({test.partition("::")[0] for test in fault.tests}))
    return hashlib.sha256(f"{fault.digest} {sources} {tests}".encode()).hexdigest()[:16]


def _files() -> list[str]:
    """The files of the tree that git knows or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(p for p in listed.split("\0") if p and (ROOT / p).is_file())


def _kept() -> dict[str, Outcome]:
    found = {}
    if RESULTS.is_file():
        for line in RESULTS.read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                key = entry.pop("key")
                found[key] = Outcome(**entry)
    return found


def _copy(to: Path) -> None:
    for path in _files():
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, to / path)


@contextlib.contextmanager
def _workers(number: int) -> Iterator[list[Warm]]:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        made = []
        try:
            for i in range(number):
                _copy(Path(folder) / str(i))
                made.append(Warm(Path(folder) / str(i)))
            yield made
        finally:
            for each in made:
                each.close()


def _fail_without_faults(
    faults: list[Fault], outcomes: dict[str, Outcome], worker: Warm
) -> list[str]:
    """The faults whose test fails as the sources are, too: it tells nothing about the fault."""
    groups: dict[bool, dict[str, list[str]]] = {}
    for fault in faults:
        noticed = outcomes[fault.id].by
        tests = (noticed,) if "::" in noticed else fault.tests
        for test in tests:
            groups.setdefault(fault.interpret, {}).setdefault(test, []).append(fault.id)
    found: list[str] = []
    for interpret, tests in groups.items():
        code, text = worker.pytest(list(tests), "", interpret, KERNELS, limit=1800, first=False)
        if code not in (0, 1):
            print(text[-3000:])
            return [fault.id for fault in faults]
        for failed in _failed(text):
            found += tests.get(failed, []) or [
                i for t in tests if failed.startswith(t) for i in tests[t]
            ]
    return found


def _run_all(
    faults: list[Fault], workers: list[Warm], end: float
) -> Iterator[tuple[Fault, Outcome | None]]:
    """Outcomes as they come; None for faults that were not begun before ``end``."""
    with ThreadPool(len(workers)) as pool:
        idle: queue.SimpleQueue[Warm] = queue.SimpleQueue()
        for worker in workers:
            idle.put(worker)

        def one(fault: Fault) -> tuple[Fault, Outcome | None]:
            worker = idle.get()
            try:
                return fault, _run(fault, worker) if time.monotonic() < end else None
            finally:
                idle.put(worker)

        yield from pool.imap_unordered(one, faults)


def _run(fault: Fault, worker: Warm) -> Outcome:
    """Put the fault into the copy, run its tests, and take it out again."""
    path, start = worker.tree / fault.file, time.monotonic()
    before = path.read_text("utf-8")
    after = fault.applied(before)
    ast.parse(after)
    # kernels are kept by their sources: a folder that keeps few files is not filled with these
    compiles = fault.file.startswith(CPU_SOURCES)
    try:
        path.write_text(after, "utf-8")
        with contextlib.ExitStack() as stack:
            kernels = KERNELS
            if compiles:
                kernels = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            code, text = 0, ""
            if fault.by:
                code, text = worker.pytest([fault.by], "", fault.interpret, kernels)
            if code in (0, 4, 5):  # it passed, or is not there any more
                code, text = worker.pytest(fault.tests, fault.only, fault.interpret, kernels)
    finally:
        path.write_text(before, "utf-8")
    failed = _failed(text)
    last = text.strip().splitlines()[-1] if text.strip() else ""
    if code == TIMED_OUT:
        caught, by = False, f"no answer within {worker.limit} s"
    elif code < 0:  # on a GPU or in machine code a fault may end the process
        caught, by = True, f"the end of the process (signal {-code})"
    else:
        caught = code == 1 and bool(failed)
        by = failed[0] if failed else f"pytest ended with {code}: {last}"
    return Outcome(fault.id, caught, by, round(time.monotonic() - start, 1))


def _failed(text: str) -> list[str]:
    """The tests that failed, by what pytest printed."""
    marks = ("FAILED ", "ERROR ")
    lines = [x.split(" ", 1)[1] for x in text.splitlines() if x.startswith(marks)]
    return [line.split(" - ")[0] for line in lines]


class Warm:
    """A process that has imported what every run needs (``warm.py``), and a copy of the tree."""

    def __init__(self, tree: Path) -> None:
        self.tree, self.limit = tree, LIMIT
        alone = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm.py"))],
            env={**clean, **alone},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def pytest(
        self,
        tests: Sequence[str],
        only: str,
        interpret: bool,
        kernels: Path,
        limit: int = 0,
        first: bool = True,
    ) -> tuple[int, str]:
        """The exit status of these tests, to the ``first`` that fails, and what they printed."""
        arguments = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
        arguments += ["--hypothesis-profile", "unshrunk"]
        arguments += [*(["-x"] if first else []), *(["-k", only] if only else []), *tests]
        environment = {"PYTHONPATH": str(self.tree / "src"), "NUMBA_CACHE_DIR": str(kernels)}
        if interpret:
            environment["TRITON_INTERPRET"] = "1"
        job = {"tree": str(self.tree), "arguments": arguments, "environment": environment}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job | {"limit": limit or self.limit}) + "\n")
        self.process.stdin.flush()
        code, text = json.loads(self.process.stdout.readline())
        return code, text

    def close(self) -> None:
        self.process.communicate()


if __name__ == "__main__":
    sys.exit(main())
