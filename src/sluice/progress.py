"""Progress on stderr: a bar if rich is installed, else plain lines."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with each step's name as it starts."""
    begun = 0
    with counted() as show:

        def start(step: str) -> None:
            nonlocal begun
            show(step, begun, total)
            begun += 1

        yield start
        if begun:
            show("", begun, total)


@contextlib.contextmanager
def counted() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function to call with what goes on, how much is done, and how much there is."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    except ImportError:
        yield _line
        return
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show


def _line(what: str, done: int, total: int) -> None:
    if what:
        width = len(str(total))
        print(f"[{min(done + 1, total):>{width}}/{total}] {what}", file=sys.stderr, flush=True)  # noqa: T201
