"""The backends that serve a call here, and when two results agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from sluice import calls, dispatch
from sluice.testing import compare
from tests.calls import Call, Shape, make
from tests.suite import DEVICE, backends


@dataclass(frozen=True)
class Server:
    """An operator on a backend, and whether a row's bits may depend on other rows."""

    op: str
    backend: str
    invariant: bool = True

    def run(self, call: Call, **options: Any) -> dict[str, Tensor]:
        if self.op == "prefill" and self.invariant:
            options["batch_invariant"] = True
        return call.run(self.backend, **options)

    def agree(self, actual: Tensor, expected: Tensor, shape: Shape, name: str) -> None:
        """Require the same bits where promised, else agreement within twice the tolerance."""
        (same_bits if self.invariant else close)(actual, expected, shape, name)

    def __str__(self) -> str:
        free = self.op == "prefill" and not self.invariant
        return f"{self.op}-{self.backend}{'-free' if free else ''}"


def refusals(backend: str, call: Call, **options: Any) -> list[str]:
    """Why the backend does not serve the call (nor its commit); nothing runs."""
    with calls.check_only() as found:
        call.run(None, **options)
    reasons = [dispatch.refusal(backend, spec) for spec, _ in found]
    return [reason for reason in reasons if reason is not None]


def servers(*ops: str) -> list[Any]:
    """Every way to serve ``ops`` here, for ``parametrize``; prefill with and without its option."""
    found = []
    for op in ops:
        for backend in backends(op):
            if refusals(backend, make(op, Shape(), 1, 1)):  # it serves other sizes only
                continue
            if op != "prefill":
                found.append(Server(op, backend))
                continue
            found.append(Server(op, backend, invariant=False))
            if not refusals(backend, make(op, Shape(), 1, 1), batch_invariant=True):
                found.append(Server(op, backend))
    return [pytest.param(server, id=str(server)) for server in found]


def beside(backend: str, op: str) -> str | None:
    """The same backend for another operator, or the one that dispatch chooses."""
    return backend if backend in backends(op) else None


def same_bits(actual: Tensor, expected: Tensor, shape: Shape | None, name: str) -> None:
    compare.assert_same_bits(actual, expected, name)


def close(actual: Tensor, expected: Tensor, shape: Shape, name: str) -> None:
    """Compare two results that may each have the contract's error."""
    narrow = name.startswith("state") and actual.dtype != torch.float32
    tolerance = compare.tolerance(shape.dtype, actual.dtype if narrow else torch.float32, DEVICE)
    compare.assert_within(actual, expected.double(), 2 * tolerance, name=name)


def assert_exact(call: Call, outputs: dict[str, Tensor], expected: Any, slots: Any = None) -> None:
    """Compare outputs, and the pools' rows ``slots`` (default: all), with the oracle."""
    exact, pools = expected
    for name, x in exact.items():
        dtype = torch.float32 if name in ("g", "beta") else call.shape.dtype
        compare.assert_within(
            outputs[name].cpu(), x, compare.tolerance(dtype, device=DEVICE), name=name
        )
    for name, x in pools.items():
        pool, x = (y if slots is None else y[slots] for y in (call.pools[name].cpu(), x))
        raw = name == "conv_state" or call.op in ("causal_conv1d", "conv_qkv")
        dtype = torch.float32 if raw else call.shape.dtype
        compare.assert_within(pool, x, compare.tolerance(dtype, pool.dtype, DEVICE), name=name)
