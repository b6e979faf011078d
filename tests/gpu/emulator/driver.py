"""Calls with CPU tensors whose kernels Triton compiles for a GPU and the emulator runs.

    with emulated("sm_90") as driver:
        sluice.decode(..., backend="triton")

``fake_driver`` stands in for ``libcuda``; here it also launches. Triton makes PTX as for that GPU;
ptxas does not run, and what is loaded as machine code is the PTX.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia.compiler import CUDABackend

from sluice import calls
from sluice.backends import cuda_driver
from sluice.backends import triton as portable
from sluice.backends.triton import compiler, gpu, launch, triton_private, variants
from tests.gpu import fake_driver
from tests.gpu.cross import DEVICE, PROCESSORS, SHARED, TARGETS
from tests.gpu.emulator.machine import Kernel

_MATRIX = struct.Struct("=IIQQQII")  # bytes of an element, of a row; sizes, stride, box
Range = tuple[int, int]


def extent(x: torch.Tensor) -> Range:
    """The addresses that a tensor's elements lie in."""
    if x.numel() == 0:
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


class Driver(fake_driver.Driver):
    """A driver that runs kernels.

    Args:
        change: PTX as it runs, of PTX as it was made: to put faults in.
    """

    def __init__(self, change: Callable[[str], str] = str) -> None:
        super().__init__()
        self.kernels: dict[int, Kernel] = {}
        self.ranges: list[Range] = []
        self.change = change
        self.seed = 1  # of the order in which programs and warps run; each launch has its own

    def load(self, code: bytes, name: str, shared: int, device: torch.device) -> int:
        function = super().load(code, name, shared, device)
        self.kernels[function] = Kernel(self.change(code.decode()))
        return function

    def cuTensorMapEncodeTiled(  # noqa: N802
        self, where, element, rank, address, dims, strides, box, steps, inter, swizzle, *more
    ) -> int:
        """What real descriptors must be, and the bytes that hopper.cpp reads."""
        (size,) = (x.itemsize for x, n in cuda_driver.ELEMENTS.items() if n == element)
        wide = {n: x for x, n in cuda_driver.SWIZZLES.items()}[swizzle]
        assert address % 16 == strides[0] % 16 == 0
        assert max(box) <= 256
        assert size * box[0] == wide, "rows of a box fill what is swizzled"
        result = super().cuTensorMapEncodeTiled(
            where, element, rank, address, dims, strides, box, steps, inter, swizzle, *more
        )
        place = fake_driver._bytes(where)
        _MATRIX.pack_into(place, 16, size, wide, *dims, strides[0], *box)
        return result

    def cuLaunchKernelEx(self, config: int, function: int, places: int, extra: None) -> int:  # noqa: N802
        result = super().cuLaunchKernelEx(config, function, places, extra)
        if result:
            return result
        set_up, kernel = cuda_driver._Config.from_address(config), self.kernels[function]
        given = (ctypes.c_void_p * len(kernel.program.parameters)).from_address(places)
        kernel.launch(
            set_up.grid[0], set_up.block[0], set_up.shared, list(given), self.ranges, self.seed
        )
        self.seed += 1
        return 0


def compile_to_ptx(needed: Any, target: Any) -> Any:
    """Stands in for ``compiler.compile_variant``."""
    with triton_private.compiling_for(target):
        return _compile(needed, target)


_compile = compiler.compile_variant


def launched_by_triton(driver: Driver, target: Any) -> Callable[..., None]:
    """Stands in for ``JITFunction.run``: what a test launches as ``kernel[grid](...)``."""

    def run(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **more: Any) -> None:
        names = [p.name for p in self.params]
        given = dict(zip(names, args, strict=False)) | {n: more.pop(n) for n in names if n in more}
        fixed = {p.name for p in self.params if p.is_constexpr or given[p.name] is None}
        kinds, places = {}, []
        for name in names:
            x = given[name]
            if name in fixed:
                kinds[name] = variants.CONSTANT
            elif isinstance(x, torch.Tensor):
                kinds[name] = variants.POINTERS[x.dtype]
                places.append(ctypes.c_uint64(x.data_ptr()))
            else:
                kinds[name] = "fp32" if isinstance(x, float) else "i32"
                places.append((ctypes.c_float if isinstance(x, float) else ctypes.c_int32)(x))
        constants = {(i,): given[name] for i, name in enumerate(names) if name in fixed}
        with triton_private.compiling_for(target):
            source = triton_private.source(self, kinds, constants, {})
            made = triton.compile(source, target=target, options=more)
        places += [ctypes.c_uint64(0)] * 2  # Triton's scratch memory
        Kernel(driver.change(made.asm["ptx"])).launch(
            grid[0], 32 * made.metadata.num_warps, made.metadata.shared,
            [ctypes.addressof(x) for x in places],
            [extent(x) for x in given.values() if isinstance(x, torch.Tensor)], driver.seed,
        )  # fmt: skip

    return run


def install(patch: pytest.MonkeyPatch, target: str, change: Callable[[str], str] = str) -> Driver:
    """Let calls with CPU tensors run on Triton's and Hopper's backends, on this target."""
    driver = Driver(change)
    patch.setattr(fake_driver, "Driver", lambda: driver)
    fake_driver.install(patch)
    patch.setattr(compiler, "compile_variant", compile_to_ptx)
    patch.setattr(triton.JITFunction, "run", launched_by_triton(driver, TARGETS[target]))
    patch.setattr(CUDABackend, "make_cubin", lambda self, src, *_: src.encode())
    patch.setattr(CUDABackend, "hash", lambda self: f"emu-{self.target.arch}")
    capability = divmod(TARGETS[target].arch, 10)
    patch.setattr(gpu, "capability", lambda device: capability)
    patch.setattr(gpu, "processors", lambda device: PROCESSORS[target])
    patch.setattr(gpu, "shared_memory", lambda device: SHARED[target] << 10)
    refuse = portable.refuse  # which knows of the interpreter's limits on a CPU
    patch.setattr(portable, "refuse", lambda spec: refuse(spec.on(DEVICE)))
    through = launch.Launches._through_driver

    def watched(self: Any, tensors: Any, counters: Any, workspace: Any) -> None:
        touched = [x for x in (*tensors, counters, workspace) if x is not None]
        driver.ranges = [extent(x) for x in touched]
        through(self, tensors, counters, workspace)

    patch.setattr(launch.Launches, "_through_driver", watched)
    return driver


@contextlib.contextmanager
def emulated(target: str, change: Callable[[str], str] = str) -> Iterator[Driver]:
    """In this scope kernels run in the emulator."""
    with pytest.MonkeyPatch.context() as patch:
        yield install(patch, target, change)
    calls.forget()
