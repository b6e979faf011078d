"""Multiply-adds on tiles: the inner loops of the delta rule, unrolled.

The order of additions is written here and nowhere else; every kernel that must give the same bits
uses the same function.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sluice.backends.cpu.simd import F32, Tile, _call, _i64, _load, _rows, _splat, _tile


def _fma(builder, a, b, c):
    return _call(builder, "fmuladd", a.type, a, b, c)


@intrinsic
def outer(typingctx, acc, a, b):
    """acc[i, j] + a[i] * b[j], where acc has as many rows as a times b."""
    if acc.rows != a.rows * b.rows:
        return None

    def codegen(context, builder, sig, args):
        sums, left, right = (_rows(builder, t) for t in args)
        pairs = [(x, y) for x in left for y in right]
        return _tile(
            builder, [_fma(builder, x, y, s) for (x, y), s in zip(pairs, sums, strict=True)]
        )

    return acc(acc, a, b), codegen


@intrinsic
def inner(typingctx, acc, a, b):
    """acc[j] + sum over t of a[t] * b[t, j], in the order of t."""
    if acc.rows * a.rows != b.rows:
        return None

    def codegen(context, builder, sig, args):
        out, left, right = (_rows(builder, t) for t in args)
        for t, x in enumerate(left):
            for j, value in enumerate(out):
                out[j] = _fma(builder, x, right[t * len(out) + j], value)
        return _tile(builder, out)

    return acc(acc, a, b), codegen


@intrinsic
def scaled(typingctx, tile, factor):
    """Every row times a vector, or row r times row r of a tile."""

    def codegen(context, builder, sig, args):
        rows = _rows(builder, args[0])
        by = _rows(builder, args[1]) if isinstance(factor, Tile) else [args[1]] * len(rows)
        return _tile(builder, [builder.fmul(x, y) for x, y in zip(rows, by, strict=True)])

    return tile(tile, factor), codegen


@intrinsic
def remainder(typingctx, v, lam, y):
    """v - lam * y, row by row."""

    def codegen(context, builder, sig, args):
        rows = zip(*(_rows(builder, t) for t in args), strict=True)
        return _tile(builder, [_fma(builder, builder.fneg(x), b, a) for a, x, b in rows])

    return v(v, lam, y), codegen


@intrinsic
def substitute(typingctx, rhs, a, stride, beta):
    """d[t] = beta[t] * (rhs[t] - sum over s < t of A[t, s] * d[s]); A has rows of `stride`."""

    def codegen(context, builder, sig, args):
        rhs, base, stride, beta_base = args
        d, at = [], _i64(0)
        for t, x in enumerate(_rows(builder, rhs)):
            for s, previous in enumerate(d):
                element = _load(builder, F32, base, builder.add(at, _i64(s)))
                x = _fma(builder, _splat(builder, builder.fneg(element)), previous, x)
            factor = _load(builder, F32, beta_base, _i64(t))
            d.append(builder.fmul(_splat(builder, factor), x))
            at = builder.add(at, stride)
        return _tile(builder, d)

    return rhs(rhs, a, types.int64, beta), codegen


@intrinsic
def lower_product(typingctx, acc, p, stride, d):
    """acc[t] + sum over s <= t of P[t, s] * d[s]; P has rows of `stride`."""

    def codegen(context, builder, sig, args):
        acc, base, stride, d = args
        out, d, at = _rows(builder, acc), _rows(builder, d), _i64(0)
        for t in range(len(out)):
            for s in range(t + 1):
                element = _splat(builder, _load(builder, F32, base, builder.add(at, _i64(s))))
                out[t] = _fma(builder, element, d[s], out[t])
            at = builder.add(at, stride)
        return _tile(builder, out)

    return acc(acc, p, types.int64, d), codegen


@intrinsic
def dot_rows(typingctx, s, x):
    """Row r of s times row j of x, lane by lane, for two rows x: R x 2 vectors of partial sums.

    A row of s and x is as many vectors as x has for one row; rows are read one after another.
    """
    n = x.rows // 2
    R = s.rows // n

    def codegen(context, builder, sig, args):
        left, right = (_rows(builder, t) for t in args)
        acc = [ir.Constant(left[0].type, None)] * (2 * R)
        for r in range(R):
            for i in range(n):
                for j in range(2):
                    product = (left[r * n + i], right[j * n + i])
                    acc[2 * r + j] = _fma(builder, *product, acc[2 * r + j])
        return _tile(builder, acc)

    return Tile(2 * R)(s, x), codegen


@intrinsic
def fold_rows(typingctx, s, lam, x, d):
    """lam * row r of s + d[r] * the first row of x."""
    n = x.rows // 2
    R = s.rows // n

    def codegen(context, builder, sig, args):
        rows, row, d = _rows(builder, args[0]), _rows(builder, args[2]), _rows(builder, args[3])
        out = []
        for r in range(R):
            for i in range(n):
                decayed = builder.fmul(rows[r * n + i], args[1])
                out.append(_fma(builder, row[i], d[r], decayed))
        return _tile(builder, out)

    return s(s, lam, x, d), codegen
