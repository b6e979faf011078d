"""Products of small float32 matrices in scratch memory, for backward passes.

    out <- scale · old + A B

A is read by single elements with any strides (so it may be a transpose), B and ``out`` by vectors.
Rows come in eights and columns in whole ``WIDTH``s: scratch matrices are padded with zeros. The
order of additions depends on sizes alone.

B is read where it lies. Many rows that are a power of two apart share few sets of a cache, so such
a matrix has rows of ``spaced`` elements.

While products are made, memory has time: with each tile goes a request for one row of something
that will be needed soon (``soon``). All at once they would have to wait for each other.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from sluice.backends.cpu.jit import jit, jit_as, jit_inline
from sluice.backends.cpu.llvm import (
    LANES,
    LINE,
    REGISTERS,
    call_llvm,
    i64,
    load_at,
    rows_of,
    splat_of,
    store_at,
    tile_of,
)
from sluice.backends.cpu.tiles import load_rows, prefetch, store_rows, transposed, zeros

WIDTH = 2 * LANES
"""Columns of a tile."""
ROWS, REST = (12, 8) if REGISTERS >= 32 else (6, 4)
"""Rows of a tile, two vectors each; and of those that take the rows that are left."""
TALL = 2 * ROWS
"""Rows of a tile of one vector each; REST takes what is left."""


@jit_inline
def spaced(n):
    """The row length of a matrix of n columns whose rows are to spread over a cache."""
    return n + LANES


@intrinsic(prefer_literal=True)
def _multiply_add(typingctx, acc, a, at, stride, b, index, width):
    """acc[r, c] + a[at + r stride] b[index + c LANES], for tiles of ``width`` columns."""
    if not isinstance(width, types.IntegerLiteral):
        return None
    count = width.literal_value

    def codegen(context, builder, sig, args):
        sums, base, at, stride, right, index, _ = args
        sums = rows_of(builder, sums)
        columns = [
            load_at(builder, b.code, right, builder.add(index, i64(c * LANES)), LANES)
            for c in range(count)
        ]
        out = []
        for r in range(acc.rows // count):
            x = splat_of(builder, load_at(builder, a.code, base, at))
            for c in range(count):
                old = sums[count * r + c]
                out.append(call_llvm(builder, "fmuladd", old.type, x, columns[c], old))
            at = builder.add(at, stride)
        return tile_of(builder, out)

    kinds = (acc, a, types.int64, types.int64, b, types.int64, width)
    return acc(*kinds), codegen


@intrinsic(prefer_literal=True)
def _add_tile(typingctx, ptr, old, index, stride, factor, tile, width):
    """ptr[index + r stride + c LANES] <- factor · old[the same] + tile[r, c]; 0 reads no old."""
    if not isinstance(width, types.IntegerLiteral):
        return None
    count = width.literal_value

    def codegen(context, builder, sig, args):
        base, source, index, stride, factor, value, _ = args
        vectors = rows_of(builder, value)
        places = [divmod(i, count) for i in range(tile.rows)]
        reads = builder.fcmp_ordered("!=", factor, factor.type(0.0))
        spread = splat_of(builder, factor)

        def where(r, c):
            return builder.add(builder.add(index, builder.mul(stride, i64(r))), i64(c * LANES))

        with builder.if_else(reads) as (then, otherwise):
            with then:
                for (r, c), new in zip(places, vectors, strict=True):
                    at = where(r, c)
                    before = load_at(builder, old.code, source, at, LANES)
                    new = call_llvm(builder, "fmuladd", new.type, spread, before, new)
                    store_at(builder, ptr.code, base, at, new)
            with otherwise:
                for (r, c), new in zip(places, vectors, strict=True):
                    store_at(builder, ptr.code, base, where(r, c), new)
        return context.get_dummy_value()

    kinds = (ptr, old, types.int64, types.int64, types.float32, tile, width)
    return types.void(*kinds), codegen


def _tile(rows, width):
    count = rows * width

    @jit_as("gemm_tile", rows, width)
    def tile(out, old, index, ldo, a, at, row_a, step_a, b, j, ldb, inner, scale):
        acc = zeros(count)
        for t in range(inner):
            acc = _multiply_add(acc, a, at + t * step_a, row_a, b, t * ldb + j, width)
        _add_tile(out, old, index, ldo, scale, acc, width)

    return tile


_many, _rest, _tall, _low = _tile(ROWS, 2), _tile(REST, 2), _tile(TALL, 1), _tile(REST, 1)


@jit_inline
def _in_many(rows):
    """How many rows are taken ROWS at a time, so that the others are a multiple of REST."""
    whole = rows - rows % ROWS
    return whole if (rows - whole) % REST == 0 else whole - ROWS


@jit_inline
def _ask(soon):
    """Ask for the next row."""
    if soon.left > 0:
        soon.left -= 1
        for line in range(soon.at, soon.at + soon.size, LINE):
            prefetch(line, 1, 2)
        soon.at += soon.step


@jit
def gemm(out, old, ldo, a, row_a, step_a, b, ldb, rows, columns, inner, scale, soon):
    """out <- scale old + A B; A[i, t] = a[i row_a + t step_a], B[t, j] = b[t ldb + j].

    ``rows`` is a multiple of 8, ``columns`` one of WIDTH. A ``scale`` of 0 reads no ``old``.
    ``soon`` has the fields ``at``, ``step``, ``size`` (of a row, in bytes) and ``left`` (rows).
    """
    whole = _in_many(rows)
    for j in range(0, columns, WIDTH):
        for i in range(0, whole, ROWS):
            _ask(soon)
            at, here = i * row_a, i * ldo + j
            _many(out, old, here, ldo, a, at, row_a, step_a, b, j, ldb, inner, scale)
        for i in range(whole, rows, REST):
            _ask(soon)
            at, here = i * row_a, i * ldo + j
            _rest(out, old, here, ldo, a, at, row_a, step_a, b, j, ldb, inner, scale)


@jit
def gemm_lower(out, ldo, a, turned, b, ldb, columns, size):
    """out <- out + A B for a lower triangular A [size, size], or its transpose: half the work."""
    row_a, step_a = (1, size) if turned else (size, 1)
    whole = _in_many(size)
    for j in range(0, columns, WIDTH):
        for i in range(0, whole, ROWS):
            first, last = (i, size) if turned else (0, i + ROWS)
            at, there, here = i * row_a + first * step_a, first * ldb + j, i * ldo + j
            n = last - first
            _many(out, out, here, ldo, a, at, row_a, step_a, b, there, ldb, n, 1.0)
        for i in range(whole, size, REST):
            first, last = (i, size) if turned else (0, i + REST)
            at, there, here = i * row_a + first * step_a, first * ldb + j, i * ldo + j
            n = last - first
            _rest(out, out, here, ldo, a, at, row_a, step_a, b, there, ldb, n, 1.0)


@jit
def _column(out, old, ldo, a, row_a, step_a, b, j, ldb, rows, inner, scale):
    """One vector of columns of a product, from column j on."""
    whole = rows - rows % TALL
    for i in range(0, whole, TALL):
        here = i * ldo + j
        _tall(out, old, here, ldo, a, i * row_a, row_a, step_a, b, j, ldb, inner, scale)
    for i in range(whole, rows, REST):
        here = i * ldo + j
        _low(out, old, here, ldo, a, i * row_a, row_a, step_a, b, j, ldb, inner, scale)


@jit
def gemm_by_triangle(out, old, a, row_a, step_a, b, upper, rows, size, scale):
    """out <- scale old + A B for a lower or ``upper`` triangular B [size, size], rows of size."""
    for j in range(0, size, LANES):
        first, last = (0, j + LANES) if upper else (j, size)
        at = a + first * step_a
        b_at, n = b + first * size, last - first
        _column(out, old, size, at, row_a, step_a, b_at, j, size, rows, n, scale)


@jit
def gemm_to_triangle(out, a, row_a, step_a, b, size, inner):
    """out <- A B, its lower triangle [size, size] alone; above it vectors may stay as they are."""
    for j in range(0, size, LANES):
        at, here = a + j * row_a, out + j * size
        _column(here, here, size, at, row_a, step_a, b, j, size, size - j, inner, 0.0)


@jit
def transpose(out, ldo, a, lda, rows, columns):
    """out[j, i] = a[i, j]; both sizes are multiples of LANES."""
    for i in range(0, rows, LANES):
        for j in range(0, columns, LANES):
            store_rows(out, j * ldo + i, ldo, transposed(load_rows(a, i * lda + j, lda, LANES)))
