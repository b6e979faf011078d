"""Progress on stderr: a bar on a terminal if rich is installed, else a line per step."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with each step's name as it starts; ``total`` may be exceeded."""
    begun = 0
    with counted() as show:

        def start(step: str) -> None:
            nonlocal begun
            show(step, begun, max(total, begun + 1))
            begun += 1

        yield start


@contextlib.contextmanager
def counted() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function to call with what goes on, how much is done, and how much there is."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except Exception:  # not installed; or broken, which raises anything
        yield _lines()
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    what = TextColumn("{task.description}")
    with Progress(*columns, what, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(step: str, done: int, total: int) -> None:
            bar.update(task, description=step, completed=done, total=total)

        yield show


def _lines() -> Callable[[str, int, int], None]:
    begin = time.monotonic()

    def line(step: str, done: int, total: int) -> None:
        text = f"[{min(done + 1, total)}/{total}] {step} ({time.monotonic() - begin:.0f} s)"
        print(text, file=sys.stderr, flush=True)  # noqa: T201

    return line
