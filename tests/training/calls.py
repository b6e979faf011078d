"""Calls with gradients: small inputs of every kind, and the comparison with exact gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import sluice
from sluice import calls
from sluice.ops.delta import FUNCTIONAL
from sluice.testing import gradients as exact
from sluice.testing.compare import assert_within

FLOAT64, FLOAT32 = 1e-10, 1e-5
HALF = {"g": 1e-2, "beta": 1e-2, "A_log": 1e-2, "dt_bias": 1e-2}  # others: 6e-3


@dataclass(frozen=True)
class Call:
    """What a call of ``prefill`` looks like."""

    name: str
    B: int = 2
    T: int = 70
    lengths: tuple[int, ...] | None = None  # packed, with three tokens behind them
    HQ: int = 2
    HK: int = 2
    HV: int = 4
    K: int = 16
    V: int = 24
    decay: str | None = "head"  # "head", "key" or None
    delta: bool = True
    rate: float = 0.1
    keys: str = "random"  # "correlated", "repeated" or "identical"
    beta: str | float = "random"  # "zero", "one", "small", or a number for all tokens
    raw: bool = False
    normalize: bool = True
    state: bool = True
    layout: str = "vk"
    scale: float | None = None
    neg_eigval: bool = False

    def __str__(self) -> str:
        return self.name

    def of(self, **change: Any) -> Call:
        return replace(self, **change)

    def make(self, dtype: torch.dtype, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Leaves by name, and the other arguments."""
        gen = torch.Generator().manual_seed(seed)
        packed = self.lengths is not None
        B, T = (1, sum(self.lengths) + 3) if packed else (self.B, self.T)
        N = len(self.lengths) if packed else B

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen, dtype=torch.float64)

        k = drawn(B, T, self.HK, self.K)
        if self.keys == "correlated":
            k = 0.1 * k + drawn(1, 1, self.HK, self.K)
        elif self.keys == "identical":
            k = drawn(1, 1, self.HK, self.K).expand_as(k)
        elif self.keys == "repeated":
            k = k[:, torch.arange(T) // 7]
        if not self.normalize:
            k = k / k.norm(dim=-1, keepdim=True)
        x = {"q": drawn(B, T, self.HQ, self.K), "k": k, "v": drawn(B, T, self.HV, self.V)}
        wide = torch.promote_types(dtype, torch.float32)
        leaves = {name: y.to(dtype) for name, y in x.items()}
        if self.decay is not None:
            size = (B, T, self.HV, *([self.K] if self.decay == "key" else []))
            g = drawn(*size) if self.raw else -self.rate * drawn(*size).abs()
            leaves["g"] = g.to(dtype if self.raw else wide)
        if self.delta:
            b = drawn(B, T, self.HV)
            if not self.raw:
                named = {
                    "random": b.sigmoid(),
                    "zero": 0 * b,
                    "one": 0 * b + 1,
                    "small": 1e-4 * b.sigmoid(),
                }
                b = named[self.beta] if isinstance(self.beta, str) else 0 * b + self.beta
            leaves["beta"] = b.to(dtype if self.raw else wide)
        if self.raw:
            leaves["A_log"] = drawn(self.HV).to(wide)
            tail = [self.K] if self.decay == "key" else []
            leaves["dt_bias"] = drawn(self.HV, *tail).to(wide)
        if self.state:
            tail = (self.V, self.K) if self.layout == "vk" else (self.K, self.V)
            leaves["initial_state"] = drawn(N, self.HV, *tail).to(wide)
        options: dict[str, Any] = {
            "normalize_qk": self.normalize,
            "state_layout": self.layout,
            "scale": self.scale,
            "neg_eigval": self.neg_eigval,
        }
        if packed:
            bounds = torch.tensor([0, *self.lengths]).cumsum(0)
            options["cu_seqlens"] = bounds.int()
            for name in ("q", "k", "v", "g", "beta"):
                if name in leaves:  # what lies behind the last border is never looked at
                    leaves[name][:, bounds[-1] :] = float("nan")
        return {name: y.requires_grad_() for name, y in leaves.items()}, options


def check(call: Call, dtype: torch.dtype, backend: str | None = None) -> None:
    """All gradients of a call, against autograd through the recurrence in float64."""
    leaves, options = call.make(dtype)
    ours = sluice.prefill(**leaves, **options, backend=backend)
    found = exact.gradients(ours, list(leaves.values()))
    theirs = exact.delta(**leaves, **options)
    wanted = exact.gradients(theirs, list(leaves.values()))
    end = None if call.lengths is None else sum(call.lengths)
    for name, a, b in zip(leaves, found, wanted, strict=True):
        limit = FLOAT64 if dtype == torch.float64 else FLOAT32
        if dtype in (torch.bfloat16, torch.float16):
            limit = HALF.get(name, 6e-3)
        if end is not None and name in ("q", "k", "v", "g", "beta"):
            assert not a[:, end:].any(), f"d{name} behind the last border"
            a, b = a[:, :end], b[:, :end]
        assert_within(a, b, limit, name=f"{call}: d{name}")


def states_in_backward(step: Callable[[], Any]) -> list[set[str]]:
    """What each backward of ``prefill`` in a training step is given of "state" and "dfinal"."""
    found = []

    def run(op: Any, tensors: Any, *more: Any) -> Any:
        if op is FUNCTIONAL.backward:
            given = dict(zip(op.spec.TENSORS, tensors, strict=True))
            found.append({name for name in ("state", "dfinal") if given[name] is not None})
        return real(op, tensors, *more)

    real = calls.run
    with mock.patch.object(calls, "run", run):
        step()
    return found
