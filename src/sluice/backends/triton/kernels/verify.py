"""Speculative decoding: verify leaves the state alone, commit folds in the accepted tokens.

``verify`` is decode's kernel with the state frozen. It stores k, d and g of each draft token, where
d kᵀ is the whole update of (D3): k is the key as given, and d contains 1 / |k|. ``commit`` repeats
(D1) and (D3),

    S <- exp(g) S,   S <- S + d kᵀ,

for the accepted tokens with decode's own device functions, so the bits are those of one ``decode``
of these tokens. One program owns BLOCK_V rows of a state or, in the same launch, BLOCK_D channels
of a conv window, which it rolls by the accepted inputs. Drafts in buffers are committed for all
layers in one launch: a program belongs to a layer, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import INDICES
from sluice.backends.triton.kernels.math import begin, divide
from sluice.backends.triton.kernels.state_tile import (
    TileShape,
    decayed,
    load_block,
    load_tile,
    load_vector,
    rank_one,
    store_tile,
    widen,
)
from sluice.backends.triton.kernels.window import ConvStrides, roll_window


@triton.jit
def load_draft(
    draft_k_ptr,
    draft_d_ptr,
    draft_g_ptr,
    token,
    on,
    head_k,
    head_v,
    offs_v,
    HK,
    HV,
    shape: tl.constexpr,
    DECAY_PER_KEY: tl.constexpr,
):
    """k, d and g of a draft token."""
    K: tl.constexpr = shape.K
    V: tl.constexpr = shape.V
    k = load_vector(draft_k_ptr + (token * HK + head_k) * K, on, K, shape.PIECE_K)
    state = token * HV + head_v
    d = load_block(draft_d_ptr + state * V, offs_v, on, V, V % shape.BLOCK_V == 0)
    g = tl.full((), 0.0, tl.float32)
    if draft_g_ptr is not None:
        if DECAY_PER_KEY:
            g = load_vector(draft_g_ptr + state * K, on, K, shape.PIECE_K)
        else:
            g = tl.load(draft_g_ptr + state, mask=on)
    return k, d, g


_UNALIGNED = [*INDICES, "num_accepted_ptr"]


@triton.jit(
    do_not_specialize=[
        "N",
        "T",
        "pad_slot",
        "rows",
        "row_programs",
        "HK",
        "HV",
        "R_K",
        "inverse_row_programs",
        "inverse_R_K",
    ],
    do_not_specialize_on_alignment=_UNALIGNED,
)
def commit_kernel(
    draft_k_ptr,  # [B, T, HK, K] float32; of many layers [layers, S, T, HK, K], as d, g and x
    draft_d_ptr,  # [B, T, HV, V] float32
    draft_g_ptr,  # [B, T, HV] or [B, T, HV, K] float32; None: no decay
    x_ptr,  # [B, T, D] raw inputs of the convolution; None: no conv window
    state_ptr,  # [P, HV, V, K] or [P, HV, K, V], read and written
    conv_state_ptr,  # [P, D, L], read and written
    num_accepted_ptr,  # [N]
    slots_ptr,  # [N]; None: row i is sequence i
    write_slots_ptr,  # [N]; None: slots
    has_state_ptr,  # [N]; None: all have
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    draft_slots_ptr,  # [N]: rows of buffers; None: row i is sequence i
    N,
    T,
    pad_slot,
    rows,  # S, rows of the buffers of a layer; None: the draft of one layer, by row
    stride_state_layer,  # None without buffers
    stride_conv_layer,
    stride_x_b,
    stride_x_t,
    stride_x_d,
    stride_state_p,
    stride_conv_p,
    stride_conv_d,
    stride_conv_l,
    row_programs,  # programs per sequence
    HK,
    HV,
    R_K,  # value heads per key head
    inverse_row_programs,  # of divide, as the next
    inverse_R_K,
    D,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PIECE_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
    DECAY_PER_KEY: tl.constexpr,
    STATE_KV: tl.constexpr,
):
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    shape: tl.constexpr = TileShape(K, V, BLOCK_V, PIECE_K, STATE_KV)
    seq, pid = divide(tl.program_id(0), row_programs, inverse_row_programs)
    state_programs = HV * BLOCKS
    layer = seq * 0
    if rows is not None:
        layer = seq // N
        seq = seq % N
    layer = layer.to(tl.int64)
    seq = seq.to(tl.int64)
    if rows is not None:
        state_ptr += layer * stride_state_layer
        if x_ptr is not None:
            conv_state_ptr += layer * stride_conv_layer
    begin()

    slot = seq
    live = seq >= 0
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + seq).to(tl.int64)
        live = slot > pad_slot
    known = live
    if has_state_ptr is not None:
        known = live & (tl.load(has_state_ptr + seq) != 0)
    write_slot = slot
    kept = live
    if write_slots_ptr is not None:
        write_slot = tl.load(write_slots_ptr + seq).to(tl.int64)
        kept = live & (write_slot > pad_slot)
    batch = seq
    if rows is not None:
        if draft_slots_ptr is not None:
            batch = tl.load(draft_slots_ptr + seq).to(tl.int64)
            kept = kept & (batch > pad_slot)
        batch += layer * rows
    start = seq * 0
    length = start + T
    if cu_seqlens_ptr is not None:
        batch = start
        start = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
        length = tl.load(cu_seqlens_ptr + seq + 1).to(tl.int64) - start
    accepted = tl.load(num_accepted_ptr + seq).to(tl.int64)
    accepted = tl.where(kept, tl.minimum(tl.maximum(accepted, 0), length), 0)

    if pid >= state_programs:
        if x_ptr is not None:
            offs_d = (pid - state_programs) * BLOCK_D + tl.arange(0, BLOCK_D)
            roll_window(
                x_ptr + batch * stride_x_b + start * stride_x_t,
                conv_state_ptr + slot * stride_conv_p, conv_state_ptr + write_slot * stride_conv_p,
                known, kept, accepted, offs_d, offs_d < D,
                ConvStrides(stride_x_t, stride_x_d, stride_conv_d, stride_conv_l), L, BLOCK_L,
            )  # fmt: skip
    else:
        head_v = pid // BLOCKS
        head_k, _ = divide(head_v, R_K, inverse_R_K)
        offs_v = (pid % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
        token = batch * T + start
        k, d, g = load_draft(
            draft_k_ptr, draft_d_ptr, draft_g_ptr, token, accepted > 0, head_k, head_v, offs_v,
            HK, HV, shape, DECAY_PER_KEY,
        )  # fmt: skip
        state_ptr += head_v * (V * K)
        S = load_tile(state_ptr + slot * stride_state_p, offs_v, known & kept, shape, LOAD)
        for t in range(accepted):
            k_next, d_next, g_next = load_draft(
                draft_k_ptr, draft_d_ptr, draft_g_ptr, token + t + 1, t + 1 < accepted, head_k,
                head_v, offs_v, HK, HV, shape, DECAY_PER_KEY,
            )  # fmt: skip
            if draft_g_ptr is not None:
                S = decayed(S, g, DECAY_PER_KEY)
            S = rank_one(S, widen(k), d)
            k, d, g = k_next, d_next, g_next
        store_tile(state_ptr + write_slot * stride_state_p, S, offs_v, kept, shape, STORE)
