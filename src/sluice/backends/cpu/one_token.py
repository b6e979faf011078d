"""(B1) to (B3) of delta.py for one token on rows of S [V, K], stored as any type.

There are three orders of the same operations. Machines with 32 vector registers hold k and q in
registers. There, `near` takes the dots of the next two rows while it folds the two before, which
keeps the multiply units busy when the state comes from a cache. `far` reads, folds and writes one
row after another, a stream that the memory system follows best: it is faster when the state comes
from beyond the last-level cache. `few` is for machines with 16 registers: it takes the dots of four
rows and then folds them, while they are in the first-level cache.

A row of 16 bits is widened when it is read and rounded once when it is written, without scratch
memory. bfloat16 comes dealt (tiles.py), and so do k and q then. Where a row's correction d is a
finite number, no element of the new row is a NaN: an infinity or a NaN in the row, in k or in the
decay would have made d one too. So only other rows are searched for NaN while they are rounded.
"""

from __future__ import annotations

import functools

from sluice.backends.cpu.delta import Function
from sluice.backends.cpu.jit import jit_as, jit_inline
from sluice.backends.cpu.llvm import ELEMENT_BYTES, LANES, LINE, REGISTERS
from sluice.backends.cpu.memory import address_of
from sluice.backends.cpu.products import dot_rows, fold_rows
from sluice.backends.cpu.simd import all_finite, fma, get, splat, store
from sluice.backends.cpu.tiles import (
    every,
    load_lanes,
    load_rows,
    load_runs,
    prefetch,
    row,
    spread_lanes,
    stack,
    store_runs,
    sums,
    zeros,
)

R = 2  # rows whose sums are merged
FEW = 4  # rows at a time where registers are few
FEW_DOTS = 2 * FEW  # their products with k and q
PAIR = 2 * LANES
AHEAD = 8192  # bytes: how far in advance memory is asked for rows
VECTORS = 8  # vectors in a row of K: k and q take 16 registers
USUAL = VECTORS * LANES  # the K of most models on machines with 32 registers


def serves(K: int) -> bool:
    """Whether these functions serve rows of K elements."""
    return K == USUAL if REGISTERS >= 32 else K % (2 * LANES) == 0


@jit_inline
def _put_row(to, at, new, finite):
    """Store a row; `finite`: it holds no NaN."""
    if finite:
        store_runs(to, at, 0, new, 1, 1)
    else:
        store_runs(to, at, 0, new, 1, 0)


@functools.cache
def near(n: int, code: int) -> Function:
    """V rows of one head, the first of which is row v0, for rows of n vectors."""
    size = ELEMENT_BYTES[code]
    both, dots, lines = 2 * n, 2 * R, R * n * LANES * size // LINE

    @jit_as("near", n, code)
    def head(w, beta, s, to, K, v0, V):
        kq, v, o = load_rows(w.kq, 0, LANES, both), w.v + v0, w.o + v0
        alpha, strength, qk = get(w.decay_in, 0), get(beta, 0), get(w.qkg, 0)
        decay, soon = splat(alpha), address_of(s) + AHEAD
        y = sums(dot_rows(zeros(dots), load_runs(s, 0, K, R, n), kq))
        older = fma(every(y, 0, 2), -alpha, load_lanes(v, 0, R)) * strength
        store(o, 0, fma(older, qk, every(y, 1, 2) * alpha))
        y = sums(dot_rows(zeros(dots), load_runs(s, R * K, K, R, n), kq))
        d = fma(every(y, 0, 2), -alpha, load_lanes(v, R, R)) * strength
        store(o, R, fma(d, qk, every(y, 1, 2) * alpha))
        for r in range(2 * R, V, R):
            at, last = r * K, (r - 2 * R) * K
            c, finite = spread_lanes(older), all_finite(older)
            prefetch(soon + at * size, lines, 2)
            first = dot_rows(zeros(2), load_runs(s, at, K, 1, n), kq)
            before = load_runs(s, last, K, 1, n)
            _put_row(to, last, fold_rows(before, decay, kq, row(c, 0)), finite)
            second = dot_rows(zeros(2), load_runs(s, at + K, K, 1, n), kq)
            before = load_runs(s, last + K, K, 1, n)
            _put_row(to, last + K, fold_rows(before, decay, kq, row(c, 1)), finite)
            older = d
            y = sums(stack(first, second))
            d = fma(every(y, 0, 2), -alpha, load_lanes(v, r, R)) * strength
            store(o, r, fma(d, qk, every(y, 1, 2) * alpha))
        for r in range(V - 2 * R, V, R):
            c, finite = spread_lanes(older), all_finite(older)
            before = load_runs(s, r * K, K, 1, n)
            _put_row(to, r * K, fold_rows(before, decay, kq, row(c, 0)), finite)
            before = load_runs(s, r * K + K, K, 1, n)
            _put_row(to, r * K + K, fold_rows(before, decay, kq, row(c, 1)), finite)
            older = d

    return head


@functools.cache
def far(n: int, code: int) -> Function:
    """The same, one row after another."""
    both = 2 * n

    @jit_as("far", n, code)
    def head(w, beta, s, to, K, v0, V):
        kq, v, o = load_rows(w.kq, 0, LANES, both), w.v + v0, w.o + v0
        alpha, strength, qk = get(w.decay_in, 0), get(beta, 0), get(w.qkg, 0)
        decay = splat(alpha)
        for r in range(V):
            y = sums(dot_rows(zeros(2), load_runs(s, r * K, K, 1, n), kq))
            d = fma(every(y, 0, 2), -alpha, load_lanes(v, r, 1)) * strength
            store(o, r, fma(d, qk, every(y, 1, 2) * alpha))
            new = fold_rows(load_runs(s, r * K, K, 1, n), decay, kq, spread_lanes(d))
            _put_row(to, r * K, new, all_finite(d))

    return head


@functools.cache
def few(code: int) -> Function:
    """The same for rows of any number of pairs of vectors, four rows at a time."""
    lines = max(FEW * PAIR * ELEMENT_BYTES[code] // LINE, 1)
    step = FEW * ELEMENT_BYTES[code]

    @jit_as("few", code)
    def head(w, beta, s, to, K, v0, V):
        k, q, v, o = w.kq, w.kq + K, w.v + v0, w.o + v0
        alpha, strength, qk = get(w.decay_in, 0), get(beta, 0), get(w.qkg, 0)
        decay, soon = splat(alpha), address_of(s) + AHEAD
        for r in range(0, V, FEW):
            at, acc = r * K, zeros(FEW_DOTS)
            for i in range(0, K, PAIR):
                kq = stack(load_rows(k, i, LANES, 2), load_rows(q, i, LANES, 2))
                acc = dot_rows(acc, load_runs(s, at + i, K, FEW, 2), kq)
                prefetch(soon + i * step, lines, 2)
            soon += K * step
            y = sums(acc)
            d = fma(every(y, 0, 2), -alpha, load_lanes(v, r, FEW)) * strength
            store(o, r, fma(d, qk, every(y, 1, 2) * alpha))
            c = spread_lanes(d)
            if all_finite(d):
                for i in range(0, K, PAIR):
                    kq = stack(load_rows(k, i, LANES, 2), load_rows(k, i, LANES, 2))
                    new = fold_rows(load_runs(s, at + i, K, FEW, 2), decay, kq, c)
                    store_runs(to, at + i, K, new, FEW, 1)
            else:
                for i in range(0, K, PAIR):
                    kq = stack(load_rows(k, i, LANES, 2), load_rows(k, i, LANES, 2))
                    new = fold_rows(load_runs(s, at + i, K, FEW, 2), decay, kq, c)
                    store_runs(to, at + i, K, new, FEW, 0)

    return head


def functions(code: int) -> tuple[Function, Function]:
    """For states of a storage type: from a cache, and from memory."""
    if REGISTERS >= 32:
        return near(VECTORS, code), far(VECTORS, code)
    return few(code), few(code)
