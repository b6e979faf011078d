"""Compile kernels with Triton: once per variant and target."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from sluice.backends.triton import gpu, triton_private
from sluice.backends.triton.arguments import KernelCall
from sluice.backends.triton.shipped import MachineCode
from sluice.backends.triton.variants import CONSTANT, Variant, variant

ALIGNED = [["tt.divisibility", 16]]


def compile_variant(needed: Variant, target: GPUTarget) -> Any:
    """Compile for a GPU, which need not be here; Triton keeps the result on disk."""
    kernel, parameters, options = needed
    source = triton_private.source(
        kernel.function,
        {p.name: triton_private.kind(p.kind) for p in parameters},
        {(i,): p.value for i, p in enumerate(parameters) if p.kind == CONSTANT},
        {(i,): ALIGNED for i, p in enumerate(parameters) if p.aligned},
    )
    return triton.compile(source, target=target, options=dict(options))


def cross_compile(needed: Variant, target: GPUTarget) -> Any:
    """The same where that GPU is absent, or another one is here."""
    with triton_private.compiling_for(target):
        return compile_variant(needed, target)


def machine_code(kernel: Any) -> MachineCode:
    """What a kernel that Triton compiled for an NVIDIA GPU is launched with."""
    found = kernel.metadata
    assert not found.global_scratch_size, found.name  # no kernel here asks for it
    described = getattr(found, "tensordesc_meta", None) or ()
    boxes = tuple(tuple(box["block_size"]) for box in described)
    return MachineCode(kernel.asm["cubin"], found.name, found.num_warps, found.shared, boxes)


_compiled: dict[tuple[Variant, int, str], Any] = {}
_lock = threading.Lock()
Progress = Callable[[str, int, int], None]


def compiled(needed: Sequence[Variant], device: torch.device) -> list[Any]:
    """The compiled kernels of these variants on a device; missing ones compile side by side."""
    target = _target(device)
    keys = [(v, target.arch, target.backend) for v in needed]
    missing = list(dict.fromkeys(key for key in keys if key not in _compiled))
    if missing:
        _compile([key[0] for key in missing], target)
    return [_compiled[key] for key in keys]


def compile_all(
    calls: Iterable[tuple[KernelCall, torch.device]],
    share: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
) -> None:
    """Compile what these launches need, on all cores; of ``share`` (i, n) every n-th."""
    number, of = share
    wanted: dict[tuple[Variant, int, str], GPUTarget] = {}
    for call, device in calls:
        if call.programs > 0:
            target = _target(device)
            wanted.setdefault((variant(call), target.arch, target.backend), target)
    mine = [key for i, key in enumerate(wanted) if i % of == number and key not in _compiled]
    for target in dict.fromkeys(wanted.values()):
        _compile([key[0] for key in mine if wanted[key] == target], target, progress)


def _compile(
    missing: Sequence[Variant], target: GPUTarget, progress: Progress | None = None
) -> None:
    def one(needed: Variant) -> Any:
        return compile_variant(needed, target)

    if len(missing) < 2:
        results: Iterable[Any] = map(one, missing)
        _keep(missing, results, target, progress)
        return
    with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1)) as pool:
        _keep(missing, pool.map(one, missing), target, progress)


def _keep(
    missing: Sequence[Variant],
    results: Iterable[Any],
    target: GPUTarget,
    progress: Progress | None,
) -> None:
    for done, (needed, result) in enumerate(zip(missing, results, strict=True), 1):
        with _lock:
            _compiled[needed, target.arch, target.backend] = result
        if progress is not None:
            progress(needed.kernel.name, done, len(missing))


@functools.cache
def _target(device: torch.device) -> GPUTarget:
    if torch.version.hip is not None:
        return triton.runtime.driver.active.get_current_target()
    major, minor = gpu.capability(device)
    return GPUTarget("cuda", 10 * major + minor, 32)
