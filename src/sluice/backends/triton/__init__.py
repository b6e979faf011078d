"""Triton kernels for the operators that memory or launch latency limits, on any GPU Triton serves.

In Triton's interpreter (``TRITON_INTERPRET=1``) the same kernels run on a CPU, for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from sluice.backends import loader
from sluice.contract.problem import Problem

try:
    import triton
except ImportError:
    triton = None

OLDEST = (3, 5)  # tuples carried by a loop, None as a pointer
MAX_HEAD_DIM = 256


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


DEVICES = ("cuda", "cpu") if interpreted() else ("cuda",)
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
    """What is missing: Triton, a version of it that is new enough, or a GPU."""
    if triton is None:
        return "the package triton is not installed"
    found = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if found < OLDEST:
        return f"needs Triton {'.'.join(map(str, OLDEST))} or newer, found {triton.__version__}"
    if not interpreted() and not torch.cuda.is_available():
        return "no CUDA device"
    return None


def compiling(
    calls: Iterable[Callable[[], Any]], share: tuple[int, int] = (0, 1)
) -> AbstractContextManager[None]:
    """Compile what these calls, and such of other sizes, need on all cores; launch nothing of them.

    ``share`` (i, n): every n-th kernel, from the i-th on. Within the scope a call runs by every
    plan that it could have with another size.
    """
    from sluice.backends.triton import launch

    return launch.warming(calls, launch.Share(*share))


def refuse(problem: Problem) -> str | None:
    """float64, head widths beyond 256, and on a CPU all that the interpreter cannot do."""
    dtypes = [problem.dtype, getattr(problem, "state_dtype", None)]
    dtypes.append(getattr(problem, "conv_dtype", None))
    if torch.float64 in dtypes:
        return "arithmetic is float32, got float64"
    if problem.device.type == "cpu" and torch.bfloat16 in dtypes:
        return "Triton's interpreter truncates float32 to bfloat16: use float16 or float32"
    for name in ("K", "V"):
        width = getattr(problem, name, 0)
        if width > MAX_HEAD_DIM and problem.op != "rms_norm_gated":
            return f"{name} must be at most {MAX_HEAD_DIM}, got {width}"
    return None
