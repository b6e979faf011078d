"""The command: ``python -m tests.wrong_calls --calls 50000 --seed 1``.

The calls run in a process of their own, which notes each seed before it calls: one that crashes or
hangs is named.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
import warnings

from tests.wrong_calls import judge, run

PATIENCE = 600
"""Seconds for one call, compiling included."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.wrong_calls", description=__doc__)
    parser.add_argument("--calls", type=int, default=2_000, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first call (%(default)s)")
    parser.add_argument("--notes", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.notes is not None:
        return _calls(given.seed, given.calls, given.notes)
    with tempfile.TemporaryFile() as notes:
        number = notes.fileno()
        argv = ["--seed", str(given.seed), "--calls", str(given.calls), "--notes", str(number)]
        worker = [sys.executable, "-m", "tests.wrong_calls", *argv]
        code = subprocess.run(worker, pass_fds=[number], check=False).returncode
        if code not in (0, 1):
            seed = os.pread(number, 32, 0).decode().strip()
            print(f"the process ended with {code} in the call of --seed {seed}")
    return code


def _calls(first: int, calls: int, notes: int) -> int:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    counts: run.Counts = collections.Counter()
    begun = shown = time.monotonic()
    wrong = 0
    for seed in range(first, first + calls):
        os.pwrite(notes, f"{seed:<32}".encode(), 0)
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        try:
            counts[run.one(seed)] += 1
        except judge.WrongAnswerError as error:
            wrong += 1
            print(run.describe(seed, error), flush=True)
        if time.monotonic() - shown > 20:
            shown = time.monotonic()
            print(f"{seed + 1 - first:,} calls, {wrong} wrong answers", flush=True)
    faulthandler.cancel_dump_traceback_later()
    took = time.monotonic() - begun
    print(f"{calls:,} wrong calls in {took:.0f} s, seeds {first} to {first + calls - 1}: ", end="")
    print(f"{wrong} wrong answers" if wrong else "pass")
    print(", ".join(f"{n:,} {kind}" for kind, n in sorted(counts.items())))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
