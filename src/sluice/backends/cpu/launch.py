"""Kernels compiled by Numba, cached on disk, and run by the OpenMP threads torch already has.

A kernel is a C callback that takes the address of a block of parameters. Every thread runs it on
the same block: it starts with its own part of the tasks, the same in every call so that a core
finds in its cache what it wrote last time, and then helps with the parts of others.

Threads come from the OpenMP runtime in the process (torch brings one), entered through
``GOMP_parallel``: about a microsecond a launch, no second pool beside torch's, and safe to call
from several Python threads at once. Where none is loaded, plain Python threads serve.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import pickle
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from numba import njit, types
from numba.core import codegen, sigutils
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock

from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.memory import call_int, fetch_add
from sluice.backends.cpu.records import record

SLOW_SECONDS = 1.0
SIGNATURE = types.void(types.voidptr)
OPTIONS = {"error_model": "numpy"}
COUNTER_STRIDE = 8  # int64 elements: one cache line a counter


@functools.cache
def source_hash() -> str:
    """A hash of this package's sources, part of the key of what is cached on disk.

    Numba itself only looks at the file a kernel is in, not at those it calls.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Fields:
    """The layout of a parameter block: int64 fields, then float64 fields, 8 bytes each.

    Every block starts with a head: `tasks`, `threads`, the addresses of `identify` (a function that
    numbers the calling thread), `counters` (a cache line for each thread), the `worker` and
    `parallel` (which lets threads call it), and whether values are `suspicious` (screen.py). Behind
    the fields there is room for the counters. `view` is the function that kernels see a block
    through.
    """

    HEAD = "tasks threads identify counters worker parallel suspicious"

    def __init__(self, name: str, ints: str, floats: str = "") -> None:
        ints = f"{self.HEAD} {ints}"
        names = (ints + " " + floats).split()
        assert len(set(names)) == len(names)
        self.offset = {field: 8 * i for i, field in enumerate(names)}
        self.view = record(name, ints, floats)
        count = len(ints.split())
        self._all = struct.Struct(f"={count}q{len(names) - count}d")
        self.size = self._all.size
        self.array = ctypes.c_char * self.size

    def block(self, values: dict[str, Any]) -> bytes:
        """A block with these fields set and all others zero."""
        assert values.keys() <= self.offset.keys(), values.keys() - self.offset.keys()
        return self._all.pack(*(values.get(field, 0) for field in self.offset))


KERNELS: dict[str, Kernel] = {}


class Kernel:
    """One worker function: compiled when first needed, then run over task numbers."""

    def __init__(
        self, name: str, fields: Fields, make: Callable[[str], Callable[[Any], None]]
    ) -> None:
        self.name, self.fields, self._make = name, fields, make
        self._lock = threading.Lock()
        self._address = 0
        KERNELS[name] = self

    def compile(self) -> int:
        """The address of the compiled worker, from the disk cache where it is there."""
        if self._address:
            return self._address
        with self._lock:
            if not self._address:
                with _Notice(self.name):
                    address, self._code = _compiled(self._make(source_hash()))
                    self._function = _as_function(address)
                    self._address = address
        return self._address

    def __call__(self, block: bytearray, tasks: int, threads: int = 0) -> None:
        """Run tasks 0 to `tasks` with the parameters in a block."""
        if tasks <= 0:
            return
        where, count = self._fill(block, tasks, threads)
        if count > 1 and _gomp_parallel is not None:
            _gomp_parallel(self._address, where, count, 0)
        else:
            _python_threads(self._function, where, count)

    def enter(self, block: bytearray, tasks: int, screen: Kernel) -> bool:
        """Run the tasks unless a screen finds the block suspicious; returns whether it did."""
        where, count = self._fill(block, tasks, 0)
        if not screen._address:
            screen.compile()
        screen._function(where)
        if _suspicious(block, _SUSPICIOUS)[0]:
            return True
        if count > 1 and _gomp_parallel is None:
            _python_threads(self._function, where, count)
        return False

    def _fill(self, block: bytearray, tasks: int, threads: int) -> tuple[int, int]:
        """Write the head of a block and append its counters; its address and the threads."""
        address = self._address or self.compile()
        count = min(threads or torch.get_num_threads(), tasks)
        size = self.fields.size
        block[size:] = bytes(8 * COUNTER_STRIDE * (count + 2))
        where = ctypes.addressof(self.fields.array.from_buffer(block))
        counters = where + size + 8 * COUNTER_STRIDE - (where + size) % (8 * COUNTER_STRIDE)
        _put_head(block, 0, tasks, count, _identify, counters, address, _parallel, 0)
        return where, count


_put_head = struct.Struct("=7q").pack_into
_suspicious = struct.Struct("=q").unpack_from
_SUSPICIOUS = 8 * Fields.HEAD.split().index("suspicious")


def _compiled(worker: Callable[[Any], None]) -> tuple[int, object]:
    """The address of a worker's machine code, and what keeps it there."""
    try:
        return _load_or_compile(worker, cached=True)
    except (EOFError, OSError, RuntimeError, pickle.UnpicklingError):
        # no directory to cache in, or what is there can be neither read nor written
        return _load_or_compile(worker, cached=False)


def _load_or_compile(worker: Callable[[Any], None], cached: bool) -> tuple[int, object]:
    kernel = CFunc(worker, sigutils.normalize_signature(SIGNATURE), {}, OPTIONS)
    if cached:
        kernel.enable_caching()
    with global_compiler_lock:
        found = kernel._cache.load_overload(kernel._sig, kernel._targetdescr.target_context)
        if found is not None:
            address = found.library.get_pointer_to_function(found.fndesc.llvm_cfunc_wrapper_name)
            return address, found
        with _once():
            njit(**OPTIONS)(worker).compile(SIGNATURE.args)
        kernel.compile()
    return kernel.address, kernel


def _finalized(library: Any) -> None:
    library._finalize_dynamic_globals()
    library._finalized = True


_SKIPPED = (
    (codegen, "JITCodeLibrary", "_optimize_final_module", lambda library: None),
    (codegen, "JITCodeLibrary", "_finalize_final_module", _finalized),
    (codegen, "JITCPUCodegen", "set_env", lambda self, name, env: None),
)


@contextlib.contextmanager
def _once() -> Iterator[None]:
    """In this scope compiled functions are kept as unoptimised LLVM modules.

    Numba optimises every function and emits it as machine code, with all that it calls, and again
    within each caller. What is compiled here first is optimised once, as a part of its kernel.
    Should Numba's internals change, kernels compile as they are, only slower.
    """
    kinds = [getattr(module, kind, None) for module, kind, _, _ in _SKIPPED]
    known = all(hasattr(kind, name) for kind, (_, _, name, _) in zip(kinds, _SKIPPED, strict=True))
    before = []
    for kind, (_, _, name, function) in zip(kinds, _SKIPPED, strict=True):
        if known:
            before.append((kind, name, kind.__dict__.get(name)))
            setattr(kind, name, function)
    try:
        yield
    finally:
        for kind, name, function in before:
            if function is None:  # it was inherited
                delattr(kind, name)
            else:
                setattr(kind, name, function)


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


def _runtime(*libraries: str | None) -> Any:
    """The first of these libraries, with all it was linked with, that has OpenMP's threads."""
    for name in libraries:
        with contextlib.suppress(AttributeError, OSError, TypeError):
            library = ctypes.CDLL(name)
            if library.GOMP_parallel and library.omp_get_thread_num:
                return library
    return None


# As torch's own calls are resolved: among the symbols of the process, then among those of what
# torch was linked with. Wheels for ARM make no OpenMP symbol visible to the process.
_openmp = _runtime(None, torch._C.__file__)
_gomp_parallel = None
_identify = _parallel = 0
if _openmp is not None:
    _gomp_parallel = _openmp.GOMP_parallel
    _gomp_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    _gomp_parallel.restype = None
    _identify = ctypes.cast(_openmp.omp_get_thread_num, ctypes.c_void_p).value or 0
    _parallel = ctypes.cast(_gomp_parallel, ctypes.c_void_p).value or 0
_as_function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _python_threads(function: Any, where: int, count: int) -> None:
    others = [threading.Thread(target=function, args=(where,)) for _ in range(count - 1)]
    for thread in others:
        thread.start()
    function(where)
    for thread in others:
        thread.join()


@jit
def first_range(p):
    """The range of tasks this thread begins with."""
    if p.threads == 1:
        return 0
    if p.identify != 0:
        return call_int(p.identify)
    return fetch_add(p.counters + 8 * COUNTER_STRIDE * p.threads)


@jit
def claim(p, part):
    """The next task of a part of all tasks, -1 when there is none left."""
    begin, end = part * p.tasks // p.threads, (part + 1) * p.tasks // p.threads
    task = begin + fetch_add(p.counters + 8 * COUNTER_STRIDE * part)
    return task if task < end else -1
