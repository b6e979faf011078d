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
from sluice.backends.cpu.llvm import BF16, ELEMENT_BYTES, F16, F32, LANES, LINE
from sluice.backends.cpu.memory import address_of
from sluice.backends.cpu.products import taps
from sluice.backends.cpu.scratch_rows import deal_factors
from sluice.backends.cpu.simd import load, pointer
from sluice.backends.cpu.tiles import (
    STREAMS,
    column,
    gathered,
    load_rows,
    load_runs,
    prefetch,
    store_rows,
    store_runs,
    stream_runs,
)
from sluice.backends.cpu.vmath import ROWS, silu_rows

TAPS = 4  # the W of every model
GROUP = 4  # tokens at a time
PAIR = 2 * LANES  # channels of one pass


@jit_inline
def _put(y, at, y_t, rows):
    """Store rows of pairs of vectors; a NaN among dealt ones stays one (`deal_factors`)."""
    store_runs(y, at, y_t, rows, ROWS, 1)


@jit_inline
def _put_gathered(y, at, y_t, rows):
    store_runs(y, at, y_t, gathered(rows), ROWS, 0)


@functools.cache
def _group(code: int, out: int) -> Function:
    """GROUP rows of results at y from the rows at x, the first of which is TAPS - 1 before.

    Sums go to the scratch rows `raw`, and from there through the activation to y, which may be
    these rows. One loop for both needs twice as many registers as some machines have.

    `soon` is the address of the inputs that are needed next, row by row as far apart as x's, and
    `late` that of rows `late_t` bytes apart where results will go next. With `past`, y is a
    multiple of cache lines, and results go to memory past the caches: nothing has to be read
    before they are written.
    """
    size, taken = ELEMENT_BYTES[code], GROUP + TAPS - 1
    lines = max(PAIR * size // LINE, 1)
    put = _put_gathered if code == BF16 and out == F32 else _put
    copied, streams = code == BF16, STREAMS and code == out

    @jit_as("conv_group", code, out)
    def group(c, x, x_t, raw, y, y_t, n, silu, soon, late, late_t, past):
        weight, bias, ld, last = c.weight, c.bias, c.width, c.weight + LANES
        for i in range(0, n, PAIR):
            for r in range(GROUP):
                prefetch(soon + (r * x_t + i) * size, lines, 2)
            inputs = load_runs(x, i, x_t, taken, 2)
            a = taps(column(inputs, 0, 2), load_rows(weight, i, ld, TAPS), load(bias, i))
            j = i + LANES
            b = taps(column(inputs, 1, 2), load_rows(last, i, ld, TAPS), load(bias, j))
            store_rows(raw, i, ld, a)
            store_rows(raw, j, ld, b)
        for r in range(0, GROUP, ROWS):
            if silu and past and streams:
                for i in range(0, n, PAIR):
                    made = silu_rows(load_runs(raw, r * ld + i, ld, ROWS, 2))
                    stream_runs(y, r * y_t + i, y_t, made, ROWS)
            elif silu:
                for i in range(0, n, PAIR):
                    for j in range(r, r + ROWS):
                        prefetch(late + j * late_t + i * size, lines, 2)
                    put(y, r * y_t + i, y_t, silu_rows(load_runs(raw, r * ld + i, ld, ROWS, 2)))
            elif copied or address_of(y) != address_of(raw):
                for i in range(0, n, PAIR):
                    for j in range(r, r + ROWS):
                        prefetch(late + j * late_t + i * size, lines, 2)
                    put(y, r * y_t + i, y_t, load_runs(raw, r * ld + i, ld, ROWS, 2))

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
    """Results of the tokens from t0 on, at least GROUP of them, to rows at the address `to`.

    `at` is the element of x where the sequence's first token begins, `next_at` the one whose rows
    are needed after these. Rows of results are `y_t` elements apart. With `lines` they go to
    float32 lines first, from where the caller takes them; else float16 is not served.
    """
    size = ELEMENT_BYTES[p.io]
    late_t = y_t * size
    past = p.far and to % LINE == 0 and late_t % LINE == 0
    for g in range(0, tokens, GROUP):
        t = min(g, tokens - GROUP)  # the last group may take some tokens again
        row = at + (t0 + t - TAPS + 1) * p.x_t
        soon = row + (TAPS - 1 + GROUP) * p.x_t if g + GROUP < tokens else next_at
        soon = p.x + soon * size
        late, raw = to + (t + GROUP) * late_t, c.y + t * c.width
        if p.io == F32 and lines:
            x = pointer(p.x, F32) + row
            GROUP_F32(c, x, p.x_t, raw, raw, c.width, count, p.silu, soon, late, late_t, 0)
        elif p.io == F32:
            x, y = pointer(p.x, F32) + row, pointer(to, F32) + t * y_t
            GROUP_F32(c, x, p.x_t, raw, y, y_t, count, p.silu, soon, late, late_t, past)
        elif p.io == BF16 and lines:
            half = pointer(p.x, BF16) + row
            GROUP_BF16_LINES(
                c, half, p.x_t, raw, raw, c.width, count, p.silu, soon, late, late_t, 0
            )
        elif p.io == BF16:
            half, short = pointer(p.x, BF16) + row, pointer(to, BF16) + t * y_t
            GROUP_BF16(c, half, p.x_t, raw, short, y_t, count, p.silu, soon, late, late_t, past)
        else:
            small = pointer(p.x, F16) + row
            GROUP_F16(c, small, p.x_t, raw, raw, c.width, count, p.silu, soon, late, late_t, 0)
