"""The convolution over a block of channels, on float32 scratch lines.

A unit of work is some tokens of a block of channels, up to TOKENS at a time. A line holds one
token's inputs of the block. Before the lines of the tokens lie those of the raw inputs before them,
from the state or from x itself. So units do not wait for each other, and one place knows about
storage types, strides and short sequences. Most tokens need no lines: conv_rows.py.

    y_t = act(bias + sum_w weight_w x_(t - W + 1 + w))
"""

from __future__ import annotations

import functools

from sluice.backends.cpu.addressing import NOWHERE
from sluice.backends.cpu.checkpoints import checkpoint, columns
from sluice.backends.cpu.delta import Function
from sluice.backends.cpu.jit import jit, jit_as
from sluice.backends.cpu.llvm import BF16, F16, F32, LANES
from sluice.backends.cpu.memory import allocate, release
from sluice.backends.cpu.scratch_rows import (
    fill,
    load_row,
    read,
    read_index,
    round_up,
    store_row,
    write,
)
from sluice.backends.cpu.simd import fma, get, load, pointer, put, store
from sluice.backends.cpu.struct_view import struct_view
from sluice.backends.cpu.tiles import (
    load_interleaved,
    load_rows,
    prefetch,
    store_interleaved,
    store_rows,
    transposed,
)
from sluice.backends.cpu.vmath import vsilu

TOKENS = 16  # tokens whose lines are held
HEADER = 128  # bytes: room for the record

# start: the first column of a sequence's window, where p.window says; base: the element of the pool
# at which a layer begins
lines = struct_view("lines", "end front width start base", pointers="x y weight bias turned")


@jit
def _take(c, floats):
    start = c.end
    c.end = start + 4 * round_up(floats, LANES)
    return pointer(start, F32)


@jit
def _lay_out(c, address, width, front, W):
    c.end = round_up(address, 64)
    c.front, c.width, c.start, c.base = front, width, 0, 0
    c.x = _take(c, (front + max(front, TOKENS)) * width)  # [front + tokens, width] raw inputs
    c.y = _take(c, TOKENS * width)  # [TOKENS, width] results
    c.weight = _take(c, W * width)  # [W, width]
    c.bias = _take(c, width)  # [width]
    c.turned = _take(c, TOKENS * width)  # [width, TOKENS], where tokens are contiguous
    return c.end


@jit
def make_lines(width, front, W):
    """A thread's scratch memory for blocks of up to `width` channels, and its address."""
    header = allocate(HEADER)
    size = _lay_out(lines(header), 0, width, front, W)
    release(header)
    memory = allocate(HEADER + size + 64)
    c = lines(memory)
    _lay_out(c, memory + HEADER, width, front, W)
    return c, memory


@jit
def _three_in(dst, ld, source, count):
    """[count, 3] to [3, count], whole vectors of it."""
    for i in range(0, count, LANES):
        store_rows(dst, i, ld, load_interleaved(source, 3 * i, 3))


@jit
def _four_in(dst, ld, source, count):
    """[count, 4] to [4, count]."""
    for i in range(0, count, LANES):
        store_rows(dst, i, ld, load_interleaved(source, 4 * i, 4))


@jit
def _columns_in(dst, ld, source, columns, count):
    """[count, columns] to [columns, count], for the three or four columns that windows have."""
    if columns == 3:
        _three_in(dst, ld, source, count)
    else:
        _four_in(dst, ld, source, count)


@jit
def _columns_out(target, columns, src, ld, count):
    """[columns, count] to [count, columns]."""
    for i in range(0, count, LANES):
        if columns == 3:
            store_interleaved(target, 3 * i, load_rows(src, i, ld, 3))
        else:
            store_interleaved(target, 4 * i, load_rows(src, i, ld, 4))


@jit
def load_weights(p, c, column, first, count):
    """Taps and bias of the channels `first` to `first + count`, to columns from `column` on."""
    weight, bias, ld = c.weight + column, c.bias + column, c.width
    whole, n = count - count % LANES, round_up(count, LANES)
    done, at = 0, first * p.weight_d
    if p.W == 4 and p.weight_d == 4 and p.weight_w == 1:
        done = whole
        if p.weight_code == F32:
            _four_in(weight, ld, pointer(p.weight, F32) + at, done)
        elif p.weight_code == BF16:
            _four_in(weight, ld, pointer(p.weight, BF16) + at, done)
        elif p.weight_code == F16:
            _four_in(weight, ld, pointer(p.weight, F16) + at, done)
        else:
            done = 0
    for w in range(p.W):
        for i in range(done, n):
            where = at + i * p.weight_d + w * p.weight_w
            put(weight, w * ld + i, read(p.weight, p.weight_code, where) if i < count else 0.0)
    if p.bias == 0:
        fill(bias, n, 0.0)
    elif p.bias_d == 1:
        load_row(bias, p.bias, p.bias_code, first, count)
    else:
        for i in range(n):
            value = read(p.bias, p.bias_code, (first + i) * p.bias_d) if i < count else 0.0
            put(bias, i, value)


@jit
def front_lines(p):
    """How many lines lie before the tokens: those of a window, or of a square if transposed."""
    return max(p.L, p.W - 1, TOKENS if p.x_d != 1 else 0)


@jit
def start_window(p, c, seq):
    """Note where a sequence's window starts."""
    if p.window != 0:
        c.start = read_index(p.window, p.window_wide, seq)


@jit
def load_window(p, c, column, slot, first, count, fresh):
    """Load the window of channels from `first` on before the tokens; zeros if `fresh`."""
    ld, L = c.width, p.L if p.window == 0 else p.W - 1
    if fresh:
        for l in range(c.front):
            fill(c.x + l * ld + column, round_up(count, LANES), 0.0)
        return
    x = c.x + (c.front - L) * ld + column
    at = c.base + slot * p.conv_p + first * p.conv_d + c.start * p.conv_l
    if p.conv_d == 1:
        for l in range(L):
            load_row(x + l * ld, p.conv, p.conv_code, at + l * p.conv_l, count)
        return
    done = 0
    if (L == 3 or L == 4) and p.conv_l == 1 and p.conv_d == L:
        done = count - count % LANES
        if p.conv_code == F32:
            _columns_in(x, ld, pointer(p.conv, F32) + at, L, done)
        elif p.conv_code == BF16:
            _columns_in(x, ld, pointer(p.conv, BF16) + at, L, done)
        elif p.conv_code == F16:
            _columns_in(x, ld, pointer(p.conv, F16) + at, L, done)
        else:
            done = 0
    for i in range(done, count):
        for l in range(L):
            value = read(p.conv, p.conv_code, at + i * p.conv_d + l * p.conv_l)
            put(x, l * ld + i, value)


@jit
def store_window(p, c, column, tokens, slot, first, count):
    """Store the L lines that end after `tokens` tokens as the window of those channels.

    A left-aligned state gets the tokens and the window before them, without its oldest line.
    """
    ld, L = c.width, p.L
    if p.window != 0:
        L = p.W - 1 + tokens - min(tokens, 1)
    x = c.x + (c.front + tokens - L) * ld + column
    at = c.base + slot * p.conv_p + first * p.conv_d
    if p.conv_d == 1:
        for l in range(L):
            store_row(p.conv, p.conv_code, at + l * p.conv_l, x + l * ld, count)
        return
    done = 0
    if (L == 3 or L == 4) and p.conv_l == 1 and p.conv_d == L:
        done = count - count % LANES
        if p.conv_code == F32:
            _columns_out(pointer(p.conv, F32) + at, L, x, ld, done)
        elif p.conv_code == BF16:
            _columns_out(pointer(p.conv, BF16) + at, L, x, ld, done)
        elif p.conv_code == F16:
            _columns_out(pointer(p.conv, F16) + at, L, x, ld, done)
        else:
            done = 0
    for i in range(done, count):
        for l in range(L):
            write(p.conv, p.conv_code, at + i * p.conv_d + l * p.conv_l, get(x, l * ld + i))


@functools.cache
def _taps(W: int) -> Function:
    """One line of results from the W lines that end at line `last`."""

    @jit_as("taps", W)
    def convolve(c, last, y, n, silu, soon, late, size):
        x, weight, bias, ld = c.x + (last - W + 1) * c.width, c.weight, c.bias, c.width
        for i in range(0, n, LANES):
            prefetch(soon + i * size, 1, 2)
            prefetch(late + i * size, 1, 2)
            total = load(bias, i)
            for w in range(W):
                total = fma(load(weight, w * ld + i), load(x, w * ld + i), total)
            store(y, i, vsilu(total) if silu else total)

    return convolve


TAPS2, TAPS3, TAPS4 = _taps(2), _taps(3), _taps(4)


@jit
def convolve(p, c, tokens, count, soon, soon_t, late, late_t):
    """The results of the tokens after the window, one line of c.y each.

    Tokens lie pages apart. So while one line is computed, memory is asked for elements from `soon`
    on, which are needed next, and from `late` on, where results will go. `soon_t` and `late_t` are
    the distances from token to token.
    """
    n, size = round_up(count, LANES), 4 if p.io == F32 else 2
    for t in range(tokens):
        y, last = c.y + t * c.width, c.front + t
        near, far = soon + t * soon_t * size, late + t * late_t * size
        if p.W == 4:
            TAPS4(c, last, y, n, p.silu, near, far, size)
        elif p.W == 3:
            TAPS3(c, last, y, n, p.silu, near, far, size)
        else:
            TAPS2(c, last, y, n, p.silu, near, far, size)


# -- tokens between memory and lines ------------------------------------------------------------


@jit
def _squares_in(dst, ld, source, stride, count):
    """[channels, TOKENS] of contiguous tokens to lines, in squares of LANES."""
    for i in range(0, count, LANES):
        for t in range(0, TOKENS, LANES):
            square = transposed(load_rows(source, i * stride + t, stride, LANES))
            store_rows(dst, t * ld + i, ld, square)


@jit
def _squares_out(target, src, ld, stride, count):
    """Lines to [channels, TOKENS] of contiguous tokens."""
    for i in range(0, count, LANES):
        for t in range(0, TOKENS, LANES):
            square = transposed(load_rows(src, t * ld + i, ld, LANES))
            store_rows(target, i * stride + t, stride, square)


@jit
def load_lines(p, c, line, column, at, tokens, count):
    """Load tokens of a block of channels, from element `at` of x on, to lines from `line` on."""
    x, ld = c.x + line * c.width + column, c.width
    if p.x_d == 1:
        for t in range(tokens):
            load_row(x + t * ld, p.x, p.io, at + t * p.x_t, count)
        return
    done = 0
    if p.x_t == 1 and tokens == TOKENS:
        done = count - count % LANES
        if p.io == F32:
            _squares_in(x, ld, pointer(p.x, F32) + at, p.x_d, done)
        else:
            for i in range(done):
                load_row(c.turned + i * TOKENS, p.x, p.io, at + i * p.x_d, TOKENS)
            _squares_in(x, ld, c.turned, TOKENS, done)
    for i in range(done, count):
        for t in range(tokens):
            put(x, t * ld + i, read(p.x, p.io, at + i * p.x_d + t * p.x_t))


@jit
def store_lines(p, c, at, tokens, count):
    """Store the results of a block of channels, from element `at` of y on."""
    y, ld = c.y, c.width
    if p.y_d == 1:
        for t in range(tokens):
            store_row(p.y, p.io, at + t * p.y_t, y + t * ld, count)
        return
    done = 0
    if p.y_t == 1 and tokens == TOKENS:
        done = count - count % LANES
        if p.io == F32:
            _squares_out(pointer(p.y, F32) + at, y, ld, p.y_d, done)
        else:
            _squares_out(c.turned, y, ld, TOKENS, done)
            for i in range(done):
                store_row(p.y, p.io, at + i * p.y_d, c.turned + i * TOKENS, TOKENS)
    for i in range(done, count):
        for t in range(tokens):
            write(p.y, p.io, at + i * p.y_d + t * p.y_t, get(y, t * ld + i))


# -- passes -------------------------------------------------------------------------------------


@jit
def load_pass(p, c, read_slot, at, t0, tokens, first, count):
    """Load the lines before token t0, and the tokens.

    `at` is the element of x where the sequence's first token begins.
    """
    if t0 == 0:
        load_window(p, c, 0, read_slot, first, count, read_slot == NOWHERE or p.conv == 0)
    else:
        before = p.W - 1 if p.x_d == 1 else TOKENS
        load_lines(p, c, c.front - before, 0, at + (t0 - before) * p.x_t, before, count)
    load_lines(p, c, c.front, 0, at + t0 * p.x_t, tokens, count)


@jit
def _window_after(p, c, read_slot, at, tokens, first, count):
    """Load the lines of the window after `tokens` tokens; returns the tokens for store_window."""
    if tokens >= p.L:
        load_lines(p, c, c.front, 0, at + (tokens - p.L) * p.x_t, p.L, count)
        return p.L
    load_window(p, c, 0, read_slot, first, count, read_slot == NOWHERE)
    load_lines(p, c, c.front, 0, at, tokens, count)
    return tokens


@jit
def keep_windows(p, c, seq, read_slot, write_slot, at, T, first, count):
    """Store the window after the last token, and at checkpoints.

    The unit of a sequence's first token does this, when its lines are loaded: no other unit reads
    the state that it replaces.
    """
    if p.conv == 0 or p.freeze:
        return
    if p.checkpoints != 0:
        begin, end = columns(p, 0, T)
        for column in range(begin, end):
            position, slot = checkpoint(p, seq, column)
            if position <= T and slot > p.pad:
                tokens = position
                if T > TOKENS:
                    tokens = _window_after(p, c, read_slot, at, position, first, count)
                store_window(p, c, 0, tokens, slot, first, count)
    if write_slot != NOWHERE:
        tokens = T
        if p.window != 0 and T > TOKENS:
            load_window(p, c, 0, read_slot, first, count, read_slot == NOWHERE)
            load_lines(p, c, c.front, 0, at, T, count)
        elif T > TOKENS:
            tokens = _window_after(p, c, read_slot, at, T, first, count)
        store_window(p, c, 0, tokens, write_slot, first, count)
