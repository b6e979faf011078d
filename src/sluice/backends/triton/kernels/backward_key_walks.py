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

from sluice.backends.triton.kernels.alignment import INDICES
from sluice.backends.triton.kernels.backward_key_chunks import KEY_C, load_by
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


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=INDICES)
def backward_key_states_kernel(
    v_ptr,  # [B, T, HV, V]
    b_ptr,  # [B * T, HV, C] float32: B; None without beta, as the next two
    beta32_ptr,  # [B * T, HV] float32
    e_ptr,  # [B * T, HV, V] float32: E
    k_in_ptr,  # [B * T, HV, K] float32: e^γ ∘ K
    k_out_ptr,  # [B * T, HV, K] float32: e^(γ_C−γ) ∘ K
    decay_ptr,  # [B * T // C + N, HV, K] float32: e^γ_C
    state_ptr,  # [N, HV, V, K] or [N, HV, K, V]; None: zeros
    S_ptr,  # [B * T // C + N, HV, V, K]: the state before each chunk
    cu_seqlens_ptr,
    T,
    stride_v_b,
    stride_v_t,
    stride_v_h,
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
    seq = (pid // (BLOCKS * HV)).to(tl.int64)
    token, batch, start, size = sequence_span(seq, cu_seqlens_ptr, T)
    offs_c = tl.arange(0, KEY_C)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = (pid % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (offs_v < V)[:, None] & (offs_k < K)[None, :]
    none = tl.zeros([BLOCK_V, KEY_C], tl.float32)
    S = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if state_ptr is not None:
        at = state_at(state_ptr, seq, head_v, HV, offs_k, offs_v, K, V, STATE_KV)
        S = tl.load(at, mask=tile, other=0.0).to(tl.float32)
    chunk_slot = (token // KEY_C + seq) * HV + head_v
    S_ptr += chunk_slot * (K * V) + offs_v[:, None] * K + offs_k[None, :]
    decay_ptr += chunk_slot * K + offs_k
    v_ptr += batch * stride_v_b + start * stride_v_t + head_v * stride_v_h
    for t in tl.range(0, size, KEY_C, num_stages=STAGES):
        left = size - t
        wide_t = tl.cast(t, tl.int64)
        chunk = (token + wide_t) * HV + head_v  # of all rows of value heads
        step = (wide_t // KEY_C) * HV
        tl.store(S_ptr + step * (K * V), S.to(S_ptr.dtype.element_ty), mask=tile)
        v_at = v_ptr + wide_t * stride_v_t
        d = load_by(v_at, offs_c[None, :], stride_v_t, offs_v[:, None], left, V)
        if b_ptr is not None:
            k_at = k_in_ptr + chunk * K
            k = load_by(k_at, offs_c[None, :], HV * K, offs_k[:, None], left, K)
            d -= exact_dot(S, k, none)
            beta = tl.load(beta32_ptr + chunk + offs_c * HV, mask=offs_c < left, other=0.0)
            b_at = b_ptr + chunk * KEY_C
            b = load_by(b_at, offs_c[None, :], HV * KEY_C, offs_c[:, None], left, KEY_C)
            d -= exact_dot(d * beta[None, :], b, none)
            e_at = e_ptr + chunk * V + offs_c[None, :] * (HV * V) + offs_v[:, None]
            tl.store(e_at, d, mask=(offs_c < left)[None, :] & (offs_v < V)[:, None])
            d *= beta[None, :]
        k_at = k_out_ptr + chunk * K
        k = load_by(k_at, offs_c[:, None], HV * K, offs_k[None, :], left, K)
        decay = tl.load(decay_ptr + step * K, mask=offs_k < K, other=0.0)
        S = exact_dot(d, k, S * decay[None, :])


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=INDICES)
def backward_key_walk_kernel(
    do_ptr,  # [B, T, HO, V]; None: zeros
    p_ptr,  # [B * T, HO, C] float32: P; None without dO, as q_in_ptr
    b_ptr,  # [B * T, HV, C] float32: B; None without beta, as the next two
    beta32_ptr,  # [B * T, HV] float32
    y_ptr,  # [B * T, HV, V] float32: Y
    k_in_ptr,  # [B * T, HV, K] float32: e^γ ∘ K
    k_out_ptr,  # [B * T, HV, K] float32: e^(γ_C−γ) ∘ K
    q_in_ptr,  # [B * T, HO, K] float32: s e^γ ∘ Q
    decay_ptr,  # [B * T // C + N, HV, K] float32: e^γ_C
    dv_ptr,  # [B, T, HV, V]
    dS_ptr,  # [B * T // C + N, HV, V, K]: the gradient of the state after each chunk
    dfinal_ptr,  # [N, HV, V, K] or [N, HV, K, V]; None: zeros
    dstate_ptr,  # the same; None: not wanted
    cu_seqlens_ptr,
    T,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    READERS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    STATE_KV: tl.constexpr,
):
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    HO: tl.constexpr = HV * READERS
    begin()
    pid = tl.program_id(0)
    head_v = (pid // BLOCKS) % HV
    seq = (pid // (BLOCKS * HV)).to(tl.int64)
    token, _batch, _start, size = sequence_span(seq, cu_seqlens_ptr, T)
    offs_c = tl.arange(0, KEY_C)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = (pid % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (offs_v < V)[:, None] & (offs_k < K)[None, :]
    none = tl.zeros([BLOCK_V, KEY_C], tl.float32)
    dS = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if dfinal_ptr is not None:
        at = state_at(dfinal_ptr, seq, head_v, HV, offs_k, offs_v, K, V, STATE_KV)
        dS = tl.load(at, mask=tile, other=0.0).to(tl.float32)
    chunk_slot = (token // KEY_C + seq) * HV + head_v
    dS_ptr += chunk_slot * (K * V) + offs_v[:, None] * K + offs_k[None, :]
    decay_ptr += chunk_slot * K + offs_k
    chunks = (size + KEY_C - 1) // KEY_C
    for i in tl.range(0, chunks, num_stages=STAGES):
        t = (chunks - 1 - i) * KEY_C
        left = size - t
        wide_t = tl.cast(t, tl.int64)
        chunk = (token + wide_t) * HV + head_v  # of all rows of value heads
        step = (wide_t // KEY_C) * HV
        tl.store(dS_ptr + step * (K * V), dS.to(dS_ptr.dtype.element_ty), mask=tile)
        k_at = k_out_ptr + chunk * K
        k = load_by(k_at, offs_c[None, :], HV * K, offs_k[:, None], left, K)
        dv = exact_dot(dS, k, none)
        decay = tl.load(decay_ptr + step * K, mask=offs_k < K, other=0.0)
        dS *= decay[None, :]
        if do_ptr is not None:
            for reader in tl.static_range(READERS):
                of_output = chunk * READERS + reader
                do_at = do_ptr + of_output * V
                do = load_by(do_at, offs_c[None, :], HO * V, offs_v[:, None], left, V)
                p_at = p_ptr + of_output * KEY_C
                p = load_by(p_at, offs_c[:, None], HO * KEY_C, offs_c[None, :], left, KEY_C)
                dv = exact_dot(do, p, dv)
                q_at = q_in_ptr + of_output * K
                q = load_by(q_at, offs_c[:, None], HO * K, offs_k[None, :], left, K)
                dS = exact_dot(do, q, dS)
        in_v = chunk * V + offs_c[None, :] * (HV * V) + offs_v[:, None]
        mask = (offs_c < left)[None, :] & (offs_v < V)[:, None]
        if b_ptr is not None:
            beta = tl.load(beta32_ptr + chunk + offs_c * HV, mask=offs_c < left, other=0.0)
            b_at = b_ptr + chunk * KEY_C
            b = load_by(b_at, offs_c[:, None], HV * KEY_C, offs_c[None, :], left, KEY_C)
            dv -= exact_dot(dv * beta[None, :], b, none)
            tl.store(y_ptr + in_v, dv, mask=mask)
            dv *= beta[None, :]
            k_at = k_in_ptr + chunk * K
            k = load_by(k_at, offs_c[:, None], HV * K, offs_k[None, :], left, K)
            dS = exact_dot(-dv, k, dS)
        tl.store(dv_ptr + in_v, dv.to(dv_ptr.dtype.element_ty), mask=mask)
    if dstate_ptr is not None:
        at = state_at(dstate_ptr, seq, head_v, HV, offs_k, offs_v, K, V, STATE_KV)
        tl.store(at, dS.to(dstate_ptr.dtype.element_ty), mask=tile)
