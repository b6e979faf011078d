"""The walk back of the backward of prefill: the gradients of states.

One program owns BLOCK_V value columns of one value head over one segment of a sequence
(backward_states.py). With dSᵀ [BLOCK_V, K] in float32 registers, docs/kernels/backward.md (G4),
(G10):

    dD = Pᵀ dO + e^(γ_C−γ) K dS,     Y = dD − Bgᵀ (beta dD),     dV = beta Y
    dS <- e^γ_C dS + Qᵀ (s e^γ dO) − Kᵀ (e^γ dV)

The gradient of the state after each chunk is stored in the dtype of the inputs. So is Y, because
dividing dV by beta would not give it: beta may be 0. With EFFECT only dS_zero of the segment is
stored.

In hard chunks (backward_chunks.py) dS is a sum of two terms where keys multiply it and where it is
stored. So are Bg and its operand, and the updates of dS. The terms from queries add up in dS, chunk
by chunk, while along keys that repeat nearly all of dS cancels: with one term, dV would have an
error that grows with the length of the sequence. Programs with a hard chunk have a launch of their
own, so that these terms take no registers from the others.
"""
# ruff: noqa: RUF005, SIM102 (Triton has no tuple unpacking; an if on a pointer stays apart)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import INDICES
from sluice.backends.triton.kernels.backward_states import resolved, scale_of, state_at
from sluice.backends.triton.kernels.math import begin
from sluice.backends.triton.kernels.prefill_chunk_loop import (
    any_hard,
    counted,
    decay_of,
    load_factors,
    load_rows,
    plus_values,
    store_columns,
)
from sluice.backends.triton.kernels.prefill_chunks import C
from sluice.backends.triton.kernels.work_units import unit_span


@triton.jit(
    do_not_specialize=["N", "T", "tokens", "segment_size"], do_not_specialize_on_alignment=INDICES
)
def backward_walk_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    do_ptr,  # [B, T, HO, V]; None: zeros
    b_ptr,  # [B * T, HV, C]; None without beta, as the next three
    b_low_ptr,  # [B * T, HV, C]: its low terms in hard chunks; None without HARD
    b_down_ptr,  # [HV, B * T] float32; None: ones
    beta32_ptr,  # [HV, B * T] float32
    decay_in_ptr,  # [HV, B * T] float32
    decay_out_ptr,
    decay_q_ptr,  # [HO, B * T] float32
    g2_ptr,  # None without g
    hard_ptr,  # [HV, B * T // C + N] int32; None: no chunk is hard
    p_ptr,  # [B * T, HO, C]; None without dO
    p_low_ptr,
    dv_ptr,  # [B, T, HV, V]: dV
    y_ptr,  # [B * T, HV, V]: Y; None without beta
    y_low_ptr,  # the same: its low terms in hard chunks; None: there are none
    dS_ptr,  # [B * T // C + N, HV, V, K]: the gradient of the state after each chunk
    dS_low_ptr,  # the same: its low terms in hard chunks; None: there are none, or no g
    dfinal_ptr,  # [N, HV, V, K] or [N, HV, K, V]; None: zeros
    dstate_ptr,  # the same; None: not wanted
    segments_ptr,  # [segments, HV, 2 * V + K, K] float32: S, transition, dS; None: no split
    cu_seqlens_ptr,
    N,
    T,
    tokens,
    segment_size,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_t,
    stride_k_h,
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
    EFFECT: tl.constexpr,
    HARD: tl.constexpr,  # with hard_ptr: the programs that have a hard chunk, else the others
):
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    HO: tl.constexpr = HQ if HQ > HV else HV
    READERS: tl.constexpr = HO // HV
    begin()
    pid = tl.program_id(0)
    pid_v = pid % BLOCKS
    head_v = (pid // BLOCKS) % HV
    unit = (pid // (BLOCKS * HV)).to(tl.int64)
    seq, batch, start, segment, end = unit_span(unit, cu_seqlens_ptr, N, T, segment_size)
    first = start + segment * segment_size
    stop = tl.minimum(first + segment_size, end)
    if seq >= N or (first >= end and segment > 0):
        return
    split = end - start > segment_size
    if EFFECT:  # nothing comes before the first segment
        if segment == 0:
            return
    token = batch * T + first  # in the workspace
    if hard_ptr is not None:
        hard_ptr += head_v.to(tl.int64) * (tokens // C + N)
        if any_hard(hard_ptr, token // C + seq, (stop - first + C - 1) // C) != HARD:
            return
        hard_ptr += token // C + seq
    offs_c = tl.arange(0, C)
    offs_f = counted()
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = pid_v * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (offs_v < V)[:, None] & (offs_k < K)[None, :]
    if segments_ptr is not None:
        segments_ptr += (unit * HV + head_v) * ((2 * V + K) * K) + (V + K) * K
        segments_ptr += offs_v[:, None] * K + offs_k[None, :]
    dS = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if not EFFECT:
        if dfinal_ptr is not None:
            at = state_at(dfinal_ptr, seq, head_v, HV, offs_k, offs_v, K, V, STATE_KV)
            alone = tile if segments_ptr is None else tile & (split == 0)
            dS = tl.load(at, mask=alone, other=0.0).to(tl.float32)
        if segments_ptr is not None:
            dS += tl.load(segments_ptr, mask=tile & split, other=0.0)
    one = tl.where(offs_c[:, None] == offs_c[None, :], 1.0, 0.0).to(k_ptr.dtype.element_ty)
    q_ptr += batch * stride_q_b + first * stride_q_t
    k_ptr += batch * stride_k_b + (head_v // (HV // HK)) * stride_k_h + first * stride_k_t
    dv_ptr += (token * HV + head_v) * V
    of_head = head_v.to(tl.int64) * tokens + token
    decay_in_ptr += of_head
    decay_out_ptr += of_head
    if g2_ptr is not None:
        g2_ptr += of_head
    if b_ptr is not None:
        b_ptr += (token * HV + head_v) * C
        if HARD:
            b_low_ptr += (token * HV + head_v) * C
        beta32_ptr += of_head
        y_ptr += (token * HV + head_v) * V
        if hard_ptr is not None:
            y_low_ptr += (token * HV + head_v) * V
        if b_down_ptr is not None:
            b_down_ptr += of_head
    in_states = ((token // C + seq) * HV + head_v) * (K * V)
    dS_ptr += in_states + offs_v[:, None] * K + offs_k[None, :]
    if dS_low_ptr is not None:
        dS_low_ptr += in_states
    size = (stop - first).to(tl.int32)
    chunks = (size + C - 1) // C
    for i in tl.range(0, chunks, num_stages=STAGES):
        t = (chunks - 1 - i) * C
        left = tl.minimum(size - t, C)
        rows = offs_c < left
        wide_t = tl.cast(t, tl.int64)
        k = load_rows(k_ptr + wide_t * stride_k_t, offs_c, offs_k, stride_k_t, rows, K, BLOCK_K)
        dS_low = dS.to(k.dtype)
        if not EFFECT:
            tl.store(dS_ptr + (wide_t // C) * (HV * K * V), dS_low, mask=tile)
        decay_out = load_factors(decay_out_ptr, t, offs_f, left)
        dv = tl.dot(dS_low, tl.trans(k), input_precision=PRECISION) * decay_out[None, :]
        hard = False
        if HARD:
            hard = tl.load(hard_ptr + t // C) != 0
            if hard:
                dS_rest = (dS - dS_low.to(tl.float32)).to(k.dtype)
                dv += tl.dot(dS_rest, tl.trans(k)) * decay_out[None, :]
                if not EFFECT:
                    if dS_low_ptr is not None:
                        in_low = dS_low_ptr + (wide_t // C) * (HV * K * V)
                        in_low += offs_v[:, None] * K + offs_k[None, :]
                        tl.store(in_low, dS_rest, mask=tile)
        given = ()
        if do_ptr is not None:
            for reader in tl.static_range(READERS):
                head_o = head_v * READERS + reader
                do_at = do_ptr + ((token + wide_t) * HO + head_o) * V
                do = load_rows(do_at, offs_c, offs_v, HO * V, rows, V, BLOCK_V)
                p_at = p_ptr + ((token + wide_t) * HO + head_o) * C
                p = load_rows(p_at, offs_c, offs_c, HO * C, rows, C, C)
                dv = tl.dot(tl.trans(do), p, acc=dv, input_precision=PRECISION)
                if HARD:
                    if hard:
                        p_at = p_low_ptr + ((token + wide_t) * HO + head_o) * C
                        p_low = load_rows(p_at, offs_c, offs_c, HO * C, rows, C, C)
                        dv = tl.dot(tl.trans(do), p_low, acc=dv)
                given = given + (do,)
        if b_ptr is not None:
            beta = load_factors(beta32_ptr, t, offs_f, left)
            b_at = b_ptr + wide_t * (HV * C)
            b = load_rows(b_at, offs_c, offs_c, HV * C, rows, C, C)
            down = scale_of(b_down_ptr, t)
            b_low_at = b_low_ptr + wide_t * (HV * C) if HARD else None
            dv -= resolved(
                dv * beta[None, :], b, down, hard, b_low_at, offs_c, HV * C, rows,
                True, PRECISION, HARD,
            )  # fmt: skip
            if not EFFECT:
                in_v = wide_t * (HV * V)
                store_columns(y_ptr + in_v, dv, offs_c, offs_v, HV * V, rows, V)
                if HARD:
                    low = dv - dv.to(y_ptr.dtype.element_ty).to(tl.float32)
                    store_columns(y_low_ptr + in_v, low, offs_c, offs_v, HV * V, rows & hard, V)
            dv *= beta[None, :]
        if not EFFECT:
            in_v = wide_t * (HV * V)
            store_columns(dv_ptr + in_v, dv, offs_c, offs_v, HV * V, rows, V)
        dS = dS * decay_of(g2_ptr, t + left - 1)
        if b_ptr is not None:
            decay_in = load_factors(decay_in_ptr, t, offs_f, left)
            dv = dv * -decay_in[None, :]
            dv_in = dv.to(k.dtype)
            if HARD:
                if hard:
                    dS = tl.dot((dv - dv_in.to(tl.float32)).to(k.dtype), k, acc=dS)
            dS = tl.dot(dv_in, k, acc=dS, input_precision=PRECISION)
        if do_ptr is not None:
            for reader in tl.static_range(READERS):
                head_o = head_v * READERS + reader
                q_at = q_ptr + (head_o * HQ // HO) * stride_q_h + wide_t * stride_q_t
                q = load_rows(q_at, offs_c, offs_k, stride_q_t, rows, K, BLOCK_K)
                of_reader = head_o.to(tl.int64) * tokens + token
                decay_q = load_factors(decay_q_ptr + of_reader, t, offs_f, left)
                turned = plus_values(tl.zeros([BLOCK_V, C], tl.float32), given[reader], one)
                turned = turned * decay_q[None, :]
                do_in = turned.to(q.dtype)
                if HARD:
                    if hard:
                        dS = tl.dot((turned - do_in.to(tl.float32)).to(q.dtype), q, acc=dS)
                dS = tl.dot(do_in, q, acc=dS, input_precision=PRECISION)
    if EFFECT:
        tl.store(segments_ptr, dS, mask=tile)
    elif dstate_ptr is not None:
        at = state_at(dstate_ptr, seq, head_v, HV, offs_k, offs_v, K, V, STATE_KV)
        tl.store(at, dS.to(dstate_ptr.dtype.element_ty), mask=tile & (segment == 0))
