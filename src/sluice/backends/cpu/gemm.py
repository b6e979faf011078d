"""Products of small float32 matrices in scratch memory, for backward passes.

    out <- scale · out + A B

A is read by single elements with any strides (so it may be a transpose), B and ``out`` by vectors.
Rows come in pairs and columns in whole ``WIDTH``s: scratch matrices are padded with zeros. The
order of additions depends on sizes alone.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from sluice.backends.cpu.jit import jit, jit_as
from sluice.backends.cpu.llvm import (
    LANES,
    REGISTERS,
    call_llvm,
    i64,
    load_at,
    rows_of,
    splat_of,
    store_at,
    tile_of,
)
from sluice.backends.cpu.tiles import load_rows, store_rows, transposed, zeros

WIDTH = 2 * LANES
"""Columns of a tile."""
ROWS = 12 if REGISTERS >= 32 else 6
"""Rows of a tile; two vectors each."""


@intrinsic
def _multiply_add(typingctx, acc, a, at, stride, b, index):
    """acc[r, c] + a[at + r stride] b[index + c LANES], for tiles of two columns."""
    rows = acc.rows // 2

    def codegen(context, builder, sig, args):
        sums, base, at, stride, right, index = args
        sums = rows_of(builder, sums)
        columns = [
            load_at(builder, b.code, right, builder.add(index, i64(c * LANES)), LANES)
            for c in range(2)
        ]
        out = []
        for r in range(rows):
            x = splat_of(builder, load_at(builder, a.code, base, at))
            for c in range(2):
                old = sums[2 * r + c]
                out.append(call_llvm(builder, "fmuladd", old.type, x, columns[c], old))
            at = builder.add(at, stride)
        return tile_of(builder, out)

    kinds = (acc, a, types.int64, types.int64, b, types.int64)
    return acc(*kinds), codegen


@intrinsic
def _add_tile(typingctx, ptr, index, stride, factor, tile):
    """ptr[index + r stride + c LANES] <- factor · itself + tile[r, c]; a factor of 0 reads none."""
    rows = tile.rows // 2

    def codegen(context, builder, sig, args):
        base, index, stride, factor, value = args
        vectors = rows_of(builder, value)
        reads = builder.fcmp_ordered("!=", factor, factor.type(0.0))
        spread = splat_of(builder, factor)
        with builder.if_else(reads) as (then, otherwise):
            with then:
                at = index
                for r in range(rows):
                    for c in range(2):
                        where = builder.add(at, i64(c * LANES))
                        old = load_at(builder, ptr.code, base, where, LANES)
                        new = vectors[2 * r + c]
                        new = call_llvm(builder, "fmuladd", new.type, spread, old, new)
                        store_at(builder, ptr.code, base, where, new)
                    at = builder.add(at, stride)
            with otherwise:
                at = index
                for r in range(rows):
                    for c in range(2):
                        where = builder.add(at, i64(c * LANES))
                        store_at(builder, ptr.code, base, where, vectors[2 * r + c])
                    at = builder.add(at, stride)
        return context.get_dummy_value()

    kinds = (ptr, types.int64, types.int64, types.float32, tile)
    return types.void(*kinds), codegen


def _tile(rows):
    count = 2 * rows

    @jit_as("gemm_tile", rows)
    def tile(out, index, ldo, a, at, row_a, step_a, b, j, ldb, inner, scale):
        acc = zeros(count)
        for t in range(inner):
            acc = _multiply_add(acc, a, at + t * step_a, row_a, b, t * ldb + j)
        _add_tile(out, index, ldo, scale, acc)

    return tile


_many, _two = _tile(ROWS), _tile(2)


@jit
def _pack(panel, b, j, ldb, inner):
    """WIDTH columns of B side by side: rows of a power of two apart would share few cache sets."""
    for t in range(inner):
        store_rows(panel, t * WIDTH, LANES, load_rows(b, t * ldb + j, LANES, 2))


@jit
def gemm(out, ldo, a, row_a, step_a, b, ldb, rows, columns, inner, scale, panel):
    """out <- scale out + A B; A[i, t] = a[i row_a + t step_a], B[t, j] = b[t ldb + j].

    ``rows`` is even, ``columns`` a multiple of WIDTH, ``panel`` scratch of inner · WIDTH.
    """
    whole = rows - rows % ROWS
    for j in range(0, columns, WIDTH):
        _pack(panel, b, j, ldb, inner)
        for i in range(0, whole, ROWS):
            at = i * row_a
            _many(out, i * ldo + j, ldo, a, at, row_a, step_a, panel, 0, WIDTH, inner, scale)
        for i in range(whole, rows, 2):
            at = i * row_a
            _two(out, i * ldo + j, ldo, a, at, row_a, step_a, panel, 0, WIDTH, inner, scale)


@jit
def gemm_lower(out, ldo, a, turned, b, ldb, columns, scale, panel, size):
    """The same for a lower triangular A [size, size], or its transpose: half of the work."""
    row_a, step_a = (1, size) if turned else (size, 1)
    for j in range(0, columns, WIDTH):
        _pack(panel, b, j, ldb, size)
        for i in range(0, size - size % ROWS, ROWS):
            first, last = (i, size) if turned else (0, i + ROWS)
            at = i * row_a + first * step_a
            there = panel + first * WIDTH
            _many(out, i * ldo + j, ldo, a, at, row_a, step_a, there, 0, WIDTH, last - first, scale)
        for i in range(size - size % ROWS, size, 2):
            first, last = (i, size) if turned else (0, i + 2)
            at = i * row_a + first * step_a
            there = panel + first * WIDTH
            _two(out, i * ldo + j, ldo, a, at, row_a, step_a, there, 0, WIDTH, last - first, scale)


@jit
def transpose(out, ldo, a, lda, rows, columns):
    """out[j, i] = a[i, j]; both sizes are multiples of LANES."""
    for i in range(0, rows, LANES):
        for j in range(0, columns, LANES):
            store_rows(out, j * ldo + i, ldo, transposed(load_rows(a, i * lda + j, lda, LANES)))
