"""(B1) to (B3) of delta.py for one token on rows of S [V, K], with k and q held in registers.

There are two orders of the same operations. `near` takes the dots of the next two rows while it
folds the two before, which keeps the multiply units busy when the state comes from a cache. `far`
reads, folds and writes one row after another, a stream that the memory system follows best: it is
faster when the state comes from beyond the last-level cache.
"""

from __future__ import annotations

import functools

from sluice.backends.cpu.delta import LINE, Function
from sluice.backends.cpu.jit import jit_as
from sluice.backends.cpu.llvm import LANES
from sluice.backends.cpu.memory import address_of
from sluice.backends.cpu.products import dot_rows, fold_rows
from sluice.backends.cpu.simd import fma, get, splat, store
from sluice.backends.cpu.tiles import (
    every,
    load_lanes,
    load_rows,
    prefetch,
    row,
    spread_lanes,
    stack,
    store_rows,
    sums,
)

R = 2  # rows whose sums are merged
AHEAD = 8192  # bytes: how far in advance memory is asked for rows
VECTORS = 8  # vectors in a row of K: k and q take 16 registers


@functools.cache
def near(n: int) -> Function:
    """V rows of one head, the first of which is row v0, for rows of n vectors."""
    both, rows, lines = 2 * n, R * n, R * n * LANES * 4 // LINE

    @jit_as("near", n)
    def head(w, beta, s, to, K, v0, V):
        kq, v, o = load_rows(w.kq, 0, LANES, both), w.v + v0, w.o + v0
        alpha, strength, qk = get(w.decay_in, 0), get(beta, 0), get(w.qkg, 0)
        decay, soon = splat(alpha), address_of(s) + AHEAD
        y = sums(dot_rows(load_rows(s, 0, LANES, rows), kq))
        older = fma(every(y, 0, 2), -alpha, load_lanes(v, 0, R)) * strength
        store(o, 0, fma(older, qk, every(y, 1, 2) * alpha))
        y = sums(dot_rows(load_rows(s, R * K, LANES, rows), kq))
        d = fma(every(y, 0, 2), -alpha, load_lanes(v, R, R)) * strength
        store(o, R, fma(d, qk, every(y, 1, 2) * alpha))
        for r in range(2 * R, V, R):
            at, last = r * K, (r - 2 * R) * K
            c = spread_lanes(older)
            prefetch(soon + at * 4, lines, 2)
            first = dot_rows(load_rows(s, at, LANES, n), kq)
            before = load_rows(s, last, LANES, n)
            store_rows(to, last, LANES, fold_rows(before, decay, kq, row(c, 0)))
            second = dot_rows(load_rows(s, at + K, LANES, n), kq)
            before = load_rows(s, last + K, LANES, n)
            store_rows(to, last + K, LANES, fold_rows(before, decay, kq, row(c, 1)))
            older = d
            y = sums(stack(first, second))
            d = fma(every(y, 0, 2), -alpha, load_lanes(v, r, R)) * strength
            store(o, r, fma(d, qk, every(y, 1, 2) * alpha))
        at = (V - 2 * R) * K
        before = load_rows(s, at, LANES, rows)
        store_rows(to, at, LANES, fold_rows(before, decay, kq, spread_lanes(older)))
        at = (V - R) * K
        before = load_rows(s, at, LANES, rows)
        store_rows(to, at, LANES, fold_rows(before, decay, kq, spread_lanes(d)))

    return head


@functools.cache
def far(n: int) -> Function:
    """The same, one row after another."""
    both = 2 * n

    @jit_as("far", n)
    def head(w, beta, s, to, K, v0, V):
        kq, v, o = load_rows(w.kq, 0, LANES, both), w.v + v0, w.o + v0
        alpha, strength, qk = get(w.decay_in, 0), get(beta, 0), get(w.qkg, 0)
        decay = splat(alpha)
        for r in range(V):
            y = sums(dot_rows(load_rows(s, r * K, LANES, n), kq))
            d = fma(every(y, 0, 2), -alpha, load_lanes(v, r, 1)) * strength
            store(o, r, fma(d, qk, every(y, 1, 2) * alpha))
            values = load_rows(s, r * K, LANES, n)
            store_rows(to, r * K, LANES, fold_rows(values, decay, kq, spread_lanes(d)))

    return head
