"""A process that has imported what tests need, and runs them in copies of itself.

Most of a short test's time would be spent on imports. Reads one line of JSON for each run (a
folder, the arguments of pytest, environment variables, a limit in seconds), and answers with one:
the exit status and what was printed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from typing import Any, NoReturn

import pytest
from faults import TIMED_OUT

NEEDED = ("torch", "torch.export", "hypothesis", "numba")
"""Imported once for all runs. Nothing that imports Triton, which asks then whether to interpret."""


def _run(job: dict[str, Any], output: int) -> NoReturn:
    """In the copy: nothing of the library was imported before."""
    os.setsid()  # so that its own processes end with it
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(job["environment"])
    if numba := sys.modules.get("numba"):
        numba.core.config.reload_config()  # NUMBA_CACHE_DIR
    os.chdir(job["tree"])
    sys.path[:0] = [job["tree"], os.environ["PYTHONPATH"]]
    sys.argv[:] = ["pytest", *job["arguments"]]
    code = 3
    try:
        code = int(pytest.main(job["arguments"]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _answer(job: dict[str, Any]) -> tuple[int, str]:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            _run(job, output.fileno())
        end, code = time.monotonic() + job["limit"], TIMED_OUT
        while time.monotonic() < end:
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                code = os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if code == TIMED_OUT:
            os.waitpid(child, 0)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def main() -> None:
    for name in NEEDED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        code, text = _answer(json.loads(line))
        sys.stdout.write(json.dumps([code, text]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
