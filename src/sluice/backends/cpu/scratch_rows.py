"""Rows of tensors, of any storage type, moved to and from float32 scratch memory.

The storage type is a run-time code: one branch per row, so that no kernel is compiled once per
input type. Scratch rows are padded with zeros to whole vectors.
"""

from __future__ import annotations

from sluice.backends.cpu.jit import jit, jit_inline
from sluice.backends.cpu.llvm import BF16, F16, F32, F64, LANES
from sluice.backends.cpu.memory import read_int
from sluice.backends.cpu.simd import fma, get, load, plain_nan, pointer, put, splat, store
from sluice.backends.cpu.tiles import (
    dealt,
    load_rows,
    pick,
    prefetch,
    store_rows,
    total,
)


@jit_inline
def round_up(n, multiple):
    return (n + multiple - 1) // multiple * multiple


@jit_inline
def _copy_in(dst, src, n):
    whole = n - n % LANES
    for i in range(0, whole, LANES):
        store(dst, i, load(src, i))
    if whole < n:
        store(dst, whole, splat(0.0))
        for i in range(whole, n):
            put(dst, i, get(src, i))


@jit_inline
def _copy_out(dst, src, n):
    whole = n - n % LANES
    for i in range(0, whole, LANES):
        store(dst, i, load(src, i))
    for i in range(whole, n):
        put(dst, i, get(src, i))


@jit
def load_row(dst, address, code, index, n):
    """dst[0 : n] = row, then zeros up to a whole vector."""
    if code == F32:
        _copy_in(dst, pointer(address, F32) + index, n)
    elif code == BF16:
        _copy_in(dst, pointer(address, BF16) + index, n)
    elif code == F16:
        _copy_in(dst, pointer(address, F16) + index, n)
    else:
        _copy_in(dst, pointer(address, F64) + index, n)


@jit
def store_row(address, code, index, src, n):
    """row = src[0 : n], rounded once to the row's type."""
    if code == F32:
        _copy_out(pointer(address, F32) + index, src, n)
    elif code == BF16:
        _copy_out(pointer(address, BF16) + index, src, n)
    elif code == F16:
        _copy_out(pointer(address, F16) + index, src, n)
    else:
        _copy_out(pointer(address, F64) + index, src, n)


@jit_inline
def read(address, code, index):
    """One element of any storage type."""
    if code == F32:
        return get(pointer(address, F32), index)
    if code == BF16:
        return get(pointer(address, BF16), index)
    if code == F16:
        return get(pointer(address, F16), index)
    return get(pointer(address, F64), index)


@jit_inline
def write(address, code, index, value):
    """One element of any storage type."""
    if code == F32:
        put(pointer(address, F32), index, value)
    elif code == BF16:
        put(pointer(address, BF16), index, value)
    elif code == F16:
        put(pointer(address, F16), index, value)
    else:
        put(pointer(address, F64), index, value)


@jit_inline
def read_index(address, wide, index):
    """One element of an int32 or (wide) int64 array."""
    if wide:
        return read_int(address, index, 8)
    return read_int(address, index, 4)


@jit_inline
def fill(dst, n, value):
    """dst[0 : n] = value, n a multiple of LANES."""
    for i in range(0, n, LANES):
        store(dst, i, splat(value))


@jit_inline
def fill_tail(row, count):
    """Zeros after the first `count` elements of a row, up to a whole vector."""
    for i in range(count, round_up(count, LANES)):
        put(row, i, 0.0)


@jit_inline
def copy_row(dst, src, n):
    """dst[0 : n] = src[0 : n] between scratch rows, n a multiple of LANES."""
    for i in range(0, n, LANES):
        store(dst, i, load(src, i))


@jit
def deal_row(dst, src, n):
    """src[0 : n] to dst, every two vectors dealt (tiles.py), n a multiple of 2 * LANES."""
    for i in range(0, n, 2 * LANES):
        store_rows(dst, i, LANES, dealt(load_rows(src, i, LANES, 2)))


@jit
def deal_factors(row, n):
    """Deal a row of float32 factors for bfloat16 numbers in place, every NaN made the usual one.

    bfloat16 numbers have no lower 16 bits. So no NaN among sums and products with such factors has
    any, and each stays a NaN when it is rounded like a number.
    """
    for i in range(0, n, 2 * LANES):
        both = dealt(load_rows(row, i, LANES, 2))
        store(row, i, plain_nan(pick(both, 0)))
        store(row, i + LANES, plain_nan(pick(both, 1)))


@jit_inline
def sum_squares(x, n):
    acc = splat(0.0)
    for i in range(0, n, LANES):
        v = load(x, i)
        acc = fma(v, v, acc)
    return total(acc)


@jit_inline
def scale_row(dst, x, n, factor):
    for i in range(0, n, LANES):
        store(dst, i, load(x, i) * factor)


@jit_inline
def prefetch_row(address, code, index, n):
    """Ask for the cache lines of a row that will be needed soon."""
    size = 4 if code == F32 else 2
    start = address + index * size
    for line in range(start, start + n * size, 64):
        prefetch(line, 1, 2)
