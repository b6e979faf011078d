"""One chunk of one value head in the backward of prefill: (G1) to (G9) of docs/kernels/backward.md.

Values are kept turned, [V, C], and states too, [V, K], so that no product needs a state turned:
with A read by single elements and B by vectors,

    (k S)ᵀ = Sᵀ kᵀ,   Sᵀ + Dᵀ k,   (k dS)ᵀ = dSᵀ kᵀ,   dO Sᵀ,   D dSᵀ,   dSᵀ + dOᵀ q

all have a B that is there already; kᵀ is made once for the heads that share it. A factor per token
is then a vector for all rows of values.

Decays between tokens of a chunk are sums of log decays from one to the other: no difference of
long sums is ever taken.
"""

from __future__ import annotations

from sluice.backends.cpu.gemm import (
    gemm,
    gemm_by_triangle,
    gemm_lower,
    gemm_to_triangle,
    transpose,
)
from sluice.backends.cpu.jit import jit, jit_inline
from sluice.backends.cpu.llvm import F32, LANES
from sluice.backends.cpu.products import outer, substitute
from sluice.backends.cpu.scratch_rows import fill, load_row, scale_row, store_row
from sluice.backends.cpu.simd import fma, get, load, pointer, put, splat, store, vmax
from sluice.backends.cpu.struct_view import struct_view
from sluice.backends.cpu.tiles import (
    load_lanes,
    load_rows,
    pick,
    spread,
    store_rows,
    sums,
    total,
    zeros,
)
from sluice.backends.cpu.vmath import vexp

C = 32
"""Tokens per chunk."""
STEP = 8
"""Tokens that are substituted one by one; also rows whose sums over lanes are made together."""
ROW = C // LANES
"""Vectors of a row of C elements."""
LOWEST = -1e30
"""Log decays below it are taken for it: the sum of a chunk's stays finite, its exp is 0."""

WORK = (
    "q k dq dk rho_q rho_k"  # [heads of the task, T, ..], over the whole sequence
    " k_turned kk qk sum_by"  # of the keys and queries in turn, over the whole sequence
    " states error bend fade down up strength"  # of one value head, over the whole sequence
    " lower ones rate rhs d rest dV by pairs inter kept minus"
    " do_dv qk_in k_out made dS"
    " alpha bias pace dA ddt wrote whole by_g columns faded now"  # with decay per key
)
work = struct_view("backward_work", "Kp Vp Tp G ld next at step size left", "", WORK)
WORK_BYTES = 8 * (10 + len(WORK.split()))


@jit
def make_constants(w):
    """What does not depend on tokens. ``lower``: 1 below the diagonal, else 0."""
    for i in range(C):
        for j in range(C):
            put(w.lower, i * C + j, 1.0 if j < i else 0.0)
    fill(w.ones, C, 1.0)
    fill(w.by, (w.G + 1) * C * C, 0.0)  # not all above the diagonal is ever written
    w.left = 0


@jit
def load_values(dst, address, code, index, stride, m, n, ld):
    """m rows of n elements in float32, and zeros for the other tokens and columns."""
    for t in range(C):
        row = dst + t * ld
        if t >= m or n < ld:
            fill(row, ld, 0.0)
        if t < m:
            load_row(row, address, code, index + t * stride, n)


@jit
def ask(w, address, code, index, stride, n):
    """Let the next products ask for the rows of n elements of a chunk."""
    size = 4 if code == F32 else 2
    w.at, w.step, w.size, w.left = address + index * size, stride * size, n * size, C


@jit
def share_keys(w, k, count):
    """What value heads with the same keys share: kᵀ and K Kᵀ of each chunk."""
    for at in range(0, count, C):
        turned = w.k_turned + at * w.Kp
        transpose(turned, C, k + at * w.Kp, w.Kp, C, w.Kp)
        gemm_to_triangle(w.kk + at * C, k + at * w.Kp, w.Kp, 1, turned, C, w.Kp)


@jit
def share_queries(w, q, stride_q, count):
    """The same for queries: Q Kᵀ of each chunk, for each query head."""
    for at in range(0, count, C):
        for r in range(w.G):
            qk, rows = w.qk + (at * w.G + r * C) * C, q + r * stride_q + at * w.Kp
            gemm_to_triangle(qk, rows, w.Kp, 1, w.k_turned + at * w.Kp, C, w.Kp)


@jit
def load_strengths(p, w, at, rows, m):
    """beta of a chunk's tokens, and zeros for those that pad it."""
    beta = pointer(p.beta, F32)
    for t in range(C):
        put(w.strength + rows, t, get(beta, at + t * p.HV) if p.delta != 0 and t < m else 0.0)


@jit
def _gates(p, w, at, rows, m):
    """A chunk's ``fade`` from j to i, ``down`` from its start, ``up`` to its end."""
    g = pointer(p.g, F32)
    fade, down, up = w.fade + rows * C, w.down + rows, w.up + rows
    for t in range(C):
        put(w.rate, t, get(g, at + t * p.HV) if p.gated != 0 and t < m else 0.0)
    for t in range(0, C, LANES):
        store(w.rate, t, vmax(load(w.rate, t), LOWEST))
    whole = 0.0
    for t in range(C):
        whole += get(w.rate, t)
        put(down, t, whole)
    rest = 0.0
    for t in range(C - 1, -1, -1):
        put(up, t, rest)
        rest += get(w.rate, t)
    for j in range(0, C, LANES):
        store(down, j, vexp(load(down, j)))
        store(up, j, vexp(load(up, j)))
        span = splat(0.0)
        for i in range(C):
            below = load(w.lower, i * C + j)
            span = (span + get(w.rate, i)) * below
            store(fade, i * C + j, vexp(span) * below)
    for i in range(C):
        put(fade, i * C + i, 1.0)


@jit_inline
def _multiply(dst, a, b, n):
    for i in range(0, n, LANES):
        store(dst, i, load(a, i) * load(b, i))


@jit
def _scale_rows(dst, src, factors, ld):
    """Row t times factor t."""
    for t in range(C):
        scale_row(dst + t * ld, src + t * ld, ld, get(factors, t))


@jit
def _scale_columns(dst, src, factors, rows):
    """Rows of C elements, each times the factors."""
    factor = load_rows(factors, 0, LANES, ROW)
    for i in range(0, rows * C, C):
        store_rows(dst, i, LANES, load_rows(src, i, LANES, ROW) * factor)


@jit
def _products(w, rows):
    """KKg, to w.rhs."""
    kk, fade = w.kk + rows * C, w.fade + rows * C
    for i in range(0, C * C, LANES):
        store(w.rhs, i, load(kk, i) * load(fade, i) * load(w.lower, i))


@jit
def _bend(w, rows):
    """Bg = (I + KKg beta)⁻¹ KKg of (G10) for the KKg in w.rhs, times −beta of its rows; w.rhs:
    times −beta of its columns, and turned."""
    kkg, bend, strength, L = w.rhs, w.bend + rows * C, w.strength + rows, w.by
    for i in range(0, C * C, C):
        for j in range(0, C, LANES):
            store(L, i + j, load(kkg, i + j) * load(strength, j))
    fill(bend, C * C, 0.0)
    for first in range(0, C, STEP):
        for j in range(0, first + STEP, LANES):
            acc = load_rows(kkg, first * C + j, C, STEP)
            for s in range(j, first):
                factors = spread(L, first * C + s, C, STEP, 1) * -1.0
                acc = outer(acc, factors, load_rows(bend, s * C + j, LANES, 1))
            store_rows(bend, first * C + j, C, substitute(acc, L + (first * C + first), C, w.ones))
    for i in range(C):
        for j in range(0, C, LANES):
            store(L, i * C + j, load(bend, i * C + j) * load(strength, j) * -1.0)
        scale_row(bend + i * C, bend + i * C, C, -get(strength, i))
    transpose(w.rhs, C, L, C, C, C)


@jit
def make_errors(w, rows):
    """E from the R in w.rest and the KKg in w.rhs, and D to w.d; both turned."""
    _bend(w, rows)
    gemm_by_triangle(w.error + rows * w.Vp, w.rest, w.rest, C, 1, w.rhs, True, w.Vp, C, 1.0)
    _scale_columns(w.d, w.error + rows * w.Vp, w.strength + rows, w.Vp)


@jit
def chunk_forward(p, w, k, chunk, v_at, g_at, m, first, last):
    """(G2), (G3): E, and the state after the chunk; ``first``: the one before is zeros."""
    Kp, Vp, rows = w.Kp, w.Vp, chunk * C
    S = w.states + chunk * Vp * w.ld
    error = w.error + rows * Vp
    _gates(p, w, g_at, rows, m)
    load_strengths(p, w, g_at, rows, m)
    load_values(w.dV, p.v, p.io, v_at, p.v_t, m, p.V, Vp)
    d = error
    ask(w, p.v, p.io, v_at + C * p.v_t, p.v_t, p.V)
    if p.delta != 0:
        rest, d = w.rest, w.d
        transpose(rest, C, w.dV, Vp, C, Vp)
        if not first:
            gemm(d, d, C, S, w.ld, 1, w.k_turned + rows * Kp, C, Vp, C, Kp, 0.0, w)
            factor = load_rows(w.down, rows, LANES, ROW) * -1.0
            for i in range(0, Vp * C, C):
                now = fma(load_rows(d, i, LANES, ROW), factor, load_rows(rest, i, LANES, ROW))
                store_rows(rest, i, LANES, now)
        _products(w, rows)
        make_errors(w, rows)
    else:
        transpose(error, C, w.dV, Vp, C, Vp)
    if not last:
        _scale_rows(w.k_out, k, w.up + rows, Kp)
        whole = 0.0 if first else get(w.down, rows + C - 1)
        gemm(S + Vp * w.ld, S, w.ld, d, C, 1, w.k_out, Kp, Vp, Kp, C, whole, w)


@jit
def _fold(dst, src, other, factors, dots, n):
    """dst[t] += factor[t] src[t]; dots[t] += factor[t] (src[t] · other[t])."""
    for t in range(0, C, STEP):
        acc, factor = zeros(STEP), spread(factors, t, 1, STEP, 1)
        for i in range(t * n, t * n + n, LANES):
            x = load_rows(src, i, n, STEP)
            acc = fma(x, load_rows(other, i, n, STEP), acc)
            store_rows(dst, i, n, fma(x, factor, load_rows(dst, i, n, STEP)))
        found = sums(acc) * load_lanes(factors, t, STEP) + load_lanes(dots, t, STEP)
        store(dots, t, found)


@jit
def _by_pairs(p, w, rows, fresh):
    """N and H of (G6), and what pairs of tokens say about the decay at t: those around it alone.

    Value heads that share keys and queries share the products with them: N and H are summed.
    """
    G, fade, kk, sum_by = w.G, w.fade + rows * C, w.kk + rows * C, w.sum_by + rows * (w.G + 1) * C
    for j in range(0, C, LANES):
        later = splat(0.0)
        for i in range((C - 1) * C + j, j - 1, -C):
            below, decay = load(w.lower, i), load(fade, i)
            for r in range(G):
                one, at = load(w.by + r * C * C, i) * decay, r * C * C + i
                store(sum_by, at, one if fresh else one + load(sum_by, at))
                later = fma(one, load(w.qk + (rows * G + r * C) * C, i), later)
            if p.delta != 0:
                one, at = load(w.by + G * C * C, i) * decay * below * -1.0, G * C * C + i
                store(sum_by, at, one if fresh else one + load(sum_by, at))
                later = fma(one, load(kk, i), later)
            store(w.rhs, i, later * below)
    for t in range(0, C, STEP):
        acc = zeros(STEP)
        for j in range(0, C, LANES):
            acc = acc + load_rows(w.rhs, t * C + j, C, STEP)
        store(w.pairs, t, sums(acc))


@jit
def multiply_pairs(p, w, q, dq, stride_q, k, dk, count):
    """What N and H give to the gradients of queries and keys, (G7) and (G8), in all chunks."""
    Kp, G = w.Kp, w.G
    for token in range(0, count, C):
        at, by = token * Kp, w.sum_by + token * (G + 1) * C
        for r in range(G):
            rows_q, rows_dq = q + r * stride_q + at, dq + r * stride_q + at
            gemm_lower(rows_dq, Kp, by + r * C * C, False, k + at, Kp, Kp, C)
            gemm_lower(dk + at, Kp, by + r * C * C, True, rows_q, Kp, Kp, C)
        if p.delta != 0:
            H, rows_dk = by + G * C * C, dk + at
            transpose(w.rhs, C, H, C, C, C)
            for i in range(0, C * C, LANES):
                store(w.rhs, i, load(w.rhs, i) + load(H, i))
            gemm(rows_dk, rows_dk, Kp, w.rhs, C, 1, k + at, Kp, C, Kp, C, 1.0, w)


@jit
def _store_decays(p, w, at, m, whole):
    """dg of a chunk: pairs, readers from t on, writers before t, and the state that passes."""
    dg = pointer(p.dg, F32)
    written = 0.0
    for t in range(m):
        put(w.pairs, t, get(w.pairs, t) + written + whole)
        written += get(w.kept, t)
    read = 0.0
    for t in range(m - 1, -1, -1):
        read += get(w.inter, t)
        put(dg, at + t * p.HV, get(w.pairs, t) + read)


@jit
def _inner_product(a, b, rows, n, ld):
    """The sum of all a[i, j] b[i, j]."""
    acc = zeros(4)
    for i in range(0, rows * ld, 4 * ld):
        for j in range(i, i + n, LANES):
            acc = fma(load_rows(a, j, ld, 4), load_rows(b, j, ld, 4), acc)
    return 1.0 * total((pick(acc, 0) + pick(acc, 1)) + (pick(acc, 2) + pick(acc, 3)))


@jit
def load_outputs(p, w, at, stride, m):
    """dO of a chunk, for each reader of the state."""
    for r in range(w.G):
        load_values(w.do_dv + r * C * w.Vp, p.do, p.io, at + r * p.V, stride, m, p.V, w.Vp)


@jit
def through_values(p, w, rows, token, head, m):
    """From the dD in w.dV: dV and dbeta to the caller, dV behind dO, dO Dᵀ and dV Dᵀ to w.by.

    Returns D, turned.
    """
    Vp, G, readers = w.Vp, w.G, w.G + 1 if p.delta != 0 else w.G
    d, dV = w.error + rows * Vp, w.dV
    if p.delta != 0:
        gemm_by_triangle(w.rest, dV, dV, C, 1, w.bend + rows * C, False, Vp, C, 1.0)
        error, d, dV, dbeta = d, w.d, w.rest, pointer(p.dbeta, F32)
        acc, factor = zeros(ROW), load_rows(w.strength, rows, LANES, ROW)
        for i in range(0, Vp * C, C):
            one, by = load_rows(error, i, LANES, ROW), load_rows(dV, i, LANES, ROW)
            acc = fma(by, one, acc)
            store_rows(d, i, LANES, one * factor)
            store_rows(dV, i, LANES, by * factor)
        store_rows(w.kept, 0, LANES, acc)
        for t in range(m):
            put(dbeta, (token + t) * p.HV + head, get(w.kept, t))
    made = w.do_dv + G * C * Vp
    transpose(made, Vp, dV, C, Vp, C)
    for t in range(m):
        store_row(p.dv, p.io, ((token + t) * p.HV + head) * p.V, made + t * Vp, p.V)
    for r in range(readers):
        gemm_to_triangle(w.by + r * C * C, w.do_dv + r * C * Vp, Vp, 1, d, C, Vp)
    return d


@jit
def chunk_backward(p, w, q, dq, stride_q, k, dk, chunk, token, head, m, first, last, fresh):
    """(G4) to (G9); dS becomes the gradient of the state before the chunk.

    ``first``: that state is zeros; ``last``: dS is zeros before the call; ``fresh``: no value head
    before this one had its keys and queries.
    """
    Kp, Vp, G, rows = w.Kp, w.Vp, w.G, chunk * C
    HO = max(p.HQ, p.HV)
    do_at, do_t = (token * HO + head * G) * p.V, HO * p.V
    g_at, readers = token * p.HV + head, G + 1 if p.delta != 0 else G
    S, dS = w.states + chunk * Vp * w.ld, w.dS
    down, up = w.down + rows, w.up + rows
    load_outputs(p, w, do_at, do_t, m)
    for r in range(G):
        _scale_rows(w.qk_in + r * C * Kp, q + r * stride_q, down, Kp)
    dV, before = w.dV, 0.0
    dv_at, dv_t = (token * p.HV + head) * p.V, p.HV * p.V
    # dD
    if not last:
        before = 1.0
        gemm(dV, dV, C, dS, w.ld, 1, w.k_turned + rows * Kp, C, Vp, C, Kp, 0.0, w)
        _scale_columns(dV, dV, up, Vp)
    for r in range(G):
        _multiply(w.rhs, w.qk + (rows * G + r * C) * C, w.fade + rows * C, C * C)
        gemm_by_triangle(dV, dV, w.do_dv + r * C * Vp, 1, Vp, w.rhs, False, Vp, C, before)
        before = 1.0
    d = through_values(p, w, rows, token, head, m)
    _by_pairs(p, w, rows, fresh)
    # through the states: readers before the chunk, writers after it
    scale_row(w.minus, down, C, -1.0)
    fill(w.inter, C, 0.0)
    fill(w.kept, C, 0.0)
    if not first:
        ask(w, p.do, p.io, do_at - C * do_t, do_t, G * p.V)
        gemm(w.made, w.made, Kp, w.do_dv, Vp, 1, S, w.ld, readers * C, Kp, Vp, 0.0, w)
        for r in range(G):
            rows_q = q + r * stride_q
            _fold(dq + r * stride_q, w.made + r * C * Kp, rows_q, down, w.inter, Kp)
        if p.delta != 0:
            _fold(dk, w.made + G * C * Kp, k, w.minus, w.inter, Kp)
    if not last:
        gemm(w.made, w.made, Kp, d, 1, C, dS, w.ld, C, Kp, Vp, 0.0, w)
        _fold(dk, w.made, k, up, w.kept, Kp)
    whole = 0.0 if last else get(down, C - 1)
    if p.gated != 0:
        passed = 0.0
        if not (first or last):
            passed = whole * _inner_product(S, dS, Vp, Kp, w.ld)
        _store_decays(p, w, g_at, m, passed)
    if not first:
        if p.delta != 0:
            _scale_rows(w.qk_in + G * C * Kp, k, w.minus, Kp)
        ask(w, p.dv, p.io, dv_at - C * dv_t, dv_t, p.V)
        gemm(dS, dS, w.ld, w.do_dv, 1, Vp, w.qk_in, Kp, Vp, Kp, readers * C, whole, w)
