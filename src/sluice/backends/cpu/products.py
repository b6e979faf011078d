"""Multiply-adds on tiles: the inner loops of the delta rule, unrolled.

The order of additions is written here and nowhere else; every kernel that must give the same bits
uses the same function.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from sluice.backends.cpu.llvm import F32, call_llvm, i64, load_at, rows_of, splat_of, tile_of
from sluice.backends.cpu.simd import Tile


def _fma(builder, a, b, c):
    return call_llvm(builder, "fmuladd", a.type, a, b, c)


@intrinsic
def outer(typingctx, acc, a, b):
    """acc[i, j] + a[i] * b[j], where acc has as many rows as a times b."""
    if acc.rows != a.rows * b.rows:
        return None

    def codegen(context, builder, sig, args):
        sums, left, right = (rows_of(builder, t) for t in args)
        pairs = [(x, y) for x in left for y in right]
        return tile_of(
            builder, [_fma(builder, x, y, s) for (x, y), s in zip(pairs, sums, strict=True)]
        )

    return acc(acc, a, b), codegen


@intrinsic
def inner(typingctx, acc, a, b):
    """acc[j] + sum over t of a[t] * b[t, j], in the order of t."""
    if acc.rows * a.rows != b.rows:
        return None

    def codegen(context, builder, sig, args):
        out, left, right = (rows_of(builder, t) for t in args)
        for t, x in enumerate(left):
            for j, value in enumerate(out):
                out[j] = _fma(builder, x, right[t * len(out) + j], value)
        return tile_of(builder, out)

    return acc(acc, a, b), codegen


@intrinsic
def taps(typingctx, x, weight, bias):
    """bias + sum over w of weight[w] * x[t + w], in the order of w, for every t that x allows."""
    W = weight.rows
    T = x.rows - W + 1

    def codegen(context, builder, sig, args):
        rows, factors = rows_of(builder, args[0]), rows_of(builder, args[1])
        out = [args[2]] * T
        for t in range(T):
            for w in range(W):
                out[t] = _fma(builder, factors[w], rows[t + w], out[t])
        return tile_of(builder, out)

    return Tile(T)(x, weight, bias), codegen


@intrinsic
def scaled(typingctx, tile, factor):
    """Every row times a vector, or row r times row r of a tile."""

    def codegen(context, builder, sig, args):
        rows = rows_of(builder, args[0])
        by = rows_of(builder, args[1]) if isinstance(factor, Tile) else [args[1]] * len(rows)
        return tile_of(builder, [builder.fmul(x, y) for x, y in zip(rows, by, strict=True)])

    return tile(tile, factor), codegen


@intrinsic
def remainder(typingctx, v, factor, y):
    """v - factor * y, row by row."""

    def codegen(context, builder, sig, args):
        rows = zip(*(rows_of(builder, t) for t in args), strict=True)
        return tile_of(builder, [_fma(builder, builder.fneg(x), b, a) for a, x, b in rows])

    return v(v, factor, y), codegen


@intrinsic
def substitute(typingctx, rhs, a, stride, beta):
    """d[t] = beta[t] * (rhs[t] - sum over s < t of A[t, s] * d[s]); A has rows of `stride`."""

    def codegen(context, builder, sig, args):
        rhs, base, stride, beta_base = args
        d, at = [], i64(0)
        for t, x in enumerate(rows_of(builder, rhs)):
            for s, previous in enumerate(d):
                element = load_at(builder, F32, base, builder.add(at, i64(s)))
                x = _fma(builder, splat_of(builder, builder.fneg(element)), previous, x)
            factor = load_at(builder, F32, beta_base, i64(t))
            d.append(builder.fmul(splat_of(builder, factor), x))
            at = builder.add(at, stride)
        return tile_of(builder, d)

    return rhs(rhs, a, types.int64, beta), codegen


@intrinsic
def lower_product(typingctx, acc, a, stride, d):
    """acc[t] + sum over s <= t of A[t, s] * d[s]; A has rows of `stride`."""

    def codegen(context, builder, sig, args):
        acc, base, stride, d = args
        out, d, at = rows_of(builder, acc), rows_of(builder, d), i64(0)
        for t in range(len(out)):
            for s in range(t + 1):
                element = splat_of(builder, load_at(builder, F32, base, builder.add(at, i64(s))))
                out[t] = _fma(builder, element, d[s], out[t])
            at = builder.add(at, stride)
        return tile_of(builder, out)

    return acc(acc, a, types.int64, d), codegen


@intrinsic
def dot_rows(typingctx, acc, s, kq):
    """acc + row r of s times k and times q, lane by lane: R x 2 vectors of partial sums.

    k, q and each row of s are n vectors. kq holds k, then q.
    """
    n = kq.rows // 2
    R = s.rows // n
    if acc.rows != 2 * R:
        return None

    def codegen(context, builder, sig, args):
        acc, left, right = (rows_of(builder, t) for t in args)
        for r in range(R):
            for i in range(n):
                for j in range(2):
                    product = (left[r * n + i], right[j * n + i])
                    acc[2 * r + j] = _fma(builder, *product, acc[2 * r + j])
        return tile_of(builder, acc)

    return acc(acc, s, kq), codegen


@intrinsic
def fold_rows(typingctx, s, decay, kq, d):
    """decay * row r of s + d[r] * k, for rows of n vectors; kq holds k, then q."""
    n = kq.rows // 2
    R = s.rows // n

    def codegen(context, builder, sig, args):
        rows, k, d = (rows_of(builder, args[i]) for i in (0, 2, 3))
        out = []
        for r in range(R):
            for i in range(n):
                decayed = builder.fmul(rows[r * n + i], args[1])
                out.append(_fma(builder, k[i], d[r], decayed))
        return tile_of(builder, out)

    return s(s, decay, kq, d), codegen
