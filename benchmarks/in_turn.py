"""Processes that get ready at the same time, and then are timed one after another.

A benchmark starts itself once per row. Each child compiles what it needs, says that it is ready,
and waits for its turn: nobody times while others compile.
"""
# ruff: noqa: T201 (children talk to their parent by lines)

from __future__ import annotations

import contextlib
import fcntl
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

READY = "ready"


@contextlib.contextmanager
def turn(lock: Path) -> Iterator[None]:
    """In a child: say that it is ready, and wait for its turn."""
    print(READY, flush=True)
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tell(row: Mapping[str, Any]) -> None:
    """In a child: a row for the parent."""
    print(json.dumps(row), flush=True)


def rows(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]] | None = None
) -> Iterator[dict[str, Any]]:
    """What the children told, in the order of their commands; ``--child LOCK`` is added to each."""
    with tempfile.NamedTemporaryFile() as lock, Path(lock.name).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        started = [
            subprocess.Popen(
                [*command, "--child", lock.name],
                stdout=subprocess.PIPE,
                text=True,
                env=None if environments is None else dict(environments[i]),
            )
            for i, command in enumerate(commands)
        ]
        for child in started:
            assert child.stdout is not None
            for line in child.stdout:  # other libraries print, too
                if line.strip() == READY:
                    break
        fcntl.flock(held, fcntl.LOCK_UN)
        for child in started:
            assert child.stdout is not None
            yield from (json.loads(line) for line in child.stdout if line.startswith("{"))
