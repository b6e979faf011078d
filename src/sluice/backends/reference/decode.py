"""Decode: the same recurrence, for the few tokens a step brings."""

from __future__ import annotations

from typing import Any

from sluice.backends.reference.prefill import prefill
from sluice.contract.spec import DeltaSpec


def decode(p: DeltaSpec, t: Any) -> None:
    """Serve ``decode`` (1 to 8 tokens a sequence)."""
    prefill(p, t)
