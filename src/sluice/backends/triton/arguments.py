"""What a kernel is launched with, before any address is known.

A binding lists the memory that a call's kernels read and write: the tensors of the spec, one
workspace, counters. Kernels name it by :class:`Pointer`; :class:`Launches` (launch.py) turns these
into addresses.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice.backends.triton import gpu
from sluice.backends.triton.configs import Config
from sluice.contract.meta import Meta
from sluice.contract.spec import Spec

WORKSPACE_ALIGNMENT = 256


class Kernel(NamedTuple):
    """A kernel by name. Its code, and Triton with it, is imported only to be compiled."""

    module: str
    name: str

    @property
    def function(self) -> Any:
        """The kernel as Triton knows it."""
        return getattr(importlib.import_module(self.module), self.name)

    @property
    def imported(self) -> Any | None:
        """The same if this process has imported it, else None."""
        return getattr(sys.modules.get(self.module), self.name, None)


class Pointer(NamedTuple):
    """The start of a tensor, or ``offset`` bytes after it."""

    source: str
    dtype: torch.dtype
    offset: int = 0


class Tiles(NamedTuple):
    """A tensor as a matrix that TMA reads in tiles, the last dimension contiguous."""

    source: str
    dtype: torch.dtype
    shape: tuple[int, int]
    strides: tuple[int, int]
    block: tuple[int, int]


class KernelCall(NamedTuple):
    """One launch of a kernel: its programs, options of the compiler, and arguments by name.

    An argument is a :class:`Pointer`, :class:`Tiles`, a number, or None where nothing is given.
    """

    kernel: Kernel
    programs: int
    options: dict[str, Any]
    arguments: dict[str, Any]


class Binding:
    """The memory of one call, by name."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.metas = dict(zip(spec.TENSORS, spec.metas, strict=True))
        self.copies: dict[str, Meta] = {}
        self.workspace: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        self.workspace_bytes = 0
        self.counters: Callable[[Sequence[Tensor | None]], Tensor] | None = None

    def __getitem__(self, name: str) -> Pointer | None:
        """Where a tensor of the spec begins; None if it is not given."""
        meta = self.metas[name]
        return None if meta is None else Pointer(name, meta.dtype)

    def dense(self, name: str) -> Pointer | None:
        """The same for a tensor that kernels read with stride 1: copied first if it has gaps."""
        meta = self.metas[name]
        if meta is not None and not meta.is_dense():
            self.copies[name] = meta
            self.metas[name] = meta.new_empty(*meta.shape)
        return self[name]

    def rows(self, name: str) -> Pointer | None:
        """The same where only the last dimension is read with stride 1."""
        meta = self.metas[name]
        gaps = meta is not None and meta.shape[-1] > 1 and meta.strides[-1] != 1
        return self.dense(name) if gaps else self[name]

    def strides(self, name: str, dims: str, prefix: str | None = None) -> dict[str, int]:
        """``stride_<name>_<d>`` for the leading dimensions of a tensor; 0 where there is none.

        0 along a batch of one as well: the step over a long packed row would not fit into 32 bits,
        and Triton compiles another kernel for a stride that does not.
        """
        meta = self.metas[name]
        steps = (0,) * len(dims) if meta is None else meta.strides
        if meta is not None and dims[0] == "b" and meta.shape[0] == 1:
            steps = (0, *steps[1:])
        prefix = f"stride_{prefix or name}_"
        return {prefix + d: step for d, step in zip(dims, steps, strict=False)}

    def scratch(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Pointer:
        """A part of the call's workspace."""
        self.workspace[name] = self.workspace_bytes, shape, dtype
        size = max(math.prod(shape) * dtype.itemsize, 1)  # a call without tokens has parts too
        self.workspace_bytes += -(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        return Pointer(name, dtype)


def inverse(d: int) -> int:
    """What kernels multiply by instead of dividing by ``d`` (``divide`` in kernels/math.py)."""
    return min(2**31 // max(d, 1), 2**31 - 1)


def kernel_call(
    kernel: Kernel, programs: int, config: Config, device: torch.device, **arguments: Any
) -> KernelCall:
    """A launch of ``programs`` programs (a grid of one dimension: x alone may pass 65,535)."""
    options = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": config.fp_fusion,
    }
    if config.maxnreg is not None and torch.version.hip is None:
        options["maxnreg"] = config.maxnreg
    if gpu.overlaps(device):
        options["launch_pdl"] = True
    return KernelCall(kernel, programs, options, arguments)
