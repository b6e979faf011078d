"""Triton kernels for the operators that memory or launch latency limits, on any GPU Triton serves.

In Triton's interpreter (``TRITON_INTERPRET=1``) the same kernels run on a CPU, for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sluice.backends import Launch, module_of
from sluice.contract.spec import Spec

try:
    import triton
except ImportError:
    triton = None

Progress = Callable[[str, int, int], None]
OLDEST = (3, 5)  # tuples carried by a loop, None as a pointer
MAX_HEAD_DIM = 256


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


DEVICES = ("cuda", "cpu") if interpreted() else ("cuda",)
OPS = {
    "prefill": "prefill",
    "decode": "decode",
    "verify": "decode",
    "commit": "verify",
    "causal_conv1d": "conv",
    "conv_qkv": "conv_qkv",
    "rms_norm_gated": "norm",
    "step": "step",
}


def bind(spec: Spec) -> Launch:
    """A launch of the operator's kernels."""
    launch: Launch = module_of(__name__, OPS, spec.op).launches(spec).bound()
    return launch


@functools.cache
def unavailable() -> str | None:
    """What is missing: Triton, a version of it that is new enough, or a GPU."""
    if triton is None:
        return "the package triton is not installed"
    found = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if found < OLDEST:
        return f"needs Triton {'.'.join(map(str, OLDEST))} or newer, found {triton.__version__}"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "no CUDA device"
    from sluice.backends.triton import triton_private

    return triton_private.missing()


def kernel_calls(
    package: str, ops: dict[str, str], specs: Sequence[Spec]
) -> Iterator[tuple[Any, torch.device]]:
    """Every launch that these calls, and such of other sizes, may make."""
    for spec in specs:
        module = module_of(package, ops, spec.op)
        every = getattr(module, "all_launches", None)
        for launches in every(spec) if every else [module.launches(spec)]:
            for call in launches.calls:
                yield call, spec.device


def compile(
    specs: Sequence[Spec], share: tuple[int, int] = (0, 1), progress: Progress | None = None
) -> None:
    """Compile what these calls, and such of other sizes, need, on all cores, and load it."""
    from sluice.backends.triton import launch

    if not interpreted():
        launch.compile_and_load(kernel_calls(__name__, OPS, specs), share, progress)


def refuse(spec: Spec) -> str | None:
    """float64, head widths beyond 256, and on a CPU all that the interpreter cannot do."""
    if torch.float64 in spec.dtypes:
        return "arithmetic is float32, got float64"
    if spec.device.type == "cpu" and torch.bfloat16 in spec.dtypes:
        return "Triton's interpreter truncates float32 to bfloat16: use float16 or float32"
    for name in ("K", "V"):
        width = getattr(spec, name, 0)
        if width > MAX_HEAD_DIM and spec.op != "rms_norm_gated":
            return f"{name} must be at most {MAX_HEAD_DIM}, got {width}"
    return None
