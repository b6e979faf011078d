"""Shared by the engines' plug-ins: compile what their code will call, before requests.

A plug-in's code takes the operators as an argument. Here a recorder takes their place and the
tensors are on the "meta" device: nothing runs, and the kernels are exactly those that the code will
use, with its dtypes, strides and options.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sluice.model_calls import ModelCall
from sluice.warmup import run

SLOWLY = "Plain torch is slow: `sluice doctor` says what is missing"
_HEADS = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")


class Recorder:
    """Takes the place of ``sluice.ops``: keeps each call, returns outputs on the "meta" device."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.calls: list[ModelCall] = []

    def __getattr__(self, op: str) -> Any:
        return lambda *args, **options: self._note(op, args, options)

    def _note(self, op: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        name = f"{self.engine} {op} {len(self.calls)}"
        self.calls.append(ModelCall(name, op, lambda: (args, options)))
        if op != "conv_qkv":
            return None  # the others write to ``out``
        x, (HK, HV, K, V) = args[0], (options[name] for name in _HEADS)
        lead = x.shape[:-1]
        q, k, v = x.new_empty(*lead, HK, K), x.new_empty(*lead, HK, K), x.new_empty(*lead, HV, V)
        return q, k, v, *(x.new_empty(*lead, HV, dtype=torch.float32) for _ in "gb")


def like(x: Tensor) -> Tensor:
    """A tensor of the same shape, strides and dtype, without memory."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def check(calls: list[ModelCall], device: torch.device) -> None:
    """Raise the contract's error if an operator does not take one of these calls."""
    for call in calls:
        call.spec(device)


def served(calls: list[ModelCall], device: torch.device) -> list[tuple[str, str]]:
    """Compile the kernels of these calls: each call's operator, and the backend that serves it."""
    found = run(calls, device, None)
    return [(call.op, backend) for call, (_, backend) in zip(calls, found, strict=True)]


def slowly(found: Iterable[tuple[str, str]]) -> bool:
    """Whether an operator is served in plain torch: a package is missing, or a shape is unusual."""
    return any(backend in ("chunked", "reference") for _, backend in found)


def served_by(found: Iterable[tuple[str, str]]) -> str:
    """Operators and the backends that serve them: ``prefill hopper, triton; step triton``."""
    backends: dict[str, list[str]] = {}
    for op, backend in found:
        known = backends.setdefault(op, [])
        if backend not in known:
            known.append(backend)
    return "; ".join(f"{op} {', '.join(names)}" for op, names in backends.items())
