"""Bad luck on demand: memory that is used up, and processes that end at a chosen point."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

ALLOCATES = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "zeros",
    "full",
    "clone",
    "contiguous",
    "fill",  # what ``nan_empty`` puts in place of methods that allocate
)


class Scarce(TorchFunctionMode):
    """In this scope the allocation with a number (from 0) fails, as on a full GPU.

    ``everywhere`` counts each function of torch, not only those that allocate. ``seen`` says how
    many there were.
    """

    def __init__(self, fails: int | None, everywhere: bool = False) -> None:
        super().__init__()
        self.fails, self.everywhere, self.seen = fails, everywhere, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in ALLOCATES or (self.everywhere and not name.startswith("_")):
            self.seen += 1
            if self.seen - 1 == self.fails:
                raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        return function(*args, **(kwargs or {}))


def in_child(function: Callable[[], Any], seconds: float = 60.0) -> int:
    """Run a function in a forked process; its exit status, or minus the signal that ended it.

    0: it returned; 1: it raised. One that hangs is killed and fails the test.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    return ended(pid, seconds)


def ended(pid: int, seconds: float = 60.0) -> int:
    """Wait for a child of this process."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the process did not end within {seconds:.0f} s")


def die() -> None:
    """End this process at once, as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)
