"""The two walks of the backward of prefill with decay per key.

One program owns BLOCK_V value columns of one value head of a sequence, in chunks of C = 16 tokens,
with Sᵀ or dSᵀ [BLOCK_V, K] in float32 registers, docs/kernels/backward.md (G12):

    R  = V − (e^γ ∘ K) S,     E = R − B (beta R),     S <- e^γ_C S + (e^(γ_C−γ) ∘ K)ᵀ (beta E)

    dD = Pᵀ dO + (e^(γ_C−γ) ∘ K) dS,     Y = dD − Bᵀ (beta dD),     dV = beta Y
    dS <- e^γ_C dS + (s e^γ ∘ Q)ᵀ dO − (e^γ ∘ K)ᵀ dV

Everything is computed transposed. Each operand is loaded the way a product takes it, so nothing is
transposed in registers. The state before each chunk, and the gradient of the state after it, are
stored in the dtype of the inputs; E and Y in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.backward_key_chunks import (
    FREE,
    KEY_C,
    UNALIGNED,
    load_beta,
    load_by,
    load_lengths,
    log2_gates,
)
from sluice.backends.triton.kernels.backward_states import state_at
from sluice.backends.triton.kernels.math import begin
from sluice.backends.triton.kernels.prefill_key import exact_dot


@triton.jit
def sequence_span(seq, cu_seqlens_ptr, T):
    """A sequence's first token of all B * T, and its batch row, first token and length there."""
    if cu_seqlens_ptr is None:
        batch = seq
        start = seq * 0
        size = start + T
    else:
        batch = seq * 0
        start = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
        size = tl.load(cu_seqlens_ptr + seq + 1).to(tl.int64) - start
    return batch * T + start, batch, start, size.to(tl.int32)


@triton.jit(do_not_specialize=FREE, do_not_specialize_on_alignment=UNALIGNED)
def backward_key_states_kernel(
    k_ptr,  # [B, T, HK, K]
    v_ptr,  # [B, T, HV, V]
    g_ptr,  # [B, T, HV, K]
    beta_ptr,  # [B, T, HV]; None: no delta rule
    A_log_ptr,  # [HV]; given: g and beta are raw gates
    dt_bias_ptr,  # [HV, K]; None: 0
    b_ptr,  # [B * T, HV, C] float32: B; None without beta
    r_k_ptr,  # [B * T, HK] float32; None without norm
    e_ptr,  # [B * T, HV, V] float32: E; None without beta
    state_ptr,  # [N, HV, V, K] or [N, HV, K, V]; None: zeros
    S_ptr,  # [B * T // C + N, HV, V, K]: the state before each chunk
    cu_seqlens_ptr,
    beta_scale,
    T,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_v_b,
    stride_v_t,
    stride_v_h,
    stride_g_b,
    stride_g_t,
    stride_g_h,
    stride_beta_b,
    stride_beta_t,
    stride_beta_h,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    STATE_KV: tl.constexpr,
):
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    begin()
    pid = tl.program_id(0)
    head_v = (pid // BLOCKS) % HV
    head_k = head_v // (HV // HK)
    seq = (pid // (BLOCKS * HV)).to(tl.int64)
    token, batch, start, size = sequence_span(seq, cu_seqlens_ptr, T)
    offs_c = tl.arange(0, KEY_C)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = (pid % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (offs_v < V)[:, None] & (offs_k < K)[None, :]
    S = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if state_ptr is not None:
        at = state_at(state_ptr, seq, head_v, HV, offs_k, offs_v, K, V, STATE_KV)
        S = tl.load(at, mask=tile, other=0.0).to(tl.float32)
    S_ptr += ((token // KEY_C + seq) * HV + head_v) * (K * V)
    S_ptr += offs_v[:, None] * K + offs_k[None, :]
    k_ptr += batch * stride_k_b + start * stride_k_t + head_k * stride_k_h
    v_ptr += batch * stride_v_b + start * stride_v_t + head_v * stride_v_h
    g_ptr += batch * stride_g_b + start * stride_g_t + head_v * stride_g_h
    if beta_ptr is not None:
        beta_ptr += batch * stride_beta_b + start * stride_beta_t + head_v * stride_beta_h
    for t in tl.range(0, size, KEY_C, num_stages=STAGES):
        left = size - t
        wide_t = tl.cast(t, tl.int64)
        chunk = token + wide_t
        tl.store(S_ptr, S.to(S_ptr.dtype.element_ty), mask=tile)
        S_ptr += HV * K * V
        k_at = k_ptr + wide_t * stride_k_t
        g_at = g_ptr + wide_t * stride_g_t
        r_k = load_lengths(r_k_ptr, (chunk + offs_c) * HK + head_k, offs_c < left)
        v_at = v_ptr + wide_t * stride_v_t
        d = load_by(v_at, offs_c[None, :], stride_v_t, offs_v[:, None], left, V)
        if beta_ptr is not None:
            beta_at = beta_ptr + wide_t * stride_beta_t
            beta = load_beta(beta_at, A_log_ptr, beta_scale, offs_c, stride_beta_t, left)
            g = log2_gates(
                g_at, A_log_ptr, dt_bias_ptr, head_v, offs_c[None, :], stride_g_t,
                offs_k[:, None], left, K,
            )  # fmt: skip
            k = load_by(k_at, offs_c[None, :], stride_k_t, offs_k[:, None], left, K)
            k = k * tl.exp2(tl.cumsum(g, axis=1)) * r_k[None, :]
            d -= exact_dot(S, k, tl.zeros([BLOCK_V, KEY_C], tl.float32))
            b_at = b_ptr + (chunk * HV + head_v) * KEY_C
            b = load_by(b_at, offs_c[None, :], HV * KEY_C, offs_c[:, None], left, KEY_C)
            d -= exact_dot(d * beta[None, :], b, tl.zeros([BLOCK_V, KEY_C], tl.float32))
            at = e_ptr + (chunk * HV + head_v) * V + offs_c[None, :] * (HV * V) + offs_v[:, None]
            tl.store(at, d, mask=(offs_c < left)[None, :] & (offs_v < V)[:, None])
            d *= beta[None, :]
        # the decays after each token, one row further down
        after = log2_gates(
            g_at, A_log_ptr, dt_bias_ptr, head_v, offs_c[:, None] + 1, stride_g_t,
            offs_k[None, :], tl.where(offs_c[:, None] < KEY_C - 1, left, 0), K,
        )  # fmt: skip
        first = log2_gates(g_at, A_log_ptr, dt_bias_ptr, head_v, 0, stride_g_t, offs_k, left, K)
        k = load_by(k_at, offs_c[:, None], stride_k_t, offs_k[None, :], left, K)
        k = k * tl.exp2(tl.cumsum(after, axis=0, reverse=True)) * r_k[:, None]
        decay = tl.exp2(tl.sum(after, axis=0) + first)
        S = exact_dot(d, k, S * decay[None, :])


@triton.jit(do_not_specialize=FREE, do_not_specialize_on_alignment=UNALIGNED)
def backward_key_walk_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    g_ptr,  # [B, T, HV, K]
    beta_ptr,  # [B, T, HV]; None: no delta rule
    A_log_ptr,  # [HV]; given: g and beta are raw gates
    dt_bias_ptr,  # [HV, K]; None: 0
    do_ptr,  # [B, T, HO, V]; None: zeros
    p_ptr,  # [B * T, HO, C] float32: P; None without dO
    b_ptr,  # [B * T, HV, C] float32: B; None without beta
    r_q_ptr,  # [B * T, HQ] float32; None without norm
    r_k_ptr,  # [B * T, HK] float32
    dv_ptr,  # [B, T, HV, V]
    y_ptr,  # [B * T, HV, V] float32: Y; None without beta
    dS_ptr,  # [B * T // C + N, HV, V, K]: the gradient of the state after each chunk
    dfinal_ptr,  # [N, HV, V, K] or [N, HV, K, V]; None: zeros
    dstate_ptr,  # the same; None: not wanted
    cu_seqlens_ptr,
    scale,
    beta_scale,
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
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    STATE_KV: tl.constexpr,
):
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    HO: tl.constexpr = HQ if HQ > HV else HV
    READERS: tl.constexpr = HO // HV
    begin()
    pid = tl.program_id(0)
    head_v = (pid // BLOCKS) % HV
    head_k = head_v // (HV // HK)
    seq = (pid // (BLOCKS * HV)).to(tl.int64)
    token, batch, start, size = sequence_span(seq, cu_seqlens_ptr, T)
    offs_c = tl.arange(0, KEY_C)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = (pid % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (offs_v < V)[:, None] & (offs_k < K)[None, :]
    none = tl.zeros([BLOCK_V, KEY_C], tl.float32)
    dS = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if dfinal_ptr is not None:
        at = state_at(dfinal_ptr, seq, head_v, HV, offs_k, offs_v, K, V, STATE_KV)
        dS = tl.load(at, mask=tile, other=0.0).to(tl.float32)
    chunks = (size + KEY_C - 1) // KEY_C
    dS_ptr += ((token // KEY_C + seq) * HV + head_v) * (K * V)
    dS_ptr += offs_v[:, None] * K + offs_k[None, :]
    q_ptr += batch * stride_q_b + start * stride_q_t
    k_ptr += batch * stride_k_b + start * stride_k_t + head_k * stride_k_h
    g_ptr += batch * stride_g_b + start * stride_g_t + head_v * stride_g_h
    if beta_ptr is not None:
        beta_ptr += batch * stride_beta_b + start * stride_beta_t + head_v * stride_beta_h
    for i in tl.range(0, chunks, num_stages=STAGES):
        t = (chunks - 1 - i) * KEY_C
        left = size - t
        wide_t = tl.cast(t, tl.int64)
        chunk = token + wide_t
        at = dS_ptr + (wide_t // KEY_C) * (HV * K * V)
        tl.store(at, dS.to(dS_ptr.dtype.element_ty), mask=tile)
        k_at = k_ptr + wide_t * stride_k_t
        g_at = g_ptr + wide_t * stride_g_t
        r_k = load_lengths(r_k_ptr, (chunk + offs_c) * HK + head_k, offs_c < left)
        # the decays after each token, one column further on
        after = log2_gates(
            g_at, A_log_ptr, dt_bias_ptr, head_v, offs_c[None, :] + 1, stride_g_t,
            offs_k[:, None], tl.where(offs_c[None, :] < KEY_C - 1, left, 0), K,
        )  # fmt: skip
        k = load_by(k_at, offs_c[None, :], stride_k_t, offs_k[:, None], left, K)
        k = k * tl.exp2(tl.cumsum(after, axis=1, reverse=True)) * r_k[None, :]
        dv = exact_dot(dS, k, none)
        if do_ptr is not None:
            for reader in tl.static_range(READERS):
                head_o = head_v * READERS + reader
                do_at = do_ptr + (chunk * HO + head_o) * V
                do = load_by(do_at, offs_c[None, :], HO * V, offs_v[:, None], left, V)
                p_at = p_ptr + (chunk * HO + head_o) * KEY_C
                p = load_by(p_at, offs_c[:, None], HO * KEY_C, offs_c[None, :], left, KEY_C)
                dv = exact_dot(do, p, dv)
        if beta_ptr is not None:
            beta_at = beta_ptr + wide_t * stride_beta_t
            beta = load_beta(beta_at, A_log_ptr, beta_scale, offs_c, stride_beta_t, left)
            b_at = b_ptr + (chunk * HV + head_v) * KEY_C
            b = load_by(b_at, offs_c[:, None], HV * KEY_C, offs_c[None, :], left, KEY_C)
            dv -= exact_dot(dv * beta[None, :], b, none)
        in_v = (chunk * HV + head_v) * V
        own = offs_c[None, :] * (HV * V) + offs_v[:, None]
        mask = (offs_c < left)[None, :] & (offs_v < V)[:, None]
        if beta_ptr is not None:
            tl.store(y_ptr + in_v + own, dv, mask=mask)
            dv *= beta[None, :]
        tl.store(dv_ptr + in_v + own, dv.to(dv_ptr.dtype.element_ty), mask=mask)
        g = log2_gates(
            g_at, A_log_ptr, dt_bias_ptr, head_v, offs_c[:, None], stride_g_t,
            offs_k[None, :], left, K,
        )  # fmt: skip
        dS *= tl.exp2(tl.sum(g, axis=0))[None, :]
        decay = tl.exp2(tl.cumsum(g, axis=0))
        if beta_ptr is not None:
            k = load_by(k_at, offs_c[:, None], stride_k_t, offs_k[None, :], left, K)
            dS = exact_dot(-dv, k * decay * r_k[:, None], dS)
        if do_ptr is not None:
            for reader in tl.static_range(READERS):
                head_o = head_v * READERS + reader
                head_q = head_o * HQ // HO
                q_at = q_ptr + head_q * stride_q_h + wide_t * stride_q_t
                q = load_by(q_at, offs_c[:, None], stride_q_t, offs_k[None, :], left, K)
                r_q = load_lengths(r_q_ptr, (chunk + offs_c) * HQ + head_q, offs_c < left)
                do_at = do_ptr + (chunk * HO + head_o) * V
                do = load_by(do_at, offs_c[None, :], HO * V, offs_v[:, None], left, V)
                dS = exact_dot(do, q * decay * (r_q * scale)[:, None], dS)
    if dstate_ptr is not None:
        at = state_at(dstate_ptr, seq, head_v, HV, offs_k, offs_v, K, V, STATE_KV)
        tl.store(at, dS.to(dstate_ptr.dtype.element_ty), mask=tile)
