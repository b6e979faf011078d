"""Which machine code a launch needs, and compiling it: once per kernel, types and constants.

A kernel is compiled for the types of its pointers, its constants, and what Triton lets it know of a
number: whether it is 1, whether it is a multiple of 16, whether it fits into 32 bits. ``variant``
says all of that, so two launches with equal variants run the same machine code.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from sluice.backends.triton import gpu, triton_private
from sluice.backends.triton.arguments import KernelCall, Pointer, Tiles

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.bool: "*i1",
}
ALIGNED = [["tt.divisibility", 16]]
CONSTANT = "constexpr"


class Parameter(NamedTuple):
    """What the compiler is told of one parameter of a kernel."""

    name: str
    kind: str  # a type, or CONSTANT
    value: Any = None  # of a constant
    aligned: bool = False  # a multiple of 16


class Variant(NamedTuple):
    """Machine code that a launch needs: a kernel, its parameters and its options."""

    kernel: Any
    parameters: tuple[Parameter, ...]
    options: tuple[tuple[str, Any], ...]


def variant(call: KernelCall, misplaced: frozenset[str] = frozenset()) -> Variant:
    """What is compiled for a launch; ``misplaced`` tensors begin at no multiple of 16 bytes."""
    told, arguments = [], call.arguments
    for name, constant, free, unaligned in parameters(call.kernel):
        value = arguments[name]
        if constant or value is None:
            told.append(value)
        elif isinstance(value, Pointer):
            aligned = not unaligned and value.offset % 16 == 0 and value.source not in misplaced
            told.append((POINTERS[value.dtype], aligned))
        elif isinstance(value, Tiles):
            told.append((_tiles_kind(value.dtype, value.block, value.layout), False))
        elif isinstance(value, float):
            told.append(_FLOAT)
        elif value == 1 and not free:
            told.append(1)
        else:
            small = -(2**31) <= value < 2**31
            told.append(_INTEGERS[small, not free and not unaligned and value % 16 == 0])
    return _variant(call.kernel, tuple(told), tuple(call.options.items()))


_FLOAT = ("fp32", False)
_INTEGERS = {
    (small, aligned): ("i32" if small else "i64", aligned)
    for small in (False, True)
    for aligned in (False, True)
}


@functools.lru_cache(maxsize=1 << 14)
def _variant(kernel: Any, told: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> Variant:
    """The variant, spelt out; the same object for what is told the same."""
    known = []
    for (name, constant, _, _), value in zip(parameters(kernel), told, strict=True):
        if not constant and isinstance(value, tuple):
            known.append(Parameter(name, value[0], None, value[1]))
        else:
            known.append(Parameter(name, CONSTANT, value))
    return Variant(kernel, tuple(known), tuple(sorted(options)))


@functools.cache
def parameters(kernel: Any) -> list[tuple[str, bool, bool, bool]]:
    """Each parameter: its name, and whether it is a constant, or kept from the compiler.

    An interpreted kernel has none.
    """
    return [
        (p.name, p.is_constexpr, p.do_not_specialize, p.do_not_specialize_on_alignment)
        for p in getattr(kernel, "params", ())
    ]


@functools.cache
def _tiles_kind(dtype: torch.dtype, block: tuple[int, int], layout: Any) -> str:
    return f"tensordesc<{POINTERS[dtype][1:]}{list(block)},{layout!r}>"


def compile_variant(needed: Variant, target: GPUTarget) -> Any:
    """Compile for a GPU, which need not be here; Triton keeps the result on disk."""
    kernel, parameters, options = needed
    source = triton_private.source(
        kernel,
        {p.name: p.kind for p in parameters},
        {(i,): p.value for i, p in enumerate(parameters) if p.kind == CONSTANT},
        {(i,): ALIGNED for i, p in enumerate(parameters) if p.aligned},
    )
    return triton.compile(source, target=target, options=dict(options))


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
            progress(needed.kernel.__name__, done, len(missing))


@functools.cache
def _target(device: torch.device) -> GPUTarget:
    if torch.version.hip is not None:
        return triton.runtime.driver.active.get_current_target()
    major, minor = gpu.capability(device)
    return GPUTarget("cuda", 10 * major + minor, 32)
