"""Kernels in Numba for every operator, on the CPU: threaded, vectorised, cached on disk."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable

import torch

from sluice.backends import loader
from sluice.contract.problem import Problem

DEVICES = ("cpu",)
OPS = {
    "prefill": "prefill",
    "decode": "decode",
    "verify": "verify",
    "commit": "verify",
    "causal_conv1d": "conv",
    "conv_qkv": "conv_qkv",
    "rms_norm_gated": "norm",
    "step": "step",
}
kernel = loader(__name__, OPS)


@functools.cache
def unavailable() -> str | None:
    """Numba is an optional dependency; it is not imported before a kernel is needed."""
    if importlib.util.find_spec("numba") is None:
        return "the package numba is not installed"
    return None


def refuse(problem: Problem) -> str | None:
    """Arithmetic is float32, and so are inputs and states at most."""
    kinds = [problem.dtype, getattr(problem, "state_dtype", None)]
    kinds.append(getattr(problem, "conv_dtype", None))
    if torch.float64 in kinds:
        return "computes in float32, not in float64"
    return None


def warmup(progress: Callable[[str, int, int], None] | None = None) -> None:
    """Compile every kernel, or load it from the disk cache.

    ``progress(name, done, all)`` is called before each kernel, and once at the end.
    """
    for module in sorted(set(OPS.values())):
        importlib.import_module(f"{__name__}.{module}")
    from sluice.backends.cpu.launch import KERNELS

    for done, (name, compiled) in enumerate(KERNELS.items()):
        if progress is not None:
            progress(name, done, len(KERNELS))
        compiled.compile()
    if progress is not None:
        progress("", len(KERNELS), len(KERNELS))
