"""The backward of prefill, before the walks: all that depends on no state.

For a chunk of C tokens of one value head, docs/kernels/backward.md:

    P   = s Q Kᵀ ∘ Γ

The other matrix that depends on no state is Bg (backward_inverse.py).

Where keys nearly repeat, gradients are small differences of large terms. With 16-bit inputs a
chunk of such keys is *hard* and marked so: what is rounded to 16 bits there (P, Bg, E, Y, N, S, dS)
is kept as two terms, x ≈ high + low. Of other chunks no low terms are stored or read. A chunk of
one token is hard too, and so is every chunk of a sequence of FEW_GATES. So a chunk's own keys, the
length of its sequence and the number of heads decide, unless the call makes every chunk hard
(ALL_HARD: prefill_backward_parts.all_hard).

Gates are activated here, once: cumulative log2 decays, beta, and the factors by which the walks
multiply each token. Keys and queries are read as given; their inverse lengths are factors too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import GATES, INDICES
from sluice.backends.triton.kernels.math import LOG2_E, NORM_EPS, begin, sigmoid, softplus
from sluice.backends.triton.kernels.prefill_chunks import NEAR, C, log2_decay
from sluice.backends.triton.kernels.work_units import unit_span

FEW_GATES: tl.constexpr = tl.constexpr(512)
"""Tokens times value heads. The gradients of so few gates are few sums, which may nearly vanish."""


@triton.jit
def tile_at(t, end, d, stride_t, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of tokens t to t + C, columns d to d + BLOCK: a scalar, those in 32 bits, a mask.

    Addresses in 64 bits would fill registers, of which these kernels have none to spare.
    """
    offs_c = tl.arange(0, C)
    offs_d = tl.arange(0, BLOCK)
    mask = (offs_c < tl.minimum(end - t, C).to(tl.int32))[:, None]
    if SIZE % BLOCK != 0:
        mask = mask & (d + offs_d < SIZE)[None, :]
    return t * stride_t + d, offs_c[:, None] * stride_t + offs_d[None, :], mask


@triton.jit
def load_tile(ptr, t, end, d, stride_t, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens t to t + C of the columns d to d + BLOCK; zeros from ``end`` and from SIZE on."""
    first, at, mask = tile_at(t, end, d, stride_t, SIZE, BLOCK)
    return tl.load(ptr + first + at, mask=mask, other=0.0)


@triton.jit
def zero_rows(ptr, t, end, part, PARTS: tl.constexpr, ROW: tl.constexpr):
    """Zeros for up to C tokens of ROW numbers each, one part of them."""
    offs = tl.arange(0, 1024)
    stop = tl.minimum(t + C, end) * ROW
    for first in range(t * ROW + part * 1024, stop, PARTS * 1024):
        at = first + offs
        tl.store(ptr + at, tl.zeros([1024], ptr.dtype.element_ty), mask=at < stop)


@triton.jit
def squares(x):
    """Σ x² of each row."""
    x32 = x.to(tl.float32)
    return tl.sum(x32 * x32, axis=1)


@triton.jit
def query_key_products(
    q_ptr, k_ptr, t, end, stride_q_t, stride_k_t,
    K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Q Kᵀ [C, C] as given, and the squared lengths of queries and keys."""
    qk = tl.zeros([C, C], tl.float32)
    qq = tl.zeros([C], tl.float32)
    kk = tl.zeros([C], tl.float32)
    for d in tl.static_range(0, K, BLOCK_K):
        k = load_tile(k_ptr, t, end, d, stride_k_t, K, BLOCK_K)
        q = load_tile(q_ptr, t, end, d, stride_q_t, K, BLOCK_K)
        qk = tl.dot(q, tl.trans(k), acc=qk, input_precision=PRECISION)
        qq += squares(q)
        kk += squares(k)
    return qk, qq, kk


@triton.jit
def log2_decay_terms(g_ptr, A_log_ptr, dt_bias_ptr, head_v, t, end, stride_g_t):
    """A chunk's cumulative log2 decay as two float32 terms, summed in float64.

    A difference of long sums must keep the digits of a short one: under strong decay, float32 sums
    would leave 1e-5 in the decays between neighbours.
    """
    offs_t = t + tl.arange(0, C)
    mask = offs_t < end
    g = tl.load(g_ptr + offs_t * stride_g_t, mask=mask, other=0.0).to(tl.float32)
    if A_log_ptr is not None:
        if dt_bias_ptr is not None:
            g += tl.load(dt_bias_ptr + head_v).to(tl.float32)
        g = -tl.exp(tl.load(A_log_ptr + head_v).to(tl.float32)) * softplus(g)
    g2 = tl.cumsum(tl.where(mask, g, 0.0).to(tl.float64) * LOG2_E, axis=0)
    high = g2.to(tl.float32)
    return high, (g2 - high.to(tl.float64)).to(tl.float32)


@triton.jit
def key_products(k_ptr, t, end, stride_k_t, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """K Kᵀ [C, C] as given."""
    kk = tl.zeros([C, C], tl.float32)
    for d in tl.static_range(0, K, BLOCK_K):
        k = load_tile(k_ptr, t, end, d, stride_k_t, K, BLOCK_K)
        kk = tl.dot(k, tl.trans(k), acc=kk)
    return kk


@triton.jit
def repeats(kk, t, end, NORMALIZE_QK: tl.constexpr):
    """Whether a chunk has as many pairs of nearly equal keys as it has keys, less one."""
    offs = tl.arange(0, C)
    near = tl.full([C], NEAR, tl.float32)
    if NORMALIZE_QK:  # of keys that are not divided by their lengths, long ones count
        near = near * tl.sqrt(tl.sum(tl.where(offs[:, None] == offs[None, :], kk, 0.0), axis=1))
        near_j = tl.sqrt(tl.sum(tl.where(offs[:, None] == offs[None, :], kk, 0.0), axis=0))
        close = tl.abs(kk) >= near[:, None] * near_j[None, :]
    else:
        close = tl.abs(kk) >= near[:, None]
    n = tl.minimum(end - t, C)
    pairs = tl.sum((close & (offs[:, None] > offs[None, :]) & (offs < n)[:, None]).to(tl.int32))
    return (n == 1) | ((pairs > 0) & (pairs >= n - 1))


@triton.jit(
    do_not_specialize=["N", "T", "tokens", "stride_g_b", "stride_beta_b"],
    do_not_specialize_on_alignment=[*INDICES, *GATES],
)
def backward_local_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    g_ptr,  # [B, T, HV]; None: no decay
    beta_ptr,  # [B, T, HV]; None: no delta rule
    A_log_ptr,  # [HV]; given: g and beta are raw gates
    dt_bias_ptr,  # [HV]; None: 0
    p_ptr,  # [B * T, HO, C]: P; None without dO
    p_low_ptr,  # the same: its low terms in hard chunks; None unless inputs have 16 bits
    hard_ptr,  # [HV, B * T // C + N] int32: whether a chunk is hard; None: no low terms
    dq_ptr,  # [B, T, HQ, K]: zeros for tokens after the last sequence, as the next four
    dk_ptr,
    dv_ptr,
    dg_ptr,  # None without g
    dbeta_ptr,  # None without beta
    beta32_ptr,  # [HV, B * T] float32: beta; None without
    g2_ptr,  # [HV, B * T] float32: cumulative log2 decay; None without g
    g2_low_ptr,  # the same: what float32 does not hold of it; None unless inputs are float32
    decay_in_ptr,  # [HV, B * T] float32: e^γ r_k
    decay_out_ptr,  # [HV, B * T] float32: e^(γ_C - γ) r_k
    decay_q_ptr,  # [HO, B * T] float32: scale e^γ r_q
    r_k_ptr,  # [HK, B * T] float32: inverse lengths of keys; None without norm
    r_q_ptr,  # [B * T, HQ] float32: of queries
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    scale,
    beta_scale,
    N,
    T,
    tokens,  # B * T
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_g_b,
    stride_g_t,
    stride_g_h,
    stride_beta_b,
    stride_beta_t,
    stride_beta_h,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    ONCE: tl.constexpr,  # keys and queries fit into registers as they are
    ALL_HARD: tl.constexpr,
):
    HO: tl.constexpr = HQ if HQ > HV else HV
    READERS: tl.constexpr = HO // HV
    begin()
    pid = tl.program_id(0)
    head_v = pid % HV
    head_k = head_v // (HV // HK)
    seq, batch, start, chunk, end = unit_span((pid // HV).to(tl.int64), cu_seqlens_ptr, N, T, C)
    t = start + chunk * C
    if t >= end:
        return
    if seq == N:  # tokens after the last sequence
        zero_rows(dq_ptr, t, end, head_v, HV, HQ * K)
        zero_rows(dk_ptr, t, end, head_v, HV, HK * K)
        zero_rows(dv_ptr, t, end, head_v, HV, HV * V)
        if dg_ptr is not None:
            zero_rows(dg_ptr, t, end, head_v, HV, HV)
        if dbeta_ptr is not None:
            zero_rows(dbeta_ptr, t, end, head_v, HV, HV)
        return
    # Memory is far away: what a program loads, it asks for before it computes. ptxas would put off
    # these loads, but not over a barrier.
    q_ptr += batch * stride_q_b
    k_ptr += batch * stride_k_b + head_k * stride_k_h
    if ONCE:
        k = load_tile(k_ptr, t, end, 0, stride_k_t, K, BLOCK_K)
    offs_c = tl.arange(0, C)
    rows = t + offs_c < end
    if beta_ptr is not None:
        at = beta_ptr + batch * stride_beta_b + head_v * stride_beta_h
        beta = tl.load(at + (t + offs_c) * stride_beta_t, mask=rows, other=0.0).to(tl.float32)
    if ONCE:
        head_q = head_v * READERS * HQ // HO
        q = load_tile(q_ptr + head_q * stride_q_h, t, end, 0, stride_q_t, K, BLOCK_K)
        tl.debug_barrier()
    token = batch * T + t + offs_c  # in the workspace
    of_value = head_v.to(tl.int64) * tokens + token
    lower = offs_c[:, None] >= offs_c[None, :]
    fade = tl.where(lower, 1.0, 0.0)
    decay_in = tl.full([C], 1.0, tl.float32)
    decay_out = decay_in
    if g_ptr is not None:
        g_at = g_ptr + batch * stride_g_b + head_v * stride_g_h
        if g2_low_ptr is None:
            g2 = log2_decay(g_at, A_log_ptr, dt_bias_ptr, head_v, t, end, stride_g_t)
            between = g2[:, None] - g2[None, :]
            decay_out = tl.exp2(tl.sum(tl.where(offs_c == C - 1, g2, 0.0)) - g2)
        else:
            g2, low = log2_decay_terms(g_at, A_log_ptr, dt_bias_ptr, head_v, t, end, stride_g_t)
            tl.store(g2_low_ptr + of_value, low, mask=rows)
            between = (g2[:, None] - g2[None, :]) + (low[:, None] - low[None, :])
            left = tl.sum(tl.where(offs_c == C - 1, g2, 0.0)) - g2
            decay_out = tl.exp2(left + (tl.sum(tl.where(offs_c == C - 1, low, 0.0)) - low))
        tl.store(g2_ptr + of_value, g2, mask=rows)
        decay_in = tl.exp2(g2)
        fade = tl.where(lower, tl.exp2(tl.where(lower, between, 0.0)), 0.0)
    if beta_ptr is not None:
        if A_log_ptr is not None:
            beta = sigmoid(beta) * beta_scale
        tl.store(beta32_ptr + of_value, beta, mask=rows)
    hard = False
    if hard_ptr is not None:
        if ONCE:
            k_k = tl.dot(k, tl.trans(k))
        else:
            k_k = key_products(k_ptr, t, end, stride_k_t, K, BLOCK_K)
        hard = repeats(k_k, t, end, r_k_ptr is not None)
        hard = hard | ((end - start) * HV <= FEW_GATES) | ALL_HARD
        chunk_slot = (batch * T + t) // C + seq
        tl.store(hard_ptr + head_v.to(tl.int64) * (tokens // C + N) + chunk_slot, hard.to(tl.int32))
    for reader in tl.static_range(READERS):
        head_o = head_v * READERS + reader
        head_q = head_o * HQ // HO
        if ONCE:
            if reader > 0:
                q = load_tile(q_ptr + head_q * stride_q_h, t, end, 0, stride_q_t, K, BLOCK_K)
            qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            qq = squares(q)
            kk = squares(k)
        else:
            qk, qq, kk = query_key_products(
                q_ptr + head_q * stride_q_h, k_ptr, t, end, stride_q_t, stride_k_t,
                K, BLOCK_K, PRECISION,
            )  # fmt: skip
        r_q = tl.full([C], 1.0, tl.float32)
        r_k = r_q
        if r_k_ptr is not None:
            r_q = tl.rsqrt(qq + NORM_EPS)
            r_k = tl.rsqrt(kk + NORM_EPS)
            if head_o % (HO // HQ) == 0:
                tl.store(r_q_ptr + token * HQ + head_q, r_q, mask=rows)
        of_output = head_o.to(tl.int64) * tokens + token
        tl.store(decay_q_ptr + of_output, decay_in * r_q * scale, mask=rows)
        if reader == 0:
            tl.store(decay_in_ptr + of_value, decay_in * r_k, mask=rows)
            tl.store(decay_out_ptr + of_value, decay_out * r_k, mask=rows)
            if r_k_ptr is not None and head_v % (HV // HK) == 0:
                tl.store(r_k_ptr + head_k.to(tl.int64) * tokens + token, r_k, mask=rows)
        if p_ptr is not None:
            qk = qk * fade * (r_q * scale)[:, None] * r_k[None, :]
            at = p_ptr + (token * HO + head_o)[:, None] * C + offs_c[None, :]
            high = qk.to(p_ptr.dtype.element_ty)
            tl.store(at, high, mask=rows[:, None])
            if p_low_ptr is not None:  # noqa: SIM102 (what a pointer decides is an if of its own)
                if hard:  # a branch: few chunks are
                    at = p_low_ptr + (token * HO + head_o)[:, None] * C + offs_c[None, :]
                    low = (qk - high.to(tl.float32)).to(p_low_ptr.dtype.element_ty)
                    tl.store(at, low, mask=rows[:, None])
