"""Which machine code a launch needs: a kernel, its types and its constants. Triton is not needed.

A kernel is compiled for the types of its pointers, its constants, and what Triton lets it know of a
number: whether it is 1, whether it is a multiple of 16, whether it fits into 32 bits. ``variant``
says all of that, so two launches with equal variants run the same machine code.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any, NamedTuple

import torch

from sluice.backends.triton import shipped
from sluice.backends.triton.arguments import Kernel, KernelCall, Pointer, Tiles

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.bool: "*i1",
}
CONSTANT = "constexpr"
TILES = "tiles"


class Parameter(NamedTuple):
    """What the compiler is told of one parameter of a kernel."""

    name: str
    kind: str  # a type; CONSTANT; or "tiles bf16 64 128": the type and the size of a tile
    value: Any = None  # of a constant
    aligned: bool = False  # a multiple of 16


class Variant(NamedTuple):
    """Machine code that a launch needs: a kernel, its parameters and its options."""

    kernel: Kernel
    parameters: tuple[Parameter, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def key(self) -> str:
        """A name of the variant that is the same in every process."""
        told = [(p.kind, p.value, p.aligned) for p in self.parameters]
        text = repr((self.kernel.name, told, self.options))
        return hashlib.sha256(text.encode()).hexdigest()[:24]


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
            told.append((_tiles_kind(value.dtype, value.block), False))
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
def _variant(
    kernel: Kernel, told: tuple[Any, ...], options: tuple[tuple[str, Any], ...]
) -> Variant:
    """The variant, spelt out; the same object for what is told the same."""
    known = []
    for (name, constant, _, _), value in zip(parameters(kernel), told, strict=True):
        if not constant and isinstance(value, tuple):
            known.append(Parameter(name, value[0], None, value[1]))
        else:
            known.append(Parameter(name, CONSTANT, value))
    return Variant(kernel, tuple(known), tuple(sorted(options)))


@functools.cache
def parameters(kernel: Kernel) -> tuple[tuple[str, bool, bool, bool], ...]:
    """Each parameter: its name, and whether it is a constant, or kept from the compiler.

    Shipped kernels say it in their manifest. An interpreted kernel has none.
    """
    told = shipped.parameters(kernel.name)
    if told is not None:
        return told
    return tuple(
        (p.name, p.is_constexpr, p.do_not_specialize, p.do_not_specialize_on_alignment)
        for p in getattr(kernel.function, "params", ())
    )


@functools.cache
def _tiles_kind(dtype: torch.dtype, block: tuple[int, int]) -> str:
    return f"{TILES} {POINTERS[dtype][1:]} {block[0]} {block[1]}"
