"""Facts about a GPU that plans and launches follow from, each asked once per device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch


class Facts(NamedTuple):
    """What kernels are planned for."""

    capability: tuple[int, int]
    processors: int
    shared_memory: int  # bytes


_assumed: Facts | None = None


@contextlib.contextmanager
def assume(facts: Facts) -> Iterator[None]:
    """In this scope every device is such a GPU: kernels are planned for one that is absent."""
    global _assumed
    before, _assumed = _assumed, facts
    try:
        yield
    finally:
        _assumed = before


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; (0, 0) for the interpreter and for GPUs of other makers."""
    return _capability(device) if _assumed is None else _assumed.capability


def processors(device: torch.device) -> int:
    """Streaming multiprocessors; one for the interpreter."""
    return _processors(device) if _assumed is None else _assumed.processors


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; any number for the interpreter."""
    return _shared_memory(device) if _assumed is None else _assumed.shared_memory


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 20
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def has_wgmma(device: torch.device) -> bool:
    """Whether its tensor cores take 64 rows at a time: Hopper's do."""
    return capability(device)[0] == 9


def shares_sm(device: torch.device) -> bool:
    """Whether prefill is planned for two programs of four warps per SM, by a model alone.

    That is every NVIDIA GPU but Hopper's, whose plans were measured (docs/kernels/triton.md): a
    thread has up to 255 of an SM's 65,536 registers, so eight warps fit.
    """
    return torch.version.hip is None and not has_wgmma(device)


def overlaps(device: torch.device) -> bool:
    """Whether it can launch a kernel while the one before it ends (see ``begin``)."""
    return capability(device) >= (9, 0)
