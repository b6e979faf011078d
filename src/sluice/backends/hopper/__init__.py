"""Gluon kernels for Hopper: what they do better than the portable Triton kernels, and no more."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from sluice.backends import Launch, module_of
from sluice.backends import triton as portable
from sluice.backends.triton import gpu, shipped, toolchain
from sluice.contract.chunk_length import CHUNK
from sluice.contract.meta import Meta
from sluice.contract.spec import DeltaSpec, Spec

DEVICES = ("cuda",)
OPS = {"prefill": "prefill"}
ALIGNED = ("q", "k", "v", "out")
TESTED = ("3.6",)
"""Versions of Triton, whose Gluon is experimental, with which the kernels ran on a GPU."""
TMA_BYTES = 16


def bind(spec: Spec) -> Launch:
    """A launch of the operator's kernels."""
    launch: Launch = portable.launches(module_of(__name__, OPS, spec.op), spec).bound()
    return launch


def aligned(spec: Spec) -> Sequence[str]:
    """TMA reaches addresses that are multiples of 16 bytes."""
    return ALIGNED


def origin(spec: Spec) -> str:
    """Where the kernels of a call come from."""
    return portable.code_origin(module_of(__name__, OPS, spec.op).launches(spec))


def compile(
    specs: Sequence[Spec],
    share: tuple[int, int] = (0, 1),
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Compile what these calls, and such of other sizes, need, on all cores, and load it."""
    from sluice.backends.triton import launch

    launch.compile_and_load(portable.kernel_calls(__name__, OPS, specs), share, progress)


@functools.cache
def unavailable() -> str | None:
    """What is missing: a GPU; kernels that come compiled, or a tested Triton."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None if shipped.installed() is not None else unable()


@functools.cache
def unable() -> str | None:
    """Why Triton cannot compile these kernels here; None if it can."""
    found = toolchain.version()
    if found is not None and ".".join(found.split(".")[:2]) not in TESTED:
        return f"tested with Triton {', '.join(TESTED)}, found {found}"
    return toolchain.unable()


def refuse(spec: Spec) -> str | None:
    """The delta rule with K = V = 128 in 16 bits, on token-major inputs; the rest is Triton's."""
    p = spec
    assert isinstance(p, DeltaSpec)
    capability = gpu.capability(p.device)
    limits = (
        (capability == (9, 0), f"compute capability 9.0, not {capability[0]}.{capability[1]}"),
        (p.dtype in (torch.bfloat16, torch.float16), f"bfloat16 or float16, not {p.dtype}"),
        ((p.K, p.V) == (128, 128), f"K = V = 128, not {p.K} and {p.V}"),
        (p.delta, f"the delta rule, not the {p.rule} rule"),
        (p.decay != "key", "decay per head, not per key"),
        (p.HQ <= p.HV, f"no more query heads than value heads, not {p.HQ} and {p.HV}"),
        (
            p.checkpoints != "positions"
            and p.checkpoint_every % CHUNK == 0
            or p.state_dtype == torch.float32,
            f"checkpoints inside chunks of {CHUNK} tokens in float32, not {p.state_dtype}",
        ),
        (p.N > 0 and p.T > 0, "at least one token"),
    )
    reason = next((text for ok, text in limits if not ok), None)
    if reason is None:
        metas = {name: getattr(p, name) for name in ALIGNED}
        reason = next((text for n, m in metas.items() if (text := _unreachable(n, m))), None)
    if reason is not None:
        return f"needs {reason}"
    return portable.not_ready(module_of(__name__, OPS, spec.op), spec, unable)


def _unreachable(name: str, x: Meta) -> str | None:
    """Why TMA cannot read [B, T, heads, width] as a matrix of tokens."""
    (B, T, H, width), (stride_b, stride_t, stride_h, _) = x.shape, x.strides
    if H > 1 and stride_h != width:
        return f"a token's heads of {name} next to each other in memory (layout bthd)"
    if B > 1 and stride_b != T * stride_t:  # also of one token: its stride is that of the rows
        return f"batch rows of {name} next to each other in memory"
    if stride_t * x.dtype.itemsize % TMA_BYTES:
        step = stride_t * x.dtype.itemsize
        return f"tokens of {name} a multiple of {TMA_BYTES} bytes apart, not {step} bytes"
    return None
