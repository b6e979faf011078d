"""Kernels: C callbacks compiled by Numba when first needed, and cached on disk.

A kernel takes the address of a block of parameters (``block.py``).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import pickle
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import types

from sluice.backends.cpu import numba_private

SLOW_SECONDS = 1.0
"""Compiling that takes longer is announced on stderr."""

KERNELS: dict[str, Kernel] = {}
"""Every kernel by its name."""


@functools.cache
def source_hash() -> str:
    """A hash of this package's sources, part of the key of what is cached on disk.

    Numba itself looks only at the file that a kernel is in, not at those it calls.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Kernel:
    """A function of a block's address, compiled when first needed.

    ``make(version)`` returns the Python function. The function must mention ``version``: that makes
    the hash of the sources a part of its key in the disk cache.
    """

    def __init__(
        self, name: str, make: Callable[[str], Callable[[Any], Any]], returns_int: bool = False
    ) -> None:
        self.name, self._make = name, make
        self._signature = (types.int64 if returns_int else types.void)(types.voidptr)
        self._prototype = ctypes.CFUNCTYPE(ctypes.c_int64 if returns_int else None, ctypes.c_void_p)
        self._lock = threading.Lock()
        self._found: tuple[int, Callable[[int], Any], object] | None = None
        KERNELS[name] = self

    @property
    def address(self) -> int:
        """Where the machine code begins."""
        return self._compiled()[0]

    @property
    def function(self) -> Callable[[int], Any]:
        """The kernel for Python, which takes a block's address and releases the GIL."""
        return self._compiled()[1]

    def compile(self) -> None:
        """Compile it now, or load it from the disk cache."""
        self._compiled()

    def _compiled(self) -> tuple[int, Callable[[int], Any], object]:
        if self._found is None:
            with self._lock:
                if self._found is None:
                    with _Notice(self.name):
                        address, alive = _load_or_compile(
                            self._make(source_hash()), self._signature
                        )
                        self._found = address, self._prototype(address), alive
        return self._found


def _load_or_compile(function: Callable[[Any], Any], signature: Any) -> tuple[int, object]:
    try:
        return numba_private.load_or_compile(function, signature, cached=True)
    except (EOFError, OSError, RuntimeError, pickle.UnpicklingError):
        # there is no directory to cache in, or what it holds can be neither read nor written
        return numba_private.load_or_compile(function, signature, cached=False)


class _Notice:
    """Says on stderr what takes so long, if compiling takes over a second."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.timer = threading.Timer(SLOW_SECONDS, self.say)
        self.timer.daemon = True

    def say(self) -> None:
        sys.stderr.write(
            f"sluice: compiling the CPU kernel {self.name!r} (once, then cached) ...\n"
        )
        sys.stderr.flush()
        self.said = True

    def __enter__(self) -> None:
        self.said, self.start = False, time.perf_counter()
        self.timer.start()

    def __exit__(self, *error: object) -> None:
        self.timer.cancel()
        if self.said:
            took = time.perf_counter() - self.start
            sys.stderr.write(f"sluice: compiled {self.name!r} in {took:.1f} s\n")
