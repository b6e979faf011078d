"""Which tokens and pool rows a call touches: the pool rules, written once for the oracle.

padded     ``slots[i] <= pad_slot``: zero outputs, nothing read, nothing written
new        ``has_state[i]`` false: starts from zeros, the pool's row is not read
not kept   ``write_slots[i] <= pad_slot``: computed, but its final state is not written
each       ``write_slots [N, M]``: the state after token t goes to ``write_slots[i, t]``, and the
           final state nowhere else
empty      no tokens: the initial state is copied to the write slot
All reads see the pool as it was before the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor


class Row(NamedTuple):
    """One sequence: its tokens, and the pool rows it reads and writes, if any."""

    index: int
    batch: int
    start: int
    end: int
    read: int | None
    write: int | None
    each: tuple[int | None, ...] = ()
    """With one write slot for each token: where the state after each token goes."""


def sequences(
    B: int, T: int, cu_seqlens: Tensor | None, lengths: Tensor | None
) -> list[tuple[int, int, int]]:
    """(batch, start, end) of each sequence; tokens after the last border belong to none."""
    if cu_seqlens is None:
        spans = [(b, 0, T) for b in range(B)]
    else:
        bounds = cu_seqlens.tolist()
        spans = [(0, start, end) for start, end in pairwise(bounds)]
    if lengths is None:
        return spans
    return [(b, start, start + n) for (b, start, _), n in zip(spans, lengths.tolist(), strict=True)]


def live_rows(
    spans: list[tuple[int, int, int]],
    state: Tensor | None,
    slots: Tensor | None,
    write_slots: Tensor | None,
    has_state: Tensor | None,
    pad_slot: int,
) -> Iterator[Row]:
    """The rows that are not padding, in order."""
    for i, (batch, start, end) in enumerate(spans):
        slot = i if slots is None else int(slots[i])
        if slots is not None and slot <= pad_slot:
            continue
        known = state is not None and (has_state is None or bool(has_state[i]))
        if write_slots is not None and write_slots.ndim == 2:
            targets = write_slots[i, : end - start].tolist()
            each = tuple(s if s > pad_slot else None for s in targets)
            yield Row(i, batch, start, end, slot if known else None, None, each)
            continue
        target = slot if write_slots is None else int(write_slots[i])
        kept = write_slots is None or target > pad_slot
        yield Row(i, batch, start, end, slot if known else None, target if kept else None)


def saves(checkpoints: Any, row: Row, pad_slot: int) -> dict[int, list[int]]:
    """For each number of tokens consumed, the slots that get the state at that point."""
    if checkpoints is None:
        return {}
    if not isinstance(checkpoints, dict):
        checkpoints = {x: getattr(checkpoints, x, None) for x in ("slots", "every", "positions")}
    slots = checkpoints["slots"][row.index].tolist()
    if checkpoints.get("every"):
        positions = [(j + 1) * checkpoints["every"] for j in range(len(slots))]
    else:
        positions = checkpoints["positions"][row.index].tolist()
    due: dict[int, list[int]] = {}
    for position, slot in zip(positions, slots, strict=True):
        if slot > pad_slot and position <= row.end - row.start:
            due.setdefault(position, []).append(slot)
    return due
