"""What a tensor looks like, without the tensor."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Meta(NamedTuple):
    """What a tensor looks like. It has a tensor's view methods, for canonical forms."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def dim(self) -> int:
        return len(self.shape)

    def stride(self) -> tuple[int, ...]:
        """As a tensor's: canonical forms are made of tensors and metas alike."""
        return self.strides

    def numel(self) -> int:
        return math.prod(self.shape)

    def reach(self) -> int:
        """Bytes from the first element to the end of the last; 0 without elements."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize

    def is_dense(self) -> bool:
        """Whether elements lie one after another, without gaps, in the order of the indices."""
        span = 1
        for size, step in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and step != span:
                return self.numel() == 0
            span *= size
        return True

    def squeeze(self, dim: int) -> Meta:
        shape, strides = list(self.shape), list(self.strides)
        del shape[dim], strides[dim]
        return Meta(tuple(shape), tuple(strides), self.dtype, self.device)

    def unsqueeze(self, dim: int) -> Meta:
        shape, strides = list(self.shape), list(self.strides)
        shape.insert(dim, 1)
        strides.insert(dim, self.shape[dim] * self.strides[dim] if dim < self.dim() else 1)
        return Meta(tuple(shape), tuple(strides), self.dtype, self.device)

    def transpose(self, a: int, b: int) -> Meta:
        order = list(range(self.dim()))
        order[a], order[b] = order[b], order[a]
        return self._replace(
            shape=tuple(self.shape[i] for i in order), strides=tuple(self.strides[i] for i in order)
        )

    def narrow(self, dim: int, start: int, length: int) -> Meta:
        shape = list(self.shape)
        shape[dim] = length
        return self._replace(shape=tuple(shape))

    def new_empty(self, *shape: int, dtype: torch.dtype | None = None) -> Meta:
        """A dense tensor on the same device."""
        strides, span = [], 1
        for size in reversed(shape):
            strides.append(span)
            span *= max(size, 1)
        return Meta(tuple(shape), tuple(reversed(strides)), dtype or self.dtype, self.device)

    def new_zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Meta:
        """Described as any dense tensor is: a description has no values."""
        return self.new_empty(*shape, dtype=dtype)


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share memory: a stride does not clear what lies inside it."""
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride <= reach:
            return 0 not in shape
        reach += stride * (size - 1)
    return False


@functools.lru_cache(maxsize=1024)
def apart(a: Meta, b: Meta, distance: int) -> bool:
    """Whether two tensors share no byte, if b begins ``distance`` bytes after a.

    Views may lie between each other's rows: columns of one buffer do. Elements a multiple of some
    stride apart fall on the same place within it, so the two are apart if their places within one
    stride are. Where no stride shows it, the answer is False.
    """
    if a.reach() == 0 or b.reach() == 0 or not -b.reach() < distance < a.reach():
        return True
    for period in {n for x in (a, b) for n in _steps(x)}:
        inside = [_within(x, period) for x in (a, b)]
        gap = distance % period
        if inside[0] <= gap and gap + inside[1] <= period:
            return True
    return False


def _steps(x: Meta) -> list[int]:
    """Strides in bytes, of dimensions that are taken."""
    return [
        s * x.dtype.itemsize for n, s in zip(x.shape, x.strides, strict=True) if n > 1 and s > 0
    ]


def _within(x: Meta, period: int) -> int:
    """Bytes that the elements cover within ``period``, from the first on."""
    size = x.dtype.itemsize
    inner = [
        (n - 1) * s * size
        for n, s in zip(x.shape, x.strides, strict=True)
        if n > 1 and (s * size) % period
    ]
    return sum(inner) + size
