"""Progress of a run on stderr: a rich bar if rich is installed, else one line per step."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with each step's name as it starts; ``total`` may be exceeded."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield _lines(total)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(total)
        return
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.description}"), console=console, transient=True
    ) as bar:
        task, count = bar.add_task("", total=total), 0

        def advance(step: str) -> None:
            nonlocal count
            bar.update(task, description=step, completed=count, total=max(total, count + 1))
            count += 1

        yield advance


def _lines(total: int) -> Callable[[str], None]:
    count, begin = 0, time.monotonic()

    def line(step: str) -> None:
        nonlocal count
        count += 1
        text = f"[{count}/{max(total, count)}] {time.monotonic() - begin:4.0f} s  {step}"
        print(text, file=sys.stderr, flush=True)

    return line
