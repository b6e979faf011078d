"""The backward of prefill with decay per key, before the walks: all that depends on no state.

For a chunk of C = 16 tokens of one value head, docs/kernels/backward.md (G12):

    P_ij = s Σ_c q_ic k_jc e^(γ_ic − γ_jc)  i >= j
    G_ij =   Σ_c k_ic k_jc e^(γ_ic − γ_jc)  i > j,      B = G (I + beta G)⁻¹

γ_i − γ_j is never a difference of two long sums, and no exponent is positive: it is the sum of the
decays after j up to i, and grows by one of them as j goes down. So a decay of any strength is
exact, and with float32 inputs nothing needs float64.

Arithmetic is float32 for all inputs, with products in three passes of tf32. No product has more
than 32 rows, so all are ``mma`` instructions of a warp: none of Hopper's and Blackwell's kinds,
which compilers of the last years got wrong, is made.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import INDICES
from sluice.backends.triton.kernels.backward_chunks import zero_rows
from sluice.backends.triton.kernels.math import LOG2_E, begin, sigmoid, softplus
from sluice.backends.triton.kernels.prefill_chunks import inverse_lengths
from sluice.backends.triton.kernels.work_units import unit_span

KEY_C = tl.constexpr(16)
UNALIGNED = [*INDICES, "beta_ptr", "A_log_ptr", "dt_bias_ptr"]
FREE = ["N", "T", "tokens", "stride_g_b", "stride_beta_b", "stride_beta_t"]


@triton.jit
def load_by(ptr, offs_t, stride_t, offs, left, END: tl.constexpr):
    """Elements of tokens ``offs_t`` and columns ``offs``, whose shapes go together, in float32.

    Zeros from token ``left`` and from column END on. [C, 1] and [1, K] give a tile, [1, C] and
    [K, 1] its transpose, a number and [K] a row.
    """
    mask = (offs_t < left) & (offs < END)
    return tl.load(ptr + offs_t * stride_t + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def log2_gates(
    g_ptr, A_log_ptr, dt_bias_ptr, head_v, offs_t, stride_t, offs_k, left, K: tl.constexpr
):
    """Log2 decays of tokens and keys, by ``load_by``: of raw gates the activated ones."""
    g = load_by(g_ptr, offs_t, stride_t, offs_k, left, K)
    if A_log_ptr is not None:
        if dt_bias_ptr is not None:
            bias = tl.load(dt_bias_ptr + head_v * K + offs_k, mask=offs_k < K, other=0.0)
            g += bias.to(tl.float32)
        g = -tl.exp(tl.load(A_log_ptr + head_v).to(tl.float32)) * softplus(g)
        g = tl.where((offs_t < left) & (offs_k < K), g, 0.0)
    return g * LOG2_E


@triton.jit
def load_beta(beta_ptr, A_log_ptr, beta_scale, offs_t, stride_t, left):
    """beta of tokens, activated if it is a raw gate; ones without a pointer."""
    if beta_ptr is None:
        beta = tl.full(offs_t.shape, 1.0, tl.float32)
    else:
        beta = tl.load(beta_ptr + offs_t * stride_t, mask=offs_t < left, other=0.0).to(tl.float32)
        if A_log_ptr is not None:
            beta = tl.where(offs_t < left, sigmoid(beta) * beta_scale, 0.0)
    return beta


@triton.jit
def spanned_products(
    x, y, k_ptr, g_ptr, A_log_ptr, dt_bias_ptr, head_v, offs_k, left, stride_k_t, stride_g_t,
    K: tl.constexpr,
):  # fmt: skip
    """Σ_c x_ic k_jc e^(γ_ic − γ_jc) [C, C] for i >= j, and the same of y unless it is None.

    Elements above the diagonal are meaningless.
    """
    index = tl.arange(0, KEY_C)
    span = tl.zeros(x.shape, tl.float32)  # log2 decays after j up to i
    by_x = tl.zeros([KEY_C, KEY_C], tl.float32)
    by_y = tl.zeros([KEY_C, KEY_C], tl.float32)
    for m in range(KEY_C):
        j = KEY_C - 1 - m
        g = log2_gates(g_ptr, A_log_ptr, dt_bias_ptr, head_v, j + 1, stride_g_t, offs_k, left, K)
        span = tl.where((index > j)[:, None], span + g[None, :], 0.0)
        k = load_by(k_ptr, j, stride_k_t, offs_k, left, K)
        k = tl.exp2(span) * k[None, :]
        here = (index == j)[None, :]
        by_x = tl.where(here, tl.sum(x * k, axis=1)[:, None], by_x)
        if y is not None:
            by_y = tl.where(here, tl.sum(y * k, axis=1)[:, None], by_y)
    return by_x, by_y


@triton.jit
def resolved_by_rows(g, beta):
    """B = G (I + beta G)⁻¹ of a strictly lower G: row by row, B = G − G beta B."""
    index = tl.arange(0, KEY_C)
    weights = g * beta[None, :]
    b = g
    for i in range(2, KEY_C):
        own = (index == i)[:, None]
        w = tl.sum(tl.where(own, weights, 0.0), axis=0)
        b = tl.where(own, b - tl.sum(w[:, None] * b, axis=0)[None, :], b)
    return b


@triton.jit(do_not_specialize=FREE, do_not_specialize_on_alignment=UNALIGNED)
def backward_key_local_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    g_ptr,  # [B, T, HV, K]
    beta_ptr,  # [B, T, HV]; None: no delta rule
    A_log_ptr,  # [HV]; given: g and beta are raw gates
    dt_bias_ptr,  # [HV, K]; None: 0
    p_ptr,  # [B * T, HO, C] float32: P; None without dO, as q_in_ptr
    b_ptr,  # [B * T, HV, C] float32: B; None without beta, as the next
    beta32_ptr,  # [B * T, HV] float32: beta
    k_in_ptr,  # [B * T, HV, K] float32: e^γ ∘ K
    k_out_ptr,  # [B * T, HV, K] float32: e^(γ_C−γ) ∘ K
    q_in_ptr,  # [B * T, HO, K] float32: s e^γ ∘ Q
    decay_ptr,  # [B * T // C + N, HV, K] float32: e^γ_C
    r_q_ptr,  # [B * T, HQ] float32: inverse lengths of queries; None without norm
    r_k_ptr,  # [B * T, HK] float32: of keys
    dv_ptr,  # [B, T, HV, V]: zeros for tokens after the last sequence, as the next two
    dg_ptr,
    dbeta_ptr,  # None without beta
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    scale,
    beta_scale,
    N,
    T,
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
):
    HO: tl.constexpr = HQ if HQ > HV else HV
    READERS: tl.constexpr = HO // HV
    begin()
    pid = tl.program_id(0)
    head_v = pid % HV
    head_k = head_v // (HV // HK)
    seq, batch, start, chunk, end = unit_span((pid // HV).to(tl.int64), cu_seqlens_ptr, N, T, KEY_C)
    t = start + chunk * KEY_C
    if t >= end:
        return
    if seq == N:  # tokens after the last sequence
        stop = tl.minimum(t + KEY_C, end)
        zero_rows(dv_ptr, t, stop, head_v, HV, HV * V)
        zero_rows(dg_ptr, t, stop, head_v, HV, HV * K)
        if dbeta_ptr is not None:
            zero_rows(dbeta_ptr, t, stop, head_v, HV, HV)
        return
    left = tl.minimum(end - t, KEY_C).to(tl.int32)
    offs_c = tl.arange(0, KEY_C)
    offs_k = tl.arange(0, BLOCK_K)
    rows = offs_c < left
    token = batch * T + t + offs_c  # in the workspace
    q_ptr += batch * stride_q_b + t * stride_q_t
    k_ptr += batch * stride_k_b + t * stride_k_t + head_k * stride_k_h
    g_ptr += batch * stride_g_b + t * stride_g_t + head_v * stride_g_h
    k = load_by(k_ptr, offs_c[:, None], stride_k_t, offs_k[None, :], left, K)
    r_k = tl.full([KEY_C], 1.0, tl.float32)
    if r_k_ptr is not None:
        r_k = inverse_lengths(k)
        if head_v % (HV // HK) == 0:
            tl.store(r_k_ptr + token * HK + head_k, r_k, mask=rows)
    g = log2_gates(
        g_ptr, A_log_ptr, dt_bias_ptr, head_v, offs_c[:, None], stride_g_t, offs_k[None, :], left, K
    )
    chunk_slot = (batch * T + t) // KEY_C + seq
    at = decay_ptr + (chunk_slot * HV + head_v) * K + offs_k
    tl.store(at, tl.exp2(tl.sum(g, axis=0)), mask=offs_k < K)
    decay = tl.exp2(tl.cumsum(g, axis=0))
    mask_k = rows[:, None] & (offs_k < K)[None, :]
    at = (token * HV + head_v)[:, None] * K + offs_k[None, :]
    k_hat = k * r_k[:, None]
    tl.store(k_in_ptr + at, k_hat * decay, mask=mask_k)
    # the decays after each token, one row further down
    g = log2_gates(
        g_ptr, A_log_ptr, dt_bias_ptr, head_v, offs_c[:, None] + 1, stride_g_t, offs_k[None, :],
        left, K,
    )  # fmt: skip
    tl.store(k_out_ptr + at, k_hat * tl.exp2(tl.cumsum(g, axis=0, reverse=True)), mask=mask_k)
    lower = offs_c[:, None] >= offs_c[None, :]
    for reader in tl.static_range(READERS):
        head_o = head_v * READERS + reader
        head_q = head_o * HQ // HO
        q = load_by(
            q_ptr + head_q * stride_q_h, offs_c[:, None], stride_q_t, offs_k[None, :], left, K
        )
        r_q = tl.full([KEY_C], 1.0, tl.float32)
        if r_q_ptr is not None:
            r_q = inverse_lengths(q)
            if head_o % (HO // HQ) == 0:
                tl.store(r_q_ptr + token * HQ + head_q, r_q, mask=rows)
        qk, kk = spanned_products(
            q, k if reader == 0 and b_ptr is not None else None,
            k_ptr, g_ptr, A_log_ptr, dt_bias_ptr, head_v, offs_k, left, stride_k_t, stride_g_t, K,
        )  # fmt: skip
        if p_ptr is not None:
            p = tl.where(lower, qk * (r_q * scale)[:, None] * r_k[None, :], 0.0)
            at = p_ptr + (token * HO + head_o)[:, None] * KEY_C + offs_c[None, :]
            tl.store(at, p, mask=rows[:, None])
            at = (token * HO + head_o)[:, None] * K + offs_k[None, :]
            tl.store(q_in_ptr + at, q * decay * (r_q * scale)[:, None], mask=mask_k)
        if reader == 0 and b_ptr is not None:
            beta_ptr += batch * stride_beta_b + t * stride_beta_t + head_v * stride_beta_h
            beta = load_beta(beta_ptr, A_log_ptr, beta_scale, offs_c, stride_beta_t, left)
            tl.store(beta32_ptr + token * HV + head_v, beta, mask=rows)
            strict = offs_c[:, None] > offs_c[None, :]
            kk = tl.where(strict, kk * r_k[:, None] * r_k[None, :], 0.0)
            at = b_ptr + (token * HV + head_v)[:, None] * KEY_C + offs_c[None, :]
            tl.store(at, resolved_by_rows(kk, beta), mask=rows[:, None])
