"""Kernels in Numba for every operator, on the CPU: threaded, vectorised, cached on disk."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from sluice.backends import Launch, module_of, transitions_by
from sluice.backends.cpu.garbage import no_search_for_garbage
from sluice.contract.spec import PassSpec, Spec

Progress = Callable[[str, int, int], None]

DEVICES = ("cpu",)
OPS = {
    "prefill": "prefill",
    "transitions": "prefill",
    "decode": "decode",
    "verify": "verify",
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
CHECKS_VALUES = True
KERNEL_OF = {"verify": "decode", "transitions": "prefill"}
"""The kernel of an operator, where it is not the operator's own."""
FOR_ONE_TOKEN = {"decode": "decode_one", "step": "step_one"}
"""Smaller kernels, where every sequence has one token."""


def bind(spec: Spec) -> Launch:
    """A launch of the operator's kernel."""
    if isinstance(spec, PassSpec):
        return transitions_by(bind, spec)
    with no_search_for_garbage():
        launch: Launch = module_of(__name__, OPS, spec.op).bind(spec)
    return launch


@functools.cache
def unavailable() -> str | None:
    """Numba is an optional dependency; it is not imported before a kernel is needed."""
    if importlib.util.find_spec("numba") is None:
        return "the package numba is not installed"
    return None


def refuse(spec: Spec) -> str | None:
    """Arithmetic is float32, and so are inputs and states at most."""
    if torch.float64 in spec.dtypes:
        return "computes in float32, not in float64"
    return _unusable()


@functools.cache
def _unusable() -> str | None:
    """Why this version of Numba does not serve; None if it does."""
    try:
        with no_search_for_garbage():
            importlib.import_module(f"{__name__}.numba_private")
    except Exception as error:  # a broken install raises anything
        return f"cannot use numba: {error!r}"
    return None


def kernels() -> dict[str, Any]:
    """Every kernel by its name, not compiled yet."""
    for module in sorted({*OPS.values(), "states"}):
        importlib.import_module(f"{__name__}.{module}")
    from sluice.backends.cpu.kernel import KERNELS

    return KERNELS


def kernel_of(spec: Spec) -> str:
    """The name of the kernel that serves a call."""
    from sluice.backends.cpu.tokens import has_one_token

    name = KERNEL_OF.get(spec.op, spec.op)
    if getattr(spec, "states", 0) > 0:
        return "decode_states"
    if name == "prefill_backward" and getattr(spec, "decay", "") == "key":
        return "prefill_key_backward"
    return FOR_ONE_TOKEN[name] if name in FOR_ONE_TOKEN and has_one_token(spec) else name


def compile(
    specs: Sequence[Spec], share: tuple[int, int] = (0, 1), progress: Progress | None = None
) -> None:
    """Compile the kernels of these calls, each of which serves calls of every size and dtype.

    ``share`` (i, n): every n-th kernel, from the i-th on. ``progress(name, done, all)`` is called
    after each kernel.
    """
    wanted = sorted({"entry", *map(kernel_of, specs)})
    compile_kernels(wanted[share[0] :: share[1]], progress)


def compile_kernels(names: Iterable[str], progress: Progress | None = None) -> None:
    """Compile kernels, or load them from the disk.

    Numba works on a kernel while LLVM, in another thread, works on the one before. Small kernels
    come first: others use their machine code.
    """
    known = kernels()
    first = ["entry", *FOR_ONE_TOKEN.values()]
    names = set(names)
    order = [x for x in first if x in names] + sorted(names.difference(first))
    futures: list[Future[None]] = []
    told = 0
    with no_search_for_garbage(), ThreadPoolExecutor(1) as others:
        for name in order:
            known[name].begin()
            futures.append(others.submit(known[name].compile))
            while told < len(futures) and (futures[told].done() or len(futures) == len(order)):
                futures[told].result()
                told += 1
                if progress is not None:
                    progress(order[told - 1], told, len(order))
