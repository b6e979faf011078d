"""What (B1) to (B3) of delta.py take, for up to 8 tokens of one head, in float32 scratch memory.

`load_tokens` loads and normalises rows of k and q. `load_gates` makes decays and write strengths
for a run of tokens. `make_operands` then makes the rest: products with decays (KKg, QKg), keys
decayed to the last token, and decays from before the first token.

A thread has one record of pointers into its scratch memory, `w`:

    kq          [1 + readers, M, K]   rows of k, then of q of each reader, as (B1) takes them
    kq_raw      [1 + readers, M, K]   the same before decays per key
    k_out       [M, K]                k decayed to the last token
    decay_all   [K]                   the decay over all tokens
    decay_in    [8]                   the decay up to each token; 1 where kq holds it
    kk, kkg     [8, 8]                products k_t . k_s, and with decays from s to t
    qk, qkg     [readers, 8, 8]       products q_t . k_s, and with decays
    g, alpha    [heads, 64]           log decays, and decays
    beta        [heads, 64]           write strengths
    decay_k     [8, K]                decays per key
    v, o        [8, V], [readers, 8, V]
    us          [1 + readers, M, block]   rows of K S, then of Q S
    d           [M, block]            corrections
    block       [BLOCK_V, K]          a block of the state as it is stored
    tile        the state, or a block of it

`w.draft` is the place in the draft where the tokens of a sequence begin; NOWHERE if no draft is
kept. A state has one reader, the query head of its value head, or several query heads share it.
"""

from __future__ import annotations

import math

from sluice.backends.cpu.delta import BLOCK_V, LD, MOST
from sluice.backends.cpu.jit import jit, jit_inline
from sluice.backends.cpu.llvm import F32, LANES
from sluice.backends.cpu.memory import allocate, release
from sluice.backends.cpu.products import outer
from sluice.backends.cpu.scratch_rows import fill, load_row, read, round_up, scale_row, sum_squares
from sluice.backends.cpu.simd import fma, get, load, pointer, put, splat, store
from sluice.backends.cpu.struct_view import struct_view
from sluice.backends.cpu.tiles import load_rows, store_columns, sums, total, zeros
from sluice.backends.cpu.vmath import vexp, vsigmoid, vsoftplus

GATES = 64  # tokens whose gates are made at a time
L2_EPS = 1e-6
HEADER = 256  # bytes: room for the record
NO_DECAY, HEAD_DECAY, KEY_DECAY = 0, 1, 2

work = struct_view(
    "work",
    "end readers ld_v delta draft",
    pointers="kq kq_raw k_out decay_all decay_in kk qk kkg qkg g alpha beta decay_k v o us d block"
    " tile",
)


@jit
def _take(w, floats):
    start = w.end
    w.end = start + 4 * round_up(floats, LANES)
    return pointer(start, F32)


@jit
def _lay_out(w, address, p, readers, heads, tile):
    """Give the fields of w memory from `address` on; returns the address after it."""
    n, ld_v = round_up(p.K, LANES), round_up(p.V, BLOCK_V)
    w.readers, w.ld_v, w.delta = readers, ld_v, p.delta
    w.end = round_up(address, 64)
    w.kq = _take(w, (1 + readers) * MOST * n)
    w.kq_raw = _take(w, (1 + readers) * MOST * n)
    w.k_out = _take(w, MOST * n)
    w.decay_all = _take(w, n)
    w.decay_in = _take(w, MOST)
    w.kk = _take(w, MOST * LD)
    w.qk = _take(w, readers * MOST * LD)
    w.kkg = _take(w, MOST * LD)
    w.qkg = _take(w, readers * MOST * LD)
    w.g = _take(w, heads * GATES)
    w.alpha = _take(w, heads * GATES)
    w.beta = _take(w, heads * GATES)
    w.decay_k = _take(w, MOST * n)
    w.v = _take(w, MOST * ld_v)
    w.o = _take(w, readers * MOST * ld_v)
    w.us = _take(w, (1 + readers) * MOST * ld_v)
    w.d = _take(w, MOST * ld_v)
    w.block = _take(w, BLOCK_V * n)
    w.tile = _take(w, tile)
    return w.end


@jit
def make_work(p, readers, heads, tile):
    """A thread's scratch memory for gates of `heads` heads and `tile` floats of states.

    Returns the record, and the address of the one allocation, which begins with the record.
    """
    header = allocate(HEADER)
    size = _lay_out(work(header), 0, p, readers, heads, tile)
    release(header)
    memory = allocate(HEADER + size + 64)
    w = work(memory)
    _lay_out(w, memory + HEADER, p, readers, heads, tile)
    return w, memory


@jit_inline
def padded_tokens(m):
    """M: m rounded up to 1, 2, 4 or 8."""
    return 1 if m == 1 else 2 if m == 2 else 4 if m <= 4 else 8


@jit
def _normalize(row, n, normalize, factor):
    if normalize:
        factor = factor / math.sqrt(sum_squares(row, n) + L2_EPS)
    if normalize or factor != 1.0:
        scale_row(row, row, n, factor)


@jit
def _products(x, y, n, M, out):
    """out[t, s] = x_t . y_s for s <= t, and some s above."""
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
def load_tokens(p, w, k_at, q_at, m):
    """Rows of k and of every reader's q, from elements k_at and q_at on, and their products."""
    K, n = p.K, round_up(p.K, LANES)
    M = padded_tokens(m)
    rows = w.kq_raw if p.decay == KEY_DECAY else w.kq
    for t in range(m):
        load_row(rows + t * n, p.k, p.io, k_at + t * p.k_t, K)
        for r in range(w.readers):
            row = rows + ((1 + r) * M + t) * n
            load_row(row, p.q, p.io, q_at + r * p.q_h + t * p.q_t, K)
    finish_tokens(p, w, m)


@jit
def finish_tokens(p, w, m):
    """Normalise loaded rows, pad them with zeros, and make their products."""
    n, M = round_up(p.K, LANES), padded_tokens(m)
    rows = w.kq_raw if p.decay == KEY_DECAY else w.kq
    for t in range(m):
        _normalize(rows + t * n, n, p.normalize, 1.0)
        for r in range(w.readers):
            _normalize(rows + ((1 + r) * M + t) * n, n, p.normalize, p.scale)
    for t in range(m, M):
        for r in range(1 + w.readers):
            fill(rows + (r * M + t) * n, n, 0.0)
    if p.decay != KEY_DECAY:
        if p.delta and M > 1:
            _products(rows, rows, n, M, w.kk)
        for r in range(w.readers):
            _products(rows + (1 + r) * M * n, rows, n, M, w.qk + r * MOST * LD)


@jit
def _gather(dst, address, code, at, stride, count, n):
    """Elements of a gate, and zeros up to n. One alone fills a vector: it is soon read as one."""
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
    """Rows of decays per key, exp(g), to w.decay_k; log decays are left in w.k_out."""
    K, n = p.K, round_up(p.K, LANES)
    for t in range(m):
        g = w.k_out + t * n
        load_row(g, p.g, p.g_code, g_at + t * p.g_t, K)
        if p.raw:
            if p.dt != 0:
                load_row(w.decay_all, p.dt, p.dt_code, head * p.dt_h, K)
            else:
                fill(w.decay_all, n, 0.0)
            rate = vexp(splat(read(p.A, p.A_code, head * p.A_h))) * -1.0
            for i in range(0, n, LANES):
                store(g, i, vsoftplus(load(g, i) + load(w.decay_all, i)) * rate)
        for i in range(0, n, LANES):
            store(w.decay_k, t * n + i, vexp(load(g, i)))


@jit
def head_decays(w, keys, alpha, m, n):
    """w.decay_all, and w.k_out from rows of keys, for one decay per token."""
    decay = get(alpha, 0)
    for t in range(1, m):
        decay = decay * get(alpha, t)
    fill(w.decay_all, n, decay)
    for s in range(m):
        c = splat(1.0)
        for t in range(s + 1, m):
            c = c * get(alpha, t)
        for i in range(0, n, LANES):
            store(w.k_out, s * n + i, load(keys, s * n + i) * c)


@jit
def key_decays(w, keys, t, n):
    """The same up to token t, from what it was at token t - 1, for one decay per token and key."""
    for i in range(0, n, LANES):
        decay = load(w.decay_k, t * n + i)
        store(w.decay_all, i, decay if t == 0 else load(w.decay_all, i) * decay)
        for s in range(t):
            store(w.k_out, s * n + i, load(w.k_out, s * n + i) * decay)
        store(w.k_out, t * n + i, load(keys, t * n + i))


@jit
def pad_keys(w, m, n):
    """Zeros for the keys of tokens that only pad: they add nothing to the state."""
    for t in range(m, padded_tokens(m)):
        fill(w.k_out + t * n, n, 0.0)


@jit
def _decay_products(raw, out, alpha, m):
    """out[t, s] = raw[t, s] times the decay from s to t, for s <= t."""
    for s in range(m):
        put(out, s * LD + s, get(raw, s * LD + s))
        c = 1.0
        for t in range(s + 1, m):
            c = c * get(alpha, t)
            put(out, t * LD + s, get(raw, t * LD + s) * c)


@jit
def _key_products(row, k_out, t, n, out):
    """out[s] = row . k_out[s] for s <= t, and some s above."""
    for s in range(0, t + 1, 4):
        acc = zeros(4)
        for i in range(0, n, LANES):
            acc = outer(acc, load_rows(row, i, n, 1), load_rows(k_out, s * n + i, n, 4))
        store(out, s, sums(acc))


@jit
def _head_operands(p, w, alpha, m, write):
    """decay_in, KKg and QKg, and with `write` k_out and decay_all, for one decay per token."""
    n = round_up(p.K, LANES)
    decay = get(alpha, 0)
    put(w.decay_in, 0, decay)
    for t in range(1, m):
        decay = decay * get(alpha, t)
        put(w.decay_in, t, decay)
    if p.delta and m > 1:
        _decay_products(w.kk, w.kkg, alpha, m)
    for r in range(w.readers):
        square = r * MOST * LD
        _decay_products(w.qk + square, w.qkg + square, alpha, m)
    if write:
        head_decays(w, w.kq, alpha, m, n)
        pad_keys(w, m, n)


@jit
def _key_operands(p, w, m):
    """kq, KKg, QKg, k_out and decay_all, for one decay per token and key."""
    n, M = round_up(p.K, LANES), padded_tokens(m)
    for t in range(m):
        put(w.decay_in, t, 1.0)
        key_decays(w, w.kq_raw, t, n)
        for r in range(1 + w.readers):
            at = (r * M + t) * n
            for i in range(0, n, LANES):
                store(w.kq, at + i, load(w.kq_raw, at + i) * load(w.decay_all, i))
            if r > 0:
                _key_products(w.kq_raw + at, w.k_out, t, n, w.qkg + ((r - 1) * MOST + t) * LD)
            elif p.delta:
                _key_products(w.kq_raw + at, w.k_out, t, n, w.kkg + t * LD)
    for t in range(m, M):
        for r in range(1 + w.readers):
            fill(w.kq + (r * M + t) * n, n, 0.0)
    pad_keys(w, m, n)


@jit
def make_operands(p, w, alpha, m, write):
    """All that (B1) to (B3) take, from the loaded tokens and gates."""
    if p.decay == KEY_DECAY:
        _key_operands(p, w, m)
    else:
        _head_operands(p, w, alpha, m, write)
    for t in range(m, padded_tokens(m)):
        put(w.decay_in, t, 0.0)
        for s in range(t):
            put(w.kkg, t * LD + s, 0.0)
