"""The delta rule over one block of V columns and up to 8 tokens at once (docs/kernels/cpu.md).

With S the state before the block, and e^γ_t the decay from before the first token up to token t:

    U_t = S^T k_t,   Z_t = S^T q_t                                                  (B1) dots
    d_t = beta_t (v_t - e^γ_t U_t - sum_{s<t} KKg_ts d_s)
    o_t = e^γ_t Z_t + sum_{s<=t} QKg_ts d_s                                         (B2) solve
    S  <- e^γ_m S + sum_t k→_t d_t^T                                                (B3) fold

KKg_ts = k_t . k_s and QKg_ts = q_t . k_s, with k_s decayed to token t; k→_t is k_t decayed to the
last token. operands.py makes them. So the state is read for (B1), and read and written for (B3),
whatever the number of tokens.

Tokens are padded to M in {1, 2, 4, 8} with rows of zeros. An element of U, d, o and S goes through
the same operations in the same order for every M >= m, block and thread. Decode, verify and commit
share them.

Several rows of a state are read at a time, which halves the bandwidth of memory that is not in a
cache yet. So every step also asks for a little of the next block (at `soon`), in the order of
addresses, into the second-level cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sluice.backends.cpu.jit import jit_as
from sluice.backends.cpu.llvm import LANES, LINE, REGISTERS
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
LD = 8  # row stride of KKg and QKg
BLOCK_V = 2 * LANES  # columns (or rows, in "vk") taken at a time
TILE = 16 if REGISTERS >= 32 else 8  # accumulators that leave room for operands


def _twice(name: str, one: Function, rows: int) -> Function:
    """A dots function for 2 * rows rows of k and q, out of one for `rows`: registers are few."""

    @jit_as(name, 2 * rows)
    def dots(x, ld_x, s, ld_s, K, width, y, soon):
        one(x, ld_x, s, ld_s, K, width, y, soon)
        one(x + rows * ld_x, ld_x, s, ld_s, K, width, y + rows * width, soon)

    return dots


@functools.cache
def dots_kv(X: int, C: int) -> Function:
    """y[j, :] = sum_i x[j, i] S[i, :] for X rows j and C vectors of columns, S [K, V] by rows.

    Wide blocks are read in the order of addresses anyway: nothing is asked for ahead.
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
    """y[j, v] = sum_i x[j, i] S[v, i] for X rows j and `width` rows v of S [V, K]."""
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
    """(B3) for S [K, V] by rows and C vectors of columns, from `s` to `to`."""
    tile, lines = M * C, max(C * LANES * 4 // LINE, 1) if ahead else 0

    @jit_as("fold_kv", M, C, ahead)
    def fold(keys, ld_k, decay, d, s, ld_s, to, ld_to, K, width, soon):
        corrections = load_rows(d, 0, LANES, tile)
        for i in range(K):
            row = scaled(load_rows(s, i * ld_s, LANES, C), splat(get(decay, i)))
            row = inner(row, spread(keys, i, ld_k, M, 1), corrections)
            store_rows(to, i * ld_to, LANES, row)
            prefetch(soon + i * lines * LINE, lines, 2)

    return fold


@functools.cache
def fold_vk(M: int, ahead: bool = False) -> Function:
    """(B3) for `width` rows of S [V, K], from `s` to `to`."""
    R = min(8, TILE // M)
    lines = max(R * LANES * 4 // LINE, 1) if ahead else 0

    @jit_as("fold_vk", M, ahead)
    def fold(keys, ld_k, decay, d, s, ld_s, to, ld_to, K, width, soon):
        for v in range(0, width, R):
            corrections = spread(d, v, width, M, R)
            for i in range(0, K, LANES):
                rows = scaled(load_rows(s, v * ld_s + i, ld_s, R), load(decay, i))
                rows = inner(rows, load_rows(keys, i, ld_k, M), corrections)
                store_rows(to, v * ld_to + i, ld_to, rows)
                prefetch(soon, lines, 2)
                soon += lines * LINE

    return fold


@functools.cache
def solve(M: int) -> Function:
    """(B2) for `width` columns from column v0 on: d [M, width], and o of every reader."""

    @jit_as("solve", M)
    def solved(w, beta, v0, width):
        decay, ld_v = spread(w.decay_in, 0, 1, M, 1), w.ld_v
        for j in range(0, width, LANES):
            d = load_rows(w.v, v0 + j, ld_v, M)
            if w.delta:
                d = remainder(d, decay, load_rows(w.us, j, width, M))
                d = substitute(d, w.kkg, LD, beta)
            store_rows(w.d, j, width, d)
            for r in range(w.readers):
                o = scaled(load_rows(w.us, (1 + r) * M * width + j, width, M), decay)
                o = lower_product(o, w.qkg + r * MOST * LD, LD, d)
                store_rows(w.o, r * MOST * ld_v + v0 + j, ld_v, o)

    return solved


@functools.cache
def block(kind: str, M: int, C: int = 2) -> Function:
    """(B1) to (B3) for one block of S at `s`, written at `to` if `write`, stored "kv" or "vk".

    A block is C vectors of columns ("kv") or as many rows ("vk"). Keys and queries go through the
    state in one pass if the state has one reader.
    """
    if kind == "vk":
        one, pair, fold = dots_vk(M), dots_vk(2 * M), fold_vk(M)
    else:
        one, pair, fold = dots_kv(M, C), dots_kv(2 * M, C), fold_kv(M, C)
    solved, width = solve(M), C * LANES

    @jit_as("block", kind, M, C)
    def run(w, beta, s, ld_s, to, ld_to, soon, K, ld_k, v0, write):
        if w.delta and w.readers == 1:
            pair(w.kq, ld_k, s, ld_s, K, width, w.us, soon)
        else:
            for r in range(0 if w.delta else 1, w.readers + 1):
                one(w.kq + r * M * ld_k, ld_k, s, ld_s, K, width, w.us + r * M * width, soon)
        solved(w, beta, v0, width)
        if write:
            fold(w.k_out, ld_k, w.decay_all, w.d, s, ld_s, to, ld_to, K, width, soon)

    return run
