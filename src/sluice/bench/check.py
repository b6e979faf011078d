"""The oracle's answer to a workload, and the verdict on what a provider made of the same inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sluice.testing import compare
from sluice.testing.benchmarks import Workload
from sluice.testing.workload import POOLS


@dataclass
class Answer:
    """Exact outputs by name, states as rows in the order of the sequences, and the tolerances."""

    exact: dict[str, Tensor]
    limits: dict[str, float]

    @classmethod
    def of(cls, workload: Workload, inputs: dict[str, Any], dtype: torch.dtype) -> Answer:
        """Ask the float64 oracle, where the inputs are: a GPU answers for long prompts sooner.

        For 16-bit inputs the answer is kept in float32, which is exact to a hundred-thousandth of
        what is allowed and half as large.
        """
        device = next(x for x in _tensors(inputs) if x.is_floating_point()).device
        expected = workload.case.expected(inputs, device)
        exact = dict(expected.outputs)
        if expected.pools:
            slots = inputs["slots"].long()
            exact |= {name: pool.exact[slots] for name, pool in expected.pools.items()}
        if dtype.itemsize < 4:
            exact = {name: x.to(torch.float32) for name, x in exact.items()}
        return cls(exact, expected.limits)

    def judge(self, workload: Workload, outputs: dict[str, Tensor]) -> dict[str, float]:
        """The relative error of each output; raises ``AssertionError`` where one is too large.

        The comparison is the one that tests use: the whole, each head, and the largest error.
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
        """As plain values, for another process."""
        return {"exact": self.exact, "limits": self.limits}


def copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """A set of inputs of its own: floating-point tensors are copied, indices are shared.

    Shared, because peers look up what follows from ``cu_seqlens`` by the identity of the tensor.
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
