"""What is fast here, and why: ``explain`` for one call, ``doctor`` for this machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from typing import Any

import torch

from sluice import calls, dispatch, ops
from sluice.contract import arguments
from sluice.contract.errors import ContractError
from sluice.contract.names import BackendName, OperatorName
from sluice.contract.spec import Spec
from sluice.layers.qwen import PRESETS, QwenShape
from sluice.model_calls import Kinds, ModelCalls
from sluice.version import __version__

PACKAGES = ("torch", "triton", "numba", "transformers", "onnxruntime", "safetensors")


def explain(
    op: OperatorName,
    *args: Any,
    backend: BackendName | None = None,
    device: str | None = None,
    **kwargs: Any,
) -> dispatch.Explanation:
    """Which backend would serve this call, and why the others do not. Nothing is run.

    Args:
        op: the operator's name.
        args: the call's own arguments (tensors on the "meta" device will do); so are ``kwargs``.
        backend: explain this choice instead of the default one.
        device: where meta tensors are meant to be: the GPU where there is one by default.

    Returns:
        an explanation that prints itself: the choice first, then every refusal.

    Raises:
        ContractError: as the call itself would.

    >>> import torch, sluice
    >>> x = torch.ones(1, 4)
    >>> print(sluice.explain("rms_norm_gated", x, x, torch.ones(4), backend="reference"))
    ... # doctest: +ELLIPSIS
    rms_norm_gated: reference
    ...
    """
    known = {*calls.OPERATORS, "commit_layers"}
    if not isinstance(op, str) or op not in known:
        raise ContractError("explain", "op", f"one of {sorted(known)}", arguments.shown(op))
    with calls.check_only() as found:
        getattr(ops, op)(*args, **kwargs)
    spec, tensors = found[0]
    misplaced = dispatch.misplaced(spec, tensors)
    if device is not None or spec.device.type == "meta":
        spec = spec.on(_device(device))
    return dispatch.explain(spec, backend, misplaced)


def doctor(device: str | None = None) -> str:
    """A report on this machine: versions, backends, and who serves each Qwen model's operators.

    Args:
        device: "cpu" or "cuda"; the GPU where there is one by default.
    """
    where = _device(device)
    for spec in specs(next(iter(PRESETS.values())), where):
        dispatch.try_out(spec)
    lines = [*_machine(), "", "Backends, fastest first"]
    for name in dispatch.ORDER:
        missing = dispatch.unavailable(name)
        state = f"unavailable: {missing}" if missing else _served(name)
        if not missing and (untried := dispatch.untried(name)):
            state += f"; {untried}"
        lines.append(f"  {name:<10} {state}")
        lines += [f"  {'':<10} {note}" for note in dispatch.notes(name)]
    lines += ["", f"Which backend serves what on {where} (bfloat16 inputs, float32 state)"]
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for shape in dict.fromkeys(PRESETS.values()):
        found = [dispatch.explain(s) for s in specs(shape, where)]
        chosen = tuple((x.op, f"{x.chosen or '-':<10} {x.origin or ''}".rstrip()) for x in found)
        groups.setdefault(chosen, []).append(shape.name)
    for rows, names in groups.items():
        lines += [f"  {', '.join(names)}"]
        lines += [f"    {op:<16} {who}" for op, who in rows]
    return "\n".join(lines)


def specs(
    shape: QwenShape, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Iterator[Spec]:
    """One spec per operator, as a model of this shape calls it; nothing is allocated."""
    for call in ModelCalls(shape, Kinds(dtype=dtype, gate_dtype=dtype)).each_operator():
        yield call.spec(device)


def _served(backend: str) -> str:
    """The public operators that a backend has, and those whose gradients it has."""
    ops = dispatch.served(backend)
    text = ", ".join(op for op in ops if op in calls.OPERATORS)
    trained = [op.removesuffix("_backward") for op in ops if op.endswith("_backward")]
    return f"{text}; gradients of {', '.join(trained)}" if trained else text


def _device(device: str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return arguments.device("doctor", device)


def _machine() -> Iterator[str]:
    cores = os.cpu_count()
    yield f"sluice {__version__}"
    yield f"  Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"  {cores} cores, {torch.get_num_threads()} torch threads"
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        yield f"  {p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB"
    if not torch.cuda.is_available():
        yield "  no CUDA device"
    for package in PACKAGES:
        version = importlib.metadata.version(package) if _installed(package) else "not installed"
        version = torch.__version__ if package == "torch" else version  # names the build, too
        yield f"  {package} {version}{_fault(package)}"


def _fault(package: str) -> str:
    """Why a package that is installed cannot be imported; nothing if it can."""
    if not _installed(package):
        return ""
    try:
        importlib.import_module(package)
    except Exception as error:  # a broken install raises anything
        return f", cannot be imported: {error!r}"
    return ""


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
