"""Checkpoints of hopper_state_kernel: states inside the sequence, kept in slots of the pool.

A checkpoint after a whole number of chunks is the state that the chain has there, stored while the
tensor cores work on the next chunk.

Any other checkpoint has a *tail*: the tokens of its last chunk that come before it. They run as in
a call that ended there. The parallel half makes Ag of the tail alone. The state at the border of
the chunk waits in float32, in the checkpoint's own slot if the pool is float32, else in the
workspace. Tails run after the last chunk.
"""

# ruff: noqa: RET505 (constexpr branches stay if/else)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sluice.backends.hopper.kernels.constants import C
from sluice.backends.hopper.kernels.gluon_api import aggregate


@aggregate
class Checkpoints:
    """The checkpoints of one sequence, and an item's place in it. All None: there are none."""

    slots_ptr: gl.tensor | gl.constexpr  # [M]
    positions_ptr: gl.tensor | gl.constexpr  # [M]; None: after every ``every`` tokens
    every: gl.tensor | gl.constexpr
    number: gl.tensor | gl.constexpr  # M
    before: gl.tensor | gl.constexpr  # tokens of the sequence before the item's first
    tokens: gl.tensor | gl.constexpr  # of the item
    tail_row: gl.tensor | gl.constexpr  # where the sequence's tails begin in the workspace
    state_ptr: gl.tensor | gl.constexpr  # the head's states
    stride_state_p: gl.tensor | gl.constexpr
    pad_slot: gl.tensor | gl.constexpr
    waiting_ptr: gl.tensor | gl.constexpr  # the head's waiting states; None: they wait in slots
    stride_waiting: gl.tensor | gl.constexpr
    TAILS: gl.constexpr  # whether there may be tails


@aggregate
class PoolCheckpoints:
    """The checkpoints of all sequences. All None: there are none."""

    slots_ptr: gl.tensor | gl.constexpr  # [N, M]
    positions_ptr: gl.tensor | gl.constexpr  # [N, M]
    every: gl.tensor | gl.constexpr
    number: gl.tensor | gl.constexpr  # M
    state_ptr: gl.tensor | gl.constexpr
    stride_state_p: gl.tensor | gl.constexpr
    pad_slot: gl.tensor | gl.constexpr
    waiting_ptr: gl.tensor | gl.constexpr  # [N, M, HV, V, K]
    HV: gl.tensor | gl.constexpr
    N: gl.tensor | gl.constexpr
    rows: gl.tensor | gl.constexpr  # of the workspace
    TAILS: gl.constexpr


@gluon.jit
def checkpoints_of(saves, seq, before, tokens, head_v, VK: gl.constexpr):
    """Those of one item. Offsets in int64: P * HV * V * K passes 2**31 at 4,096 slots."""
    if saves.slots_ptr is None:
        return Checkpoints(
            None, None, None, None, None, None, None, None, None, None, None, None, False
        )  # fmt: skip
    else:
        of = gl.minimum(seq, saves.N - 1).to(gl.int64) * saves.number
        stride_waiting = saves.HV.to(gl.int64) * VK
        if saves.positions_ptr is None:
            positions_ptr: gl.constexpr = None
        else:
            positions_ptr = saves.positions_ptr + of
        if saves.waiting_ptr is None:
            waiting_ptr: gl.constexpr = None
        else:
            waiting_ptr = saves.waiting_ptr + of * stride_waiting + head_v * VK
        return Checkpoints(
            slots_ptr=saves.slots_ptr + of, positions_ptr=positions_ptr,
            every=saves.every, number=saves.number, before=before, tokens=tokens,
            tail_row=saves.rows - (saves.N - seq) * saves.number * C,
            state_ptr=saves.state_ptr + head_v * VK, stride_state_p=saves.stride_state_p,
            pad_slot=saves.pad_slot, waiting_ptr=waiting_ptr, stride_waiting=stride_waiting,
            TAILS=saves.TAILS,
        )  # fmt: skip


@gluon.jit
def token_of(saves, j):
    """How many of the program's tokens come before checkpoint j; -1 if another program makes it."""
    if saves.positions_ptr is None:
        at = (j + 1) * saves.every - saves.before
    else:
        at = gl.load(saves.positions_ptr + j).to(gl.int32) - saves.before
    mine = (at <= saves.tokens) & ((at > 0) | ((at == 0) & (saves.before == 0)))
    return gl.where(mine, at, -1)


@gluon.jit
def candidates(saves, first, last):
    """The numbers of checkpoints that may come after ``first`` to ``last`` of its tokens."""
    if saves.positions_ptr is None:
        begin = gl.maximum((saves.before + first + saves.every - 1) // saves.every, 1) - 1
        return begin, gl.minimum((saves.before + last) // saves.every, saves.number)
    else:
        return saves.number * 0, saves.number


@gluon.jit
def next_border(saves, chunk):
    """The first chunk after ``chunk`` before which a state is kept."""
    border = saves.tokens // C + 1
    if saves.positions_ptr is None:
        first = saves.before + (chunk + 1) * C
        position = gl.maximum((first + saves.every - 1) // saves.every, 1) * saves.every
        border = gl.minimum(border, (position - saves.before) // C)
    else:
        for j in range(saves.number):
            here = token_of(saves, j) // C
            border = gl.where(here > chunk, gl.minimum(border, here), border)
    return border


@gluon.jit
def tail_of(saves, j):
    """The tail of checkpoint j: the chunks before it, and its tokens; 0 if it has none."""
    at = gl.maximum(token_of(saves, j), 0)
    return at // C, at % C


@gluon.jit
def slot_of(saves, j):
    """Where checkpoint j lies, and whether it is kept at all."""
    slot = gl.load(saves.slots_ptr + j).to(gl.int64)
    return saves.state_ptr + slot * saves.stride_state_p, slot > saves.pad_slot


@gluon.jit
def first_saved(saves):
    """The program's first checkpoint between chunks, and the chunks before it; without tails."""
    saved = saves.before // saves.every
    return saved, ((saved + 1) * saves.every - saves.before) // C


@gluon.jit
def slot_ahead(saves, saved, on):
    """The slot of checkpoint ``saved``, loaded before it is needed."""
    on = on & (saved < saves.number)
    return gl.load(saves.slots_ptr + saved, mask=on, other=0)


@gluon.jit
def waiting_at(saves, j, saved_ptr):
    """Where the state before the tail of checkpoint j waits."""
    if saves.waiting_ptr is None:
        return saved_ptr
    else:
        return saves.waiting_ptr + j.to(gl.int64) * saves.stride_waiting
