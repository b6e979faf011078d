"""Decode: the same recurrence, for the few tokens a step brings."""

from __future__ import annotations

from sluice.backends.reference.prefill import prefill
from sluice.contract.problem import DeltaProblem
from sluice.contract.tensors import DeltaTensors


def decode(p: DeltaProblem, t: DeltaTensors) -> None:
    """Serve ``decode`` (1 to 8 tokens a sequence)."""
    prefill(p, t)
