"""Which states inside a sequence are to be kept, and where."""

from __future__ import annotations

from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.scratch_rows import read_index


@jit
def checkpoint(p, seq, column):
    """The number of tokens and the slot of one checkpoint of a sequence."""
    at = seq * p.columns + column
    slot = read_index(p.checkpoints, p.checkpoints_wide, at)
    if p.positions != 0:
        return read_index(p.positions, p.positions_wide, at), slot
    return (column + 1) * p.every, slot


@jit
def columns(p, first, last):
    """A range of columns that holds every checkpoint after more than `first`, at most `last`."""
    if p.positions != 0:
        return 0, p.columns
    return max(first, 0) // p.every, min(last // p.every, p.columns)
