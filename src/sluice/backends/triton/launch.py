"""Launching: the device, the strides, and the options every kernel shares."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
from torch import Tensor

from sluice.backends.triton.configs import Config

_compile_only: ContextVar[bool] = ContextVar("sluice_compile_only", default=False)


def launch(
    kernel: Any, programs: int, config: Config, device: torch.device, **arguments: Any
) -> None:
    """Run ``programs`` programs (a grid of one dimension: x alone may pass 65,535) on ``device``.

    A grid of none launches nothing.
    """
    if programs == 0:
        return
    options = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": config.fp_fusion,
    }
    if config.maxnreg is not None and torch.version.hip is None:
        options["maxnreg"] = config.maxnreg
    if device.type == "cuda" and torch.version.hip is None:
        options["launch_pdl"] = _overlaps(device)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            run(kernel, programs, arguments, options)
    else:
        run(kernel, programs, arguments, options)


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Whether the GPU can launch a kernel while the one before it ends (see ``tiles.begin``)."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def run(kernel: Any, programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> None:
    """The launch itself, apart so that tests can take its arguments and compile for any GPU."""
    if _compile_only.get():
        kernel.warmup(**arguments, **options, grid=(programs,))
    else:
        kernel[(programs,)](**arguments, **options)


@contextmanager
def compiling(calls: Iterable[Callable[[], Any]]) -> Iterator[None]:
    """Make these calls without launching anything; their kernels compile on all cores meanwhile.

    What is called within the scope waits for its own kernels alone. With a Triton that cannot
    compile aside, kernels are compiled there, one after the other.
    """
    aside = getattr(triton, "AsyncCompileMode", None)
    if aside is None:
        yield
        return
    with ThreadPoolExecutor() as pool, aside(pool):
        token = _compile_only.set(True)
        try:
            for call in calls:
                call()
        finally:
            _compile_only.reset(token)
        yield


def strides(x: Tensor | None, name: str, dims: str) -> dict[str, int]:
    """``stride_<name>_<d>`` for the leading dimensions of x."""
    steps = (0,) * len(dims) if x is None else x.stride()
    return {f"stride_{name}_{d}": step for d, step in zip(dims, steps, strict=False)}


def dense(x: Tensor | None) -> Tensor | None:
    """Index tensors and small parameters are read with stride 1; nearly always they have it."""
    return x if x is None or x.is_contiguous() else x.contiguous()
