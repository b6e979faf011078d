"""The two walks of the backward of prefill: states forward, their gradients back.

One program owns BLOCK_V value columns of one value head of one sequence. With Sᵀ, or dSᵀ,
[BLOCK_V, K] in float32 registers, docs/kernels/backward.md (G3), (G4), (G10):

    R  = V − e^γ K S,         E = R − Bg (beta R),         S  <- e^γ_C S + Kᵀ (e^(γ_C−γ) beta E)
    dD = Pᵀ dO + e^(γ_C−γ) K dS,  Y = dD − Bgᵀ (beta dD),  dV = beta Y
    dS <- e^γ_C dS + Qᵀ (s e^γ dO) − Kᵀ (e^γ dV)

Everything is computed transposed, so what a product makes is the left operand of the next one as
it lies in registers, and right operands are tiles as they were loaded. No left operand is the
transpose of something computed: Triton 3.4 to 3.7.0 compiles such products wrongly for Hopper.

Each walk stores the state it meets before its step, in the dtype of the inputs: S before each
chunk, dS after it. In hard chunks (backward_chunks.py) low terms are read and stored as well. The
second one also stores, per token and tile of columns, its share of dbeta
and of what dS asks of the token's decay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import INDICES
from sluice.backends.triton.kernels.math import begin, float16_scale
from sluice.backends.triton.kernels.prefill_chunk_loop import (
    counted,
    decay_of,
    load_factors,
    load_rows,
    plus_values,
    store_columns,
)
from sluice.backends.triton.kernels.prefill_chunks import C
from sluice.backends.triton.kernels.prefill_state import state_offsets


@triton.jit
def sequence_span(seq, cu_seqlens_ptr, T):
    """The batch row, first token and end of a sequence."""
    if cu_seqlens_ptr is None:
        batch = seq
        start = seq * 0
        end = start + T
    else:
        batch = seq * 0
        start = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
        end = tl.load(cu_seqlens_ptr + seq + 1).to(tl.int64)
    return batch, start, end


@triton.jit
def resolved(x, b, down, TURNED: tl.constexpr, PRECISION: tl.constexpr):
    """x Bgᵀ, or x Bg if TURNED; ``b`` is Bg / down."""
    b = b if TURNED else tl.trans(b)
    if b.dtype == tl.float32:
        y = tl.dot(x, b, input_precision=PRECISION)
    else:
        up, back = float16_scale(tl.max(tl.abs(x), axis=1), 80)
        y = tl.dot((x * up[:, None]).to(tl.float16), b) * (back * down)[:, None]
    return y


@triton.jit
def scale_of(b_down_ptr, t):
    """A chunk's power of two."""
    return 1.0 if b_down_ptr is None else tl.load(b_down_ptr + t)


@triton.jit(do_not_specialize=["N", "T", "tokens"], do_not_specialize_on_alignment=INDICES)
def backward_states_kernel(
    k_ptr,  # [B, T, HK, K]
    v_ptr,  # [B, T, HV, V]
    b_ptr,  # [B * T, HV, C]; None without beta, as the next two
    b_down_ptr,  # [HV, B * T] float32; None: ones
    beta32_ptr,  # [HV, B * T] float32
    decay_in_ptr,  # [HV, B * T] float32
    decay_out_ptr,
    g2_ptr,  # None without g
    state_ptr,  # [N, HV, V, K] or [N, HV, K, V]; None: zeros
    e_ptr,  # [B * T, HV, V]: E; None without beta
    e_low_ptr,  # the same: its low terms in hard chunks; None: there are none
    hard_ptr,  # [HV, B * T // C + N] int32; None: no chunk is hard
    S_ptr,  # [B * T // C + N, HV, V, K]: the state before each chunk
    cu_seqlens_ptr,
    N,
    T,
    tokens,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_v_b,
    stride_v_t,
    stride_v_h,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_KV: tl.constexpr,
):
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    begin()
    pid = tl.program_id(0)
    pid_v = pid % BLOCKS
    head_v = (pid // BLOCKS) % HV
    seq = (pid // (BLOCKS * HV)).to(tl.int64)
    batch, start, end = sequence_span(seq, cu_seqlens_ptr, T)
    offs_c = tl.arange(0, C)
    offs_f = counted()
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = pid_v * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (offs_v < V)[:, None] & (offs_k < K)[None, :]
    S = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if state_ptr is not None:
        at = state_ptr + (seq * HV + head_v) * (K * V)
        at += tl.trans(state_offsets(offs_k, offs_v, K, V, STATE_KV))
        S = tl.load(at, mask=tile, other=0.0).to(tl.float32)
    one = tl.where(offs_c[:, None] == offs_c[None, :], 1.0, 0.0).to(v_ptr.dtype.element_ty)
    token = batch * T + start  # in the workspace
    k_ptr += batch * stride_k_b + (head_v // (HV // HK)) * stride_k_h + start * stride_k_t
    v_ptr += batch * stride_v_b + head_v * stride_v_h + start * stride_v_t
    of_head = head_v.to(tl.int64) * tokens + token
    decay_in_ptr += of_head
    decay_out_ptr += of_head
    if g2_ptr is not None:
        g2_ptr += of_head
    if b_ptr is not None:
        b_ptr += (token * HV + head_v) * C
        beta32_ptr += of_head
        e_ptr += (token * HV + head_v) * V
        if hard_ptr is not None:
            e_low_ptr += (token * HV + head_v) * V
            hard_ptr += head_v.to(tl.int64) * (tokens // C + N) + token // C + seq
        if b_down_ptr is not None:
            b_down_ptr += of_head
    S_ptr += ((token // C + seq) * HV + head_v) * (K * V) + offs_v[:, None] * K + offs_k[None, :]
    # from here on t counts from the first token: 32 bits are enough
    size = (end - start).to(tl.int32)
    for t in tl.range(0, size, C, num_stages=STAGES):
        left = tl.minimum(size - t, C)
        rows = offs_c < left
        wide_t = tl.cast(t, tl.int64)
        k = load_rows(k_ptr + wide_t * stride_k_t, offs_c, offs_k, stride_k_t, rows, K, BLOCK_K)
        v = load_rows(v_ptr + wide_t * stride_v_t, offs_c, offs_v, stride_v_t, rows, V, BLOCK_V)
        S_low = S.to(k.dtype)
        tl.store(S_ptr + (wide_t // C) * (HV * K * V), S_low, mask=tile)
        decay_out = load_factors(decay_out_ptr, t, offs_f, left)
        if b_ptr is None:
            d = plus_values(tl.zeros([BLOCK_V, C], tl.float32), v, one)
        else:
            decay_in = load_factors(decay_in_ptr, t, offs_f, left)
            beta = load_factors(beta32_ptr, t, offs_f, left)
            b_at = b_ptr + wide_t * (HV * C)
            b = load_rows(b_at, offs_c, offs_c, HV * C, rows, C, C)
            read = tl.dot(S_low, tl.trans(k), input_precision=PRECISION)
            r = plus_values(read * -decay_in[None, :], v, one)
            e = r - resolved(r * beta[None, :], b, scale_of(b_down_ptr, t), False, PRECISION)
            in_e = wide_t * (HV * V)
            store_columns(e_ptr + in_e, e, offs_c, offs_v, HV * V, rows, V)
            if hard_ptr is not None:
                some = rows & (tl.load(hard_ptr + t // C) != 0)
                low = e - e.to(e_ptr.dtype.element_ty).to(tl.float32)
                store_columns(e_low_ptr + in_e, low, offs_c, offs_v, HV * V, some, V)
            d = e * beta[None, :]
        S = S * decay_of(g2_ptr, t + left - 1)
        S = tl.dot((d * decay_out[None, :]).to(k.dtype), k, acc=S, input_precision=PRECISION)


@triton.jit(do_not_specialize=["N", "T", "tokens"], do_not_specialize_on_alignment=INDICES)
def backward_walk_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    v_ptr,  # [B, T, HV, V]; read without beta only
    do_ptr,  # [B, T, HO, V]; None: zeros
    b_ptr,  # [B * T, HV, C]; None without beta, as the next two
    b_down_ptr,  # [HV, B * T] float32; None: ones
    beta32_ptr,  # [HV, B * T] float32
    decay_in_ptr,  # [HV, B * T] float32
    decay_out_ptr,
    decay_q_ptr,  # [HO, B * T] float32
    g2_ptr,  # None without g
    e_ptr,  # [B * T, HV, V]: E; None without beta
    e_low_ptr,  # the same: its low terms in hard chunks; None: there are none
    hard_ptr,  # [HV, B * T // C + N] int32; None: no chunk is hard
    p_ptr,  # [B * T, HO, C]; None without dO
    p_low_ptr,
    dv_ptr,  # [B, T, HV, V]: dV
    dv_low_ptr,  # [B * T, HV, V]; None: there are none
    dS_ptr,  # [B * T // C + N, HV, V, K]: the gradient of the state after each chunk
    by_beta_ptr,  # [BLOCKS, HV, B * T] float32: shares of Σ_v Y E; None without beta
    by_write_ptr,  # [BLOCKS, HV, B * T] float32: shares of Σ_v D (e^(γ_C-γ) K dS); None without g
    dfinal_ptr,  # [N, HV, V, K] or [N, HV, K, V]; None: zeros
    dstate_ptr,  # the same; None: not wanted
    cu_seqlens_ptr,
    N,
    T,
    tokens,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_v_b,
    stride_v_t,
    stride_v_h,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_KV: tl.constexpr,
):
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    HO: tl.constexpr = HQ if HQ > HV else HV
    READERS: tl.constexpr = HO // HV
    begin()
    pid = tl.program_id(0)
    pid_v = pid % BLOCKS
    head_v = (pid // BLOCKS) % HV
    seq = (pid // (BLOCKS * HV)).to(tl.int64)
    batch, start, end = sequence_span(seq, cu_seqlens_ptr, T)
    offs_c = tl.arange(0, C)
    offs_f = counted()
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = pid_v * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (offs_v < V)[:, None] & (offs_k < K)[None, :]
    in_state = tl.trans(state_offsets(offs_k, offs_v, K, V, STATE_KV))
    dS = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if dfinal_ptr is not None:
        at = dfinal_ptr + (seq * HV + head_v) * (K * V) + in_state
        dS = tl.load(at, mask=tile, other=0.0).to(tl.float32)
    one = tl.where(offs_c[:, None] == offs_c[None, :], 1.0, 0.0).to(k_ptr.dtype.element_ty)
    token = batch * T + start  # in the workspace
    q_ptr += batch * stride_q_b + start * stride_q_t
    k_ptr += batch * stride_k_b + (head_v // (HV // HK)) * stride_k_h + start * stride_k_t
    v_ptr += batch * stride_v_b + head_v * stride_v_h + start * stride_v_t
    dv_ptr += (token * HV + head_v) * V
    of_head = head_v.to(tl.int64) * tokens + token
    of_part = (pid_v * HV).to(tl.int64) * tokens + of_head
    decay_in_ptr += of_head
    decay_out_ptr += of_head
    if g2_ptr is not None:
        g2_ptr += of_head
        by_write_ptr += of_part
    if b_ptr is not None:
        b_ptr += (token * HV + head_v) * C
        beta32_ptr += of_head
        by_beta_ptr += of_part
        e_ptr += (token * HV + head_v) * V
        if hard_ptr is not None:
            e_low_ptr += (token * HV + head_v) * V
            dv_low_ptr += (token * HV + head_v) * V
            hard_ptr += head_v.to(tl.int64) * (tokens // C + N) + token // C + seq
        if b_down_ptr is not None:
            b_down_ptr += of_head
    dS_ptr += ((token // C + seq) * HV + head_v) * (K * V) + offs_v[:, None] * K + offs_k[None, :]
    size = (end - start).to(tl.int32)
    chunks = (size + C - 1) // C
    for i in tl.range(0, chunks, num_stages=STAGES):
        t = (chunks - 1 - i) * C
        left = tl.minimum(size - t, C)
        rows = offs_c < left
        wide_t = tl.cast(t, tl.int64)
        k = load_rows(k_ptr + wide_t * stride_k_t, offs_c, offs_k, stride_k_t, rows, K, BLOCK_K)
        if b_ptr is None:
            e = load_rows(v_ptr + wide_t * stride_v_t, offs_c, offs_v, stride_v_t, rows, V, BLOCK_V)
        else:
            e = load_rows(e_ptr + wide_t * (HV * V), offs_c, offs_v, HV * V, rows, V, BLOCK_V)
        some = rows
        if hard_ptr is not None:
            some = rows & (tl.load(hard_ptr + t // C) != 0)
        dS_low = dS.to(k.dtype)
        tl.store(dS_ptr + (wide_t // C) * (HV * K * V), dS_low, mask=tile)
        decay_out = load_factors(decay_out_ptr, t, offs_f, left)
        write = tl.dot(dS_low, tl.trans(k), input_precision=PRECISION) * decay_out[None, :]
        dv = write
        if do_ptr is not None:
            for reader in tl.static_range(READERS):
                head_o = head_v * READERS + reader
                do_at = do_ptr + ((token + wide_t) * HO + head_o) * V
                do = load_rows(do_at, offs_c, offs_v, HO * V, rows, V, BLOCK_V)
                p_at = p_ptr + ((token + wide_t) * HO + head_o) * C
                p = load_rows(p_at, offs_c, offs_c, HO * C, rows, C, C)
                dv = tl.dot(tl.trans(do), p, acc=dv, input_precision=PRECISION)
                if hard_ptr is not None:
                    p_at = p_low_ptr + ((token + wide_t) * HO + head_o) * C
                    p = load_rows(p_at, offs_c, offs_c, HO * C, some, C, C)
                    dv = tl.dot(tl.trans(do), p, acc=dv)
        e = plus_values(tl.zeros([BLOCK_V, C], tl.float32), e, one)
        if hard_ptr is not None:
            e_at = e_low_ptr + wide_t * (HV * V)
            e_low = load_rows(e_at, offs_c, offs_v, HV * V, some, V, BLOCK_V)
            e = plus_values(e, e_low, one)
        beta = tl.full([C], 1.0, tl.float32)
        if b_ptr is not None:
            beta = load_factors(beta32_ptr, t, offs_f, left)
            b_at = b_ptr + wide_t * (HV * C)
            b = load_rows(b_at, offs_c, offs_c, HV * C, rows, C, C)
            dv -= resolved(dv * beta[None, :], b, scale_of(b_down_ptr, t), True, PRECISION)
            by_beta = tl.sum(dv * e, axis=0)
            tl.store(by_beta_ptr + t + offs_c, by_beta, mask=rows)
            dv *= beta[None, :]
        if g2_ptr is not None:
            by_write = tl.sum(write * e, axis=0) * beta
            tl.store(by_write_ptr + t + offs_c, by_write, mask=rows)
        in_v = wide_t * (HV * V)
        store_columns(dv_ptr + in_v, dv, offs_c, offs_v, HV * V, rows, V)
        if hard_ptr is not None:
            low = dv - dv.to(dv_ptr.dtype.element_ty).to(tl.float32)
            store_columns(dv_low_ptr + in_v, low, offs_c, offs_v, HV * V, some, V)
        dS = dS * decay_of(g2_ptr, t + left - 1)
        if b_ptr is not None:
            decay_in = load_factors(decay_in_ptr, t, offs_f, left)
            dv_in = (dv * -decay_in[None, :]).to(k.dtype)
            dS = tl.dot(dv_in, k, acc=dS, input_precision=PRECISION)
        if do_ptr is not None:
            for reader in tl.static_range(READERS):
                head_o = head_v * READERS + reader
                q_at = q_ptr + (head_o * HQ // HO) * stride_q_h + wide_t * stride_q_t
                q = load_rows(q_at, offs_c, offs_k, stride_q_t, rows, K, BLOCK_K)
                do_at = do_ptr + ((token + wide_t) * HO + head_o) * V
                do = load_rows(do_at, offs_c, offs_v, HO * V, rows, V, BLOCK_V)
                of_reader = head_o.to(tl.int64) * tokens + token
                decay_q = load_factors(decay_q_ptr + of_reader, t, offs_f, left)
                do = plus_values(tl.zeros([BLOCK_V, C], tl.float32), do, one)
                do_in = (do * decay_q[None, :]).to(q.dtype)
                dS = tl.dot(do_in, q, acc=dS, input_precision=PRECISION)
    if dstate_ptr is not None:
        at = dstate_ptr + (seq * HV + head_v) * (K * V) + in_state
        tl.store(at, dS.to(dstate_ptr.dtype.element_ty), mask=tile)
