"""The serial half of chunked prefill: which program owns what, and where states come from.

One program owns BLOCK_V value columns of one value head over one segment of ``segment_size``
tokens, and loops over its chunks (prefill_chunk_loop.py). A sequence of one segment takes one pass.
A longer one is split over the SMs (K16). The first kernel runs all segments but the last from zero,
and once more from the identity with V = 0, which gives the exact transition of the segment:
S_out = M S_in + S_zero. The second kernel joins the segments. The last one starts each segment from
its own state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import INDICES
from sluice.backends.triton.kernels.math import begin, divide
from sluice.backends.triton.kernels.prefill_chunk_loop import (
    QKVO,
    Checkpoints,
    Place,
    Sizes,
    Workspace,
    any_hard,
    chunk_loop,
    load_marks,
    run_of,
    segment_loop,
)
from sluice.backends.triton.kernels.prefill_chunks import C
from sluice.backends.triton.kernels.work_units import unit_span


@triton.jit
def state_offsets(offs_k, offs_v, K: tl.constexpr, V: tl.constexpr, STATE_KV: tl.constexpr):
    """Offsets of elements (k, v) in a head's state."""
    if STATE_KV:
        return offs_k[:, None] * V + offs_v[None, :]
    return offs_k[:, None] + offs_v[None, :] * K


# Sizes that differ from call to call and from model to model: no variant is compiled for them.
_SIZES = ["N", "T", "tokens", "segment_size", "HV", "R_K", "inverse_HV", "inverse_R_K"]


@triton.jit(
    do_not_specialize=[*_SIZES, "M", "every", "pad_slot", "R_Q", "inverse_R_Q"],
    do_not_specialize_on_alignment=INDICES,
)
def prefill_state_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    v_ptr,  # [B, T, HV, V]
    ag_ptr,  # [HV, B * T, C]; None without beta
    beta32_ptr,  # [HV, B * T] float32: beta; None without
    hard_ptr,  # [HV, B * T // C + N] int32: whether a chunk is hard; None: none is
    qkg_ptr,  # [HO, B * T, C]: scale QKg / qkg_down
    qkg_down_ptr,  # [HO, B * T] float32, at a chunk's first token; None: ones
    decay_in_ptr,  # [HV, B * T] float32: factors of K S in W; None: ones
    decay_out_ptr,  # [HV, B * T] float32: factors of D on its way into the state; None: ones
    decay_q_ptr,  # [HO, B * T] float32: factors of Q S in O; None: scale times decay_in
    g2_ptr,  # [HV, B * T] float32; None without g
    r_k_ptr,  # [HK, B * T] float32, for checkpoints; None without norm
    segments_ptr,  # [segments, HV, K, V + K] float32: the state after each segment; in place of a
    #                sequence's last one the state before its first. None: no sequence is split
    state_ptr,  # [P, HV, V, K] or [P, HV, K, V], read and written
    o_ptr,  # [B, T, HO, V]
    slots_ptr,  # [N]
    write_slots_ptr,  # [N]
    has_state_ptr,  # [N]
    cu_seqlens_ptr,  # [N + 1]
    checkpoint_slots_ptr,  # [N, M]; None: no checkpoints
    checkpoint_positions_ptr,  # [N, M]; None: after every ``every`` tokens
    scale,
    N,
    T,
    tokens,  # B * T
    M,
    every,
    pad_slot,
    segment_size,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_v_b,
    stride_v_t,
    stride_v_h,
    stride_o_b,
    stride_o_t,
    stride_o_h,
    stride_state_p,
    HV,
    R_Q,  # value heads per query head; 1 if there are fewer
    R_K,  # value heads per key head
    inverse_HV,  # for divide, as are the next two
    inverse_R_Q,
    inverse_R_K,
    READERS: tl.constexpr,  # query heads per value head; 1 if there are fewer
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_KV: tl.constexpr,
    HARD: tl.constexpr,
):
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    sizes: tl.constexpr = Sizes(READERS, K, V, BLOCK_K, BLOCK_V, STAGES, PRECISION)
    pid = tl.program_id(0)
    pid_v = pid % BLOCKS
    unit, head_v = divide(pid // BLOCKS, HV, inverse_HV)
    head_q, _ = divide(head_v * READERS, R_Q, inverse_R_Q)
    head_k, _ = divide(head_v, R_K, inverse_R_K)
    unit = unit.to(tl.int64)
    begin()
    seq, batch, start, segment, end = unit_span(unit, cu_seqlens_ptr, N, T, segment_size)
    first = start + segment * segment_size
    if seq >= N or (first >= end and segment > 0):
        return

    offs_c = tl.arange(0, C)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = pid_v * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (offs_v < V)[:, None] & (offs_k < K)[None, :]
    k_ptr += batch * stride_k_b + head_k * stride_k_h
    v_ptr += batch * stride_v_b + head_v * stride_v_h
    q_ptr += batch * stride_q_b
    o_ptr += batch * stride_o_b
    slot = seq
    live = seq >= 0
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + seq).to(tl.int64)
        live = slot > pad_slot
    stop = tl.minimum(first + segment_size, end)
    if hard_ptr is not None:
        hard_ptr += head_v * (tokens // C + N) + seq
        if any_hard(hard_ptr, (batch * T + first) // C, (stop - first + C - 1) // C) != HARD:
            return
    if not live:
        zeros = tl.zeros([C, BLOCK_V], o_ptr.dtype.element_ty)
        for t in range(first, stop, C):
            mask = (t + offs_c < end)[:, None] & (offs_v < V)[None, :]
            for reader in tl.static_range(READERS):
                at = o_ptr + (t + offs_c)[:, None] * stride_o_t
                at += (head_v * READERS + reader) * stride_o_h
                tl.store(at + offs_v[None, :], zeros, mask=mask)
        return

    # int64: P·HV·V·K passes 2**31 at 4,096 slots
    state_ptr += head_v * (V * K)
    in_pool = tl.trans(state_offsets(offs_k, offs_v, K, V, STATE_KV))
    known = live
    if has_state_ptr is not None:
        known = tl.load(has_state_ptr + seq) != 0
    own = state_ptr + slot * stride_state_p + in_pool
    if segments_ptr is None:
        S = tl.load(own, mask=tile & known, other=0.0).to(tl.float32)
    else:
        # A split sequence does not read the pool here: another program may have written it already.
        split = end - start > segment_size
        before = tl.where(segment > 0, unit - 1, unit + (end - start - 1) // segment_size)
        segments_ptr += (before * HV + head_v) * (K * (V + K))
        in_segment = offs_v[:, None] + offs_k[None, :] * (V + K)
        S = tl.load(segments_ptr + in_segment, mask=tile & split, other=0.0)
        S += tl.load(own, mask=tile & known & (split == 0), other=0.0).to(tl.float32)
    if checkpoint_positions_ptr is not None and segment == 0:
        for j in range(M):
            if tl.load(checkpoint_positions_ptr + seq * M + j) == 0:
                kept = tl.load(checkpoint_slots_ptr + seq * M + j).to(tl.int64)
                saved = state_ptr + kept * stride_state_p + in_pool
                tl.store(saved, S.to(state_ptr.dtype.element_ty), mask=tile & (kept > pad_slot))

    qkvo = QKVO(
        q_ptr, k_ptr, v_ptr, o_ptr,
        stride_q_t, stride_q_h, stride_k_t, stride_v_t, stride_o_t, stride_o_h,
    )  # fmt: skip
    workspace = Workspace(
        ag_ptr, beta32_ptr, qkg_ptr, qkg_down_ptr, decay_in_ptr, decay_out_ptr, decay_q_ptr, g2_ptr,
        r_k_ptr, tokens,
    )  # fmt: skip
    checkpoints = Checkpoints(
        checkpoint_slots_ptr, checkpoint_positions_ptr, M, every, state_ptr, stride_state_p,
        in_pool, tile, pad_slot,
    )  # fmt: skip
    place = Place(seq, batch, start, end, head_q, head_k, head_v, T)
    if HARD:
        t = first
        while t < stop:
            marks = load_marks(hard_ptr, (batch * T + t) // C, (stop - t + C - 1) // C)
            easy = run_of(marks, 0)
            until = tl.minimum(t + easy * C, stop)
            if easy == 0:
                until = tl.minimum(t + run_of(marks, 1) * C, stop)
                S = chunk_loop(
                    S, t, until, qkvo, workspace, checkpoints, place, offs_v, scale, sizes, True
                )
            else:
                S = chunk_loop(
                    S, t, until, qkvo, workspace, checkpoints, place, offs_v, scale, sizes, False
                )
            t = until
    else:
        S = chunk_loop(
            S, first, stop, qkvo, workspace, checkpoints, place, offs_v, scale, sizes, False
        )

    if stop == end:
        write = live
        if write_slots_ptr is not None:
            slot = tl.load(write_slots_ptr + seq).to(tl.int64)
            write = slot > pad_slot
        at = state_ptr + slot * stride_state_p + in_pool
        tl.store(at, S.to(state_ptr.dtype.element_ty), mask=tile & write)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=INDICES)
def prefill_segments_kernel(
    k_ptr,  # [B, T, HK, K]
    v_ptr,  # [B, T, HV, V]
    ag_ptr,  # [HV, B * T, C]; None without beta
    beta32_ptr,  # [HV, B * T] float32: beta; None without
    hard_ptr,  # [HV, B * T // C + N] int32: whether a chunk is hard; None: none is
    decay_in_ptr,  # [HV, B * T] float32; None: ones
    decay_out_ptr,  # [HV, B * T] float32; None: ones
    g2_ptr,  # [HV, B * T] float32; None without g
    segments_ptr,  # [segments, HV, K, V + K] float32, written: S_zero | M
    cu_seqlens_ptr,  # [N + 1]
    N,
    T,
    tokens,  # B * T
    segment_size,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_v_b,
    stride_v_t,
    stride_v_h,
    HV,
    R_K,  # value heads per key head
    inverse_HV,  # for divide, as is the next one
    inverse_R_K,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    HARD: tl.constexpr,
    EVERY: tl.constexpr,
):
    """S_zero and the transition M of each segment but the last of its sequence, or of EVERY one."""
    BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    BLOCKS: tl.constexpr = BLOCKS_V + (K + BLOCK_V - 1) // BLOCK_V
    sizes: tl.constexpr = Sizes(None, K, V, BLOCK_K, BLOCK_V, STAGES, PRECISION)
    pid = tl.program_id(0)
    pid_v = pid % BLOCKS
    unit, head_v = divide(pid // BLOCKS, HV, inverse_HV)
    head_k, _ = divide(head_v, R_K, inverse_R_K)
    unit = unit.to(tl.int64)
    begin()
    seq, batch, start, segment, end = unit_span(unit, cu_seqlens_ptr, N, T, segment_size)
    first = start + segment * segment_size
    stop = first + segment_size
    if EVERY:
        stop = tl.minimum(stop, end)
        if seq >= N:
            return
    elif seq >= N or stop >= end:
        return
    if hard_ptr is not None:
        hard_ptr += head_v * (tokens // C + N) + seq
        if any_hard(hard_ptr, (batch * T + first) // C, (stop - first + C - 1) // C) != HARD:
            return

    offs_k = tl.arange(0, BLOCK_K)
    k_ptr += batch * stride_k_b + head_k * stride_k_h
    v_ptr += batch * stride_v_b + head_v * stride_v_h
    is_transition = pid_v >= BLOCKS_V
    offs_v = tl.where(is_transition, pid_v - BLOCKS_V, pid_v) * BLOCK_V + tl.arange(0, BLOCK_V)
    # the transition is the same recurrence, from the identity and without values
    S = tl.where(is_transition & (offs_v[:, None] == offs_k[None, :]), 1.0, 0.0)
    qkvo = QKVO(None, k_ptr, v_ptr, None, 0, 0, stride_k_t, stride_v_t, 0, 0)
    workspace = Workspace(
        ag_ptr, beta32_ptr, None, None, decay_in_ptr, decay_out_ptr, None, g2_ptr, None, tokens
    )
    place = Place(seq, batch, start, end, None, head_k, head_v, T)
    if HARD:
        t = first
        while t < stop:
            marks = load_marks(hard_ptr, (batch * T + t) // C, (stop - t + C - 1) // C)
            easy = run_of(marks, 0)
            until = t + easy * C
            if easy == 0:
                until = t + run_of(marks, 1) * C
                S = segment_loop(
                    S, t, until, qkvo, workspace, place, offs_v, is_transition, sizes, True, EVERY
                )
            else:
                S = segment_loop(
                    S, t, until, qkvo, workspace, place, offs_v, is_transition, sizes, False, EVERY
                )
            t = until
    else:
        S = segment_loop(
            S, first, stop, qkvo, workspace, place, offs_v, is_transition, sizes, False, EVERY
        )
    segments_ptr += (pid // BLOCKS).to(tl.int64) * (K * (V + K))
    columns = tl.where(is_transition, K, V)
    at = tl.where(is_transition, V, 0) + offs_v[:, None] + offs_k[None, :] * (V + K)
    tl.store(segments_ptr + at, S, mask=(offs_v < columns)[:, None] & (offs_k < K)[None, :])


@triton.jit(
    do_not_specialize=["N", "T", "pad_slot", "segment_size", "HV", "inverse_HV"],
    do_not_specialize_on_alignment=INDICES,
)
def prefill_join_kernel(
    segments_ptr,  # [segments, HV, K, V + K] float32: S_zero | M in, the state after it | M out;
    #                in place of a sequence's last one the state before its first
    state_ptr,  # [P, HV, V, K] or [P, HV, K, V]
    slots_ptr,  # [N]
    has_state_ptr,  # [N]
    cu_seqlens_ptr,  # [N + 1]
    N,
    T,
    pad_slot,
    segment_size,
    stride_state_p,
    HV,
    inverse_HV,  # for divide
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_KV: tl.constexpr,
):
    """S <- M S + S_zero from segment to segment (K17). A program owns BLOCK_V columns of a head."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    pid_v = pid % BLOCKS
    seq, head_v = divide(pid // BLOCKS, HV, inverse_HV)
    seq = seq.to(tl.int64)
    begin()
    if cu_seqlens_ptr is None:
        length = seq * 0 + T
        unit = seq * ((T + segment_size - 1) // segment_size)
    else:
        start = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
        length = tl.load(cu_seqlens_ptr + seq + 1).to(tl.int64) - start
        unit = start // segment_size + seq
    if length <= segment_size:
        return
    slot = seq
    known = seq >= 0
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + seq).to(tl.int64)
        known = slot > pad_slot
    if has_state_ptr is not None:
        known = known & (tl.load(has_state_ptr + seq) != 0)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = pid_v * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (offs_k < K)[:, None] & (offs_v < V)[None, :]
    at = state_ptr + slot * stride_state_p + head_v * (V * K)
    at += state_offsets(offs_k, offs_v, K, V, STATE_KV)
    S = tl.load(at, mask=tile & known, other=0.0).to(tl.float32)
    # no segment starts from the state after the last one: the state before the first lies there
    row = (unit + (length - 1) // segment_size) * HV + head_v
    first = segments_ptr + row * (K * (V + K)) + offs_k[:, None] * (V + K)
    tl.store(first + offs_v[None, :], S, mask=tile)
    square = (offs_k < K)[:, None] & (offs_k < K)[None, :]
    for i in tl.range((length - 1) // segment_size, num_stages=STAGES):
        row = (unit + i) * HV + head_v
        base = segments_ptr + row * (K * (V + K)) + offs_k[:, None] * (V + K)
        transition = tl.load(base + V + offs_k[None, :], mask=square, other=0.0)
        S_zero = tl.load(base + offs_v[None, :], mask=tile, other=0.0)
        S = tl.dot(transition, S, acc=S_zero, input_precision=PRECISION)
        tl.store(base + offs_v[None, :], S, mask=tile)
