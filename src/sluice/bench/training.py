"""A training step of the recurrence: forward and backward of ``prefill`` without a state.

The loss is ⟨o, dO⟩ with dO the values, first token last: numbers that every provider can make from
its own inputs. Gradients are checked against those of the chunked backward in float64, which tests
hold to autograd through the token recurrence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sluice
from sluice.bench.providers.base import Call, Job

LEAVES = ("q", "k", "v", "g", "beta")
Function = Callable[..., Tensor]
"""Takes the leaves and returns o [1, T, Hv, V]."""


def limits(dtype: torch.dtype) -> dict[str, float]:
    """The largest relative error of each gradient (docs/training.md)."""
    if dtype == torch.float32:
        return dict.fromkeys((f"d{name}" for name in LEAVES), 1e-5)
    return {f"d{name}": 1e-2 if name in ("g", "beta") else 6e-3 for name in LEAVES}


def exact(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The gradients in float64."""
    leaves = _leaves(inputs, torch.float64)
    with torch.enable_grad():
        o, _ = sluice.prefill(**leaves, **_options(inputs), backend="chunked")
        return _gradients(o, leaves)


def call(job: Job, function: Function, converted: tuple[str, ...] = (), detail: str = "") -> Call:
    """One step by a provider's ``function``."""
    leaves = _leaves(job.inputs)

    def run() -> dict[str, Tensor]:
        with torch.enable_grad():
            return _gradients(function(*leaves.values()), leaves)

    return Call(run, lambda made: made, converted, detail=detail)


def own(job: Job, backend: str | None) -> Call:
    """One step by the public function."""
    options = {**_options(job.inputs), "backend": backend}
    return call(job, lambda *leaves: sluice.prefill(*leaves, **options)[0])


def forward_of(job: Job) -> Callable[[], Any]:
    """The forward of a step alone, for who only asks which backend serves it."""
    leaves = {name: job.inputs[name] for name in LEAVES}
    return lambda: sluice.prefill(**leaves, **_options(job.inputs))


def _options(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: inputs[name] for name in ("cu_seqlens", "cu_seqlens_cpu") if name in inputs}


def _leaves(inputs: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    made = {name: inputs[name].detach().to(dtype, copy=True) for name in LEAVES}
    return {name: x.requires_grad_() for name, x in made.items()}


def _gradients(o: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    do = leaves["v"].detach().flip(1).to(o.dtype)
    found = torch.autograd.grad(o, list(leaves.values()), do.view_as(o))
    return {f"d{name}": x for name, x in zip(leaves, found, strict=True)}
