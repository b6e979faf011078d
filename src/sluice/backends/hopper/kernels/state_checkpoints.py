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
    """The checkpoints of one sequence, and the program's place in it. All None: there are none."""

    slots_ptr: gl.tensor | gl.constexpr  # [M]
    positions_ptr: gl.tensor | gl.constexpr  # [M]; None: after every ``every`` tokens
    every: gl.tensor | gl.constexpr
    number: gl.tensor | gl.constexpr  # M
    before: gl.tensor | gl.constexpr  # tokens of the sequence before the program's first
    tokens: gl.tensor | gl.constexpr  # of the program
    tail_row: gl.tensor | gl.constexpr  # where the sequence's tails begin in the workspace
    state_ptr: gl.tensor | gl.constexpr  # the head's states
    stride_state_p: gl.tensor | gl.constexpr
    pad_slot: gl.tensor | gl.constexpr
    waiting_ptr: gl.tensor | gl.constexpr  # the head's waiting states; None: they wait in slots
    stride_waiting: gl.tensor | gl.constexpr
    TAILS: gl.constexpr  # whether there may be tails


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
