"""Prefill with decay per key in two kernels: chunks of 16 tokens in parallel, states in pieces.

The equations are prefill_key.py's, (K20) and (K21). That kernel needs more registers than a thread
has; these need less shared memory and, on other GPUs than Hopper's, almost no stack.

``prefill_key_chunks_kernel`` makes QKg and the inverse of all chunks at once. The decay between two
tokens i > j is cut at a border of blocks of 1, 2, 4 or 8 tokens, where i lies in one block and j in
the one before it (K28). Then all pairs of one block size are one product: of rows that decay from
the border on, and rows that decay up to it. No exponent is positive, however strong the gates. Each
is a sum of decays between two tokens (a product with zeros and ones), not a difference of
cumulative ones.

``prefill_key_states_kernel`` carries the states. A program owns BLOCK_V value columns of one value
head of one sequence, as Sᵀ. A warp owns 16 of these columns, so that no warp repeats another's
products. It works on PIECE keys at a time, and loads keys and gates again when it needs them again,
because more would not fit into registers.
"""

# ruff: noqa: RUF005 (Triton has no tuple unpacking)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import INDICES
from sluice.backends.triton.kernels.math import LOG2_E, NORM_EPS, begin, divide, softplus
from sluice.backends.triton.kernels.prefill_chunks import zero_tail
from sluice.backends.triton.kernels.prefill_key import exact_dot, zero_rows
from sluice.backends.triton.kernels.prefill_state import state_offsets
from sluice.backends.triton.kernels.work_units import unit_span

C = tl.constexpr(16)


@triton.jit
def sums(x, which):
    """For each column of ``which`` the sum of the columns of x that it names."""
    return exact_dot(x, tl.where(which, 1.0, 0.0), tl.zeros(x.shape, tl.float32))


@triton.jit
def load_columns(ptr, left, stride_t, first, END: tl.constexpr, BLOCK: tl.constexpr):
    """16 tokens from ptr on as columns, in float32, their elements from ``first`` to END.

    Zeros from token ``left`` on.
    """
    offs = tl.arange(0, BLOCK)
    offs_c = tl.arange(0, C)
    mask = (offs_c < left)[None, :]
    if END % BLOCK != 0:
        mask = mask & (first + offs < END)[:, None]
    at = ptr + first + (offs[:, None] + offs_c[None, :] * stride_t)
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_decays(
    g_ptr, A_log_ptr, dt_bias_ptr, left, stride_t, first, K: tl.constexpr, PIECE: tl.constexpr
):
    """The log2 decay of each key and token, zeros from token ``left`` on; all pointers at their
    head."""
    g = load_columns(g_ptr, left, stride_t, first, K, PIECE)
    offs = first + tl.arange(0, PIECE)
    if A_log_ptr is not None:
        if dt_bias_ptr is not None:
            bias = tl.load(dt_bias_ptr + offs, mask=offs < K, other=0.0)
            g += bias.to(tl.float32)[:, None]
        g = -tl.exp(tl.load(A_log_ptr).to(tl.float32)) * softplus(g)
        g = tl.where((offs < K)[:, None] & (tl.arange(0, C) < left)[None, :], g, 0.0)
    return g * LOG2_E


@triton.jit
def add_pairs(q, k, g, qkg, kkg, SIZE: tl.constexpr, DELTA: tl.constexpr):
    """Adds QKg_ij, and KKg_ij if DELTA, where j's block of SIZE tokens is the one before i's and
    the two make a block of twice the size. q, k, g [PIECE, 16]."""
    rows = tl.arange(0, C)[:, None]
    cols = tl.arange(0, C)[None, :]
    none = tl.zeros([C, C], tl.float32)
    later = (cols // SIZE) % 2 == 1
    between = (rows // SIZE == cols // SIZE) & tl.where(later, rows <= cols, rows > cols)
    decay = tl.exp2(sums(g, between))
    k = k * decay
    here = ((rows // SIZE) % 2 == 1) & (cols // SIZE + 1 == rows // SIZE)
    qkg = tl.where(here, qkg + exact_dot(tl.trans(q * decay), k, none), qkg)
    if DELTA:
        kkg = tl.where(here, kkg + exact_dot(tl.trans(k), k, none), kkg)
    return qkg, kkg


@triton.jit
def join_halves(inverse, l, HALF: tl.constexpr):
    """From inverses of diagonal blocks of HALF rows those of twice the size (K26)."""
    rows = tl.arange(0, C)[:, None]
    cols = tl.arange(0, C)[None, :]
    none = tl.zeros([C, C], tl.float32)
    below = ((rows // HALF) % 2 == 1) & (cols // HALF + 1 == rows // HALF)
    below = exact_dot(tl.where(below, l, 0.0), inverse, none)
    return inverse - exact_dot(inverse, below, none)


@triton.jit
def invert(l):
    """(I + l)⁻¹ of a strictly lower l [16, 16]."""
    rows = tl.arange(0, C)[:, None]
    cols = tl.arange(0, C)[None, :]
    inverse = tl.where(rows == cols, 1.0, 0.0)
    inverse -= tl.where((rows == cols + 1) & (rows % 2 == 1), l, 0.0)
    for i in tl.static_range(1, 4):
        inverse = join_halves(inverse, l, 1 << i)
    return inverse


# Sizes that differ from call to call and from model to model: no variant is compiled for them.
_SIZES = ["N", "T", "tokens", "stride_g_b", "R_Q", "R_K", "inverse_R_Q", "inverse_R_K"]
_OF_CHUNKS = [*_SIZES, "stride_beta_b", "stride_beta_t", "HO", "inverse_HO"]
_OF_STATES = [*_SIZES, "M", "every", "pad_slot", "HV", "inverse_HV"]


@triton.jit(
    do_not_specialize=_OF_CHUNKS,
    do_not_specialize_on_alignment=[*INDICES, "beta_ptr", "A_log_ptr"],
)
def prefill_key_chunks_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    g_ptr,  # [B, T, HV, K]
    beta_ptr,  # [B, T, HV]; None without beta
    A_log_ptr,  # [HV]; given: g and beta are raw gates
    dt_bias_ptr,  # [HV, K]; None: 0
    ab_ptr,  # [HV, B * T, 16] float32: the inverse times diag(beta); None without beta
    qkg_ptr,  # [HO, B * T, 16] float32: scale QKg
    r_k_ptr,  # [HV, B * T] float32: inverse lengths of keys; None without norm
    r_q_ptr,  # [HO, B * T] float32: scale over the lengths of queries; None without norm
    cu_seqlens_ptr,  # [N + 1]
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
    HO,
    R_Q,  # value heads per query head; 1 if there are fewer
    R_K,  # value heads per key head
    inverse_HO,  # for divide, as are the next two
    inverse_R_Q,
    inverse_R_K,
    READERS: tl.constexpr,  # query heads per value head; 1 if there are fewer
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECE: tl.constexpr,
):
    """A program owns a chunk of one output head. A value head's first one also inverts."""
    unit, head_o = divide(tl.program_id(0), HO, inverse_HO)
    head_v = head_o // READERS
    head_q, _ = divide(head_o, R_Q, inverse_R_Q)
    head_k, _ = divide(head_v, R_K, inverse_R_K)
    begin()
    seq, batch, start, chunk, end = unit_span(unit.to(tl.int64), cu_seqlens_ptr, N, T, C)
    t = start + chunk * C
    if seq >= N or t >= end:
        return
    offs_c = tl.arange(0, C)
    rows = offs_c[:, None]
    cols = offs_c[None, :]
    left = tl.minimum(end - t, C).to(tl.int32)
    here = offs_c < left
    q_ptr += batch * stride_q_b + head_q * stride_q_h + t * stride_q_t
    k_ptr += batch * stride_k_b + head_k * stride_k_h + t * stride_k_t
    g_ptr += batch * stride_g_b + head_v * stride_g_h + t * stride_g_t
    if A_log_ptr is not None:
        A_log_ptr += head_v
        if dt_bias_ptr is not None:
            dt_bias_ptr += head_v * K
    kkg = tl.zeros([C, C], tl.float32)
    qkg = tl.zeros([C, C], tl.float32)
    qk = tl.zeros([C], tl.float32)
    kk = tl.zeros([C], tl.float32)
    qq = tl.zeros([C], tl.float32)
    for piece in range(0, BLOCK_K, PIECE):
        k = load_columns(k_ptr, left, stride_k_t, piece, K, PIECE)
        q = load_columns(q_ptr, left, stride_q_t, piece, K, PIECE)
        g = load_decays(g_ptr, A_log_ptr, dt_bias_ptr, left, stride_g_t, piece, K, PIECE)
        for i in tl.static_range(4):
            qkg, kkg = add_pairs(q, k, g, qkg, kkg, 1 << i, beta_ptr is not None)
        qk += tl.sum(q * k, axis=0)
        if r_k_ptr is not None:
            kk += tl.sum(k * k, axis=0)
            qq += tl.sum(q * q, axis=0)
    qkg = tl.where(rows == cols, qk[:, None], qkg)
    of_value = head_v.to(tl.int64) * tokens + batch * T + t
    of_output = head_o.to(tl.int64) * tokens + batch * T + t
    first = head_o == head_v * READERS
    r_q = tl.full([C], 1.0, tl.float32) * scale
    if r_k_ptr is not None:
        r_k = tl.rsqrt(kk + NORM_EPS)
        r_q *= tl.rsqrt(qq + NORM_EPS)
        tl.store(r_k_ptr + of_value + offs_c, r_k, mask=here & first)
        tl.store(r_q_ptr + of_output + offs_c, r_q, mask=here)
        kkg *= r_k[:, None] * r_k[None, :]
        qkg *= r_k[None, :]
    in_chunk = rows * C + cols
    tl.store(qkg_ptr + of_output * C + in_chunk, qkg * r_q[:, None], mask=here[:, None])
    if beta_ptr is not None:
        beta_ptr += batch * stride_beta_b + head_v * stride_beta_h + t * stride_beta_t
        beta = tl.load(beta_ptr + offs_c * stride_beta_t, mask=here, other=0.0).to(tl.float32)
        if A_log_ptr is not None:
            beta = tl.where(here, tl.sigmoid(beta) * beta_scale, 0.0)
        ab = invert(kkg * beta[:, None]) * beta[None, :]
        tl.store(ab_ptr + of_value * C + in_chunk, ab, mask=here[:, None] & first)


@triton.jit
def load_piece(
    ptr, i: tl.constexpr, offs_v, mask,
    K: tl.constexpr, V: tl.constexpr, PIECE: tl.constexpr, STATE_KV: tl.constexpr,
):  # fmt: skip
    """Piece i of the state at ptr, zeros if not ``mask``."""
    offs_k = i * PIECE + tl.arange(0, PIECE)
    tile = (offs_v < V)[:, None] & (offs_k < K)[None, :] & mask
    at = ptr + tl.trans(state_offsets(offs_k, offs_v, K, V, STATE_KV))
    return tl.load(at, mask=tile, other=0.0).to(tl.float32)


@triton.jit
def store_piece(
    ptr, S, i: tl.constexpr, offs_v, mask,
    K: tl.constexpr, V: tl.constexpr, PIECE: tl.constexpr, STATE_KV: tl.constexpr,
):  # fmt: skip
    """Store S as piece i of the state at ptr, if ``mask``."""
    offs_k = i * PIECE + tl.arange(0, PIECE)
    tile = (offs_v < V)[:, None] & (offs_k < K)[None, :] & mask
    at = ptr + tl.trans(state_offsets(offs_k, offs_v, K, V, STATE_KV))
    tl.store(at, S.to(ptr.dtype.element_ty), mask=tile)


@triton.jit
def next_piece(S, k, g, d, n):
    """Some keys of the state after n tokens of a chunk, (e^γ_n S + (e^(γ_n - γ) ∘ K)ᵀ D)ᵀ.

    S [BLOCK_V, PIECE], k and g [PIECE, 16], d [BLOCK_V, 16].
    """
    rows = tl.arange(0, C)[:, None]
    cols = tl.arange(0, C)[None, :]
    g = tl.where(cols < n, g, 0.0)
    k_out = tl.where(cols < n, k * tl.exp2(sums(g, rows > cols)), 0.0)
    return exact_dot(d, tl.trans(k_out), S * tl.exp2(tl.sum(g, axis=1))[None, :])


@triton.jit(
    do_not_specialize=_OF_STATES,
    do_not_specialize_on_alignment=[*INDICES, "A_log_ptr"],
)
def prefill_key_states_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    v_ptr,  # [B, T, HV, V]
    g_ptr,  # [B, T, HV, K]
    A_log_ptr,  # [HV]; given: g are raw gates
    dt_bias_ptr,  # [HV, K]; None: 0
    ab_ptr,  # [HV, B * T, 16] float32: the inverse times diag(beta); None without beta
    qkg_ptr,  # [HO, B * T, 16] float32: scale QKg
    r_k_ptr,  # [HV, B * T] float32: inverse lengths of keys; None without norm
    r_q_ptr,  # [HO, B * T] float32: scale over the lengths of queries; None without norm
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
    segment_size,  # no sequence is longer
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_v_b,
    stride_v_t,
    stride_v_h,
    stride_g_b,
    stride_g_t,
    stride_g_h,
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
    PIECE: tl.constexpr,
    STATE_KV: tl.constexpr,
):
    PIECES: tl.constexpr = BLOCK_K // PIECE
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    pid_v = pid % BLOCKS
    unit, head_v = divide(pid // BLOCKS, HV, inverse_HV)
    first_q, _ = divide(head_v * READERS, R_Q, inverse_R_Q)
    head_k, _ = divide(head_v, R_K, inverse_R_K)
    begin()
    seq, batch, start, _segment, end = unit_span(
        unit.to(tl.int64), cu_seqlens_ptr, N, T, segment_size
    )
    o_ptr += batch * stride_o_b
    if seq >= N:  # tokens after the last sequence
        if pid_v == 0:
            for t in range(start, end, 64):
                zero_tail(o_ptr, t, end, head_v, stride_o_t, stride_o_h, READERS, V)
        return

    none = tl.zeros([BLOCK_V, C], tl.float32)
    offs_c = tl.arange(0, C)
    rows = offs_c[:, None]
    cols = offs_c[None, :]
    offs_v = pid_v * BLOCK_V + tl.arange(0, BLOCK_V)
    slot = seq
    live = seq >= 0
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + seq).to(tl.int64)
        live = slot > pad_slot
    if not live:
        zero_rows(o_ptr, start, end, head_v, offs_v, stride_o_t, stride_o_h, READERS, V)
        return

    # int64: P·HV·V·K passes 2**31 at 4,096 slots
    state_ptr += head_v * (V * K)
    known = live
    if has_state_ptr is not None:
        known = tl.load(has_state_ptr + seq) != 0
    S = ()
    own = state_ptr + slot * stride_state_p
    for i in tl.static_range(PIECES):
        S = S + (load_piece(own, i, offs_v, known, K, V, PIECE, STATE_KV),)
    if checkpoint_positions_ptr is not None:
        for j in range(M):
            if tl.load(checkpoint_positions_ptr + seq * M + j) == 0:
                kept = tl.load(checkpoint_slots_ptr + seq * M + j).to(tl.int64)
                saved = state_ptr + kept * stride_state_p
                for i in tl.static_range(PIECES):
                    store_piece(saved, S[i], i, offs_v, kept > pad_slot, K, V, PIECE, STATE_KV)

    q_ptr += batch * stride_q_b + first_q * stride_q_h
    k_ptr += batch * stride_k_b + head_k * stride_k_h
    v_ptr += batch * stride_v_b + head_v * stride_v_h
    g_ptr += batch * stride_g_b + head_v * stride_g_h
    if A_log_ptr is not None:
        A_log_ptr += head_v
        if dt_bias_ptr is not None:
            dt_bias_ptr += head_v * K
    for t in range(start, end, C):
        left = tl.minimum(end - t, C).to(tl.int32)
        here = offs_c < left
        of_value = head_v.to(tl.int64) * tokens + batch * T + t
        turned = cols * C + rows
        r_k = tl.full([C], 1.0, tl.float32)
        if r_k_ptr is not None:
            r_k = tl.load(r_k_ptr + of_value + offs_c, mask=here, other=0.0)
        q_at = q_ptr + t * stride_q_t
        k_at = k_ptr + t * stride_k_t
        g_at = g_ptr + t * stride_g_t
        d = load_columns(v_ptr + t * stride_v_t, left, stride_v_t, pid_v * BLOCK_V, V, BLOCK_V)
        qS = none
        for i in tl.static_range(PIECES):
            # side by side: then no operand of these products is kept
            k = load_columns(k_at, left, stride_k_t, i * PIECE, K, PIECE) * r_k[None, :]
            g = load_decays(g_at, A_log_ptr, dt_bias_ptr, left, stride_g_t, i * PIECE, K, PIECE)
            decay_in = tl.exp2(sums(g, rows <= cols))
            if ab_ptr is not None:
                d = exact_dot(S[i], -k * decay_in, d)
            q = load_columns(q_at, left, stride_q_t, i * PIECE, K, PIECE)
            qS = exact_dot(S[i], q * decay_in, qS)
        if ab_ptr is not None:
            ab = tl.load(ab_ptr + of_value * C + turned, mask=here[None, :], other=0.0)
            d = exact_dot(d, ab, none)
        for reader in tl.static_range(READERS):
            head_o = head_v * READERS + reader
            of_output = head_o.to(tl.int64) * tokens + batch * T + t
            o = qS
            if reader > 0:
                o = none
                for i in tl.static_range(PIECES):
                    q = load_columns(
                        q_at + reader * stride_q_h, left, stride_q_t, i * PIECE, K, PIECE
                    )
                    g = load_decays(
                        g_at, A_log_ptr, dt_bias_ptr, left, stride_g_t, i * PIECE, K, PIECE
                    )
                    o = exact_dot(S[i], q * tl.exp2(sums(g, rows <= cols)), o)
            if r_q_ptr is None:
                o *= scale
            else:
                r_q = tl.load(r_q_ptr + of_output + offs_c, mask=here, other=0.0)
                o *= r_q[None, :]
            qkg = tl.load(qkg_ptr + of_output * C + turned, mask=here[None, :], other=0.0)
            o = exact_dot(d, qkg, o)
            at = o_ptr + t * stride_o_t + head_o * stride_o_h
            at += offs_v[:, None] + offs_c[None, :] * stride_o_t
            mask = (offs_v < V)[:, None] & here[None, :]
            tl.store(at, o.to(o_ptr.dtype.element_ty), mask=mask)
        if checkpoint_slots_ptr is not None:
            for j in range(M):
                position = tl.cast((j + 1) * every, tl.int64)
                if checkpoint_positions_ptr is not None:
                    position = tl.load(checkpoint_positions_ptr + seq * M + j).to(tl.int64)
                n = position - (t - start)  # tokens of this chunk before the checkpoint
                if (n > 0) & (n <= C) & (t + n <= end):
                    kept = tl.load(checkpoint_slots_ptr + seq * M + j).to(tl.int64)
                    saved = state_ptr + kept * stride_state_p
                    for i in tl.static_range(PIECES):
                        k = load_columns(k_at, left, stride_k_t, i * PIECE, K, PIECE)
                        k *= r_k[None, :]
                        g = load_decays(
                            g_at, A_log_ptr, dt_bias_ptr, left, stride_g_t, i * PIECE, K, PIECE
                        )
                        S_n = next_piece(S[i], k, g, d, n)
                        store_piece(saved, S_n, i, offs_v, kept > pad_slot, K, V, PIECE, STATE_KV)
        after = ()
        for i in tl.static_range(PIECES):
            # loaded again: kept, they would fill the registers
            k = load_columns(k_at, left, stride_k_t, i * PIECE, K, PIECE) * r_k[None, :]
            g = load_decays(g_at, A_log_ptr, dt_bias_ptr, left, stride_g_t, i * PIECE, K, PIECE)
            after = after + (next_piece(S[i], k, g, d, C),)
        S = after

    write = live
    if write_slots_ptr is not None:
        slot = tl.load(write_slots_ptr + seq).to(tl.int64)
        write = slot > pad_slot
    own = state_ptr + slot * stride_state_p
    for i in tl.static_range(PIECES):
        store_piece(own, S[i], i, offs_v, write, K, V, PIECE, STATE_KV)
