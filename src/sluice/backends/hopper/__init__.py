"""Gluon kernels for Hopper: what they do better than the portable Triton kernels, and no more.

Gluon is experimental, and each release of Triton renames some of it (``kernels/gluon_api.py``). A
release becomes tested when the suite has run with it on a GPU. Another one is tried: if the kernels
do not compile or load, the backend gives up for this process and says why. A release whose ptxas is
known to make wrong code is refused. Kernels that come compiled serve with any release.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from sluice.backends import Launch, module_of
from sluice.backends import triton as portable
from sluice.backends.triton import gpu, shipped, toolchain
from sluice.contract.backward import DeltaBackwardSpec
from sluice.contract.errors import GaveUpError
from sluice.contract.meta import Meta
from sluice.contract.spec import DeltaSpec, Spec

DEVICES = ("cuda",)
OPS = {
    "prefill": "prefill",
    "transitions": "transitions",
    "resume": "transitions",
    "prefill_backward": "prefill_backward",
}
ALIGNED = ("q", "k", "v", "out", "do", "dv")
OLDEST = (3, 6)
"""The first release of Triton whose Gluon has what the kernels use."""
TESTED = ("3.6", "3.9")
"""Releases with which the kernels ran on a GPU, and ran right."""
FAULTY = ((12, 9), (13, 3))
"""From this ptxas on, and before that one, the registers of a left operand may be used again before
the tensor cores have read them: up to 2 of 1,000 repeats of a call differed
(docs/kernels/triton.md)."""
TMA_BYTES = 16

_failed: list[str] = []
"""Why the kernels do not work with this release, once that has been seen."""


def bind(spec: Spec) -> Launch:
    """A launch of the operator's kernels."""
    with _trial():
        launch: Launch = portable.launches(module_of(__name__, OPS, spec.op), spec).bound()
    return launch


def aligned(spec: Spec) -> Sequence[str]:
    """TMA reaches addresses that are multiples of 16 bytes."""
    return [name for name in ALIGNED if getattr(spec, name, None) is not None]


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

    with _trial():
        launch.compile_and_load(portable.kernel_calls(__name__, OPS, specs), share, progress)


def unavailable() -> str | None:
    """What is missing: a GPU; kernels that come compiled, or a Triton that compiles them."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None if shipped.installed() is not None else unable()


def unable() -> str | None:
    """Why Triton cannot compile these kernels here; None if it can, or was not tried yet."""
    found = toolchain.version()
    if found is not None and toolchain.release(found) < OLDEST:
        return f"needs Triton {'.'.join(map(str, OLDEST))} or newer, found {found}"
    return _failed[0] if _failed else toolchain.unable() or _misassembles()


def _misassembles() -> str | None:
    """That Triton's ptxas for Hopper is one of those that make wrong code of these kernels."""
    from sluice.backends.triton import triton_private

    ptxas = triton_private.assembler(90)
    if ptxas is None or not FAULTY[0] <= ptxas < FAULTY[1]:
        return None
    return (
        f"the ptxas {ptxas[0]}.{ptxas[1]} of Triton {toolchain.version()} makes wrong code of it: "
        f"install {shipped.DISTRIBUTION}, whose kernels come compiled, or Triton {TESTED[-1]}"
    )


def untried() -> str | None:
    """The release of Triton, if these kernels never ran with it on a GPU."""
    found = toolchain.version()
    if found is None or ".".join(map(str, toolchain.release(found))) in TESTED:
        return None
    return f"never ran with Triton {found}, only with {', '.join(TESTED)}"


@contextlib.contextmanager
def _trial() -> Iterator[None]:
    """In this scope kernels compile and load. Of an untried release, any error ends the trial."""
    try:
        yield
    except shipped.DamagedKernelError:
        raise
    except Exception as error:
        if untried() is None:
            raise
        _failed.append(f"does not work with Triton {toolchain.version()}: {_reason(error)}")
        raise GaveUpError(_failed[-1]) from error


def _reason(error: BaseException) -> str:
    """The first cause of an error, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = getattr(error, "error_message", None) or str(error)  # Triton's has its source around it
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def refuse(spec: Spec) -> str | None:
    """The delta rule with K = V = 128 in 16 bits, on token-major inputs; the rest is Triton's."""
    p = spec
    assert isinstance(p, DeltaSpec | DeltaBackwardSpec)
    capability = gpu.capability(p.device)
    limits = (
        (capability == (9, 0), f"compute capability 9.0, not {capability[0]}.{capability[1]}"),
        (p.dtype in (torch.bfloat16, torch.float16), f"bfloat16 or float16, not {p.dtype}"),
        ((p.K, p.V) == (128, 128), f"K = V = 128, not {p.K} and {p.V}"),
        (p.delta, f"the delta rule, not the {p.rule} rule"),
        (p.decay != "key", "decay per head, not per key"),
        (p.HQ <= p.HV, f"no more query heads than value heads, not {p.HQ} and {p.HV}"),
        (p.N > 0 and p.T > 0, "at least one token"),
        (getattr(p, "do", p.q) is not None, "a gradient of the output"),
    )
    reason = next((text for ok, text in limits if not ok), None)
    if reason is None:
        metas = {name: getattr(p, name) for name in aligned(p)}
        reason = next((text for n, m in metas.items() if (text := _unreachable(n, m))), None)
    if reason is not None:
        return f"needs {reason}"
    return portable.not_ready(__name__, spec, unable)


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
