"""Kernels: C callbacks compiled by Numba when first needed, and kept on disk (kernel_cache.py).

A kernel takes the address of a block of parameters (``block.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import types

from sluice.backends.cpu import kernel_cache, machine_code, numba_private
from sluice.backends.cpu.llvm_text import Unit

SLOW_SECONDS = 1.0
"""Compiling that takes longer is announced on stderr."""

KERNELS: dict[str, Kernel] = {}
"""Every kernel by its name."""


@functools.cache
def _made_from() -> str:
    """What compiled kernels depend on: this package's sources, the compiler and the machine."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()} {numba_private.DESCRIPTION}"


class Kernel:
    """A Python function of a block's address, compiled when first needed."""

    def __init__(
        self, name: str, function: Callable[[Any], Any], returns_int: bool = False
    ) -> None:
        self.name, self._python = name, function
        self._signature = (types.int64 if returns_int else types.void)(types.voidptr)
        self._prototype = ctypes.CFUNCTYPE(ctypes.c_int64 if returns_int else None, ctypes.c_void_p)
        self._lock = threading.Lock()
        self._notice = _Notice(name)
        self._lowered: tuple[str, Unit] | None = None
        self._found: tuple[int, Callable[[int], Any]] | None = None
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

    def begin(self) -> None:
        """Do what of ``compile`` needs Numba alone, so that the rest can run in another thread."""
        with self._lock:
            if self._found is None and not self.is_kept():
                self._notice.begin()
                self._lowered = numba_private.lower(self._python, self._signature)

    def _compiled(self) -> tuple[int, Callable[[int], Any]]:
        if self._found is None:
            with self._lock:
                if self._found is None:
                    self._notice.begin()
                    try:
                        address = self._load_or_compile()
                        self._found = address, self._prototype(address)
                    finally:
                        self._notice.end()
        return self._found

    def is_kept(self) -> bool:
        """Whether it was compiled before, here or by another process."""
        return self._found is not None or kernel_cache.holds(
            cache_folders(), self.name, self._made_from()
        )

    def _made_from(self) -> str:
        source = Path(self._python.__code__.co_filename)  # of a benchmark's kernel, outside of here
        return f"{self.name} {_made_from()} {hashlib.sha256(source.read_bytes()).hexdigest()}"

    def _load_or_compile(self) -> int:
        key, folders = self._made_from(), cache_folders()
        payload = kernel_cache.find(folders, self.name, key)
        if payload is None:
            lowered = self._lowered or numba_private.lower(self._python, self._signature)
            payload, self._lowered = machine_code.emit(*lowered), None
            kernel_cache.keep(folders, self.name, key, payload)
        return machine_code.load(payload)


def cache_folders() -> list[Path]:
    """Where compiled kernels are looked for, in this order, and kept in the first that allows it.

    Numba's ``NUMBA_CACHE_DIR`` if it is set; else beside these sources, or in the user's cache.
    """
    named = numba_private.cache_folder()
    if named:
        return [Path(named)]
    folders = [Path(__file__).parent / "__pycache__"]
    with contextlib.suppress(RuntimeError):  # nobody knows the user's home
        folders.append(Path.home() / ".cache" / "sluice")
    return folders


class _Notice:
    """Says on stderr what takes so long, if compiling takes over a second."""

    def __init__(self, name: str) -> None:
        self.name, self.said, self.start = name, False, 0.0
        self.timer: threading.Timer | None = None

    def begin(self) -> None:
        """Compiling begins, unless it has begun already."""
        if self.timer is None:
            self.said, self.start = False, time.perf_counter()
            self.timer = threading.Timer(SLOW_SECONDS, self._say)
            self.timer.daemon = True
            self.timer.start()

    def _say(self) -> None:
        sys.stderr.write(
            f"sluice: compiling the CPU kernel {self.name!r} (once, then cached) ...\n"
        )
        sys.stderr.flush()
        self.said = True

    def end(self) -> None:
        """It is compiled, or cannot be."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.said:
            took = time.perf_counter() - self.start
            sys.stderr.write(f"sluice: compiled {self.name!r} in {took:.1f} s\n")
