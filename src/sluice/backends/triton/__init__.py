"""Triton kernels for the operators that memory or launch latency limits, on any GPU Triton serves.

In Triton's interpreter (``TRITON_INTERPRET=1``) the same kernels run on a CPU, for tests.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sluice.backends import Launch, module_of, transitions_by
from sluice.backends.triton import shipped, toolchain
from sluice.backends.triton.toolchain import interpreted
from sluice.contract.spec import PassSpec, Spec

Progress = Callable[[str, int, int], None]
MAX_HEAD_DIM = 256
DEVICES = ("cuda", "cpu") if interpreted() else ("cuda",)
OPS = {
    "prefill": "prefill",
    "transitions": "transitions",
    "resume": "transitions",
    "decode": "decode",
    "verify": "decode",
    "commit": "verify",
    "causal_conv1d": "conv",
    "conv_qkv": "conv_qkv",
    "rms_norm_gated": "norm",
    "step": "step",
    "prefill_backward": "prefill_backward",
    "causal_conv1d_backward": "conv_backward",
    "conv_qkv_backward": "conv_backward",
    "rms_norm_gated_backward": "norm_backward",
}


def bind(spec: Spec) -> Launch:
    """A launch of the operator's kernels."""
    module = module_of(__name__, OPS, spec.op)
    if isinstance(spec, PassSpec) and not module.has_kernels(spec):
        return transitions_by(bind, spec)
    launch: Launch = launches(module, spec).bound()
    return launch


_looked_at: dict[tuple[Any, Spec], Any] = {}
_NOT_SHIPPED = "these kernels are not among the shipped ones"


def launches(module: Any, spec: Spec) -> Any:
    """The launches of a call, not yet loaded; those that ``not_ready`` looked at, once."""
    return _looked_at.pop((module, spec), None) or module.launches(spec)


def not_ready(package: str, spec: Spec, unable: Callable[[], str | None]) -> str | None:
    """Why a call's kernels cannot be had: they do not come compiled, nor can they be compiled."""
    if shipped.installed() is None:
        return None  # ``unavailable`` has asked Triton
    module = module_of(package, importlib.import_module(package).OPS, spec.op)
    try:
        made = module.launches(spec)
    except ImportError:  # not even the parameters of these kernels are known without Triton
        if (reason := unable()) is None:
            raise
        return f"{_NOT_SHIPPED}, and {reason}"
    if "compiled" in made.codes() and (reason := unable()) is not None:
        return f"{_NOT_SHIPPED}, and {reason}"
    _looked_at.clear()
    _looked_at[module, spec] = made
    return None


def aligned(spec: Spec) -> Sequence[str]:
    """Tensors whose addresses must be multiples of 16 bytes: only where nothing can be compiled."""
    if shipped.installed() is None or toolchain.version() is not None:
        return ()
    names: Sequence[str] = module_of(__name__, OPS, spec.op).launches(spec).aligned()
    return names


def origin(spec: Spec) -> str:
    """Where the kernels of a call come from."""
    return code_origin(module_of(__name__, OPS, spec.op).launches(spec))


def notes() -> list[str]:
    """Which kernels come compiled, and for which GPUs."""
    kernels = shipped.installed()
    if kernels is None:
        return [f"shipped kernels: none, {shipped.unused()}"]
    targets = kernels.manifest["targets"].items()
    told = [f"{name} ({len(x['kernels'])} kernels, {x['status']})" for name, x in targets]
    return [f"shipped kernels: by Triton {kernels.triton} for {', '.join(told)}"]


def code_origin(made: Any) -> str:
    """Where the kernels of these launches come from, in words."""
    if interpreted():
        return "Triton's interpreter"
    codes = made.codes()
    compiled = f"compiled by Triton {toolchain.version()}"
    if "shipped" not in codes:
        return compiled
    return "shipped kernels" if "compiled" not in codes else f"shipped kernels, some {compiled}"


@functools.cache
def unavailable() -> str | None:
    """What is missing: a GPU; kernels that come compiled, or Triton, new enough to compile them."""
    if not interpreted():
        if not torch.cuda.is_available():
            return "no CUDA device"
        if shipped.installed() is not None:
            return None
    return toolchain.unable()


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
        if width > MAX_HEAD_DIM and not spec.op.startswith("rms_norm_gated"):
            return f"{name} must be at most {MAX_HEAD_DIM}, got {width}"
    refusal = getattr(module_of(__name__, OPS, spec.op), "refuse", None)
    if refusal is not None and (reason := refusal(spec)) is not None:
        return str(reason)
    if interpreted():
        return None
    return not_ready(__name__, spec, toolchain.unable)
