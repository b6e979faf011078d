"""Kernels in Numba for every operator, on the CPU: threaded, vectorised, cached on disk."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

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


# kernels that a second process compiles meanwhile: about half of the work
BESIDE = ("step", "prefill", "commit", "roll")
_OTHER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from sluice.backends import cpu
kernels = cpu.kernels()
for name in sys.argv[2:]:
    kernels[name].compile()
"""


def kernels() -> dict[str, Any]:
    """Every kernel by its name, not compiled yet."""
    for module in sorted(set(OPS.values())):
        importlib.import_module(f"{__name__}.{module}")
    from sluice.backends.cpu.launch import KERNELS

    return KERNELS


def warmup(progress: Callable[[str, int, int], None] | None = None) -> None:
    """Compile every kernel, or load it from the disk cache.

    ``progress(name, done, all)`` is called before each kernel, and once at the end. A compiler
    keeps to one core, so where the cache is empty a second process fills a part of it; whatever
    that leaves is compiled here.
    """
    known = kernels()
    order = sorted(known, key=lambda name: (name in BESIDE, name != "screen"))
    other = None
    for done, name in enumerate(order):
        if progress is not None:
            progress(name, done, len(order))
        if name in BESIDE and other is not None:
            other.wait()
        start = time.perf_counter()
        known[name].compile()
        if done == 0 and time.perf_counter() - start > COLD_SECONDS:
            other = _compile_beside()
    if progress is not None:
        progress("", len(order), len(order))


COLD_SECONDS = 0.3  # a kernel that takes longer did not come from the disk


def _compile_beside() -> subprocess.Popen[bytes] | None:
    arguments = [json.dumps(sys.path), *BESIDE]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _OTHER, *arguments], stderr=subprocess.DEVNULL, **quiet
        )
    except OSError:  # no interpreter to start: everything is compiled here
        return None
