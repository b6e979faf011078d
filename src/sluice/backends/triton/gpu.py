"""Facts about a GPU that plans and launches follow from, each asked once per device."""

from __future__ import annotations

import functools

import torch


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; (0, 0) for the interpreter and for GPUs of other makers."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors; one for the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; any number for the interpreter."""
    if device.type != "cuda":
        return 1 << 20
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def has_wgmma(device: torch.device) -> bool:
    """Whether its tensor cores take 64 rows at a time: Hopper's do."""
    return capability(device)[0] == 9


def overlaps(device: torch.device) -> bool:
    """Whether it can launch a kernel while the one before it ends (see ``begin``)."""
    return capability(device) >= (9, 0)
