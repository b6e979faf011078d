"""What the delta rule needs of up to 8 tokens of one head, in float32 scratch memory.

`load_tokens` loads and normalises the rows of k and q; `load_gates` makes decays and write
strengths for a run of tokens; `operands` then makes what delta.py takes: X, A, P, w and lam.
"""

from __future__ import annotations

import math

from sluice.backends.cpu.delta import BLOCK_V, LD, MOST
from sluice.backends.cpu.jit import jit, jit_inline
from sluice.backends.cpu.llvm import F32, LANES
from sluice.backends.cpu.memory import allocate, release
from sluice.backends.cpu.products import outer
from sluice.backends.cpu.records import record
from sluice.backends.cpu.rows import fill, load_row, read, round_up, scale_row, sum_squares
from sluice.backends.cpu.simd import fma, get, load, pointer, put, splat, store
from sluice.backends.cpu.tiles import load_rows, store_columns, sums, total, zeros
from sluice.backends.cpu.vmath import vexp, vsigmoid, vsoftplus

GATES = 64  # tokens whose gates are made at a time
L2_EPS = 1e-6
HEADER = 256  # bytes: room for the record
NO_DECAY, HEAD_DECAY, KEY_DECAY = 0, 1, 2

work = record(
    "work", "end", pointers="x raw w lam lams kk qk a p g alpha beta ak v o y d block tile"
)


@jit
def _take(w, floats):
    start = w.end
    w.end = start + 4 * round_up(floats, LANES)
    return pointer(start, F32)


@jit
def lay_out(w, address, K, V, groups, heads, tile):
    """Give the fields of w memory from `address` on; returns the address behind it."""
    Kp, Vp = round_up(K, LANES), round_up(V, BLOCK_V)
    w.end = round_up(address, 64)
    w.x = _take(w, (1 + groups) * MOST * Kp)  # [1 + G, M, K] rows k and q as (1) takes them
    w.raw = _take(w, (1 + groups) * MOST * Kp)  # the same before decays per key
    w.w = _take(w, MOST * Kp)  # [M, K]
    w.lam = _take(w, Kp)  # [K]
    w.lams = _take(w, MOST)  # [8] lam_t, one where X holds it
    w.kk = _take(w, MOST * LD)  # [8, 8] products k_t . k_s
    w.qk = _take(w, groups * MOST * LD)  # [G, 8, 8]
    w.a = _take(w, MOST * LD)  # [8, 8]
    w.p = _take(w, groups * MOST * LD)  # [G, 8, 8]
    w.g = _take(w, heads * GATES)  # [heads, 64] log decays
    w.alpha = _take(w, heads * GATES)  # [heads, 64] decays
    w.beta = _take(w, heads * GATES)  # [heads, 64]
    w.ak = _take(w, MOST * Kp)  # [8, K] decays per key
    w.v = _take(w, MOST * Vp)  # [8, V]
    w.o = _take(w, groups * MOST * Vp)  # [G, 8, V]
    w.y = _take(w, (1 + groups) * MOST * max(BLOCK_V, Vp))  # [1 + G, M, block]
    w.d = _take(w, MOST * max(BLOCK_V, Vp))  # [M, block]
    w.block = _take(w, BLOCK_V * Kp)  # a block of the state as it is stored
    w.tile = _take(w, tile)  # the state or a block of it
    return w.end


@jit
def make_work(K, V, groups, heads, tile):
    """A thread's scratch memory (one allocation, the record in front), and its address."""
    header = allocate(HEADER)
    size = lay_out(work(header), 0, K, V, groups, heads, tile)
    release(header)
    memory = allocate(HEADER + size + 64)
    w = work(memory)
    lay_out(w, memory + HEADER, K, V, groups, heads, tile)
    return w, memory


@jit_inline
def padded_tokens(m):
    """M: m rounded up to 1, 2, 4 or 8."""
    return 1 if m == 1 else 2 if m == 2 else 4 if m <= 4 else 8


@jit
def _normalized(row, n, normalize, factor):
    if normalize:
        factor = factor / math.sqrt(sum_squares(row, n) + L2_EPS)
    if normalize or factor != 1.0:
        scale_row(row, row, n, factor)


@jit
def _products(x, y, n, M, out):
    """out[t, s] = x_t . y_s for s <= t (and some s above)."""
    if M == 1:
        acc = splat(0.0)
        for i in range(0, n, LANES):
            acc = fma(load(x, i), load(y, i), acc)
        put(out, 0, total(acc))
        return
    for t in range(0, M, 2):
        for s in range(0, t + 2, 2):
            acc = zeros(4)
            for i in range(0, n, LANES):
                ys = load_rows(y, s * n + i, n, 2)
                acc = outer(acc, ys, load_rows(x, t * n + i, n, 2))
            store_columns(out, t * LD + s, LD, sums(acc), 2)


@jit
def load_tokens(p, w, k_at, q_at, m, groups):
    """Rows of k and of `groups` query heads, from elements k_at and q_at on, and their products."""
    K, n = p.K, round_up(p.K, LANES)
    M = padded_tokens(m)
    rows = w.raw if p.decay == KEY_DECAY else w.x
    for t in range(m):
        load_row(rows + t * n, p.k, p.io, k_at + t * p.k_t, K)
        for g in range(groups):
            row = rows + ((1 + g) * M + t) * n
            load_row(row, p.q, p.io, q_at + g * p.q_h + t * p.q_t, K)
    finish_tokens(p, w, m, groups)


@jit
def finish_tokens(p, w, m, groups):
    """Normalise loaded rows, pad them with zeros, and make their products."""
    n, M = round_up(p.K, LANES), padded_tokens(m)
    rows = w.raw if p.decay == KEY_DECAY else w.x
    for t in range(m):
        _normalized(rows + t * n, n, p.normalize, 1.0)
        for g in range(groups):
            _normalized(rows + ((1 + g) * M + t) * n, n, p.normalize, p.scale)
    for t in range(m, M):
        for g in range(1 + groups):
            fill(rows + (g * M + t) * n, n, 0.0)
    if p.decay != KEY_DECAY:
        if p.delta and M > 1:
            _products(rows, rows, n, M, w.kk)
        for g in range(groups):
            _products(rows + (1 + g) * M * n, rows, n, M, w.qk + g * MOST * LD)


@jit
def _gather(dst, address, code, at, stride, count, n):
    """Elements of a gate, and zeros up to n; one alone as a vector, which is soon read as one."""
    if count == 1:
        store(dst, 0, splat(read(address, code, at)))
        return
    for t in range(count):
        put(dst, t, read(address, code, at + t * stride))
    for t in range(count, n):
        put(dst, t, 0.0)


@jit
def load_gates(p, w, base, g_at, beta_at, head, count):
    """Decays and write strengths of `count` tokens, from element g_at and beta_at on."""
    g, alpha, beta = w.g + base, w.alpha + base, w.beta + base
    n = round_up(count, LANES)
    if p.decay == HEAD_DECAY:
        _gather(g, p.g, p.g_code, g_at, p.g_t, count, n)
        if p.raw:
            bias = read(p.dt, p.dt_code, head * p.dt_h) if p.dt != 0 else 0.0
            rate = vexp(splat(read(p.A, p.A_code, head * p.A_h))) * -1.0
            for t in range(0, n, LANES):
                store(g, t, vsoftplus(load(g, t) + bias) * rate)
        for t in range(0, n, LANES):
            store(alpha, t, vexp(load(g, t)))
    elif p.decay == NO_DECAY:
        fill(alpha, n, 1.0)
    if p.delta:
        _gather(beta, p.beta, p.beta_code, beta_at, p.beta_t, count, n)
        if p.raw:
            for t in range(0, n, LANES):
                strength = vsigmoid(load(beta, t))
                store(beta, t, strength * 2.0 if p.double else strength)


@jit
def load_key_gates(p, w, g_at, head, m):
    """Rows of decays per key: w.ak = exp(g); log decays are left in w.w."""
    K, n = p.K, round_up(p.K, LANES)
    for t in range(m):
        g = w.w + t * n
        load_row(g, p.g, p.g_code, g_at + t * p.g_t, K)
        if p.raw:
            if p.dt != 0:
                load_row(w.lam, p.dt, p.dt_code, head * p.dt_h, K)
            else:
                fill(w.lam, n, 0.0)
            rate = vexp(splat(read(p.A, p.A_code, head * p.A_h))) * -1.0
            for i in range(0, n, LANES):
                store(g, i, vsoftplus(load(g, i) + load(w.lam, i)) * rate)
        for i in range(0, n, LANES):
            store(w.ak, t * n + i, vexp(load(g, i)))


@jit
def head_factors(w, rows, alpha, m, n):
    """lam, and w_s = k_s decayed to the last token, for one decay a token."""
    lam = get(alpha, 0)
    for t in range(1, m):
        lam = lam * get(alpha, t)
    fill(w.lam, n, lam)
    for s in range(m):
        c = splat(1.0)
        for t in range(s + 1, m):
            c = c * get(alpha, t)
        for i in range(0, n, LANES):
            store(w.w, s * n + i, load(rows, s * n + i) * c)


@jit
def key_factors(w, rows, t, n):
    """The same for one decay a token and key, from what it was at token t - 1."""
    for i in range(0, n, LANES):
        decay = load(w.ak, t * n + i)
        store(w.lam, i, decay if t == 0 else load(w.lam, i) * decay)
        for s in range(t):
            store(w.w, s * n + i, load(w.w, s * n + i) * decay)
        store(w.w, t * n + i, load(rows, t * n + i))


@jit
def zero_factors(w, m, n):
    """Padded tokens add nothing."""
    for t in range(m, padded_tokens(m)):
        fill(w.w + t * n, n, 0.0)


@jit
def _head_products(raw, out, alpha, m):
    """out[t, s] = raw[t, s] times the decay from s to t, for s <= t."""
    for s in range(m):
        put(out, s * LD + s, get(raw, s * LD + s))
        c = 1.0
        for t in range(s + 1, m):
            c = c * get(alpha, t)
            put(out, t * LD + s, get(raw, t * LD + s) * c)


@jit
def _key_products(row, w, t, n, out):
    """out[s] = row . w_s for s <= t (and some s above)."""
    for s in range(0, t + 1, 4):
        acc = zeros(4)
        for i in range(0, n, LANES):
            acc = outer(acc, load_rows(row, i, n, 1), load_rows(w, s * n + i, n, 4))
        store(out, s, sums(acc))


@jit
def head_operands(p, w, alpha, m, groups, write):
    """lam_t, A and P, and with `write` w and lam, for one decay a token; X is loaded already."""
    n = round_up(p.K, LANES)
    lam = get(alpha, 0)
    put(w.lams, 0, lam)
    for t in range(1, m):
        lam = lam * get(alpha, t)
        put(w.lams, t, lam)
    if p.delta and m > 1:
        _head_products(w.kk, w.a, alpha, m)
    for g in range(groups):
        square = g * MOST * LD
        _head_products(w.qk + square, w.p + square, alpha, m)
    if write:
        head_factors(w, w.x, alpha, m, n)
        zero_factors(w, m, n)


@jit
def key_operands(p, w, m, groups):
    """X, A, P, w and lam for one decay a token and key."""
    n, M = round_up(p.K, LANES), padded_tokens(m)
    for t in range(m):
        put(w.lams, t, 1.0)
        key_factors(w, w.raw, t, n)
        for g in range(1 + groups):
            at = (g * M + t) * n
            for i in range(0, n, LANES):
                store(w.x, at + i, load(w.raw, at + i) * load(w.lam, i))
            if g > 0:
                _key_products(w.raw + at, w.w, t, n, w.p + ((g - 1) * MOST + t) * LD)
            elif p.delta:
                _key_products(w.raw + at, w.w, t, n, w.a + t * LD)
    for t in range(m, M):
        for g in range(1 + groups):
            fill(w.x + (g * M + t) * n, n, 0.0)
    zero_factors(w, m, n)


@jit
def operands(p, w, alpha, m, groups, write):
    """Everything delta.py takes, from the loaded tokens and gates."""
    if p.decay == KEY_DECAY:
        key_operands(p, w, m, groups)
    else:
        head_operands(p, w, alpha, m, groups, write)
    for t in range(m, padded_tokens(m)):
        put(w.lams, t, 0.0)
        for s in range(t):
            put(w.a, t * LD + s, 0.0)
