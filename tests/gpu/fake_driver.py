"""A CUDA driver that keeps what it is given: launches can be read without a GPU.

It stands in for ``libcuda`` behind ``cuda_driver``, and ``compiler.compile_variant`` makes no
machine code, so that calls with CPU tensors take every step of a call on a GPU but the last.
"""

from __future__ import annotations

import ctypes
import re
import struct
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from sluice import calls, torch_private
from sluice.backends import cuda_driver, hopper
from sluice.backends import triton as portable
from sluice.backends.triton import gpu, launch, variants

NUMBERS = {"i": ctypes.c_int32, "q": ctypes.c_int64, "f": ctypes.c_float}
DESCRIPTOR = struct.Struct("=QQ")  # how often it was encoded, and the address; the rest is not read


class Launched(NamedTuple):
    """What the driver was given for one kernel."""

    kernel: str
    programs: int
    threads: int
    shared: int
    stream: int
    overlap: bool
    arguments: dict[str, Any]  # pointers are addresses; of a descriptor, its address and numbers


class Driver:
    """The functions of ``libcuda`` that are used; nothing happens."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []
        self.encoded: list[tuple[int, tuple[int, ...]]] = []  # address, and what it describes
        self.moved: list[int] = []
        self.loaded: list[str] = []
        self.codes: list[bytes] = []  # of the same kernels
        self.result = 0
        self.context: int | None = 1  # of the thread

    def load(self, code: bytes, name: str, shared: int, device: torch.device) -> int:
        self.loaded.append(name)
        self.codes.append(code)
        return len(self.loaded)

    def cuTensorMapEncodeTiled(  # noqa: N802
        self, where, element, rank, address, dims, strides, box, steps, inter, swizzle, *more
    ) -> int:
        assert where % cuda_driver.DESCRIPTOR_ALIGNMENT == 0
        described = (element, rank, *dims, strides[0], *box, *steps, inter, swizzle)
        self.encoded.append((address, described))
        DESCRIPTOR.pack_into(_bytes(where), 0, len(self.encoded), address)
        return self.result

    def cuTensorMapReplaceAddress(self, where: int, address: int) -> int:  # noqa: N802
        self.moved.append(address)
        DESCRIPTOR.pack_into(_bytes(where), 0, DESCRIPTOR.unpack_from(_bytes(where))[0], address)
        return self.result

    def cuLaunchKernelEx(self, config: int, function: int, places: int, extra: None) -> int:  # noqa: N802
        if self.context is None:
            return cuda_driver.NO_CONTEXT
        set_up = cuda_driver._Config.from_address(config)
        code = next(c for c in launch._codes.values() if c.function == function)
        arguments: dict[str, Any] = {}
        at = iter((ctypes.c_void_p * len(code.layout.offsets)).from_address(places))
        for name, kind in code.given:
            arguments[name] = _read(next(at), kind)
            if kind == "matrix":
                numbers = [_read(next(at), k) for k in "iiqq"]
                arguments[name] = (arguments[name], *numbers)
        assert [_read(place, "q") for place in at] == [0, 0]
        self.launched.append(
            Launched(
                code.name,
                set_up.grid[0],
                set_up.block[0],
                set_up.shared,
                set_up.stream,
                bool(set_up.number and set_up.attributes[0].value[0]),
                arguments,
            )
        )
        return self.result

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.context
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.context = context.value
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:  # noqa: N802
        device._obj.value = number
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        context._obj.value = 1000 + device.value
        return 0

    def cuGetErrorString(self, result: int, text: Any) -> None:  # noqa: N802
        text._obj.value = b"the fake refuses"


def _bytes(where: int) -> Any:
    return (ctypes.c_char * cuda_driver.DESCRIPTOR_BYTES).from_address(where)


def _read(place: int, kind: str) -> Any:
    """A parameter, as the driver reads it."""
    if kind == "matrix":
        return DESCRIPTOR.unpack_from(_bytes(place))[1]
    if kind == "pointer":
        return ctypes.c_uint64.from_address(place).value
    return NUMBERS[kind].from_address(place).value


def compile_nothing(needed: variants.Variant, target: Any) -> Any:
    """Stands in for ``compiler.compile_variant``."""
    blocks = [re.search(r"tiles \w+ (\d+) (\d+)", p.kind) for p in needed.parameters]
    options = dict(needed.options)
    metadata = SimpleNamespace(
        name=needed.kernel.name,
        num_warps=options["num_warps"],
        shared=1024 * options["num_warps"],
        global_scratch_size=0,
        tensordesc_meta=[{"block_size": [int(b[1]), int(b[2])]} for b in blocks if b],
    )
    return SimpleNamespace(metadata=metadata, asm={"cubin": b""})


def install(monkeypatch: pytest.MonkeyPatch, compiles: bool = True) -> Driver:
    """Let calls with CPU tensors run on Triton's backend, and its kernels on this driver.

    Not ``compiles``: kernels come compiled, or not at all.
    """
    driver, streams = Driver(), iter(range(1, 1 << 20))
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    monkeypatch.setattr(cuda_driver, "load", driver.load)
    if compiles:
        from sluice.backends.triton import compiler

        monkeypatch.setattr(compiler, "compile_variant", compile_nothing)
        monkeypatch.setattr(compiler, "_compiled", {})
        monkeypatch.setattr(compiler, "_target", compiler._target.__wrapped__)  # it keeps a GPU
    monkeypatch.setattr(launch, "_codes", {})
    monkeypatch.setattr(launch.Launches, "_by_driver", lambda self: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch_private, "current_stream", lambda index: next(streams))
    for backend in (hopper, portable):
        monkeypatch.setattr(backend, "DEVICES", ("cpu",))
    monkeypatch.setattr(portable, "unavailable", lambda: None)
    monkeypatch.setattr(hopper, "_failed", [])
    monkeypatch.setattr(hopper, "unavailable", lambda: next(iter(hopper._failed), None))
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    calls.forget()
    return driver
