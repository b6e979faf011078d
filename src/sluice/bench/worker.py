"""A session in its own process, and the same interface for one in this process.

A peer may write outside its memory, wait for ever, or end the process. Then it loses only its own
rows: its process is ended, its last output goes into the row, and a new process takes the next
workload.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import sluice
from sluice.bench.peer_environment import for_peers
from sluice.bench.session import Session, without_places

METHODS = ("start", "check", "time", "eager", "release", "prime", "compile")


class WorkerError(Exception):
    """The process is gone or did not answer; the text has its last output."""


class Local:
    """A session in this process."""

    def __init__(self, name: str, device: str, threads: int) -> None:
        self.name = name
        self.session = Session(name, device, threads)
        self.reply: Any = None
        self.broken = 0  # times that its process was of no more use

    def send(self, method: str, *arguments: Any) -> None:
        self.reply = getattr(self.session, method)(*arguments)

    def receive(self, timeout: float | None = None) -> Any:
        return self.reply

    def restart(self, graphs: bool = True) -> None:
        self.session.release()

    def close(self) -> None:
        self.session.release()


class Worker:
    """A session in its own process. ``paths`` are put before its module search path.

    ``cold`` gives it an empty compile cache, so that its first call really compiles; ``caches`` is
    the compile cache of another session.
    """

    def __init__(
        self,
        name: str,
        device: str,
        threads: int,
        paths: Sequence[str] = (),
        cold: bool = False,
        caches: str | None = None,
    ) -> None:
        self.name, self.arguments = name, (name, device, threads)
        self.paths = list(paths)
        self.broken = 0  # times that its process was of no more use
        self._folder = tempfile.TemporaryDirectory(
            prefix="sluice-bench-", ignore_cleanup_errors=True
        )
        self.log = Path(self._folder.name) / "log"
        self.caches = str(Path(self._folder.name) / "caches") if cold else caches
        self._begin(graphs=True)

    def _begin(self, graphs: bool) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        what = {"pipe": theirs.fileno(), "session": [*self.arguments, graphs]}
        what |= {"paths": self.paths, "caches": self.caches}
        where = str(Path(sluice.__file__).parents[1])
        code = f"import sys; sys.path.insert(0, {where!r})\n"
        code += "from sluice.bench.worker import serve; serve()"
        # a new program, not a fork or a spawn: the caller's main module does not run again
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(what)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        theirs.close()

    def send(self, method: str, *arguments: Any) -> None:
        try:
            self.pipe.send((method, arguments))
        except (BrokenPipeError, OSError) as error:
            raise WorkerError(self._last_words()) from error

    def receive(self, timeout: float | None = None) -> Any:
        """The method's result. Raises ``WorkerError``; the process is then gone."""
        try:
            if not self.pipe.poll(timeout):
                self._end()
                raise WorkerError(f"no answer in {timeout:.0f} s")
            ok, value = self.pipe.recv()
        except (EOFError, OSError) as error:
            self._wait(5)
            raise WorkerError(self._last_words()) from error
        if not ok:
            raise WorkerError(value)
        return value

    def restart(self, graphs: bool = True) -> None:
        """End the process and start another, as after a timeout or a crash."""
        self._end()
        self._begin(graphs)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(("stop", ()))
        self._wait(2)
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self._wait(5)
        self.pipe.close()

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def _last_words(self) -> str:
        code = self.process.returncode
        how = f"process ended with status {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = f"process ended by {signal.Signals(-code).name}"
        written = self.log.read_text(errors="replace").strip() if self.log.exists() else ""
        last = [x.strip() for x in written.splitlines() if x.strip()][-1:]
        return f"{how}: {without_places(last[0])[:200]}" if last else how


def serve() -> None:
    """The process's main loop: one answer per request, until the other side is gone.

    All output of the process, including a peer's, goes to the log.
    """
    what = json.loads(sys.argv[1])
    for_peers(what["caches"], what["paths"])
    sys.path[:0] = what["paths"]
    import torch

    name, device, threads, graphs = what["session"]
    torch.set_num_threads(threads)
    session = Session(name, device, threads, graphs)
    pipe = Connection(what["pipe"])
    while True:
        try:
            method, values = pipe.recv()
        except (EOFError, OSError):
            return
        if method not in METHODS:
            return
        try:
            reply = True, getattr(session, method)(*values)
        except Exception as error:
            reply = False, without_places(f"{type(error).__name__}: {error}")[:400]
        pipe.send(reply)
