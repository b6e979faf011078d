"""What is fast here, and why: ``explain`` for one call, ``doctor`` for this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from sluice import dispatch, library, ops
from sluice.contract.problem import Problem
from sluice.contract.tensors import Rows
from sluice.layers.qwen import PRESETS, QwenShape

PACKAGES = ("torch", "triton", "numba", "transformers", "onnxruntime", "safetensors")


def explain(
    op: str, *args: Any, backend: str | None = None, device: str | None = None, **kwargs: Any
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
    if op not in library.OPERATORS:
        raise ValueError(f"op: expected one of {sorted(library.OPERATORS)}, got {op!r}")
    with library.probing() as found:
        getattr(ops, op)(*args, **kwargs)
    problem = found[0]
    if device is not None or problem.device.type == "meta":
        problem = replace(problem, device=_device(device))
    return dispatch.explain_problem(problem, backend)


def doctor(device: str | None = None) -> str:
    """A report on this machine: versions, backends, and who serves each Qwen model's operators.

    Args:
        device: "cpu" or "cuda"; the GPU where there is one by default.
    """
    where = _device(device)
    lines = [*_machine(), "", "Backends, fastest first"]
    for name in dispatch.ORDER:
        missing = dispatch.unavailable(name)
        state = f"unavailable: {missing}" if missing else ", ".join(dispatch.served(name))
        lines.append(f"  {name:<10} {state}")
    lines += ["", f"Who serves what on {where} (bfloat16 inputs, float32 state)"]
    groups: dict[tuple[str, ...], list[str]] = {}
    for shape in dict.fromkeys(PRESETS.values()):
        chosen = tuple(dispatch.explain_problem(p).chosen or "-" for p in problems(shape, where))
        groups.setdefault(chosen, []).append(shape.name)
    for row, names in groups.items():
        lines += [f"  {', '.join(names)}"]
        lines += [f"    {op:<16} {who}" for op, who in zip(library.OPERATORS, row, strict=True)]
    return "\n".join(lines)


def problems(
    shape: QwenShape, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Iterator[Problem]:
    """One problem for each operator, as a model of this shape calls it; nothing is allocated."""
    for name, arguments in calls(shape, dtype):
        with library.probing() as found:
            getattr(ops, name)(*arguments.pop("args"), **arguments)
        yield replace(found[0], device=device)


def calls(shape: QwenShape, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each operator's arguments for a batch of 8 (one prompt of 2048), on the "meta" device."""
    N, T, P = 8, 2048, 64
    HK, HV, K, V = shape.num_k_heads, shape.num_v_heads, shape.head_k_dim, shape.head_v_dim
    D, W = shape.conv_channels, shape.conv_width

    def empty(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device="meta")

    def tokens(B: int, T: int) -> list[torch.Tensor]:
        return [empty(B, T, HK, K), empty(B, T, HK, K), empty(B, T, HV, V)]

    def gates(B: int, T: int) -> list[torch.Tensor]:
        return [empty(B, T, HV, dtype=torch.float32)] * 2

    state = {"state": empty(P, HV, V, K, dtype=torch.float32)}
    window = {"state": empty(P, D, W - 1)}
    slots = {"slots": empty(N, dtype=torch.int64)}
    one = {
        "slots": empty(1, dtype=torch.int64),
        "cu_seqlens": empty(2, dtype=torch.int32),
        "cu_seqlens_cpu": torch.tensor([0, T], dtype=torch.int32),
    }
    draft = ops.Draft(
        empty(N, 4, HK, K, dtype=torch.float32),
        empty(N, 4, HV, V, dtype=torch.float32),
        empty(N, 4, HV, dtype=torch.float32),
        state["state"],
        Rows(slots["slots"]),
        -1,
        "vk",
        None,
        None,
    )
    weights = {
        "conv_weight": empty(D, W),
        "A_log": empty(HV),
        "dt_bias": empty(HV),
        "norm_weight": empty(V),
    }
    yield "prefill", {"args": [*tokens(1, T), *gates(1, T)], **state, **one}
    yield "decode", {"args": [*tokens(N, 1), *gates(N, 1)], **state, **slots}
    yield "verify", {"args": [*tokens(N, 4), *gates(N, 4)], **state, **slots}
    yield "commit", {"args": [draft, slots["slots"]]}
    yield "causal_conv1d", {"args": [empty(1, T, D), empty(D, W)], **window, **one}
    heads = {"num_k_heads": HK, "num_v_heads": HV, "head_k_dim": K, "head_v_dim": V}
    raw = {"a": empty(1, T, HV), "b": empty(1, T, HV), "A_log": empty(HV), "dt_bias": empty(HV)}
    yield "conv_qkv", {"args": [empty(1, T, D), empty(D, W)], **heads, **raw, **window, **one}
    yield "rms_norm_gated", {"args": [empty(T, HV, V), empty(T, HV, V), empty(V)]}
    whole = {"conv_state": window["state"], **state, **slots, **weights, "order": shape.order}
    yield "step", {"args": [empty(N, D + HV * V), empty(N, 2 * HV)], **whole}


def _device(device: str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def _machine() -> Iterator[str]:
    cores = os.cpu_count()
    yield f"sluice {importlib.metadata.version('sluice') if _installed('sluice') else '(source)'}"
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
        yield f"  {package} {version}"


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
