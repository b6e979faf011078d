"""The serial half of chunked prefill: the state goes from chunk to chunk in registers.

Per chunk of C = 64 tokens, docs/kernels/chunked.md:

    W  = V - e^gc (K S)
    Vd = Ag W
    O  = scale (e^gc Q S + P Vd)
    S <- e^gl S + Kᵀ (e^(gl - gc) Vd)

All of it is transposed here: Sᵀ [BLOCK_V, K] is the left operand of its products, and so are Wᵀ and
Vdᵀ, so that what the tensor cores make goes back into them from registers, and shared memory holds
nothing but tiles of the inputs. Vᵀ is added by a product with the identity, which is exact: tiles
that only tensor cores read arrive asynchronously, and need no transposing.

Ag, P and the vectors of gates come from prefill_chunks.py. One program owns BLOCK_V value columns
of one value head over one segment of ``segment_size`` tokens. A sequence of one segment is done in
one pass. A longer one is split over the SMs: a first pass runs all segments but the last from zero,
and once more with V = 0 from the identity, which gives the segment's exact transition:
S_out = M S_in + S_zero. A second kernel joins the segments, and the last pass starts each from its
own state.
"""
# ruff: noqa: SIM108 (constants decide)

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
def load_rows(ptr, offs_c, offs, stride_t, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Token rows of a chunk, [C, BLOCK]; zeros where not ``rows``, and beyond SIZE columns."""
    at = ptr + (offs_c[:, None] * stride_t + offs[None, :])
    mask = rows[:, None]
    if SIZE % BLOCK != 0:
        mask = mask & (offs < SIZE)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def counted(C: tl.constexpr):
    """0, 1, .. C - 1, by a sum.

    Triton makes an arange anew for every layout, and then loads a short vector 16 times over, once
    for each thread that needs it. A scan is not made anew: what is addressed by it is copied once.
    """
    return tl.cumsum(tl.full([C], 1, tl.int32), axis=0) - 1


@triton.jit
def load_factors(ptr, token, offs_f, left):
    """One number for each token of a chunk; ones where there are none to load."""
    if ptr is None:
        factors = tl.full(offs_f.shape, 1.0, tl.float32)
    else:
        factors = tl.load(ptr + token + offs_f, mask=offs_f < left, other=0.0)
    return factors


@triton.jit
def store_columns(ptr, o, offs_c, offs_v, stride_t, rows, V: tl.constexpr):
    """Outputs [BLOCK_V, C] as token rows."""
    at = ptr + (offs_v[:, None] + offs_c[None, :] * stride_t)
    tl.store(at, o.to(ptr.dtype.element_ty), mask=rows[None, :] & (offs_v < V)[:, None])


@triton.jit
def plus_values(x, v, one):
    """x + vᵀ."""
    if v.dtype == tl.float32:
        x = x + tl.trans(v)
    else:
        x = tl.dot(tl.trans(v), one, acc=x)
    return x


@triton.jit
def corrections(
    S_low, k, v, one, a_ptr, forget, offs_c, rows,
    HV: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Vdᵀ of one chunk."""
    if a_ptr is None:
        vd = plus_values(tl.zeros([BLOCK_V, C], tl.float32), v, one)
    else:
        a = load_rows(a_ptr, offs_c, offs_c, HV * C, rows, C, C)
        u = tl.dot(S_low, tl.trans(k), input_precision=PRECISION)
        w = plus_values(u * -forget[None, :], v, one)
        vd = tl.dot(w.to(k.dtype), tl.trans(a), input_precision=PRECISION)
    return vd


@triton.jit
def decayed_state(S, k, vd, decay, keep, PRECISION: tl.constexpr):
    """(e^gl S + Kᵀ (e^(gl - gc) Vd))ᵀ."""
    to_end = vd * keep[None, :]
    return tl.dot(to_end.to(k.dtype), k, acc=S * decay, input_precision=PRECISION)


@triton.jit
def decay_of(g2_ptr, token):
    """e^gc at a token; 1 without decay."""
    if g2_ptr is None:
        decay = 1.0
    else:
        decay = tl.exp2(tl.load(g2_ptr + token))
    return decay


@triton.jit
def decay_between(g2_ptr, r_k_ptr, token, n, offs_c, HK: tl.constexpr):
    """e^(gc_n - gc) and the keys' lengths, for the n tokens before a checkpoint; zeros behind."""
    before = offs_c < n
    keep = tl.where(before, 1.0, 0.0)
    if g2_ptr is not None:
        g2 = tl.load(g2_ptr + token + offs_c, mask=before, other=0.0)
        g2_n = tl.load(g2_ptr + token + n - 1)
        keep = tl.where(before, tl.exp2(tl.where(before, g2_n - g2, 0.0)), 0.0)
    if r_k_ptr is not None:
        keep *= tl.load(r_k_ptr + (token + offs_c) * HK, mask=before, other=0.0)
    return keep


@triton.jit(do_not_specialize=["N", "T", "tokens", "M", "every", "pad_slot", "segment_size"])
def prefill_state_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    v_ptr,  # [B, T, HV, V]
    a_ptr,  # [B * T, HV, C]; None without beta
    p_ptr,  # [B * T, HO, C]: scale P, over lift
    lift_ptr,  # [HO, B * T] float32, at the first token of a chunk; None: ones
    forget_ptr,  # [HV, B * T] float32: what W takes of K S; None: ones
    keep_ptr,  # [HV, B * T] float32: what the state gets of Vd; None: ones
    read_ptr,  # [HO, B * T] float32: what O takes of Q S; None: scale times ``forget``
    g2_ptr,  # [HV, B * T] float32; None without g
    r_k_ptr,  # [B * T, HK] float32, for checkpoints; None without norm
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
    if joined_ptr is None:
        S = tl.load(own, mask=tile & known, other=0.0).to(tl.float32)
    else:
        # not from the pool: the program that ends the sequence writes it while others still begin
        split = end - start > segment_size
        before = tl.where(segment > 0, unit - 1, unit + (end - start - 1) // segment_size)
        joined_ptr += (before * HV + head_v) * (K * (V + K))
        joined = offs_v[:, None] + offs_k[None, :] * (V + K)
        S = tl.load(joined_ptr + joined, mask=tile & split, other=0.0)
        S += tl.load(own, mask=tile & known & (split == 0), other=0.0).to(tl.float32)
    if checkpoint_positions_ptr is not None and segment == 0:
        for j in range(M):
            if tl.load(checkpoint_positions_ptr + seq * M + j) == 0:
                kept = tl.load(checkpoint_slots_ptr + seq * M + j).to(tl.int64)
                saved = state_ptr + kept * stride_state_p + in_pool
                tl.store(saved, S.to(state_ptr.dtype.element_ty), mask=tile & (kept > pad_slot))

    of_head = head_v.to(tl.int64) * tokens
    if forget_ptr is not None:
        forget_ptr += of_head
        keep_ptr += of_head
    if g2_ptr is not None:
        g2_ptr += of_head
    if r_k_ptr is not None:
        r_k_ptr += head_k
    offs_f = counted(C)
    one = tl.where(offs_c[:, None] == offs_c[None, :], 1.0, 0.0).to(v_ptr.dtype.element_ty)
    for t in tl.range(first, stop, C, num_stages=STAGES):
        token = batch * T + t  # of the workspace
        left = tl.minimum(end - t, C).to(tl.int32)
        rows = offs_c < left
        k = load_rows(k_ptr + t * stride_k_t, offs_c, offs_k, stride_k_t, rows, K, BLOCK_K)
        v = load_rows(v_ptr + t * stride_v_t, offs_c, offs_v, stride_v_t, rows, V, BLOCK_V)
        forget = load_factors(forget_ptr, token, offs_f, left)
        S_low = S.to(k.dtype)
        a_at = a_ptr
        if a_ptr is not None:
            a_at += (token * HV + head_v) * C
        vd = corrections(S_low, k, v, one, a_at, forget, offs_c, rows, HV, C, BLOCK_V, PRECISION)
        for reader in tl.static_range(READERS):
            head_o = head_v * READERS + reader
            q_at = q_ptr + (head_o * HQ // HO) * stride_q_h + t * stride_q_t
            q = load_rows(q_at, offs_c, offs_k, stride_q_t, rows, K, BLOCK_K)
            p_at = p_ptr + (token * HO + head_o) * C
            p = load_rows(p_at, offs_c, offs_c, HO * C, rows, C, C)
            if read_ptr is None:
                read = forget * scale
            else:
                read = load_factors(read_ptr + head_o.to(tl.int64) * tokens, token, offs_f, left)
            o = tl.dot(S_low, tl.trans(q), input_precision=PRECISION) * read[None, :]
            if lift_ptr is None:
                o = tl.dot(vd, tl.trans(p), acc=o, input_precision=PRECISION)
            else:
                up, down = powers(tl.max(tl.abs(vd), axis=1), 80)
                down *= tl.load(lift_ptr + head_o.to(tl.int64) * tokens + token)
                pv = tl.dot((vd * up[:, None]).to(tl.float16), tl.trans(p))
                o = pv * down[:, None] + o
            if reader + 1 < READERS:
                at = o_ptr + head_o * stride_o_h + t * stride_o_t
                store_columns(at, o, offs_c, offs_v, stride_o_t, rows, V)
        if checkpoint_slots_ptr is not None:
            for j in range(M):
                position = tl.cast((j + 1) * every, tl.int64)
                if checkpoint_positions_ptr is not None:
                    position = tl.load(checkpoint_positions_ptr + seq * M + j).to(tl.int64)
                n = position - (t - start)  # tokens of this chunk before the checkpoint
                if (n > 0) & (n <= left):
                    kept = tl.load(checkpoint_slots_ptr + seq * M + j).to(tl.int64)
                    keep = decay_between(g2_ptr, r_k_ptr, token, n, offs_c, HK)
                    S_n = decayed_state(S, k, vd, decay_of(g2_ptr, token + n - 1), keep, PRECISION)
                    saved = state_ptr + kept * stride_state_p + in_pool
                    rounded = S_n.to(state_ptr.dtype.element_ty)
                    tl.store(saved, rounded, mask=tile & (kept > pad_slot))
        keep = load_factors(keep_ptr, token, offs_f, left)
        S = decayed_state(S, k, vd, decay_of(g2_ptr, token + left - 1), keep, PRECISION)
        # behind the product: the next state does not wait for the barriers of the last output
        at = o_ptr + (head_v * READERS + READERS - 1) * stride_o_h + t * stride_o_t
        store_columns(at, o, offs_c, offs_v, stride_o_t, rows, V)

    if stop == end:
        write = live
        if write_slots_ptr is not None:
            slot = tl.load(write_slots_ptr + seq).to(tl.int64)
            write = slot > pad_slot
        at = state_ptr + slot * stride_state_p + in_pool
        tl.store(at, S.to(state_ptr.dtype.element_ty), mask=tile & write)


@triton.jit(do_not_specialize=["N", "T", "tokens", "segment_size"])
def prefill_segments_kernel(
    k_ptr,  # [B, T, HK, K]
    v_ptr,  # [B, T, HV, V]
    a_ptr,  # [B * T, HV, C]; None without beta
    forget_ptr,  # [HV, B * T] float32; None: ones
    keep_ptr,  # [HV, B * T] float32; None: ones
    g2_ptr,  # [HV, B * T] float32; None without g
    joined_ptr,  # [segments, HV, K, V + K] float32, written: S_zero | M
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
    of_head = head_v.to(tl.int64) * tokens
    if forget_ptr is not None:
        forget_ptr += of_head
        keep_ptr += of_head
    if g2_ptr is not None:
        g2_ptr += of_head
    joined_ptr += (unit * HV + head_v) * (K * (V + K))
    transition = pid_v >= BLOCKS_V
    offs_v = tl.where(transition, pid_v - BLOCKS_V, pid_v) * BLOCK_V + tl.arange(0, BLOCK_V)
    # the transition is the same recurrence from the identity, with no values
    S = tl.where(transition & (offs_v[:, None] == offs_k[None, :]), 1.0, 0.0)
    offs_f = counted(C)
    one = tl.where(offs_c[:, None] == offs_c[None, :], 1.0, 0.0).to(v_ptr.dtype.element_ty)
    for t in tl.range(first, first + segment_size, C, num_stages=STAGES):
        token = batch * T + t
        left = C  # no last segment is here: its chunks are whole
        rows = offs_c < left
        k = load_rows(k_ptr + t * stride_k_t, offs_c, offs_k, stride_k_t, rows, K, BLOCK_K)
        some = rows & (transition == 0)
        v = load_rows(v_ptr + t * stride_v_t, offs_c, offs_v, stride_v_t, some, V, BLOCK_V)
        forget = load_factors(forget_ptr, token, offs_f, left)
        a_at = a_ptr
        if a_ptr is not None:
            a_at += (token * HV + head_v) * C
        vd = corrections(
            S.to(k.dtype), k, v, one, a_at, forget, offs_c, rows, HV, C, BLOCK_V, PRECISION
        )
        keep = load_factors(keep_ptr, token, offs_f, left)
        S = decayed_state(S, k, vd, decay_of(g2_ptr, token + C - 1), keep, PRECISION)
    columns = tl.where(transition, K, V)
    at = tl.where(transition, V, 0) + offs_v[:, None] + offs_k[None, :] * (V + K)
    tl.store(joined_ptr + at, S, mask=(offs_v < columns)[:, None] & (offs_k < K)[None, :])


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
    STAGES: tl.constexpr,
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
    for i in tl.range((length - 1) // segment_size, num_stages=STAGES):
        base = joined_ptr + ((unit + i) * HV + head_v) * (K * (V + K)) + offs_k[:, None] * (V + K)
        M = tl.load(base + V + offs_k[None, :], mask=square, other=0.0)
        S_zero = tl.load(base + offs_v[None, :], mask=tile, other=0.0)
        S = tl.dot(M, S, acc=S_zero, input_precision=PRECISION)
        tl.store(base + offs_v[None, :], S, mask=tile)
