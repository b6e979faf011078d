"""Tiles of vectors held in registers: loads, stores, reductions, transposes.

A tile of R x C vectors is row major. Shapes are compile-time constants; every operation is unrolled
while the LLVM IR is built, so a kernel that carries a tile through a loop keeps it in registers.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sluice.backends.cpu.llvm import (
    LANES,
    LINE,
    i64,
    load_at,
    load_run,
    prefetch_at,
    rows_of,
    shuffle,
    splat_of,
    store_at,
    store_run,
    tile_of,
    vector_type,
)
from sluice.backends.cpu.simd import Tile, Vec

STREAMS = 4 * LANES == LINE  # a vector is a whole cache line


def _const_int(*kinds):
    return all(isinstance(t, types.IntegerLiteral) for t in kinds)


@intrinsic(prefer_literal=True)
def zeros(typingctx, rows):
    """A tile of zeros."""
    if not _const_int(rows):
        return None
    n = rows.literal_value

    def codegen(context, builder, sig, args):
        return ir.Constant(ir.ArrayType(vector_type(LANES), n), None)

    return Tile(n)(rows), codegen


@intrinsic(prefer_literal=True)
def load_rows(typingctx, ptr, index, stride, rows):
    """LANES elements from each of `index + r * stride`."""
    if not _const_int(rows):
        return None
    n = rows.literal_value

    def codegen(context, builder, sig, args):
        base, index, stride, _ = args
        out = []
        for _r in range(n):
            out.append(load_at(builder, ptr.code, base, index, LANES))
            index = builder.add(index, stride)
        return tile_of(builder, out)

    return Tile(n)(ptr, types.int64, types.int64, rows), codegen


@intrinsic
def store_rows(typingctx, ptr, index, stride, tile):
    """Store row r of the tile at `index + r * stride`."""

    def codegen(context, builder, sig, args):
        base, index, stride, value = args
        for vector in rows_of(builder, value):
            store_at(builder, ptr.code, base, index, vector)
            index = builder.add(index, stride)
        return context.get_dummy_value()

    return types.void(ptr, types.int64, types.int64, tile), codegen


@intrinsic(prefer_literal=True)
def load_runs(typingctx, ptr, index, stride, rows, count):
    """`count` vectors of consecutive elements from each of `index + r * stride`.

    Pairs of vectors of bfloat16 come dealt: see `dealt`.
    """
    if not _const_int(rows, count):
        return None
    R, C = rows.literal_value, count.literal_value

    def codegen(context, builder, sig, args):
        base, index, stride = args[:3]
        out = []
        for _r in range(R):
            out += load_run(builder, ptr.code, base, index, C)
            index = builder.add(index, stride)
        return tile_of(builder, out)

    return Tile(R * C)(ptr, types.int64, types.int64, rows, count), codegen


@intrinsic(prefer_literal=True)
def store_runs(typingctx, ptr, index, stride, tile, rows, no_nan):
    """Store a tile of `rows` runs so that `load_runs` gives it back.

    With `no_nan` (1) the caller knows that no element is a NaN, which saves looking for them.
    """
    if not _const_int(rows, no_nan):
        return None
    R, C = rows.literal_value, tile.rows // rows.literal_value

    def codegen(context, builder, sig, args):
        base, index, stride, value = args[:4]
        vectors = rows_of(builder, value)
        for r in range(R):
            run = vectors[r * C : (r + 1) * C]
            store_run(builder, ptr.code, base, index, run, no_nan.literal_value == 1)
            index = builder.add(index, stride)
        return context.get_dummy_value()

    return types.void(ptr, types.int64, types.int64, tile, rows, no_nan), codegen


@intrinsic(prefer_literal=True)
def stream_runs(typingctx, ptr, index, stride, tile, rows):
    """`store_runs` past the caches: runs are whole cache lines, and no element is a NaN.

    Where a run is not a whole line per vector, it is an ordinary store.
    """
    if not _const_int(rows):
        return None
    R, C = rows.literal_value, tile.rows // rows.literal_value

    def codegen(context, builder, sig, args):
        base, index, stride, value = args[:4]
        vectors = rows_of(builder, value)
        for r in range(R):
            store_run(builder, ptr.code, base, index, vectors[r * C : (r + 1) * C], True, STREAMS)
            index = builder.add(index, stride)
        return context.get_dummy_value()

    return types.void(ptr, types.int64, types.int64, tile, rows), codegen


@intrinsic(prefer_literal=True)
def spread(typingctx, ptr, index, stride, rows, columns):
    """The single elements `index + r * stride + c`, each in every lane of vector [r, c]."""
    if not _const_int(rows, columns):
        return None
    R, C = rows.literal_value, columns.literal_value

    def codegen(context, builder, sig, args):
        base, index, stride = args[:3]
        out = []
        for _r in range(R):
            for c in range(C):
                element = load_at(builder, ptr.code, base, builder.add(index, i64(c)))
                out.append(splat_of(builder, element))
            index = builder.add(index, stride)
        return tile_of(builder, out)

    return Tile(R * C)(ptr, types.int64, types.int64, rows, columns), codegen


@intrinsic(prefer_literal=True)
def prefetch(typingctx, address, lines, level):
    """Ask for cache lines from an address on (any is allowed), into the cache of a level."""
    if not _const_int(lines, level):
        return None

    def codegen(context, builder, sig, args):
        for line in range(lines.literal_value):
            where = builder.add(args[0], i64(64 * line))
            prefetch_at(builder, where, level.literal_value)
        return context.get_dummy_value()

    return types.void(types.int64, lines, level), codegen


@intrinsic
def stack(typingctx, a, b):
    """The rows of a, then those of b."""

    def codegen(context, builder, sig, args):
        return tile_of(builder, [x for t in args for x in rows_of(builder, t)])

    return Tile(a.rows + b.rows)(a, b), codegen


@intrinsic(prefer_literal=True)
def row(typingctx, tile, index):
    """One row of a tile, as a tile."""
    if not _const_int(index):
        return None

    def codegen(context, builder, sig, args):
        return tile_of(builder, [builder.extract_value(args[0], index.literal_value)])

    return Tile(1)(tile, index), codegen


@intrinsic(prefer_literal=True)
def pick(typingctx, tile, index):
    """One row of a tile, as a vector."""
    if not _const_int(index):
        return None

    def codegen(context, builder, sig, args):
        return builder.extract_value(args[0], index.literal_value)

    return Vec(LANES)(tile, index), codegen


@intrinsic
def pair(typingctx, a, b):
    """Two vectors as a tile."""

    def codegen(context, builder, sig, args):
        return tile_of(builder, args)

    return Tile(2)(a, b), codegen


@intrinsic(prefer_literal=True)
def column(typingctx, tile, index, columns):
    """One column of a tile with rows of `columns` vectors, as a tile."""
    if not _const_int(index, columns):
        return None
    i, n = index.literal_value, columns.literal_value

    def codegen(context, builder, sig, args):
        return tile_of(builder, rows_of(builder, args[0])[i::n])

    return Tile(tile.rows // n)(tile, index, columns), codegen


# -- single lanes -------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def load_lanes(typingctx, ptr, index, count):
    """`count` consecutive elements as a short vector."""
    if not _const_int(count):
        return None
    n = count.literal_value

    def codegen(context, builder, sig, args):
        return load_at(builder, ptr.code, args[0], args[1], n)

    return Vec(n)(ptr, types.int64, count), codegen


@intrinsic(prefer_literal=True)
def every(typingctx, vector, start, step):
    """Lanes start, start + step, and so on."""
    if not _const_int(start, step):
        return None
    lanes = list(range(start.literal_value, vector.lanes, step.literal_value))

    def codegen(context, builder, sig, args):
        return shuffle(builder, args[0], args[0], lanes)

    return Vec(len(lanes))(vector, start, step), codegen


@intrinsic
def spread_lanes(typingctx, vector):
    """A tile whose row r has lane r of a (short) vector in every lane."""

    def codegen(context, builder, sig, args):
        rows = [shuffle(builder, args[0], args[0], [r] * LANES) for r in range(vector.lanes)]
        return tile_of(builder, rows)

    return Tile(vector.lanes)(vector), codegen


@intrinsic(prefer_literal=True)
def store_columns(typingctx, ptr, index, stride, vector, columns):
    """Store a vector of rows of `columns` lanes by columns, column j at `index + j * stride`."""
    if not _const_int(columns):
        return None
    count = columns.literal_value

    def codegen(context, builder, sig, args):
        base, index, stride, value, _ = args
        for j in range(count):
            lanes = list(range(j, vector.lanes, count))
            column = shuffle(builder, value, value, lanes)
            store_at(builder, ptr.code, base, index, column)
            index = builder.add(index, stride)
        return context.get_dummy_value()

    return types.void(ptr, types.int64, types.int64, vector, columns), codegen


def _gathered(builder, vectors, lanes):
    """One vector of the given lanes of several vectors, numbered through."""
    width = vectors[0].type.count
    out = vectors[0]
    mask = [lane if lane < width else 0 for lane in lanes]
    out = shuffle(builder, out, out, mask)
    for v in range(1, len(vectors)):
        mask = [
            width + lane - v * width if v * width <= lane < (v + 1) * width else i
            for i, lane in enumerate(lanes)
        ]
        out = shuffle(builder, out, vectors[v], mask)
    return out


@intrinsic(prefer_literal=True)
def load_interleaved(typingctx, ptr, index, count):
    """A tile of `count` rows: lane i of row j is element `index + i * count + j`."""
    if not _const_int(count):
        return None
    n = count.literal_value

    def codegen(context, builder, sig, args):
        base, index, _ = args
        vectors = []
        for _v in range(n):
            vectors.append(load_at(builder, ptr.code, base, index, LANES))
            index = builder.add(index, i64(LANES))
        rows = [_gathered(builder, vectors, range(j, n * LANES, n)) for j in range(n)]
        return tile_of(builder, rows)

    return Tile(n)(ptr, types.int64, count), codegen


@intrinsic
def store_interleaved(typingctx, ptr, index, tile):
    """Store a tile so that `load_interleaved` gives it back."""

    def codegen(context, builder, sig, args):
        base, index, value = args
        rows = rows_of(builder, value)
        n = len(rows)
        for v in range(n):
            lanes = [e % n * LANES + e // n for e in range(v * LANES, (v + 1) * LANES)]
            store_at(builder, ptr.code, base, index, _gathered(builder, rows, lanes))
            index = builder.add(index, i64(LANES))
        return context.get_dummy_value()

    return types.void(ptr, types.int64, tile), codegen


@intrinsic
def dealt(typingctx, pair):
    """Of two vectors, the even elements and the odd ones."""
    even, odd = list(range(0, 2 * LANES, 2)), list(range(1, 2 * LANES, 2))

    def codegen(context, builder, sig, args):
        a, b = rows_of(builder, args[0])
        return tile_of(builder, [shuffle(builder, a, b, lanes) for lanes in (even, odd)])

    return pair(pair), codegen


@intrinsic
def gathered(typingctx, pairs):
    """What was `dealt`, in its order; one pair or several."""
    order = [lane for i in range(LANES) for lane in (i, LANES + i)]
    halves = (order[:LANES], order[LANES:])

    def codegen(context, builder, sig, args):
        rows = rows_of(builder, args[0])
        both = zip(rows[::2], rows[1::2], strict=True)
        return tile_of(
            builder, [shuffle(builder, a, b, lanes) for a, b in both for lanes in halves]
        )

    return pairs(pairs), codegen


# -- sums and transposes ------------------------------------------------------------------------


def _halves(count, width):
    """Lane numbers of the lower and the upper half of each of `count` runs of `width` lanes."""
    half = width // 2
    low = [run * width + i for run in range(count) for i in range(half)]
    return low, [i + half for i in low]


def _merged_sums(builder, vectors):
    """The sum of the lanes of each vector, all in one vector.

    Lane i always meets lane i + width / 2, whatever shares the vector: the bits of a sum do not
    depend on its neighbours.
    """
    width = LANES
    while len(vectors) > 1 and width > 1:
        low, high = _halves(2 * LANES // width, width)
        vectors = [
            builder.fadd(shuffle(builder, a, b, low), shuffle(builder, a, b, high))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width //= 2
    while width > 1:
        runs = vectors[0].type.count // width
        low, high = _halves(runs, width)
        vectors = [
            builder.fadd(shuffle(builder, a, a, low), shuffle(builder, a, a, high)) for a in vectors
        ]
        width //= 2
    while len(vectors) > 1:
        both = list(range(2 * vectors[0].type.count))
        vectors = [
            shuffle(builder, a, b, both) for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


@intrinsic
def sums(typingctx, tile):
    """Lane r is the sum over the lanes of row r; the number of rows is a power of two."""
    if isinstance(tile, Vec) or tile.rows & (tile.rows - 1):
        return None

    def codegen(context, builder, sig, args):
        return _merged_sums(builder, rows_of(builder, args[0]))

    return Vec(tile.rows)(tile), codegen


@intrinsic
def total(typingctx, vector):
    """The sum over the lanes, in the order of `sums`."""

    def codegen(context, builder, sig, args):
        return builder.extract_element(_merged_sums(builder, [args[0]]), i64(0))

    return types.float32(vector), codegen


@intrinsic
def transposed(typingctx, tile):
    """A square tile with rows and lanes exchanged."""
    if tile.rows != LANES:
        return None

    def codegen(context, builder, sig, args):
        rows = rows_of(builder, args[0])
        step = LANES // 2
        while step:
            first = [i if not i & step else i - step + LANES for i in range(LANES)]
            second = [i + step if not i & step else i + LANES for i in range(LANES)]
            for i in range(LANES):
                if not i & step:
                    a, b = rows[i], rows[i + step]
                    rows[i] = shuffle(builder, a, b, first)
                    rows[i + step] = shuffle(builder, a, b, second)
            step //= 2
        return tile_of(builder, rows)

    return tile(tile), codegen
