"""The oracle's answer to a workload, and the verdict on a provider's result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sluice.bench import training
from sluice.testing import compare, oracle
from sluice.testing.case import POOLS
from sluice.testing.workload import Workload

HOST = ("cu_seqlens_cpu",)  # inputs that stay on the host


@dataclass
class Answer:
    """Exact outputs by name, states as rows in sequence order, and the tolerances."""

    exact: dict[str, Tensor]
    limits: dict[str, float]

    @classmethod
    def of(cls, workload: Workload, inputs: dict[str, Any], dtype: torch.dtype) -> Answer:
        """Run the float64 oracle on the inputs' device; a GPU is faster for long prompts.

        For 16-bit inputs the answer is kept in float32, which takes half the memory. Its rounding
        is a hundred-thousandth of the tolerance.
        """
        device = next(x for x in _tensors(inputs) if x.is_floating_point()).device
        if workload.op == "train":
            return cls(training.exact(inputs), training.limits(dtype))
        same = set(workload.case.lengths or ())
        if workload.op == "prefill" and len(same) == 1 < workload.case.N:
            exact = side_by_side(inputs, workload.case.N)
        else:
            expected = workload.case.expected(inputs, device)
            exact = dict(expected.outputs)
            if expected.pools:
                slots = inputs["slots"].long()
                exact |= {name: pool.exact[slots] for name, pool in expected.pools.items()}
        if dtype.itemsize < 4:
            exact = {name: x.to(torch.float32) for name, x in exact.items()}
        return cls(exact, workload.case.tolerances(dtype, device))

    def judge(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        """The relative error of each output; raises ``AssertionError`` if one is too large.

        The comparison is that of the tests: the whole, each head, and the largest error.
        """
        absent = [name for name in self.exact if name not in outputs]
        if absent:
            raise AssertionError(f"no {', '.join(absent)} among the outputs")
        errors = {}
        for name, exact in self.exact.items():
            actual = outputs[name].to(exact.device)
            per = 1 if name in POOLS and exact.ndim == 4 else -2 if exact.ndim == 4 else None
            compare.assert_within(actual, exact, self.limits[name], name=name, per=per)
            errors[name] = compare.relative_error(actual, exact)
        return errors

    def save(self) -> dict[str, Any]:
        """The answer as plain values, for another process."""
        return {"exact": self.exact, "limits": self.limits}


def side_by_side(inputs: dict[str, Any], N: int) -> dict[str, Tensor]:
    """The oracle's answer to N packed prompts of one length, as more heads of a single prompt.

    Heads are independent, so the numbers are the same, and the oracle, which goes from token to
    token, takes N times fewer steps.
    """
    ours = ("cu_seqlens", "cu_seqlens_cpu", "slots", "state")
    options = {name: x for name, x in inputs.items() if name not in ours}
    for name in ("q", "k", "v", "g", "beta"):  # [1, N·T, H, ..] to [1, T, N·H, ..]
        x = options[name][0].unflatten(0, (N, -1)).transpose(0, 1)
        options[name] = x.flatten(1, 2)[None]
    for name in ("A_log", "dt_bias"):
        if name in options:
            options[name] = options[name].repeat(N)
    rows = inputs["state"][inputs["slots"].long()]
    o, state = oracle.delta(**options, state=rows.flatten(0, 1)[None])
    o = o[0].unflatten(1, (N, -1)).transpose(0, 1).flatten(0, 1)[None]
    return {"o": o, "state": state[0].unflatten(0, (N, -1))}


def moved(value: Any, device: torch.device, name: str = "") -> Any:
    """Move tensors in nested containers to a device; host lengths stay on the host."""
    if isinstance(value, dict):
        return {n: moved(x, device, n) for n, x in value.items()}
    if isinstance(value, tuple):
        return tuple(moved(x, device, name) for x in value)
    movable = isinstance(value, Tensor) and name not in HOST
    return value.to(device) if movable else value


def copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """A copy of a set of inputs: floating-point tensors are copied, index tensors are shared.

    They are shared because peers cache what they derive from ``cu_seqlens`` by tensor identity.
    """

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone() if value.is_floating_point() else value
        return tuple(copy(x) for x in value) if isinstance(value, tuple) else value

    return {name: copy(value) for name, value in inputs.items()}


def nbytes(inputs: dict[str, Any]) -> int:
    """Bytes of all tensors of a set."""
    return sum(x.numel() * x.element_size() for x in _tensors(inputs))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [x for part in value.values() for x in _tensors(part)]
    return [x for part in value for x in _tensors(part)] if isinstance(value, tuple) else []
