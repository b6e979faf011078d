"""Kernels through the CUDA driver: load machine code, keep its parameters ready, launch it.

A launch needs its addresses and a stream; everything else lies ready in memory. It needs neither
Triton nor a C compiler. ``ctypes`` is enough: one call into the driver per launch, and one more for
each TMA descriptor whose address has changed (docs/kernels/launch.md).
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
MAX_DYNAMIC_SHARED, STATIC_SHARED = 8, 1  # CUfunction_attribute
PREFER_SHARED = 1  # CUfunc_cache
USUAL_SHARED = 48 << 10  # bytes of shared memory that need no permission
NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
DESCRIPTOR_BYTES, DESCRIPTOR_ALIGNMENT = 128, 64
PROMOTE_L2_128B = 2  # CUtensorMapL2promotion
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes -> CUtensorMapSwizzle
ELEMENTS = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType


class DriverError(RuntimeError):
    """The CUDA driver refused a call."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("number", ctypes.c_uint),
    )


@functools.cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    driver.cuLaunchKernelEx.argtypes = [pointer, pointer, pointer, pointer]
    driver.cuTensorMapReplaceAddress.argtypes = [pointer, pointer]
    driver.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
    driver.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
    driver.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    driver.cuFuncGetAttribute.argtypes = [pointer, ctypes.c_int, pointer]
    driver.cuFuncSetCacheConfig.argtypes = [pointer, ctypes.c_int]
    driver.cuCtxGetCurrent.argtypes = driver.cuCtxSetCurrent.argtypes = [pointer]
    driver.cuDeviceGet.argtypes = [pointer, ctypes.c_int]
    driver.cuDevicePrimaryCtxRetain.argtypes = [pointer, ctypes.c_int]
    driver.cuGetErrorString.argtypes = [ctypes.c_int, pointer]
    driver.cuTensorMapEncodeTiled.argtypes = [
        pointer, ctypes.c_int, number, pointer, pointer, pointer, pointer, pointer,
        ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    return driver


def _check(result: int, what: str) -> None:
    if result != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise DriverError(f"{what}: {reason} (CUDA error {result})")


def _enter() -> None:
    """Give this thread the current device's context, which torch works in, unless it has one.

    A thread has none before its first call into the CUDA runtime: autograd's threads, for one.
    """
    driver, context, device = _driver(), ctypes.c_void_p(), ctypes.c_int()
    _check(driver.cuCtxGetCurrent(ctypes.byref(context)), "asking for the context")
    if not context.value:
        number, what = torch.cuda.current_device(), "entering the device's context"
        _check(driver.cuDeviceGet(ctypes.byref(device), number), what)
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), what)
        _check(driver.cuCtxSetCurrent(context), what)


def load(code: bytes, name: str, shared: int, device: torch.device) -> int:
    """The handle of a kernel in machine code, on ``device``, which is the current one.

    It stays loaded as long as the process: a captured graph may launch it at any time.
    """
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    _enter()
    _check(driver.cuModuleLoadData(ctypes.byref(module), code), f"loading {name}")
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), name)
    most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    if shared > most:
        raise DriverError(f"{name}: needs {shared} bytes of shared memory, the GPU has {most}")
    if shared > USUAL_SHARED:
        static = ctypes.c_int()
        _check(driver.cuFuncSetCacheConfig(function, PREFER_SHARED), name)
        _check(driver.cuFuncGetAttribute(ctypes.byref(static), STATIC_SHARED, function), name)
        room = most - static.value
        _check(driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, room), name)
    assert function.value is not None
    return function.value


class Matrix(NamedTuple):
    """A matrix in memory as TMA sees it: rows ``stride`` elements apart, read in boxes."""

    dtype: torch.dtype
    rows: int
    columns: int
    stride: int
    box: tuple[int, int]  # rows, columns
    swizzle: int  # bytes

    def encode(self, where: int, address: int) -> None:
        """Write the descriptor of the matrix at ``address`` to ``where``."""
        size = self.dtype.itemsize
        result = _driver().cuTensorMapEncodeTiled(
            where,
            ELEMENTS[self.dtype],
            2,
            address,
            (ctypes.c_uint64 * 2)(self.columns, self.rows),
            (ctypes.c_uint64 * 2)(self.stride * size, self.rows * self.stride * size),
            (ctypes.c_uint32 * 2)(*reversed(self.box)),
            (ctypes.c_uint32 * 2)(1, 1),
            0,
            SWIZZLES[self.swizzle],
            PROMOTE_L2_128B,
            0,
        )
        if result != 0:
            _check(result, f"a TMA descriptor of {self}")


class Layout:
    """Where the parameters of a kernel lie in memory: the same for every launch of it.

    Descriptors come first, each in its own aligned place, then pointers, then numbers, 8 bytes
    each.

    Args:
        kinds: of each parameter, in order: "matrix", "pointer", or a number's format for ``struct``
            ("i", "q" or "f").
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self.matrices, self.pointers = kinds.count("matrix"), kinds.count("pointer")
        numbers = [kind for kind in kinds if kind not in ("matrix", "pointer")]
        self.first = DESCRIPTOR_BYTES * self.matrices
        self.size = self.first + 8 * (self.pointers + len(numbers))
        self.pack_pointers = struct.Struct(f"={self.pointers}Q").pack_into
        padded = "".join(kind if kind == "q" else kind + "4x" for kind in numbers)
        self.pack_numbers = struct.Struct(f"={padded}").pack_into
        places = {"matrix": 0, "pointer": self.first, "number": self.first + 8 * self.pointers}
        self.offsets = []
        for kind in kinds:
            kind = kind if kind in places else "number"
            self.offsets.append(places[kind])
            places[kind] += DESCRIPTOR_BYTES if kind == "matrix" else 8


class KernelLaunch:
    """One kernel with its grid and all of its parameters but addresses.

    Args:
        function: from :func:`load`. name: for errors. grid: programs. threads: of a program.
        shared: bytes of shared memory. overlap: may start while the kernel before it ends.
        layout: of the parameters. numbers: their values, in order. matrices: what TMA descriptors
            describe, in order; their addresses come with each launch.
    """

    def __init__(
        self,
        function: int,
        name: str,
        grid: int,
        threads: int,
        shared: int,
        overlap: bool,
        layout: Layout,
        numbers: Sequence[float],
        matrices: Sequence[Matrix] = (),
    ) -> None:
        self.function, self.name, self._matrices = function, name, matrices
        self._memory = ctypes.create_string_buffer(layout.size + DESCRIPTOR_ALIGNMENT)
        start = -ctypes.addressof(self._memory) % DESCRIPTOR_ALIGNMENT
        self._base = base = ctypes.addressof(self._memory) + start
        self._at = start + layout.first
        self._pack = layout.pack_pointers
        layout.pack_numbers(self._memory, self._at + 8 * layout.pointers, *numbers)
        places = [base + offset for offset in layout.offsets]
        self._places = (ctypes.c_void_p * len(places))(*places)
        self._encoded: tuple[int, ...] = (0,) * len(matrices)
        self._attribute = _Attribute(OVERLAP)
        self._attribute.value[0] = 1
        self._config = _Config(
            (grid, 1, 1), (threads, 1, 1), shared, None, ctypes.pointer(self._attribute), overlap
        )
        self._arguments = ctypes.addressof(self._config), ctypes.addressof(self._places)
        self._launch, self._move = _driver().cuLaunchKernelEx, _driver().cuTensorMapReplaceAddress
        self._lock = threading.Lock()

    def __call__(self, pointers: tuple[int, ...], matrices: tuple[int, ...], stream: int) -> None:
        """Launch with these addresses, in the order of the parameters."""
        config, places = self._arguments
        with self._lock:  # the memory is one launch's at a time: the driver copies it
            self._pack(self._memory, self._at, *pointers)
            if self._encoded != matrices:
                self._point(matrices)
            self._config.stream = stream
            result = self._launch(config, self.function, places, None)
            if result == NO_CONTEXT:
                _enter()
                result = self._launch(config, self.function, places, None)
        if result != 0:
            _check(result, f"launching {self.name}")

    def _point(self, addresses: tuple[int, ...]) -> None:
        """Let the descriptors point at these addresses; each is noted once it does."""
        now = list(self._encoded)
        try:
            for i, address in enumerate(addresses):
                before = now[i]
                if before != address:
                    where = self._base + DESCRIPTOR_BYTES * i
                    now[i] = 0  # if this fails, nobody knows where it points
                    if before == 0:
                        self._matrices[i].encode(where, address)
                    else:
                        _check(self._move(where, address), self.name)
                    now[i] = address
        finally:
            self._encoded = tuple(now)
