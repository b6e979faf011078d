"""Decode: the same recurrence, for the few tokens a step brings."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sluice.backends.reference import rows
from sluice.backends.reference.prefill import prefill, sequences, stored
from sluice.backends.reference.recurrence import Tokens, recur
from sluice.contract.spec import DeltaSpec


def decode(p: DeltaSpec, t: Any) -> None:
    """Serve ``decode`` (1 to 8 tokens per sequence)."""
    if p.states == 0:
        prefill(p, t)
        return
    live = ~rows.padded(p, t)
    first = 0

    def run(x: Tokens, S: Tensor, o: Tensor, _: object) -> Tensor:
        """Rows ``first`` and on; packed sequences come one by one."""
        nonlocal first
        pick = slice(first, first + S.shape[0])
        found: list[tuple[Tensor, Tensor]] = []

        def keep(n: int, S: Tensor) -> None:
            found.append((t.write_slots[pick, n - 1], stored(p, S)))

        S, _ds = recur(x, S, o, keep)
        written.append((found, live[pick]))
        first = pick.stop
        return S

    written: list[tuple[list[tuple[Tensor, Tensor]], Tensor]] = []
    sequences(p, t, run)
    for found, own in written:  # all reads come before the first write
        for slots, S in found:
            rows.scatter(t.state, slots, own & (slots > p.pad_slot), S)
