"""The serial half of chunked prefill: the state goes from chunk to chunk in registers.

Per chunk of C = 64 tokens, with S [K, BLOCK_V], docs/kernels/chunked.md:

    W  = V - e^gc (K S)
    Vd = Ag W
    O  = scale (e^gc Q S + P Vd)
    S <- e^gl S + Kᵀ (e^(gl - gc) Vd)

Ag and P come from prefill_chunks.py. One program owns BLOCK_V value columns of one value head over
one segment of ``segment_size`` tokens. A sequence of one segment is done in one pass. A longer one
is split over the SMs: a first pass runs all segments but the last from zero, and once more with
V = 0 from the identity, which gives the segment's exact transition: S_out = M S_in + S_zero. A
second kernel joins the segments, and the last pass starts each from its own state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.prefill_chunks import powers, unit_span
from sluice.backends.triton.tiles import begin


@triton.jit
def state_offsets(offs_k, offs_v, K: tl.constexpr, V: tl.constexpr, STATE_KV: tl.constexpr):
    """Where element (k, v) of a head's state lies in the pool."""
    if STATE_KV:
        return offs_k[:, None] * V + offs_v[None, :]
    return offs_k[:, None] + offs_v[None, :] * K


@triton.jit
def load_gates(g2_ptr, r_ptr, token, t, end, offs_c, HV: tl.constexpr, HK: tl.constexpr):
    """A chunk's cumulative log2 decays, the last of them, and the keys' inverse lengths."""
    mask = t + offs_c < end
    g2 = tl.zeros(offs_c.shape, tl.float32)
    g2_last = 0.0
    if g2_ptr is not None:
        g2 = tl.load(g2_ptr + (token + offs_c) * HV, mask=mask, other=0.0)
        last = tl.minimum(end - t, offs_c.shape[0]) - 1
        g2_last = tl.load(g2_ptr + (token + last) * HV, mask=last >= 0, other=0.0)
    r_k = tl.zeros(offs_c.shape, tl.float32) + 1.0
    if r_ptr is not None:
        r_k = tl.load(r_ptr + (token + offs_c) * HK, mask=mask, other=0.0)
    return g2, g2_last, r_k


@triton.jit
def chunk_update(
    k_ptr,
    v_ptr,
    a_ptr,
    S,
    g2,
    r_k,
    t,
    end,
    token,
    offs_c,
    offs_k,
    offs_v,
    stride_k_t,
    stride_v_t,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """k, the state rounded for products, and Vd of one chunk."""
    rows = (t + offs_c < end)[:, None]
    k = tl.load(
        k_ptr + (t + offs_c)[:, None] * stride_k_t + offs_k[None, :],
        mask=rows & (offs_k < K)[None, :], other=0.0,
    )  # fmt: skip
    S_low = S.to(k.dtype)
    if v_ptr is not None:
        v = tl.load(
            v_ptr + (t + offs_c)[:, None] * stride_v_t + offs_v[None, :],
            mask=rows & (offs_v < V)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
    else:
        v = tl.zeros([C, offs_v.shape[0]], tl.float32)
    if a_ptr is not None:
        a = tl.load(
            a_ptr + (token + offs_c)[:, None] * (HV * C) + offs_c[None, :], mask=rows, other=0.0
        )
        u = tl.dot(k, S_low, input_precision=PRECISION)
        w = v - u * (tl.exp2(g2) * r_k)[:, None]
        vd = tl.dot(a, w.to(k.dtype), input_precision=PRECISION)
    else:
        vd = v
    return k, S_low, vd


@triton.jit
def decayed_state(S, k, vd, g2, g2_last, r_k, PRECISION: tl.constexpr):
    """e^gl S + Kᵀ (e^(gl - gc) Vd)."""
    to_end = vd * (tl.exp2(g2_last - g2) * r_k)[:, None]
    return tl.dot(
        tl.trans(k), to_end.to(k.dtype), acc=S * tl.exp2(g2_last), input_precision=PRECISION
    )


@triton.jit(do_not_specialize=["N", "T", "M", "every", "pad_slot", "segment_size"])
def prefill_state_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    v_ptr,  # [B, T, HV, V]
    a_ptr,  # [B * T, HV, C]; None without beta
    p_ptr,  # [B * T, HO, C]: P, over p_scale
    p_scale_ptr,  # [B * T, HO] float32; None: ones
    g2_ptr,  # [B * T, HV]; None without g
    r_q_ptr,  # [B * T, HQ]; None without norm
    r_k_ptr,  # [B * T, HK]; None without norm
    joined_ptr,  # [segments, HV, K, V + K] float32: states behind segments, and in a sequence's
    #              last one the state before the first; None: one segment
    state_ptr,  # [P, HV, V, K] or [P, HV, K, V], read and written
    o_ptr,  # [B, T, HO, V]
    slots_ptr,  # [N]
    write_slots_ptr,  # [N]
    has_state_ptr,  # [N]
    cu_seqlens_ptr,  # [N + 1]
    checkpoint_slots_ptr,  # [N, M]; None: no checkpoints
    checkpoint_positions_ptr,  # [N, M]; None: every ``every`` tokens
    scale,
    N,
    T,
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
    C: tl.constexpr = 64
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    HO: tl.constexpr = HQ if HQ > HV else HV
    READERS: tl.constexpr = HO // HV
    begin()
    pid = tl.program_id(0)
    pid_v = pid % BLOCKS
    head_v = (pid // BLOCKS) % HV
    unit = (pid // (BLOCKS * HV)).to(tl.int64)
    head_k = head_v // (HV // HK)
    seq, batch, start, segment, end = unit_span(unit, cu_seqlens_ptr, N, T, segment_size)
    first = start + segment * segment_size
    if seq >= N or (first >= end and segment > 0):
        return

    offs_c = tl.arange(0, C)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = pid_v * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (offs_k < K)[:, None] & (offs_v < V)[None, :]
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
    in_pool = state_offsets(offs_k, offs_v, K, V, STATE_KV)
    known = live
    if has_state_ptr is not None:
        known = tl.load(has_state_ptr + seq) != 0
    own = state_ptr + slot * stride_state_p + in_pool
    if joined_ptr is None:
        S = tl.load(own, mask=tile & known, other=0.0).to(tl.float32)
    else:
        # not from the pool: the program that ends the sequence writes it while others still begin
        split = end - start > segment_size
        before = tl.where(segment > 0, unit - 1, unit + (end - start - 1) // segment_size)
        joined_ptr += (before * HV + head_v) * (K * (V + K))
        joined = offs_k[:, None] * (V + K) + offs_v[None, :]
        S = tl.load(joined_ptr + joined, mask=tile & split, other=0.0)
        S += tl.load(own, mask=tile & known & (split == 0), other=0.0).to(tl.float32)
    if checkpoint_positions_ptr is not None and segment == 0:
        for j in range(M):
            if tl.load(checkpoint_positions_ptr + seq * M + j) == 0:
                kept = tl.load(checkpoint_slots_ptr + seq * M + j).to(tl.int64)
                saved = state_ptr + kept * stride_state_p + in_pool
                tl.store(saved, S.to(state_ptr.dtype.element_ty), mask=tile & (kept > pad_slot))

    token = batch * T
    if g2_ptr is not None:
        g2_ptr += token * HV + head_v
    if r_k_ptr is not None:
        r_k_ptr += token * HK + head_k
        r_q_ptr += token * HQ
    if a_ptr is not None:
        a_ptr += (token * HV + head_v) * C
    p_ptr += token * HO * C
    if p_scale_ptr is not None:
        p_scale_ptr += token * HO
    g2, g2_last, r_k = load_gates(g2_ptr, r_k_ptr, first, first, end, offs_c, HV, HK)
    for t in tl.range(first, stop, C, num_stages=STAGES):
        # one chunk ahead: a global load's latency is not to sit in the chain
        g2_next, g2_last_next, r_k_next = load_gates(
            g2_ptr, r_k_ptr, t + C, t + C, end, offs_c, HV, HK
        )
        k, S_low, vd = chunk_update(
            k_ptr, v_ptr, a_ptr, S, g2, r_k, t, end, t, offs_c, offs_k, offs_v,
            stride_k_t, stride_v_t, HV, K, V, C, PRECISION,
        )  # fmt: skip
        rows = (t + offs_c < end)[:, None]
        for reader in tl.static_range(READERS):
            head_o = head_v * READERS + reader
            head_q = head_o * HQ // HO
            q = tl.load(
                q_ptr + head_q * stride_q_h + (t + offs_c)[:, None] * stride_q_t + offs_k[None, :],
                mask=rows & (offs_k < K)[None, :], other=0.0,
            )  # fmt: skip
            p = tl.load(
                p_ptr + (t + offs_c)[:, None] * (HO * C) + head_o * C + offs_c[None, :],
                mask=rows, other=0.0,
            )  # fmt: skip
            factor = tl.exp2(g2)
            if r_q_ptr is not None:
                factor *= tl.load(r_q_ptr + (t + offs_c) * HQ + head_q, mask=t + offs_c < end)
            if p_scale_ptr is None:
                o = tl.dot(q, S_low, input_precision=PRECISION) * factor[:, None]
                o = tl.dot(p, vd, acc=o, input_precision=PRECISION) * scale
            else:
                # both products are summed at the scale of P and Vd: powers of two lose no bit
                at = p_scale_ptr + (t + offs_c) * HO + head_o
                lift = tl.load(at, mask=t + offs_c < end, other=1.0)
                inverse = 254 * (1 << 23) - lift.to(tl.int32, bitcast=True)
                factor *= inverse.to(tl.float32, bitcast=True)
                up, down = powers(tl.max(tl.abs(vd), axis=0), 80)
                o = tl.dot(q, S_low, input_precision=PRECISION) * factor[:, None] * up[None, :]
                o = tl.dot(p, (vd * up[None, :]).to(tl.float16), acc=o)
                o = o * (lift * scale)[:, None] * down[None, :]
            at = o_ptr + (t + offs_c)[:, None] * stride_o_t + head_o * stride_o_h + offs_v[None, :]
            tl.store(at, o.to(o_ptr.dtype.element_ty), mask=rows & (offs_v < V)[None, :])
        if checkpoint_slots_ptr is not None:
            for j in range(M):
                position = tl.cast((j + 1) * every, tl.int64)
                if checkpoint_positions_ptr is not None:
                    position = tl.load(checkpoint_positions_ptr + seq * M + j).to(tl.int64)
                n = position - (t - start)  # tokens of this chunk before the checkpoint
                if (n > 0) & (n <= C) & (t + n <= end):
                    kept = tl.load(checkpoint_slots_ptr + seq * M + j).to(tl.int64)
                    g2_n = 0.0
                    if g2_ptr is not None:
                        g2_n = tl.load(g2_ptr + (t + n - 1) * HV)
                    before = offs_c < n
                    S_n = decayed_state(
                        S, k, tl.where(before[:, None], vd, 0.0),
                        tl.where(before, g2, g2_n), g2_n, r_k, PRECISION,
                    )  # fmt: skip
                    saved = state_ptr + kept * stride_state_p + in_pool
                    rounded = S_n.to(state_ptr.dtype.element_ty)
                    tl.store(saved, rounded, mask=tile & (kept > pad_slot))
        S = decayed_state(S, k, vd, g2, g2_last, r_k, PRECISION)
        g2 = g2_next
        g2_last = g2_last_next
        r_k = r_k_next

    if stop == end:
        write = live
        if write_slots_ptr is not None:
            slot = tl.load(write_slots_ptr + seq).to(tl.int64)
            write = slot > pad_slot
        at = state_ptr + slot * stride_state_p + in_pool
        tl.store(at, S.to(state_ptr.dtype.element_ty), mask=tile & write)


@triton.jit(do_not_specialize=["N", "T", "segment_size"])
def prefill_segments_kernel(
    k_ptr,  # [B, T, HK, K]
    v_ptr,  # [B, T, HV, V]
    a_ptr,  # [B * T, HV, C]; None without beta
    g2_ptr,  # [B * T, HV]; None without g
    r_k_ptr,  # [B * T, HK]; None without norm
    joined_ptr,  # [segments, HV, K, V + K] float32, written: S_zero | M
    cu_seqlens_ptr,  # [N + 1]
    N,
    T,
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
):
    """What each segment but the last of its sequence does to any state: S_zero and M."""
    C: tl.constexpr = 64
    BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    BLOCKS: tl.constexpr = BLOCKS_V + (K + BLOCK_V - 1) // BLOCK_V
    begin()
    pid = tl.program_id(0)
    pid_v = pid % BLOCKS
    head_v = (pid // BLOCKS) % HV
    unit = (pid // (BLOCKS * HV)).to(tl.int64)
    head_k = head_v // (HV // HK)
    seq, batch, start, segment, end = unit_span(unit, cu_seqlens_ptr, N, T, segment_size)
    first = start + segment * segment_size
    if seq >= N or first + segment_size >= end:
        return

    offs_c = tl.arange(0, C)
    offs_k = tl.arange(0, BLOCK_K)
    k_ptr += batch * stride_k_b + head_k * stride_k_h
    v_ptr += batch * stride_v_b + head_v * stride_v_h
    token = batch * T
    if g2_ptr is not None:
        g2_ptr += token * HV + head_v
    if r_k_ptr is not None:
        r_k_ptr += token * HK + head_k
    if a_ptr is not None:
        a_ptr += (token * HV + head_v) * C
    joined_ptr += (unit * HV + head_v) * (K * (V + K))
    transition = pid_v >= BLOCKS_V
    offs_v = tl.where(transition, pid_v - BLOCKS_V, pid_v) * BLOCK_V + tl.arange(0, BLOCK_V)
    columns = tl.where(transition, K, V)
    # the transition is the same recurrence from the identity, with no values
    S = tl.where(transition & (offs_k[:, None] == offs_v[None, :]), 1.0, 0.0)
    values = tl.where(transition, 0, V)  # masks v out
    g2, g2_last, r_k = load_gates(g2_ptr, r_k_ptr, first, first, end, offs_c, HV, HK)
    for t in tl.range(first, first + segment_size, C, num_stages=STAGES):
        g2_next, g2_last_next, r_k_next = load_gates(
            g2_ptr, r_k_ptr, t + C, t + C, end, offs_c, HV, HK
        )
        k, _, vd = chunk_update(
            k_ptr, v_ptr, a_ptr, S, g2, r_k, t, end, t, offs_c, offs_k,
            tl.where(offs_v < values, offs_v, V), stride_k_t, stride_v_t, HV, K, V, C, PRECISION,
        )  # fmt: skip
        S = decayed_state(S, k, vd, g2, g2_last, r_k, PRECISION)
        g2 = g2_next
        g2_last = g2_last_next
        r_k = r_k_next
    at = offs_k[:, None] * (V + K) + tl.where(transition, V, 0) + offs_v[None, :]
    tl.store(joined_ptr + at, S, mask=(offs_k < K)[:, None] & (offs_v < columns)[None, :])


@triton.jit(do_not_specialize=["N", "T", "pad_slot", "segment_size"])
def prefill_join_kernel(
    joined_ptr,  # [segments, HV, K, V + K] float32: S_zero | M in, the state behind it | M out;
    #              in a sequence's last one the state before the first
    state_ptr,  # [P, HV, V, K] or [P, HV, K, V]
    slots_ptr,  # [N]
    has_state_ptr,  # [N]
    cu_seqlens_ptr,  # [N + 1]
    N,
    T,
    pad_slot,
    segment_size,
    stride_state_p,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    STATE_KV: tl.constexpr,
):
    """S <- M S + S_zero from segment to segment; one program owns BLOCK_V columns of a head."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    begin()
    pid = tl.program_id(0)
    pid_v = pid % BLOCKS
    head_v = (pid // BLOCKS) % HV
    seq = (pid // (BLOCKS * HV)).to(tl.int64)
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
    # the last segment has no row of its own to keep: there stands what the first one starts from
    row = (unit + (length - 1) // segment_size) * HV + head_v
    first = joined_ptr + row * (K * (V + K)) + offs_k[:, None] * (V + K)
    tl.store(first + offs_v[None, :], S, mask=tile)
    square = (offs_k < K)[:, None] & (offs_k < K)[None, :]
    for _ in range((length - 1) // segment_size):
        base = joined_ptr + (unit * HV + head_v) * (K * (V + K)) + offs_k[:, None] * (V + K)
        M = tl.load(base + V + offs_k[None, :], mask=square, other=0.0)
        S_zero = tl.load(base + offs_v[None, :], mask=tile, other=0.0)
        S = tl.dot(M, S, acc=S_zero, input_precision=PRECISION)
        tl.store(base + offs_v[None, :], S, mask=tile)
        unit += 1
