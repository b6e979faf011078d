"""A whole layer's decode after its input projections, in one launch, docs/kernels/step.md.

    q, k, v = act(conv(x)) split into heads, q and k over their l2 norms      (S1)
    S <- exp(g) S,   d = beta (v - S k),   S <- S + d kᵀ,   o = scale S q     (S2)
    y = weight · o / sqrt(mean o² + eps) · act(z)                            (S3)

One program owns one value head of one row. It holds the head's whole state [V, K] in registers, so
it can make the norm over V by itself. Nothing is rounded between the parts.

The conv windows of q and k belong to a key head, and r = HV / HK value heads read them. Each of
these r programs counts itself in ``arrivals`` after it has read them, and the last one writes.
"""
# ruff: noqa: SIM108 (constexpr branches stay if/else)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import GATES, INDICES
from sluice.backends.triton.kernels.math import begin, divide, exp, sigmoid, silu, softplus
from sluice.backends.triton.kernels.step_parts import (
    Channels,
    conv_taps,
    half_of,
    load_gates,
    load_taps,
    make_keys,
    store_state,
    store_window,
    tile_dot3,
    where_all,
)
from sluice.backends.triton.kernels.window import ConvStrides, load_weights, roll_window

_FREE = [
    "T",
    "HK",
    "HV",
    "readers",
    "inverse_HV",
    "inverse_readers",
    "pad_slot",
    "k_offset",
    "v_offset",
    "stride_q_g",
    "stride_v_g",
]
_FREE += [f"stride_{name}_{dim}" for name in "xzbay" for dim in "nt"]
_FREE += [f"stride_{name}_{dim}" for name in "zba" for dim in "gh" if name + dim != "zh"]
_UNALIGNED = [*INDICES, *GATES, "b_ptr", "a_ptr", "norm_weight_ptr", "conv_bias_ptr"]
_UNALIGNED += ["x_ptr", "z_ptr", "y_ptr", "arrivals_ptr"]


@triton.jit(do_not_specialize=_FREE, do_not_specialize_on_alignment=_UNALIGNED)
def step_kernel(
    x_ptr,  # [N, T, ..] q, k and v; of key head h: q at h stride_q_g, k k_offset after it, its r
    # heads of v at v_offset + h stride_v_g
    z_ptr,  # [N, T, HK, r V], groups stride_z_g apart
    b_ptr,  # [N, T, HK, r], groups stride_b_g, heads stride_b_h apart
    a_ptr,  # [N, T, HK, r], likewise
    conv_weight_ptr,  # [D, W]
    conv_bias_ptr,  # [D] or None
    A_log_ptr,  # [HV]
    dt_bias_ptr,  # [HV]
    norm_weight_ptr,  # [V]
    conv_state_ptr,  # [P, D, L], read and written
    state_ptr,  # [P, HV, V, K] or [P, HV, K, V], read and written
    y_ptr,  # [N, T, HV V]
    arrivals_ptr,  # [P, HK] int32 zeros, left as zeros; None where HV = HK
    slots_ptr,  # [N]; None: row i is sequence i
    write_slots_ptr,  # [N]; None: slots
    has_state_ptr,  # [N]; None: all have
    scale,
    beta_scale,
    eps,
    pad_slot,
    k_offset,
    v_offset,
    stride_x_n,
    stride_x_t,
    stride_q_g,
    stride_v_g,
    stride_z_n,
    stride_z_t,
    stride_z_g,
    stride_b_n,
    stride_b_t,
    stride_b_g,
    stride_b_h,
    stride_a_n,
    stride_a_t,
    stride_a_g,
    stride_a_h,
    stride_w_d,
    stride_w_w,
    stride_conv_p,
    stride_conv_d,
    stride_conv_l,
    stride_state_p,
    stride_y_n,
    stride_y_t,
    T,
    HK,
    HV,
    readers,  # of the conv windows of a key head: its value heads
    inverse_HV,  # for divide, as is the next one
    inverse_readers,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    W: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_L: tl.constexpr,
    NORMALIZE_QK: tl.constexpr,
    CONV_SILU: tl.constexpr,
    GATE_SIGMOID: tl.constexpr,
    STATE_KV: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
):
    # q and k are halves along this dimension: [2, PIECE_K, PIECES] or [PIECE_K, PIECES, 2]. With
    # the last one the compiler gives the state their layout, lanes along K; with the first it
    # cannot.
    HALF: tl.constexpr = 2 if ONE_TOKEN and not STATE_KV else 0
    seq, head_v = divide(tl.program_id(0), HV, inverse_HV)
    head_k, member = divide(head_v, readers, inverse_readers)
    seq = seq.to(tl.int64)
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

    # [PIECE_K, PIECES]
    offs_k = tl.arange(0, PIECE_K)[:, None] + tl.arange(0, PIECES)[None, :] * PIECE_K
    offs_v = tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    # The tile [PIECE_K, PIECES, BLOCK_V] is loaded as [PIECE_K, PIECES · BLOCK_V]: with two
    # dimensions every version of Triton gives it the same layout, all pieces of a row in a thread.
    offs_n = tl.arange(0, PIECES * BLOCK_V)[None, :]
    tile_k = tl.arange(0, PIECE_K)[:, None] + offs_n // BLOCK_V * PIECE_K
    tile_v = offs_n % BLOCK_V
    if STATE_KV:
        offs_tile = tile_v + tile_k * V
    else:
        offs_tile = tile_v * K + tile_k
    if PIECES * PIECE_K == K and BLOCK_V == V:
        mask_tile = tl.full((1, 1), True, tl.int1)
    else:
        mask_tile = (tile_v < V) & (tile_k < K)
    # int64: P·HV·V·K passes 2**31 at 4,096 slots
    state_ptr += head_v * (V * K)
    read_ptr = state_ptr + slot * stride_state_p
    write_ptr = state_ptr + write_slot * stride_state_p

    window_ptr = conv_state_ptr + slot * stride_conv_p
    rolled_ptr = conv_state_ptr + write_slot * stride_conv_p
    x_ptr += seq * stride_x_n
    z_ptr += seq * stride_z_n + head_k * stride_z_g
    b_ptr += seq * stride_b_n + head_k * stride_b_g
    a_ptr += seq * stride_a_n + head_k * stride_a_g
    y_ptr += seq * stride_y_n
    # q and k are the halves of one tensor, and v is the first half of another (step_parts.py)
    pair = tl.arange(0, 2)
    if HALF == 0:
        half_k = pair[:, None, None]
    else:
        half_k = pair[None, None, :]
    keys_k = tl.expand_dims(offs_k, HALF)
    keys_index = head_k * K + half_k * (HK * K) + keys_k
    keys_x = head_k * stride_q_g + half_k * k_offset + keys_k
    keys_mask = (keys_k < K) & (half_k < 2)
    keys = Channels(keys_index, keys_x, keys_mask)
    half_v = pair[None, :]  # [BLOCK_V, 2]
    values_index = 2 * HK * K + head_v * V + offs_v[:, None] + half_v
    values_x = v_offset + head_k * stride_v_g + member * V + offs_v[:, None] + half_v
    values_mask = mask_v[:, None] & (half_v < 1)
    values = Channels(values_index, values_x, values_mask)

    if ONE_TOKEN:  # these few loads before the many of the state, which would delay them
        norm_weight = tl.load(norm_weight_ptr + offs_v, mask=mask_v, other=0.0)
        keys_weights = load_weights(
            conv_weight_ptr, keys.index, keys.mask, stride_w_d, stride_w_w, W, False
        )
        values_weights = load_weights(
            conv_weight_ptr, values.index, values.mask, stride_w_d, stride_w_w, W, False
        )
        z, a, b, A_log, dt_bias = load_gates(
            z_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, head_v, member, offs_v, mask_v,
            stride_a_h, stride_b_h, V,
        )  # fmt: skip
        keys_taps = load_taps(
            x_ptr, window_ptr, known, 0, keys, stride_x_t, stride_conv_d, stride_conv_l,
            ONE_TOKEN, L, W,
        )  # fmt: skip
        values_taps = load_taps(
            x_ptr, window_ptr, known, 0, values, stride_x_t, stride_conv_d, stride_conv_l,
            ONE_TOKEN, L, W,
        )  # fmt: skip
        tl.debug_barrier()
    S = tl.load(read_ptr + offs_tile, mask=mask_tile & known, other=0.0).to(tl.float32)
    S = tl.reshape(S, (PIECE_K, PIECES, BLOCK_V))
    if ONE_TOKEN:
        if slots_ptr is not None:
            # Left alone, the compiler moves the arithmetic on the taps, and so the wait for them,
            # before the loads of the state. So the taps depend on a load after a barrier (of the
            # slot, which is in the L1 cache by now).
            tl.debug_barrier()
            same = tl.load(slots_ptr + seq).to(tl.int64) == slot
            keys_taps = where_all(same, keys_taps)
        q, k, norms = make_keys(
            keys_taps, keys_weights, conv_bias_ptr, keys, half_k, HALF, CONV_SILU, NORMALIZE_QK
        )

    mine = kept  # whether this program writes the windows of q and k: all readers have read them
    if arrivals_ptr is not None and ONE_TOKEN:
        # Add 1, computed from the norms: every thread has all its taps before the program counts
        # itself. The count returns while the state is loaded, and needs no fence.
        one = 1 + (norms < 0.0).to(tl.int32)
        counter = arrivals_ptr + write_slot * HK + head_k
        arrived = tl.atomic_add(counter, one, mask=kept, sem="relaxed")
        mine = kept & (arrived == readers - 1)

    for t in range(1 if ONE_TOKEN else T):
        if not ONE_TOKEN:  # weights again for each token: registers cannot hold them and the state
            norm_weight = tl.load(norm_weight_ptr + offs_v, mask=mask_v, other=0.0)
            keys_weights = load_weights(
                conv_weight_ptr, keys.index, keys.mask, stride_w_d, stride_w_w, W, False
            )
            values_weights = load_weights(
                conv_weight_ptr, values.index, values.mask, stride_w_d, stride_w_w, W, False
            )
            keys_taps = load_taps(
                x_ptr, window_ptr, known, t, keys, stride_x_t, stride_conv_d, stride_conv_l,
                ONE_TOKEN, L, W,
            )  # fmt: skip
            q, k, norms = make_keys(
                keys_taps, keys_weights, conv_bias_ptr, keys, half_k, HALF, CONV_SILU, NORMALIZE_QK
            )
            values_taps = load_taps(
                x_ptr, window_ptr, known, t, values, stride_x_t, stride_conv_d, stride_conv_l,
                ONE_TOKEN, L, W,
            )  # fmt: skip
            z, a, b, A_log, dt_bias = load_gates(
                z_ptr + t * stride_z_t, a_ptr + t * stride_a_t, b_ptr + t * stride_b_t,
                A_log_ptr, dt_bias_ptr, head_v, member, offs_v, mask_v, stride_a_h, stride_b_h, V,
            )  # fmt: skip
        v = conv_taps(values_taps, values_weights, conv_bias_ptr, values, CONV_SILU)
        v = half_of(v, 0, half_v, 1)
        raw = a.to(tl.float32) + dt_bias.to(tl.float32)
        alpha = exp(-exp(A_log.to(tl.float32)) * softplus(raw))
        beta = sigmoid(b.to(tl.float32)) * beta_scale

        S = S * alpha
        d = beta * (v - tile_dot3(S, k))
        d_tile = tl.broadcast_to(d[None, None, :], (PIECE_K, PIECES, BLOCK_V))
        S = tl.fma(d_tile, tl.broadcast_to(k[:, :, None], (PIECE_K, PIECES, BLOCK_V)), S)
        o = tile_dot3(S, q) * scale
        square = tl.sum(o * o, axis=0)
        if ONE_TOKEN:
            tl.debug_barrier()  # all threads have read what is overwritten here
            store_window(rolled_ptr, values_taps, values, kept, stride_conv_d, stride_conv_l)
            store_state(write_ptr + offs_tile, S, mask_tile & kept)

        y = o * tl.rsqrt(square / V + eps) * norm_weight.to(tl.float32)
        if GATE_SIGMOID:
            y = y * sigmoid(z.to(tl.float32))
        else:
            y = y * silu(z.to(tl.float32))
        y = tl.where(live, y, 0.0).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + t * stride_y_t + head_v * V + offs_v, y, mask=mask_v)

    if not ONE_TOKEN:
        store_state(write_ptr + offs_tile, S, mask_tile & kept)
        roll_window(
            x_ptr + v_offset + head_k * stride_v_g + member * V,
            window_ptr + (2 * HK * K + head_v * V) * stride_conv_d,
            rolled_ptr + (2 * HK * K + head_v * V) * stride_conv_d,
            known, kept, T, offs_v, mask_v,
            ConvStrides(stride_x_t, 1, stride_conv_d, stride_conv_l), L, BLOCK_L,
        )  # fmt: skip
    if arrivals_ptr is not None:
        if not ONE_TOKEN:
            tl.debug_barrier()
            counter = arrivals_ptr + write_slot * HK + head_k
            arrived = tl.atomic_add(counter, 1, mask=kept, sem="acq_rel")
            mine = kept & (arrived == readers - 1)
        tl.store(counter, 0, mask=mine)
    if ONE_TOKEN:
        tl.debug_barrier()
        store_window(rolled_ptr, keys_taps, keys, mine, stride_conv_d, stride_conv_l)
    else:
        offs = tl.arange(0, PIECES * PIECE_K)
        for i in range(2):
            channel = head_k * K + i * (HK * K)
            roll_window(
                x_ptr + head_k * stride_q_g + i * k_offset,
                window_ptr + channel * stride_conv_d,
                rolled_ptr + channel * stride_conv_d,
                known & mine, mine, T, offs, offs < K,
                ConvStrides(stride_x_t, 1, stride_conv_d, stride_conv_l), L, BLOCK_L,
            )  # fmt: skip
