"""Gluon kernels for Hopper: what they do better than the portable Triton kernels, and no more."""

from __future__ import annotations

import functools

import torch

from sluice.backends import loader
from sluice.contract.problem import DeltaProblem, Problem

try:
    import triton
except ImportError:
    triton = None

DEVICES = ("cuda",)
OPS = {"prefill": "prefill"}
kernel = loader(__name__, OPS)
TESTED = ("3.6",)
"""Versions of Triton, whose Gluon is experimental, with which the kernels ran on a GPU."""


@functools.cache
def unavailable() -> str | None:
    """What is missing: a tested Triton, or a GPU of compute capability 9.0."""
    if triton is None:
        return "the package triton is not installed"
    if ".".join(triton.__version__.split(".")[:2]) not in TESTED:
        return f"tested with Triton {', '.join(TESTED)}, found {triton.__version__}"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None


def refuse(problem: Problem) -> str | None:
    """The delta rule with K = V = 128 in 16 bits, on token-major inputs; the rest is Triton's."""
    p = problem
    assert isinstance(p, DeltaProblem)
    capability = torch.cuda.get_device_capability(p.device)
    limits = (
        (capability == (9, 0), f"compute capability 9.0, not {capability[0]}.{capability[1]}"),
        (p.dtype in (torch.bfloat16, torch.float16), f"bfloat16 or float16, not {p.dtype}"),
        ((p.K, p.V) == (128, 128), f"K = V = 128, not {p.K} and {p.V}"),
        (p.delta, f"the delta rule, not the {p.rule} rule"),
        (p.decay != "key", "decay per head, not per key"),
        (p.HQ <= p.HV, f"no more query heads than value heads, not {p.HQ} and {p.HV}"),
        (p.checkpoints == "none", "no checkpoints"),
        (p.token_rows, "a token's heads next to each other in memory (layout bthd)"),
    )
    return next((f"needs {text}" for ok, text in limits if not ok), None)
