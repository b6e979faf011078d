"""One chunk of one value head in the backward of prefill with decay per key: (G12) to (G14) of
docs/kernels/backward.md.

Products with states are those of ``chunk_backward.py``. Pairs of tokens go from token to token.
With a_t the decays of token t, one per key,

    k_j(t) = a_t k_j(t − 1),                   k_j(j) = k_j             k_j as token t finds it
    z_j(t) = N_tj q_t + H_tj k_t + a_t+1 z_j(t + 1)                     what is asked of k_j(t)
    z_j(C) = N_Cj q_C + H_Cj k_C + (D dSᵀ)_j

give P_tj = q_t · k_j(t) and G_tj = k_t · k_j(t), and for each key by itself

    dq_t += Σ_j N_tj k_j(t),   dk_t += Σ_j H_tj k_j(t) + z_t(t),   dg_t += Σ_{j<t} k_j(t) z_j(t)

So all decays are products of the tokens' own: nothing is divided, no exponent is positive, and no
difference of sums is taken.
"""

from __future__ import annotations

from sluice.backends.cpu.chunk_backward import (
    STEP,
    C,
    ask,
    load_outputs,
    load_strengths,
    load_values,
    make_errors,
    through_values,
)
from sluice.backends.cpu.gemm import gemm, gemm_by_triangle, transpose
from sluice.backends.cpu.jit import jit, jit_inline
from sluice.backends.cpu.llvm import F32, LANES
from sluice.backends.cpu.products import inner, outer, scaled
from sluice.backends.cpu.scratch_rows import copy_row, fill, load_row, store_row
from sluice.backends.cpu.simd import fma, get, load, pointer, put, splat, store
from sluice.backends.cpu.tiles import load_rows, pick, spread, store_rows, sums, total, zeros
from sluice.backends.cpu.vmath import vexp, vsigmoid, vsoftplus

COLUMN = C * LANES
"""Elements of a column: LANES keys of all tokens of a chunk, side by side."""


@jit
def begin_gates(p, w, head):
    """What raw gates of a head take, and zeros for the sums of its gradients."""
    if p.A != 0:
        fill(w.bias, w.Kp, 0.0)
        if p.dt != 0:
            load_row(w.bias, p.dt, F32, head * p.K, p.K)
        store(w.pace, 0, vexp(splat(get(pointer(p.A, F32), head))) * -1.0)
        fill(w.ddt, w.Kp, 0.0)
        store(w.dA, 0, splat(0.0))


@jit
def _decays(p, w, alpha, g_at, m):
    """The decays of a chunk's tokens; 1 for those that pad it."""
    fill(alpha, C * w.Kp, 0.0)
    for t in range(m):
        row = alpha + t * w.Kp
        load_row(row, p.g, p.g_code, g_at + t * p.g_t, p.K)
        if p.A != 0:
            pace = load(w.pace, 0)
            for i in range(0, w.Kp, LANES):
                store(row, i, vsoftplus(load(row, i) + load(w.bias, i)) * pace)
    for i in range(0, C * w.Kp, LANES):
        store(alpha, i, vexp(load(alpha, i)))


@jit
def _from_start(w, alpha):
    """w.down: decays from the chunk's start up to each token."""
    copy_row(w.down, alpha, w.Kp)
    for i in range(w.Kp, C * w.Kp, LANES):
        store(w.down, i, load(w.down, i - w.Kp) * load(alpha, i))


@jit_inline
def _multiply(dst, a, b, n, sign):
    for i in range(0, n, LANES):
        store(dst, i, load(a, i) * load(b, i) * sign)


@jit
def _scale_columns(dst, src, factors, rows, n, ld):
    """Each row of n elements times the factors."""
    for j in range(0, rows * ld, ld):
        for i in range(0, n, LANES):
            store(dst, j + i, load(src, j + i) * load(factors, i))


@jit
def _dots(out, rows, x, n):
    """out[j] = row j · x, for STEP rows."""
    acc = zeros(STEP)
    for i in range(0, n, LANES):
        acc = outer(acc, load_rows(rows, i, n, STEP), load_rows(x, i, n, 1))
    store(out, 0, sums(acc))


@jit
def _pairs(p, w, q, stride_q, k, alpha, rows, m):
    """P to w.qk, G to w.rhs, and in w.k_out keys decayed to the chunk's end."""
    Kp, G = w.Kp, w.G
    faded, P = w.k_out + rows * Kp, w.qk + rows * G * C
    fill(faded, C * Kp, 0.0)
    fill(w.rhs, C * C, 0.0)
    fill(P, G * C * C, 0.0)
    for t in range(m):
        for j in range(0, t, STEP):  # rows from t on are zeros
            for i in range(j * Kp, j * Kp + Kp, LANES):
                decay = load(alpha, t * Kp + i - j * Kp)
                store_rows(faded, i, Kp, scaled(load_rows(faded, i, Kp, STEP), decay))
            if p.delta != 0:
                _dots(w.rhs + (t * C + j), faded + j * Kp, k + t * Kp, Kp)
            for r in range(G):
                row = q + r * stride_q + t * Kp
                _dots(P + (r * C + t) * C + j, faded + j * Kp, row, Kp)
        copy_row(faded + t * Kp, k + t * Kp, Kp)
        for r in range(G):
            acc, row = splat(0.0), q + r * stride_q + t * Kp
            for i in range(0, Kp, LANES):
                acc = fma(load(row, i), load(k, t * Kp + i), acc)
            put(P, (r * C + t) * C + t, total(acc))


@jit
def chunk_key_forward(p, w, q, stride_q, k, chunk, v_at, g_at, beta_at, m, first, last):
    """(G12): E, and the state after the chunk; ``first``: the one before is zeros."""
    Kp, Vp, rows = w.Kp, w.Vp, chunk * C
    S, alpha = w.states + chunk * Vp * w.ld, w.alpha + rows * Kp
    _decays(p, w, alpha, g_at, m)
    load_strengths(p, w, beta_at, rows, m)
    _from_start(w, alpha)
    _pairs(p, w, q, stride_q, k, alpha, rows, m)
    load_values(w.dV, p.v, p.io, v_at, p.v_t, m, p.V, Vp)
    d = w.error + rows * Vp
    ask(w, p.v, p.io, v_at + C * p.v_t, p.v_t, p.V)
    if p.delta != 0:
        d = w.d
        transpose(w.rest, C, w.dV, Vp, C, Vp)
        if not first:
            _multiply(w.made, k, w.down, C * Kp, -1.0)
            transpose(w.k_turned, C, w.made, Kp, C, Kp)
            gemm(w.rest, w.rest, C, S, w.ld, 1, w.k_turned, C, Vp, C, Kp, 1.0, w)
        make_errors(w, rows)
    else:
        transpose(d, C, w.dV, Vp, C, Vp)
    if not last:
        before = 0.0
        if not first:
            before = 1.0
            _scale_columns(S + Vp * w.ld, S, w.down + (C - 1) * Kp, Vp, Kp, w.ld)
        k_out = w.k_out + rows * Kp
        gemm(S + Vp * w.ld, S + Vp * w.ld, w.ld, d, C, 1, k_out, Kp, Vp, Kp, C, before, w)


@jit
def _inner_columns(out, a, b, rows, n, ld):
    """out[i] = the sum over all rows of a[j, i] b[j, i]."""
    for i in range(0, n, LANES):
        acc = zeros(4)
        for j in range(i, i + rows * ld, 4 * ld):
            acc = fma(load_rows(a, j, ld, 4), load_rows(b, j, ld, 4), acc)
        store(out, i, (pick(acc, 0) + pick(acc, 1)) + (pick(acc, 2) + pick(acc, 3)))


@jit
def _load_column(p, w, q, dq, stride_q, k, dk, alpha, i, m, first):
    """LANES keys from i on of every token, and what tokens ask of the state before the chunk."""
    Kp, G = w.Kp, w.G
    rates, keys, by_k, by_g = w.columns, w.columns + COLUMN, w.columns + 2 * COLUMN, w.by_g
    later, whole = splat(0.0), load(w.whole, i)
    for t in range(m - 1, -1, -1):
        at, here = t * Kp + i, t * LANES
        down, key, asked = load(w.down, at), load(k, at), load(dk, at)
        if p.delta != 0 and not first:
            one = load(w.made + G * C * Kp, at) * down * -1.0
            asked, later = asked + one, fma(one, key, later)
        store(rates, here, load(alpha, at))
        store(keys, here, key)
        store(by_k, here, asked)
        for r in range(G):
            query, asked = load(q + r * stride_q, at), load(dq + r * stride_q, at)
            if not first:
                one = load(w.made + r * C * Kp, at) * down
                asked, later = asked + one, fma(one, query, later)
            store(w.columns + (3 + 2 * r) * COLUMN, here, query)
            store(w.columns + (4 + 2 * r) * COLUMN, here, asked)
        store(by_g, at, later + whole)


@jit_inline
def _read_keys(p, w, keys, t, j):
    """Add what token t asks of the keys of STEP tokens from j on, to its own gradients."""
    for r in range(w.G):
        by_q, factors = (
            w.columns + (4 + 2 * r) * COLUMN,
            spread(w.by, (r * C + t) * C + j, 0, 1, STEP),
        )
        asked = inner(load_rows(by_q, t * LANES, LANES, 1), factors, keys)
        store_rows(by_q, t * LANES, LANES, asked)
    if p.delta != 0:
        by_k, factors = w.columns + 2 * COLUMN, spread(w.by, (w.G * C + t) * C + j, 0, 1, STEP)
        asked = inner(load_rows(by_k, t * LANES, LANES, 1), factors, keys)
        store_rows(by_k, t * LANES, LANES, asked)


@jit_inline
def _ask_keys(p, w, by_keys, t, j, i):
    """Add what token t asks to z of STEP tokens from j on, and what spans t to its dg."""
    for r in range(w.G):
        factors = spread(w.by, (r * C + t) * C + j, 0, 1, STEP)
        by_keys = outer(
            by_keys, factors, load_rows(w.columns + (3 + 2 * r) * COLUMN, t * LANES, 0, 1)
        )
    if p.delta != 0:
        factors = spread(w.by, (w.G * C + t) * C + j, 0, 1, STEP)
        by_keys = outer(by_keys, factors, load_rows(w.columns + COLUMN, t * LANES, 0, 1))
    at, faded = t * w.Kp + i, load_rows(w.faded, t * STEP * LANES, LANES, STEP)
    store_rows(w.by_g, at, LANES, inner(load_rows(w.by_g, at, LANES, 1), faded, by_keys))
    return by_keys


@jit
def _writers(p, w, j, i, m, last):
    """Pairs of a column whose writers are the STEP tokens from j on."""
    rates, keys, by_k, now = w.columns, w.columns + COLUMN, w.columns + 2 * COLUMN, w.now
    near = min(j + STEP, m)
    tile = zeros(STEP)
    for t in range(j, near):  # rows from t on are zeros
        tile = scaled(tile, load(rates, t * LANES))
        store_rows(w.faded, t * STEP * LANES, LANES, tile)
        store_rows(now, 0, LANES, tile)
        store(now, (t - j) * LANES, load(keys, t * LANES))
        tile = load_rows(now, 0, LANES, STEP)
        _read_keys(p, w, tile, t, j)
    for t in range(near, m):
        tile = scaled(tile, load(rates, t * LANES))
        store_rows(w.faded, t * STEP * LANES, LANES, tile)
        _read_keys(p, w, tile, t, j)
    tile = zeros(STEP)
    if not last:
        tile = load_rows(w.wrote, j * w.Kp + i, w.Kp, STEP)
    for t in range(m - 1, near - 1, -1):
        tile = scaled(_ask_keys(p, w, tile, t, j, i), load(rates, t * LANES))
    for t in range(near - 1, j - 1, -1):
        tile = _ask_keys(p, w, tile, t, j, i)
        store_rows(now, 0, LANES, tile)
        store(by_k, t * LANES, load(by_k, t * LANES) + load(now, (t - j) * LANES))
        tile = scaled(tile, load(rates, t * LANES))


@jit
def _store_column(w, dq, stride_q, dk, i, m):
    for t in range(m):
        at, here = t * w.Kp + i, t * LANES
        store(dk, at, load(w.columns + 2 * COLUMN, here))
        for r in range(w.G):
            store(dq + r * stride_q, at, load(w.columns + (4 + 2 * r) * COLUMN, here))


@jit
def _store_decays(p, w, g_at, dg_at, m):
    """dg of a chunk, through raw gates if they are."""
    for t in range(m):
        row = w.by_g + t * w.Kp
        if p.A != 0:
            load_row(w.wrote, p.g, p.g_code, g_at + t * p.g_t, p.K)
            pace, by_A = load(w.pace, 0), load(w.dA, 0)
            for i in range(0, p.K, LANES):
                x, by = load(w.wrote, i) + load(w.bias, i), load(row, i) * pace
                by_A = fma(by, vsoftplus(x), by_A)
                by = by * vsigmoid(x)
                store(row, i, by)
                store(w.ddt, i, load(w.ddt, i) + by)
            store(w.dA, 0, by_A)
        store_row(p.dg, p.g_code, dg_at + t * p.HV * p.K, row, p.K)


@jit
def end_gates(p, w, seq, head):
    """The sums of a head's raw gates over one sequence."""
    if p.A != 0:
        put(pointer(p.dA, F32), seq * p.HV + head, total(load(w.dA, 0)))
        store_row(p.ddt, F32, (seq * p.HV + head) * p.K, w.ddt, p.K)


@jit
def chunk_key_backward(p, w, q, dq, stride_q, k, dk, chunk, token, g_at, head, m, first, last):
    """(G12) to (G14); dS becomes the gradient of the state before the chunk.

    ``first``: that state is zeros; ``last``: dS is zeros before the call.
    """
    Kp, Vp, G, rows = w.Kp, w.Vp, w.G, chunk * C
    HO, readers = max(p.HQ, p.HV), w.G + 1 if p.delta != 0 else w.G
    do_at, do_t = (token * HO + head * G) * p.V, HO * p.V
    S, dS, dV, alpha = w.states + chunk * Vp * w.ld, w.dS, w.dV, w.alpha + rows * Kp
    load_outputs(p, w, do_at, do_t, m)
    _from_start(w, alpha)
    # dD
    before = 0.0
    if not last:
        before = 1.0
        transpose(w.k_turned, C, w.k_out + rows * Kp, Kp, C, Kp)
        gemm(dV, dV, C, dS, w.ld, 1, w.k_turned, C, Vp, C, Kp, 0.0, w)
    for r in range(G):
        P = w.qk + (rows * G + r * C) * C
        gemm_by_triangle(dV, dV, w.do_dv + r * C * Vp, 1, Vp, P, False, Vp, C, before)
        before = 1.0
    d = through_values(p, w, rows, token, head, m)
    if p.delta != 0:
        _multiply(w.by + G * C * C, w.by + G * C * C, w.lower, C * C, -1.0)
    # readers of the state before the chunk, writers to the one after it
    if not first:
        ask(w, p.do, p.io, do_at - C * do_t, do_t, G * p.V)
        gemm(w.made, w.made, Kp, w.do_dv, Vp, 1, S, w.ld, readers * C, Kp, Vp, 0.0, w)
    fill(w.whole, Kp, 0.0)
    if not last:
        gemm(w.wrote, w.wrote, Kp, d, 1, C, dS, w.ld, C, Kp, Vp, 0.0, w)
        if not first:
            _inner_columns(w.whole, S, dS, Vp, Kp, w.ld)
            _multiply(w.whole, w.whole, w.down + (C - 1) * Kp, Kp, 1.0)
    for i in range(0, Kp, LANES):
        _load_column(p, w, q, dq, stride_q, k, dk, alpha, i, m, first)
        for j in range(0, m, STEP):
            _writers(p, w, j, i, m, last)
        _store_column(w, dq, stride_q, dk, i, m)
    _store_decays(p, w, g_at, (token * p.HV + head) * p.K, m)
    if not first:
        for r in range(G):
            _multiply(w.qk_in + r * C * Kp, q + r * stride_q, w.down, C * Kp, 1.0)
        if p.delta != 0:
            _multiply(w.qk_in + G * C * Kp, k, w.down, C * Kp, -1.0)
        before = 0.0
        if not last:
            before = 1.0
            _scale_columns(dS, dS, w.down + (C - 1) * Kp, Vp, Kp, w.ld)
        dv_t = p.HV * p.V
        ask(w, p.dv, p.io, token * dv_t + head * p.V - C * dv_t, dv_t, p.V)
        gemm(dS, dS, w.ld, w.do_dv, 1, Vp, w.qk_in, Kp, Vp, Kp, readers * C, before, w)
