"""Which tokens and state rows belong to a sequence."""

from __future__ import annotations

from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.memory import read_int
from sluice.backends.cpu.scratch_rows import read_index

NOWHERE = -1


@jit
def span(p, seq):
    """Batch row, first token and number of tokens of a sequence."""
    if p.cu != 0:
        start = read_index(p.cu, p.cu_wide, seq)
        return 0, start, read_index(p.cu, p.cu_wide, seq + 1) - start
    return seq, 0, p.T


@jit
def state_rows(p, seq):
    """Whether a sequence is padding, and the slots it reads and writes, NOWHERE for none.

    Where each token has a write slot, it is the first token's.
    """
    read = seq
    if p.slots != 0:
        read = read_index(p.slots, p.slots_wide, seq)
        if read <= p.pad:
            return True, NOWHERE, NOWHERE
    write = read
    if p.write != 0:
        write = read_index(p.write, p.write_wide, seq * max(p.states, 1))
    if (p.slots != 0 or p.write != 0) and write <= p.pad:
        write = NOWHERE
    if p.has_state != 0 and read_int(p.has_state, seq, 1) == 0:
        read = NOWHERE
    return False, read, write


@jit
def state_slot(p, seq, t):
    """The slot of the state after token t, where each token has one; NOWHERE for none."""
    slot = read_index(p.write, p.write_wide, seq * p.states + t)
    return slot if slot > p.pad else NOWHERE


@jit
def draft_row(p, seq):
    """The row of the draft buffers that a sequence has; NOWHERE for none."""
    if p.draft_slots != 0:
        row = read_index(p.draft_slots, p.draft_slots_wide, seq)
    elif p.slots != 0:
        row = read_index(p.slots, p.slots_wide, seq)
    else:
        return seq
    return row if row > p.pad else NOWHERE


@jit
def locate(p, unit, size):
    """The sequence of a unit of `size` tokens, and the unit's first token in it.

    Of packed sequences, sequence n has the units from cu[n] // size + n on. They are enough for all
    of its tokens; the first token of the last unit may lie after the sequence's end.
    """
    if p.cu == 0:
        each = max((p.T + size - 1) // size, 1)
        return unit // each, unit % each * size
    low, high = 0, p.N
    while high - low > 1:
        middle = (low + high) // 2
        if read_index(p.cu, p.cu_wide, middle) // size + middle <= unit:
            low = middle
        else:
            high = middle
    return low, (unit - read_index(p.cu, p.cu_wide, low) // size - low) * size
