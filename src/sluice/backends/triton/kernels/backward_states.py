"""The walk forward over states in the backward of prefill, and the join of split sequences.

One program owns BLOCK_V value columns of one value head over one segment of a sequence. With Sᵀ
[BLOCK_V, K] in float32 registers, docs/kernels/backward.md (G3), (G10):

    R = V − e^γ K S,     E = R − Bg (beta R),     S <- e^γ_C S + Kᵀ (e^(γ_C−γ) beta E)

Everything is computed transposed. So the result of a product has the register layout of the next
one's left operand, and right operands are tiles as they were loaded. No left operand is the
transpose of something computed: Triton 3.4 to 3.7.0 compiles such products wrongly for Hopper.

The state before each chunk is stored in the dtype of the inputs. In hard chunks
(backward_chunks.py) the state is two terms where keys multiply it and where it is stored. So are E,
Bg and its operand, and the state's updates. Programs with a hard chunk have a launch of their own,
so that these terms take no registers from the others.

A sequence longer than ``segment_size`` is split over the SMs. Both directions use the same matrix
(G11). First, with EFFECT, each segment is walked from zero, which gives S_zero, and from the
identity without values, which gives its transition; the walk back gives dS_zero in the same way.
A join then makes the states at all borders of segments, from which the walks themselves start.
"""
# ruff: noqa: SIM102 (an if on a pointer or a constant stays apart)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import INDICES
from sluice.backends.triton.kernels.math import begin, float16_scale
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
from sluice.backends.triton.kernels.prefill_state import state_offsets
from sluice.backends.triton.kernels.work_units import unit_span


@triton.jit
def resolved(
    x, b, down, hard, b_low_ptr, offs_c, stride_t, rows,
    TURNED: tl.constexpr, PRECISION: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """x Bgᵀ, or x Bg if TURNED, where ``b`` is Bg / down. In a hard chunk both are two terms."""
    b = b if TURNED else tl.trans(b)
    if b.dtype == tl.float32:
        y = tl.dot(x, b, input_precision=PRECISION)
    else:
        up, back = float16_scale(tl.max(tl.abs(x), axis=1), 80)
        x = x * up[:, None]
        high = x.to(tl.float16)
        y = tl.dot(high, b)
        if HARD:
            if hard:
                y = tl.dot((x - high.to(tl.float32)).to(tl.float16), b, acc=y)
                b_low = load_rows(b_low_ptr, offs_c, offs_c, stride_t, rows, C, C)
                y = tl.dot(high, b_low if TURNED else tl.trans(b_low), acc=y)
        y = y * (back * down)[:, None]
    return y


@triton.jit
def scale_of(b_down_ptr, t):
    """A chunk's power of two."""
    return 1.0 if b_down_ptr is None else tl.load(b_down_ptr + t)


@triton.jit
def state_at(ptr, seq, head_v, HV: tl.constexpr, offs_k, offs_v, K: tl.constexpr, V: tl.constexpr,
             STATE_KV: tl.constexpr):  # fmt: skip
    """Where elements (v, k) of a sequence's initial or final state are, [V, K]."""
    at = ptr + (seq * HV + head_v) * (K * V)
    return at + tl.trans(state_offsets(offs_k, offs_v, K, V, STATE_KV))


@triton.jit(
    do_not_specialize=["N", "T", "tokens", "segment_size"], do_not_specialize_on_alignment=INDICES
)
def backward_states_kernel(
    k_ptr,  # [B, T, HK, K]
    v_ptr,  # [B, T, HV, V]
    b_ptr,  # [B * T, HV, C]; None without beta, as the next three
    b_low_ptr,  # [B * T, HV, C]: its low terms in hard chunks; None without HARD
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
    S_low_ptr,  # the same: its low terms in hard chunks; None without g too
    segments_ptr,  # [segments, HV, 2 * V + K, K] float32: S, transition, dS; None: no split
    cu_seqlens_ptr,
    N,
    T,
    tokens,
    segment_size,
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
    EFFECT: tl.constexpr,
    HARD: tl.constexpr,  # with hard_ptr: the programs that have a hard chunk, else the others
):
    BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    BLOCKS: tl.constexpr = BLOCKS_V + (K + BLOCK_V - 1) // BLOCK_V if EFFECT else BLOCKS_V
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
    is_transition = pid_v >= BLOCKS_V  # only with EFFECT
    if EFFECT:
        if split == 0 or (stop == end and is_transition == 0):
            return
        pid_v = tl.where(is_transition, pid_v - BLOCKS_V, pid_v)
    token = batch * T + first  # in the workspace
    hard = False
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
        segments_ptr += (unit * HV + head_v) * ((2 * V + K) * K)
        segments_ptr += offs_v[:, None] * K + offs_k[None, :]
    S = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if EFFECT:
        # the transition is the same recurrence, from the identity and without values
        S = tl.where(is_transition & (offs_v[:, None] == offs_k[None, :]), 1.0, 0.0)
    else:
        if state_ptr is not None:
            at = state_at(state_ptr, seq, head_v, HV, offs_k, offs_v, K, V, STATE_KV)
            alone = tile if segments_ptr is None else tile & (split == 0)
            S = tl.load(at, mask=alone, other=0.0).to(tl.float32)
        if segments_ptr is not None:
            S += tl.load(segments_ptr, mask=tile & split, other=0.0)
    one = tl.where(offs_c[:, None] == offs_c[None, :], 1.0, 0.0).to(v_ptr.dtype.element_ty)
    k_ptr += batch * stride_k_b + (head_v // (HV // HK)) * stride_k_h + first * stride_k_t
    v_ptr += batch * stride_v_b + head_v * stride_v_h + first * stride_v_t
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
        e_ptr += (token * HV + head_v) * V
        if hard_ptr is not None:
            e_low_ptr += (token * HV + head_v) * V
        if b_down_ptr is not None:
            b_down_ptr += of_head
    in_states = ((token // C + seq) * HV + head_v) * (K * V)
    S_ptr += in_states + offs_v[:, None] * K + offs_k[None, :]
    if S_low_ptr is not None:
        S_low_ptr += in_states
    # from here on t counts from the first token: 32 bits are enough
    size = (stop - first).to(tl.int32)
    for t in tl.range(0, size, C, num_stages=STAGES):
        left = tl.minimum(size - t, C)
        rows = offs_c < left
        wide_t = tl.cast(t, tl.int64)
        k = load_rows(k_ptr + wide_t * stride_k_t, offs_c, offs_k, stride_k_t, rows, K, BLOCK_K)
        some = rows & (is_transition == 0) if EFFECT else rows
        v = load_rows(v_ptr + wide_t * stride_v_t, offs_c, offs_v, stride_v_t, some, V, BLOCK_V)
        S_low = S.to(k.dtype)
        if not EFFECT:
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
            if HARD:
                hard = tl.load(hard_ptr + t // C) != 0
                if hard:
                    S_rest = (S - S_low.to(tl.float32)).to(k.dtype)
                    read = tl.dot(S_rest, tl.trans(k), acc=read)
                    if not EFFECT:
                        if S_low_ptr is not None:
                            in_low = S_low_ptr + (wide_t // C) * (HV * K * V)
                            in_low += offs_v[:, None] * K + offs_k[None, :]
                            tl.store(in_low, S_rest, mask=tile)
            r = plus_values(read * -decay_in[None, :], v, one)
            down = scale_of(b_down_ptr, t)
            b_low_at = b_low_ptr + wide_t * (HV * C) if HARD else None
            e = r - resolved(
                r * beta[None, :], b, down, hard, b_low_at, offs_c, HV * C, rows,
                False, PRECISION, HARD,
            )  # fmt: skip
            if not EFFECT:
                in_e = wide_t * (HV * V)
                store_columns(e_ptr + in_e, e, offs_c, offs_v, HV * V, rows, V)
                if HARD:
                    low = e - e.to(e_ptr.dtype.element_ty).to(tl.float32)
                    store_columns(e_low_ptr + in_e, low, offs_c, offs_v, HV * V, rows & hard, V)
            d = e * beta[None, :]
        S = S * decay_of(g2_ptr, t + left - 1)
        d = d * decay_out[None, :]
        d_low = d.to(k.dtype)
        if HARD:
            if hard:
                S = tl.dot((d - d_low.to(tl.float32)).to(k.dtype), k, acc=S)
        S = tl.dot(d_low, k, acc=S, input_precision=PRECISION)
    if EFFECT:
        columns = tl.where(is_transition, K, V)
        at = segments_ptr + tl.where(is_transition, V * K, 0)
        tl.store(at, S, mask=(offs_v < columns)[:, None] & (offs_k < K)[None, :])


@triton.jit
def joined(
    S, segments_ptr, unit, count, stride_unit, offs_v, offs_k,
    K: tl.constexpr, V: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """Put the state before each segment in place of S_zero; BACK: the gradient after it."""
    tile = (offs_v < V)[:, None] & (offs_k < K)[None, :]
    square = (offs_k < K)[:, None] & (offs_k < K)[None, :]
    own = offs_v[:, None] * K + offs_k[None, :]
    for i in tl.range(count, num_stages=STAGES):
        at = segments_ptr + (unit + (count - 1 - i if BACK else i)) * stride_unit
        turn = tl.load(at + V * K + offs_k[:, None] * K + offs_k[None, :], mask=square, other=0.0)
        at += own + ((V + K) * K if BACK else 0)
        zero = tl.load(at, mask=tile & (i + 1 < count), other=0.0)
        tl.store(at, S, mask=tile)
        S = tl.dot(S, tl.trans(turn) if BACK else turn, acc=zero, input_precision=PRECISION)


@triton.jit(do_not_specialize=["N", "T", "segment_size"], do_not_specialize_on_alignment=INDICES)
def backward_join_kernel(
    segments_ptr,  # [segments, HV, 2 * V + K, K] float32: S_zero, transition, dS_zero in; in place
    #                of S_zero the state before the segment out, of dS_zero the gradient after it
    state_ptr,  # [N, HV, V, K] or [N, HV, K, V]; None: zeros
    dfinal_ptr,  # the same
    cu_seqlens_ptr,
    N,
    T,
    segment_size,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_KV: tl.constexpr,
):
    """From segment to segment (G11). A program owns BLOCK_V columns of a head, in one direction."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    begin()
    pid = tl.program_id(0)
    back = pid % 2
    pid_v = (pid // 2) % BLOCKS
    head_v = (pid // (2 * BLOCKS)) % HV
    seq = (pid // (2 * BLOCKS * HV)).to(tl.int64)
    if cu_seqlens_ptr is None:
        length = seq * 0 + T
        unit = seq * ((T + segment_size - 1) // segment_size)
    else:
        start = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
        length = tl.load(cu_seqlens_ptr + seq + 1).to(tl.int64) - start
        unit = start // segment_size + seq
    if length <= segment_size:
        return
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = pid_v * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (offs_v < V)[:, None] & (offs_k < K)[None, :]
    count = ((length + segment_size - 1) // segment_size).to(tl.int32)
    stride_unit = tl.full([], HV * (2 * V + K) * K, tl.int64)
    segments_ptr += head_v * ((2 * V + K) * K)
    S = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if back == 0:
        if state_ptr is not None:
            at = state_at(state_ptr, seq, head_v, HV, offs_k, offs_v, K, V, STATE_KV)
            S = tl.load(at, mask=tile, other=0.0).to(tl.float32)
        joined(
            S, segments_ptr, unit, count, stride_unit, offs_v, offs_k, K, V, STAGES, PRECISION,
            False,
        )  # fmt: skip
    else:
        if dfinal_ptr is not None:
            at = state_at(dfinal_ptr, seq, head_v, HV, offs_k, offs_v, K, V, STATE_KV)
            S = tl.load(at, mask=tile, other=0.0).to(tl.float32)
        joined(
            S, segments_ptr, unit, count, stride_unit, offs_v, offs_k, K, V, STAGES, PRECISION,
            True,
        )  # fmt: skip
