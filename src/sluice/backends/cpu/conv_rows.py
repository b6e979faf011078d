"""The convolution straight from x, for tokens whose inputs before them are in x as well.

Four tokens of a block of channels are taken at a time: seven rows of inputs serve four rows of
results, and taps are loaded once for all of them. Nothing is copied to scratch memory before, and
what needs no norm is written to memory at once. bfloat16 comes dealt (tiles.py), and so do taps.

    y_t = act(bias + sum_w weight_w x_(t - W + 1 + w))
"""

from __future__ import annotations

import functools

from sluice.backends.cpu.delta import Function
from sluice.backends.cpu.jit import jit, jit_as, jit_inline
from sluice.backends.cpu.llvm import BF16, ELEMENT_BYTES, F16, F32, LANES
from sluice.backends.cpu.memory import address_of
from sluice.backends.cpu.products import taps
from sluice.backends.cpu.scratch_rows import deal_factors
from sluice.backends.cpu.simd import load, pointer
from sluice.backends.cpu.tiles import (
    column,
    gathered,
    load_rows,
    load_runs,
    pair,
    pick,
    prefetch,
    store_rows,
    store_runs,
)
from sluice.backends.cpu.vmath import vsilu

TAPS = 4  # the W of every model
GROUP = 4  # tokens at a time
PAIR = 2 * LANES  # channels of one pass


@jit_inline
def _put(y, at, both):
    """Store a pair of vectors; a NaN among dealt ones stays one (`deal_factors`)."""
    store_runs(y, at, 0, both, 1, 1)


@jit_inline
def _put_gathered(y, at, both):
    store_runs(y, at, 0, gathered(both), 1, 0)


@functools.cache
def _group(code: int, out: int) -> Function:
    """GROUP rows of results at y from the rows at x, the first of which is TAPS - 1 before.

    Sums go to the scratch rows `raw`, and from there through the activation to y, which may be
    these rows. One loop for both needs twice as many registers as some machines have.

    `soon` is the address of the inputs that are needed next, row by row as far apart as x's, and
    `late` that of y.
    """
    size, size_out, taken = ELEMENT_BYTES[code], ELEMENT_BYTES[out], GROUP + TAPS - 1
    put = _put_gathered if code == BF16 and out == F32 else _put
    copied = code == BF16

    @jit_as("conv_group", code, out)
    def group(c, x, x_t, raw, y, y_t, n, silu, soon, late):
        weight, bias, ld, last = c.weight, c.bias, c.width, c.weight + LANES
        for i in range(0, n, PAIR):
            for r in range(GROUP):
                prefetch(soon + (r * x_t + i) * size, 1, 2)
                prefetch(late + (r * y_t + i) * size_out, 1, 2)
            inputs = load_runs(x, i, x_t, taken, 2)
            a = taps(column(inputs, 0, 2), load_rows(weight, i, ld, TAPS), load(bias, i))
            j = i + LANES
            b = taps(column(inputs, 1, 2), load_rows(last, i, ld, TAPS), load(bias, j))
            store_rows(raw, i, ld, a)
            store_rows(raw, j, ld, b)
        if silu:
            for r in range(GROUP):
                for i in range(0, n, PAIR):
                    both = load_rows(raw, r * ld + i, LANES, 2)
                    put(y, r * y_t + i, pair(vsilu(pick(both, 0)), vsilu(pick(both, 1))))
        elif copied or late != address_of(raw):
            for r in range(GROUP):
                for i in range(0, n, PAIR):
                    put(y, r * y_t + i, load_rows(raw, r * ld + i, LANES, 2))

    return group


GROUP_F32, GROUP_F16 = _group(F32, F32), _group(F16, F32)
GROUP_BF16, GROUP_BF16_LINES = _group(BF16, BF16), _group(BF16, F32)


@jit
def serves_rows(p, count):
    """Whether `convolve_rows` serves blocks of `count` channels."""
    return p.W == TAPS and p.x_d == 1 and count % PAIR == 0


@jit
def deal_taps(p, c, count):
    """Bring taps into the order in which `convolve_rows` gets its inputs."""
    if p.io == BF16:
        for w in range(TAPS):
            deal_factors(c.weight + w * c.width, count)
        deal_factors(c.bias, count)


@jit
def convolve_rows(p, c, at, t0, tokens, count, next_at, to, y_t, lines):
    """Results of the tokens from t0 on, at least GROUP of them, to rows from address `to` on.

    `at` is the element of x where the sequence's first token begins, `next_at` the one whose rows
    are needed after these. With `lines` results are float32, else of the type of x, not float16.
    """
    size = ELEMENT_BYTES[p.io]
    for g in range(0, tokens, GROUP):
        t = min(g, tokens - GROUP)  # the last group may take some tokens again
        row, out = at + (t0 + t - TAPS + 1) * p.x_t, t * y_t
        soon = row + (TAPS - 1 + GROUP) * p.x_t if g + GROUP < tokens else next_at
        soon = p.x + soon * size
        late, raw = to + out * (4 if lines else size), c.y + t * c.width
        if p.io == F32:
            x, y = pointer(p.x, F32) + row, pointer(to, F32) + out
            GROUP_F32(c, x, p.x_t, raw, y, y_t, count, p.silu, soon, late)
        elif p.io == BF16 and lines:
            half, y = pointer(p.x, BF16) + row, pointer(to, F32) + out
            GROUP_BF16_LINES(c, half, p.x_t, raw, y, y_t, count, p.silu, soon, late)
        elif p.io == BF16:
            half, short = pointer(p.x, BF16) + row, pointer(to, BF16) + out
            GROUP_BF16(c, half, p.x_t, raw, short, y_t, count, p.silu, soon, late)
        else:
            small, y = pointer(p.x, F16) + row, pointer(to, F32) + out
            GROUP_F16(c, small, p.x_t, raw, y, y_t, count, p.silu, soon, late)
