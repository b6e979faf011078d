"""The delta rule over one block of V columns and up to 8 tokens at once.

With S the state before the tokens and lam_t the decay from before the first token to token t:

    Y_t  = lam_t (k_t S),  Z_t = lam_t (q_t S)                                         (1) dots
    d_t  = beta_t (v_t - Y_t - sum_{s<t} A_ts d_s)        A_ts = k_t . (k_s decayed to t)
    o_t  = Z_t + sum_{s<=t} P_ts d_s                      P_ts = q_t . (k_s decayed to t)  (2) solve
    S   <- lam_T S + sum_t w_t d_t^T                      w_t = k_t decayed to the end     (3) fold

so the state is read for (1), read and written for (3), however many the tokens. (1) and (3) are
three multiply-adds for each element and token, the least there is. Decays are products of the
tokens' own factors, never differences of sums of logarithms: a decay of zero stays zero.
`prepare.py` makes A, P, w, lam and X, the rows k and q.

Tokens are padded to M in {1, 2, 4, 8} with zero rows. An element of Y, d, o and S goes through the
same operations in the same order for every M >= m, block and thread; decode, verify and commit
share them.

Rows are walked side by side, which halves the bandwidth of memory that is not in a cache yet. So
every step asks for a little of the block that comes next (at `soon`), in the order of addresses,
into the second-level cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sluice.backends.cpu.jit import jit_as
from sluice.backends.cpu.llvm import LANES, REGISTERS
from sluice.backends.cpu.products import inner, lower_product, outer, remainder, scaled, substitute
from sluice.backends.cpu.simd import get, load, splat
from sluice.backends.cpu.tiles import (
    load_rows,
    prefetch,
    spread,
    store_columns,
    store_rows,
    sums,
    zeros,
)

Function = Callable[..., Any]

MOST = 8  # tokens at once
LD = 8  # row stride of A and P
BLOCK_V = 2 * LANES  # columns (or rows, in "vk") taken at a time
LINE = 64  # bytes of a cache line
TILE = 16 if REGISTERS >= 32 else 8  # accumulators that leave room for operands


def _twice(name: str, one: Function, rows: int) -> Function:
    """A dots function for 2 * rows vectors X out of one for `rows`, where registers are few."""

    @jit_as(name, 2 * rows)
    def dots(x, ld_x, s, ld_s, K, width, y, soon):
        one(x, ld_x, s, ld_s, K, width, y, soon)
        one(x + rows * ld_x, ld_x, s, ld_s, K, width, y + rows * width, soon)

    return dots


@functools.cache
def dots_kv(X: int, C: int) -> Function:
    """Y[j, :] = sum_i X[j, i] S[i, :] for X rows j and C vectors of columns, S [K, V] by rows.

    Wide blocks are read in order as they are: nothing is asked for ahead.
    """
    if X * C > TILE and X > 1:
        return _twice("dots_kv", dots_kv(X // 2, C), X // 2)
    tile, lines = X * C, max(C * LANES * 4 // LINE, 1) if C == 2 else 0

    @jit_as("dots_kv", X, C)
    def dots(x, ld_x, s, ld_s, K, width, y, soon):
        acc = zeros(tile)
        for i in range(K):
            acc = outer(acc, spread(x, i, ld_x, X, 1), load_rows(s, i * ld_s, LANES, C))
            prefetch(soon + i * lines * LINE, lines, 2)
        store_rows(y, 0, LANES, acc)

    return dots


@functools.cache
def dots_vk(X: int) -> Function:
    """Y[j, v] = sum_i X[j, i] S[v, i] for X rows j and `width` rows v of S [V, K]."""
    if X > TILE // 2:
        return _twice("dots_vk", dots_vk(X // 2), X // 2)
    R, tile, lines = TILE // X, TILE, max(TILE // X * LANES * 4 // LINE, 1)

    @jit_as("dots_vk", X)
    def dots(x, ld_x, s, ld_s, K, width, y, soon):
        for v in range(0, width, R):
            acc = zeros(tile)
            for i in range(0, K, LANES):
                rows = load_rows(s, v * ld_s + i, ld_s, R)
                acc = outer(acc, rows, load_rows(x, i, ld_x, X))
                prefetch(soon, lines, 2)
                soon += lines * LINE
            store_columns(y, v, width, sums(acc), X)

    return dots


@functools.cache
def fold_kv(M: int, C: int, ahead: bool = False) -> Function:
    """(3) for S [K, V] by rows and C vectors of columns; from `s` to `to`."""
    tile, lines = M * C, max(C * LANES * 4 // LINE, 1) if ahead else 0

    @jit_as("fold_kv", M, C, ahead)
    def fold(w, ld_w, lam, d, s, ld_s, to, ld_to, K, width, soon):
        corrections = load_rows(d, 0, LANES, tile)
        for i in range(K):
            row = scaled(load_rows(s, i * ld_s, LANES, C), splat(get(lam, i)))
            row = inner(row, spread(w, i, ld_w, M, 1), corrections)
            store_rows(to, i * ld_to, LANES, row)
            prefetch(soon + i * lines * LINE, lines, 2)

    return fold


@functools.cache
def fold_vk(M: int, ahead: bool = False) -> Function:
    """(3) for `width` rows of S [V, K]; from `s` to `to`."""
    R = min(8, TILE // M)
    lines = max(R * LANES * 4 // LINE, 1) if ahead else 0

    @jit_as("fold_vk", M, ahead)
    def fold(w, ld_w, lam, d, s, ld_s, to, ld_to, K, width, soon):
        for v in range(0, width, R):
            corrections = spread(d, v, width, M, R)
            for i in range(0, K, LANES):
                rows = scaled(load_rows(s, v * ld_s + i, ld_s, R), load(lam, i))
                rows = inner(rows, load_rows(w, i, ld_w, M), corrections)
                store_rows(to, v * ld_to + i, ld_to, rows)
                prefetch(soon, lines, 2)
                soon += lines * LINE

    return fold


@functools.cache
def solve(M: int) -> Function:
    """(2) for `width` columns from column v0: d [M, width] and o rows of every query head."""

    @jit_as("solve", M)
    def solved(w, beta, v0, width, ld_v, groups, delta):
        lam = spread(w.lams, 0, 1, M, 1)
        for j in range(0, width, LANES):
            d = load_rows(w.v, v0 + j, ld_v, M)
            if delta:
                d = remainder(d, lam, load_rows(w.y, j, width, M))
                d = substitute(d, w.a, LD, beta)
            store_rows(w.d, j, width, d)
            for g in range(groups):
                o = scaled(load_rows(w.y, (1 + g) * M * width + j, width, M), lam)
                o = lower_product(o, w.p + g * MOST * LD, LD, d)
                store_rows(w.o, g * MOST * ld_v + v0 + j, ld_v, o)

    return solved


@functools.cache
def block(kind: str, M: int, C: int = 2) -> Function:
    """(1) to (3) for one block of S at `s`, written at `to` if `write`, stored "kv" or "vk".

    A block is C vectors of columns ("kv") or as many rows ("vk"). Keys and queries go through the
    state in one pass where there is one group of queries.
    """
    if kind == "vk":
        one, pair, fold = dots_vk(M), dots_vk(2 * M), fold_vk(M)
    else:
        one, pair, fold = dots_kv(M, C), dots_kv(2 * M, C), fold_kv(M, C)
    solved, width = solve(M), C * LANES

    @jit_as("block", kind, M, C)
    def run(w, beta, s, ld_s, to, ld_to, soon, K, ld_k, v0, ld_v, groups, delta, write):
        if delta and groups == 1:
            pair(w.x, ld_k, s, ld_s, K, width, w.y, soon)
        else:
            for g in range(0 if delta else 1, groups + 1):
                one(w.x + g * M * ld_k, ld_k, s, ld_s, K, width, w.y + g * M * width, soon)
        solved(w, beta, v0, width, ld_v, groups, delta)
        if write:
            fold(w.w, ld_k, w.lam, w.d, s, ld_s, to, ld_to, K, width, soon)

    return run
