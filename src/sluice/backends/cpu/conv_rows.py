"""The convolution straight from x, for tokens whose inputs before them are in x as well.

Four tokens of a block of channels are taken at a time: seven rows of inputs serve four rows of
results, and taps are loaded once for all of them. Nothing is copied to scratch memory before.

    y_t = act(bias + sum_w weight_w x_(t - W + 1 + w))
"""

from __future__ import annotations

import functools

from sluice.backends.cpu.delta import Function
from sluice.backends.cpu.jit import jit, jit_as
from sluice.backends.cpu.llvm import BF16, ELEMENT_BYTES, F16, F32, LANES
from sluice.backends.cpu.products import taps
from sluice.backends.cpu.simd import load, pointer, store
from sluice.backends.cpu.tiles import load_rows, pick, prefetch
from sluice.backends.cpu.vmath import vsilu

TAPS = 4  # the W of every model
GROUP = 4  # tokens at a time
PAIR = 2 * LANES  # channels of one pass


@functools.cache
def _group(code: int) -> Function:
    """GROUP rows of float32 results at y from the rows at x, the first of which is TAPS - 1 before.

    `soon` is the address of the inputs that are needed next, row by row as far apart as x's.
    """
    size, taken = ELEMENT_BYTES[code], GROUP + TAPS - 1

    @jit_as("conv_group", code)
    def group(c, x, x_t, y, y_t, n, silu, soon):
        weight, bias, ld = c.weight, c.bias, c.width
        for i in range(0, n, PAIR):
            for r in range(GROUP):
                prefetch(soon + (r * x_t + i) * size, 1, 2)
            for j in range(i, i + PAIR, LANES):
                inputs = load_rows(x, j, x_t, taken)
                total = taps(inputs, load_rows(weight, j, ld, TAPS), load(bias, j))
                if silu:
                    store(y, j, vsilu(pick(total, 0)))
                    store(y, j + y_t, vsilu(pick(total, 1)))
                    store(y, j + 2 * y_t, vsilu(pick(total, 2)))
                    store(y, j + 3 * y_t, vsilu(pick(total, 3)))
                else:
                    store(y, j, pick(total, 0))
                    store(y, j + y_t, pick(total, 1))
                    store(y, j + 2 * y_t, pick(total, 2))
                    store(y, j + 3 * y_t, pick(total, 3))

    return group


GROUP_F32, GROUP_BF16, GROUP_F16 = _group(F32), _group(BF16), _group(F16)


@jit
def serves_rows(p, count):
    """Whether `convolve_rows` serves blocks of `count` channels."""
    return p.W == TAPS and p.x_d == 1 and count % PAIR == 0


@jit
def convolve_rows(p, c, at, t0, tokens, count, next_at, y, y_t):
    """Results of the tokens from t0 on, at least GROUP of them, to float32 rows at y.

    `at` is the element of x where the sequence's first token begins, `next_at` the one whose rows
    are needed after these.
    """
    size = ELEMENT_BYTES[p.io]
    for g in range(0, tokens, GROUP):
        t = min(g, tokens - GROUP)  # the last group may take some tokens again
        row = at + (t0 + t - TAPS + 1) * p.x_t
        soon = row + (TAPS - 1 + GROUP) * p.x_t if g + GROUP < tokens else next_at
        soon = p.x + soon * size
        to = y + t * y_t
        if p.io == F32:
            GROUP_F32(c, pointer(p.x, F32) + row, p.x_t, to, y_t, count, p.silu, soon)
        elif p.io == BF16:
            GROUP_BF16(c, pointer(p.x, BF16) + row, p.x_t, to, y_t, count, p.silu, soon)
        else:
            GROUP_F16(c, pointer(p.x, F16) + row, p.x_t, to, y_t, count, p.silu, soon)
