"""Nanoseconds of the host per launch: ctypes, as sluice does it, cuda-bindings and cuda-core.

    PYTHONPATH=src python benchmarks/gpu_launchers.py

The same kernels, parameters and grids. Each way writes the call's addresses into the parameters and
launches; the medians of rounds that take turns.
"""
# ruff: noqa: T201

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import sluice
from sluice.backends import cuda_driver
from sluice.bench.machine import conditions

ROUNDS, LAUNCHES = 15, 200


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Any, tuple[Any, ...]]]]:
    """Every launch made inside: its object, its addresses and its stream."""
    found: list[tuple[Any, tuple[Any, ...]]] = []
    launch = cuda_driver.KernelLaunch.__call__

    def record(self: Any, *given: Any) -> None:
        found.append((self, given))
        launch(self, *given)

    cuda_driver.KernelLaunch.__call__ = record  # type: ignore[method-assign]
    try:
        yield found
    finally:
        cuda_driver.KernelLaunch.__call__ = launch  # type: ignore[method-assign]


def by_bindings(launch: Any, pointers: tuple[int, ...], stream: int) -> Callable[[], None]:
    """cuda-bindings: the same parameter memory and lock, its own configuration."""
    from cuda.bindings import driver

    config, kept = driver.CUlaunchConfig(), launch._config
    config.gridDimX, config.gridDimY, config.gridDimZ = kept.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = kept.block
    config.sharedMemBytes, config.hStream = kept.shared, stream
    if kept.number:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID(cuda_driver.OVERLAP)
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    function = driver.CUfunction(launch.function)
    places = ctypes.addressof(launch._places)
    memory, at, pack, call = launch._memory, launch._at, launch._pack, driver.cuLaunchKernelEx

    lock = threading.Lock()

    def run() -> None:
        with lock:
            pack(memory, at, *pointers)
            config.hStream = stream
            (result,) = call(config, function, places, 0)
        if result:
            raise RuntimeError(result)

    return run


def by_core(launch: Any, pointers: tuple[int, ...], stream: int) -> Callable[[], None]:
    """cuda-core: it packs the parameters in every launch. Kernels without descriptors alone."""
    from cuda.core import Device, Kernel, LaunchConfig, Stream
    from cuda.core import launch as call

    Device(torch.cuda.current_device()).set_current()
    kernel, kept = Kernel.from_handle(launch.function), launch._config
    config = LaunchConfig(
        grid=tuple(kept.grid), block=tuple(kept.block), shmem_size=int(kept.shared)
    )
    on = Stream.from_handle(stream)
    first = launch._at + 8 * len(pointers)
    numbers = [
        ctypes.c_int32.from_buffer(launch._memory, first + 8 * i)
        for i in range(len(launch._places) - len(pointers))
    ]

    def run() -> None:
        call(on, config, kernel, *pointers, *numbers)

    return run


def nanoseconds(run: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    for _ in range(LAUNCHES):
        run()
    spent = time.perf_counter_ns() - begin
    torch.cuda.synchronize()
    return spent / LAUNCHES


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, weight = randn(8, 32, 128), randn(128)
    yield "rms_norm_gated", lambda: sluice.rms_norm_gated(x, x, weight)
    q, k, v = randn(1, 256, 4, 128), randn(1, 256, 4, 128), randn(1, 256, 4, 128)
    g, beta = -torch.rand(1, 256, 4, device="cuda"), torch.rand(1, 256, 4, device="cuda")
    yield "prefill", lambda: sluice.prefill(q, k, v, g, beta, normalize_qk=True)


def main() -> None:
    print(
        *(f"{name}: {value}" for name, value in conditions(torch.device("cuda"), 1).items()),
        sep="\n",
    )
    for name in ("cuda-bindings", "cuda-core"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            print(f"{name} {importlib.metadata.version(name)}")
    stream = torch.cuda.current_stream().cuda_stream
    print(f"\n{'ns per launch':34} {'ctypes':>8} {'bindings':>9} {'core':>8}  parameters")
    for op, call in calls():
        call()
        with recorded() as found:
            call()
        for launch, (pointers, matrices, _) in found:
            ways: dict[str, Callable[[], None]] = {}
            ways["ctypes"] = lambda l=launch, p=pointers, m=matrices: l(p, m, stream)
            for name, make in (("bindings", by_bindings), ("core", by_core)):
                if name == "core" and matrices:
                    continue
                try:
                    run = make(launch, pointers, stream)
                    run()
                    torch.cuda.synchronize()
                    ways[name] = run
                except Exception as why:  # a way that is not there, or another release of it
                    print(f"{name}: {type(why).__name__}: {why}")
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(ROUNDS):
                for name, run in ways.items():
                    times[name].append(nanoseconds(run))
            cells = [
                f"{statistics.median(times[n]):.0f}" if n in times else "-"
                for n in ("ctypes", "bindings", "core")
            ]
            row = f"{op}: {launch.name}"
            print(f"{row:34.34} {cells[0]:>8} {cells[1]:>9} {cells[2]:>8}  {len(launch._places)}")


if __name__ == "__main__":
    main()
