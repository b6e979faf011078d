"""Gated delta rule for 1 to 8 tokens per sequence, docs/kernels/decode.md.

    S <- exp(g) S                     (D1)
    d  = beta (v - S k / |k|) / |k|   (D2)
    S <- S + d kᵀ                     (D3)
    o  = scale S q / |q|              (D4)

One program owns BLOCK_V rows of one value head's state and keeps them in registers from the first
token to the last. The state is read once and written once, or after each token to a slot of its
own. q and k are not normalised in place; their inverse lengths go into d and o instead (1 without
``normalize_qk``). ``verify`` runs this kernel too. It stores k, d and g of each token, by row or in
buffers by slot, and leaves the state alone.
"""
# ruff: noqa: RUF005 (Triton has no tuple unpacking)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import GATES, INDICES
from sluice.backends.triton.kernels.math import NORM_EPS, begin, divide, exp, sigmoid, softplus
from sluice.backends.triton.kernels.state_tile import (
    TileShape,
    decayed,
    load_block,
    load_tile,
    load_vector,
    rank_one,
    square_norm,
    store_tile,
    tile_dot,
    widen,
)


@triton.jit
def load_qv(
    q_ptr,
    v_ptr,
    t,
    on,
    offs_v,
    stride_q_t,
    stride_q_h,
    stride_v_t,
    READERS: tl.constexpr,
    shape: tl.constexpr,
):
    """A token's v and the queries that read this state, in their own dtypes."""
    q = ()
    for i in tl.static_range(READERS):
        q_i = load_vector(q_ptr + t * stride_q_t + i * stride_q_h, on, shape.K, shape.PIECE_K)
        q = q + (q_i,)
    whole: tl.constexpr = shape.V % shape.BLOCK_V == 0
    return q, load_block(v_ptr + t * stride_v_t, offs_v, on, shape.V, whole)


@triton.jit
def load_gates(
    g_ptr,
    beta_ptr,
    t,
    on,
    stride_g_t,
    stride_beta_t,
    K: tl.constexpr,
    PIECE_K: tl.constexpr,
    DECAY_PER_KEY: tl.constexpr,
):
    """A token's gates, in their own dtypes; g = 0 and beta = 1 where not given."""
    g = tl.full((), 0.0, tl.float32)
    if g_ptr is not None:
        if DECAY_PER_KEY:
            g = load_vector(g_ptr + t * stride_g_t, on, K, PIECE_K)
        else:
            g = tl.load(g_ptr + t * stride_g_t, mask=on)
    beta = tl.full((), 1.0, tl.float32)
    if beta_ptr is not None:
        beta = tl.load(beta_ptr + t * stride_beta_t, mask=on)
    return g, beta


@triton.jit
def load_rates(
    A_log_ptr,
    dt_bias_ptr,
    head_v,
    K: tl.constexpr,
    PIECE_K: tl.constexpr,
    DECAY_PER_KEY: tl.constexpr,
):
    """A value head's A_log and dt_bias, in their own dtypes; 0 where not given."""
    A_log = tl.full((), 0.0, tl.float32)
    if A_log_ptr is not None:
        A_log = tl.load(A_log_ptr + head_v)
    dt_bias = tl.full((), 0.0, tl.float32)
    if dt_bias_ptr is not None:
        if DECAY_PER_KEY:
            dt_bias = load_vector(dt_bias_ptr + head_v * K, None, K, PIECE_K)
        else:
            dt_bias = tl.load(dt_bias_ptr + head_v)
    return A_log, dt_bias


@triton.jit
def log_decay(
    g, A_log, dt_bias, RAW: tl.constexpr, BIASED: tl.constexpr, DECAY_PER_KEY: tl.constexpr
):
    """g in float32. RAW: g is the raw gate a, and the result -exp(A_log) softplus(a + dt_bias)."""
    if DECAY_PER_KEY:
        y = ()
        for j in tl.static_range(len(g)):
            bias = dt_bias[j] if BIASED else dt_bias
            y = y + (log_decay(g[j], A_log, bias, RAW, BIASED, False),)
    else:
        y = g.to(tl.float32)
        if RAW:
            y = -exp(A_log.to(tl.float32)) * softplus(y + dt_bias.to(tl.float32))
    return y


@triton.jit
def advance(
    S,
    k,
    q,
    v,
    g,
    beta,
    scale,
    GATED: tl.constexpr,
    DELTA: tl.constexpr,
    NORMALIZE_QK: tl.constexpr,
    DECAY_PER_KEY: tl.constexpr,
):
    """(D1) to (D4) for one token in float32: the new S, d [BLOCK_V], and o of each reader."""
    if GATED:
        S = decayed(S, g, DECAY_PER_KEY)
    r_k = 1.0
    if NORMALIZE_QK:
        r_k = tl.rsqrt(square_norm(k) + NORM_EPS)
    d = v
    if DELTA:
        d = beta * (v - tile_dot(S, k) * r_k)
    d = d * r_k
    S = rank_one(S, k, d)
    o = ()
    for i in tl.static_range(len(q)):
        q_i = widen(q[i])
        r_q = scale
        if NORMALIZE_QK:
            r_q = scale * tl.rsqrt(square_norm(q_i) + NORM_EPS)
        o = o + (tile_dot(S, q_i) * r_q,)
    return S, d, o


# A serving process changes these sizes from call to call, and these strides cannot make a load
# wider: no variant of the kernel is compiled for their values.
_FREE = ["N", "T", "pad_slot", "HV", "R_Q", "R_K", "inverse_HV", "inverse_R_Q", "inverse_R_K"]
_FREE += [f"stride_{name}_{dim}" for name in ("v", "g", "beta", "o") for dim in "bth"]
_FREE += ["states", "draft_tokens", "D", "stride_x_b", "stride_x_t"]
_UNALIGNED = [*INDICES, *GATES, "v_ptr", "o_ptr"]


@triton.jit(do_not_specialize=_FREE, do_not_specialize_on_alignment=_UNALIGNED)
def decode_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    v_ptr,  # [B, T, HV, V]
    g_ptr,  # [B, T, HV] or [B, T, HV, K]; None: no decay
    beta_ptr,  # [B, T, HV]; None: no delta rule
    A_log_ptr,  # [HV]; given: g and beta are raw gates
    dt_bias_ptr,  # [HV] or [HV, K]; None: 0
    state_ptr,  # [P, HV, V, K] or [P, HV, K, V], read and written
    o_ptr,  # [B, T, HO, V]
    draft_k_ptr,  # [B, T, HK, K] float32; None: decode, which writes the state
    draft_d_ptr,  # [B, T, HV, V] float32
    draft_g_ptr,  # as g, float32
    x_ptr,  # [B, T, D] raw inputs of the convolution; None: none are kept
    draft_x_ptr,  # [S, draft_tokens, D]
    draft_slots_ptr,  # [N]: rows of buffers; None: row i is sequence i
    slots_ptr,  # [N]; None: row i is sequence i
    write_slots_ptr,  # [N], or [N, states]; None: slots
    has_state_ptr,  # [N]; None: all have
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    scale,
    beta_scale,
    N,
    T,
    pad_slot,
    states,  # write slots of a sequence, one for each token; None: one for all
    draft_tokens,  # the draft lies in buffers [S, draft_tokens, ..]; None: by row
    D,  # None without x
    stride_x_b,
    stride_x_t,
    stride_x_d,
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
    stride_beta_b,
    stride_beta_t,
    stride_beta_h,
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
    BLOCK_V: tl.constexpr,
    PIECE_K: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    NORMALIZE_QK: tl.constexpr,
    DECAY_PER_KEY: tl.constexpr,
    STATE_KV: tl.constexpr,
    BLOCK_X: tl.constexpr,  # channels of x that a program copies, rounded up; 0 without x
):
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    GATED: tl.constexpr = g_ptr is not None
    DELTA: tl.constexpr = beta_ptr is not None
    RAW: tl.constexpr = A_log_ptr is not None
    shape: tl.constexpr = TileShape(K, V, BLOCK_V, PIECE_K, STATE_KV)
    pid = tl.program_id(0)
    pid_v = pid % BLOCKS
    seq, head_v = divide(pid // BLOCKS, HV, inverse_HV)
    head_q, _ = divide(head_v * READERS, R_Q, inverse_R_Q)
    head_k, _ = divide(head_v, R_K, inverse_R_K)
    seq = seq.to(tl.int64)
    head_q = head_q.to(tl.int64)
    head_k = head_k.to(tl.int64)
    head_v = head_v.to(tl.int64)
    begin()
    offs_v = pid_v * BLOCK_V + tl.arange(0, BLOCK_V)

    slot = seq
    live = seq >= 0
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + seq).to(tl.int64)
        live = slot > pad_slot
    batch = seq
    start = seq * 0
    end = start + T
    if cu_seqlens_ptr is not None:
        batch = start
        start = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
        end = tl.load(cu_seqlens_ptr + seq + 1).to(tl.int64)

    q_ptr += batch * stride_q_b + head_q * stride_q_h
    k_ptr += batch * stride_k_b + head_k * stride_k_h
    v_ptr += batch * stride_v_b + head_v * stride_v_h
    o_ptr += batch * stride_o_b + (head_v * READERS) * stride_o_h
    if g_ptr is not None:
        g_ptr += batch * stride_g_b + head_v * stride_g_h
    if beta_ptr is not None:
        beta_ptr += batch * stride_beta_b + head_v * stride_beta_h

    # Issue all loads together and before any arithmetic, first those that need no slot. Left alone,
    # the compiler loads and uses the state row by row. So k is loaded after a barrier: without k
    # there is nothing to compute.
    on = None if ONE_TOKEN else start < end
    g, beta = load_gates(
        g_ptr, beta_ptr, start, on, stride_g_t, stride_beta_t, K, PIECE_K, DECAY_PER_KEY
    )
    A_log, dt_bias = load_rates(A_log_ptr, dt_bias_ptr, head_v, K, PIECE_K, DECAY_PER_KEY)
    q, v = load_qv(
        q_ptr, v_ptr, start, on, offs_v, stride_q_t, stride_q_h, stride_v_t, READERS, shape
    )
    known = live
    if has_state_ptr is not None:
        known = live & (tl.load(has_state_ptr + seq) != 0)
    drafted = live
    row = seq
    if draft_slots_ptr is not None:
        row = tl.load(draft_slots_ptr + seq).to(tl.int64)
        drafted = live & (row > pad_slot)
    # int64: P·HV·V·K passes 2**31 at 4,096 slots
    state_ptr += head_v * (V * K)
    S = load_tile(state_ptr + slot * stride_state_p, offs_v, known, shape, LOAD)
    tl.debug_barrier()
    k = load_vector(k_ptr + start * stride_k_t, on, K, PIECE_K)

    for t in range(start, start + 1 if ONE_TOKEN else end):
        g32 = log_decay(g, A_log, dt_bias, RAW, dt_bias_ptr is not None, DECAY_PER_KEY)
        beta32 = beta.to(tl.float32)
        if DELTA and RAW:
            beta32 = sigmoid(beta32) * beta_scale
        k32 = widen(k)
        v32 = v.to(tl.float32)
        if states is not None:  # columns that are missing are padding
            at = write_slots_ptr + seq * states + (t - start)
            own = tl.load(at, mask=t - start < states, other=-1).to(tl.int64)
        if not ONE_TOKEN:
            more = t + 1 < end
            k = load_vector(k_ptr + (t + 1) * stride_k_t, more, K, PIECE_K)
            q_next, v = load_qv(
                q_ptr, v_ptr, t + 1, more, offs_v, stride_q_t, stride_q_h, stride_v_t, READERS,
                shape,
            )  # fmt: skip
            g, beta = load_gates(
                g_ptr, beta_ptr, t + 1, more, stride_g_t, stride_beta_t, K, PIECE_K, DECAY_PER_KEY
            )
        S, d, o = advance(
            S, k32, q, v32, g32, beta32, scale, GATED, DELTA, NORMALIZE_QK, DECAY_PER_KEY
        )
        for i in tl.static_range(READERS):
            o_i = tl.where(live, o[i], 0.0).to(o_ptr.dtype.element_ty)
            tl.store(o_ptr + t * stride_o_t + i * stride_o_h + offs_v, o_i, mask=offs_v < V)
        if states is not None:
            kept = live & (own > pad_slot)
            store_tile(state_ptr + own * stride_state_p, S, offs_v, kept, shape, STORE)
        if draft_k_ptr is not None:
            token = batch * T + t
            fits = drafted
            if draft_tokens is not None:
                token = row * draft_tokens + (t - start)
                fits = drafted & (t - start < draft_tokens)
            tl.store(draft_d_ptr + (token * HV + head_v) * V + offs_v, d, mask=fits & (offs_v < V))
            if draft_x_ptr is not None:
                each = (D + HV * BLOCKS - 1) // (HV * BLOCKS)
                offs = tl.arange(0, BLOCK_X)
                offs_x = (head_v * BLOCKS + pid_v) * each + offs
                mask = fits & (offs < each) & (offs_x < D)
                at = x_ptr + batch * stride_x_b + t * stride_x_t + offs_x * stride_x_d
                x = tl.load(at, mask=mask, other=0.0)
                tl.store(draft_x_ptr + token * D + offs_x, x, mask=mask)
            if pid_v == 0 and fits:
                store_draft(
                    draft_k_ptr, draft_g_ptr, k32, g32, token, head_k, head_v, HV, R_K, K, PIECE_K,
                    DECAY_PER_KEY,
                )  # fmt: skip
        if not ONE_TOKEN:
            q = q_next

    if draft_k_ptr is None and states is None:
        write = live
        if write_slots_ptr is not None:
            slot = tl.load(write_slots_ptr + seq).to(tl.int64)
            write = live & (slot > pad_slot)
        store_tile(state_ptr + slot * stride_state_p, S, offs_v, write, shape, STORE)
    if cu_seqlens_ptr is not None:  # the outputs of tokens after the last sequence are zeros
        zeros = tl.zeros([BLOCK_V], o_ptr.dtype.element_ty)
        for t in range(tl.load(cu_seqlens_ptr + N).to(tl.int64) + seq, T, N):
            for i in tl.static_range(READERS):
                tl.store(o_ptr + t * stride_o_t + i * stride_o_h + offs_v, zeros, mask=offs_v < V)


# The same for programs with fewer lanes than a piece has keys, as 16-bit states [V, K] have. There,
# if the compiler knew the alignment of q, k or the draft's k, it would give a lane keys that lie
# side by side, and |k| and |q| would be summed in another order: decode of a few tokens would then
# differ in bits from verify, which stores k, or from a call whose tokens lie elsewhere. Where lanes
# suffice, the state's layout decides, and what is known of q and k saves 5% of the time.
decode_unaligned_kernel = triton.jit(
    decode_kernel.fn,
    do_not_specialize=[*_FREE, *(f"stride_{name}_{dim}" for name in "qk" for dim in "bth")],
    do_not_specialize_on_alignment=[*_UNALIGNED, "q_ptr", "k_ptr", "draft_k_ptr"],
)


@triton.jit
def store_draft(
    draft_k_ptr,
    draft_g_ptr,
    k,
    g,
    token,
    head_k,
    head_v,
    HV,
    R_K,
    K: tl.constexpr,
    PIECE_K: tl.constexpr,
    DECAY_PER_KEY: tl.constexpr,
):
    """Store a token's k and g for ``commit``; the first value head of a key head stores its k."""
    for j in tl.static_range(len(k)):
        offs_k = j * PIECE_K + tl.arange(0, PIECE_K)
        first = head_v == head_k * R_K
        at = draft_k_ptr + (token * (HV // R_K) + head_k) * K + offs_k
        tl.store(at, k[j], mask=first & (offs_k < K))
        if draft_g_ptr is not None and DECAY_PER_KEY:
            at = draft_g_ptr + (token * HV + head_v) * K + offs_k
            tl.store(at, g[j], mask=offs_k < K)
    if draft_g_ptr is not None and not DECAY_PER_KEY:
        tl.store(draft_g_ptr + token * HV + head_v, g)
