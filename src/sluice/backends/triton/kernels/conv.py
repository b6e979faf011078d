"""Depthwise causal convolution with a rolling window, docs/kernels/conv.md.

    y_t = act(bias + Σ_w weight_w x_(t - W + 1 + w))                         (V1)

One program owns UNIT_T tokens of one sequence × BLOCK_D channels, and convolves BLOCK_T tokens at a
time. Only a sequence's first unit reads its window, and it writes the new one. Calls with one token
per sequence, as in decode, have a kernel of their own, and so have checkpoints.
"""
# ruff: noqa: SIM102 (a constexpr branch stays an if of its own)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import INDICES
from sluice.backends.triton.kernels.math import begin, divide
from sluice.backends.triton.kernels.window import (
    FIRST,
    ConvStrides,
    Unit,
    convolve,
    convolve_first,
    convolve_one,
    keep_stream,
    load_weights,
    placed,
    roll_window,
)
from sluice.backends.triton.kernels.work_units import probe_sequence


@triton.jit
def locate(
    unit,
    cu_seqlens_ptr,
    slots_ptr,
    write_slots_ptr,
    has_state_ptr,
    N,
    T,
    pad_slot,
    UNIT_T: tl.constexpr,
):
    """The work unit with this index in the call."""
    if cu_seqlens_ptr is not None:
        seq, number, start, length = probe_sequence(unit, cu_seqlens_ptr, N, T, UNIT_T)
        owned = seq < N
        seq = seq.to(tl.int64)
        start = start.to(tl.int64)
        batch = seq * 0
    else:
        units = tl.maximum((T + UNIT_T - 1) // UNIT_T, 1)
        seq = (unit // units).to(tl.int64)
        number = unit % units
        owned = seq >= 0
        start = seq * 0
        length = T
        batch = seq
    slot = seq
    live = owned
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + seq, mask=owned, other=0).to(tl.int64)
        live = owned & (slot > pad_slot)
    known = live
    if has_state_ptr is not None:
        known = live & (tl.load(has_state_ptr + seq, mask=owned, other=0) != 0)
    write_slot = slot
    kept = live
    if write_slots_ptr is not None:
        write_slot = tl.load(write_slots_ptr + seq, mask=owned, other=0).to(tl.int64)
        kept = live & (write_slot > pad_slot)
    return Unit(seq, number, batch, start, length, live, slot, known, write_slot, kept)


FREE = ["N", "T", "pad_slot"]
COLUMNS = ["columns", "inverse_columns"]


@triton.jit(do_not_specialize=[*FREE, *COLUMNS], do_not_specialize_on_alignment=INDICES)
def conv_kernel(
    x_ptr,  # [B, T, D]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    state_ptr,  # [P, D, L], read and written, or None
    y_ptr,  # [B, T, D]
    slots_ptr,  # [N]; None: row i is sequence i
    write_slots_ptr,  # [N]; None: slots
    has_state_ptr,  # [N]; None: all have
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    window_start_ptr,  # [N]: windows are left-aligned and read from this column on; None: are not
    N,
    T,
    pad_slot,
    stride_x_b,
    stride_x_t,
    stride_x_d,
    stride_w_d,
    stride_w_w,
    stride_state_p,
    stride_state_d,
    stride_state_l,
    stride_y_b,
    stride_y_t,
    stride_y_d,
    columns,  # programs side by side
    inverse_columns,  # of divide
    D,
    L: tl.constexpr,
    W: tl.constexpr,
    UNIT_T: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    SILU: tl.constexpr,
    WRITE_STATE: tl.constexpr,
):
    number, column = divide(tl.program_id(0), columns, inverse_columns)
    strides = ConvStrides(stride_x_t, stride_x_d, stride_state_d, stride_state_l)
    begin()
    unit = locate(
        number, cu_seqlens_ptr, slots_ptr, write_slots_ptr, has_state_ptr, N, T, pad_slot,
        UNIT_T,
    )  # fmt: skip
    length = unit.length
    offs_d = (column * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    mask_d = offs_d < D
    x_ptr += unit.batch * stride_x_b + unit.start * stride_x_t
    y_ptr += unit.batch * stride_y_b + unit.start * stride_y_t
    window_ptr = state_ptr
    if state_ptr is not None:
        window_ptr = state_ptr + unit.slot * stride_state_p
        if window_start_ptr is not None:
            window_ptr = placed(
                window_ptr,
                window_start_ptr,
                unit.seq,
                unit.known,
                stride_state_l,
                L,
                W,
            )
    weights = load_weights(weight_ptr, offs_d, mask_d, stride_w_d, stride_w_w, W, True)

    # tokens whose taps reach into the window are made here, so that the loop reads tokens only
    first = unit.number * UNIT_T
    last = tl.minimum(first + UNIT_T, length)
    if state_ptr is not None:
        if unit.known & (unit.number == 0):
            offs_t = tl.arange(0, FIRST).to(tl.int64)
            y = convolve_first(
                x_ptr, weights, bias_ptr, window_ptr, offs_t, length, offs_d, mask_d, strides,
                L, W, SILU,
            )  # fmt: skip
            at = y_ptr + offs_t[:, None] * stride_y_t + offs_d[None, :] * stride_y_d
            mask = (offs_t < tl.minimum(W - 1, length))[:, None] & mask_d[None, :]
            tl.store(at, y.to(y_ptr.dtype.element_ty), mask=mask)
            first = W - 1
    offs_t = first + tl.arange(0, BLOCK_T)
    rows = offs_t.to(tl.int64)[:, None]  # T·D passes 2**31 in long inputs
    place = x_ptr + (rows - (W - 1)) * stride_x_t + offs_d[None, :] * stride_x_d
    out = y_ptr + rows * stride_y_t + offs_d[None, :] * stride_y_d
    if not unit.live:
        for begins in range(first, last, BLOCK_T):
            zeros = tl.zeros([BLOCK_T, BLOCK_D], y_ptr.dtype.element_ty)
            mask = (begins + tl.arange(0, BLOCK_T) < last)[:, None] & mask_d[None, :]
            tl.store(out + (begins - first) * stride_y_t, zeros, mask=mask)
        last = first
    for _ in tl.range(first, last, BLOCK_T, num_stages=STAGES):
        y = convolve(place, weights, bias_ptr, offs_t, length, offs_d, mask_d, stride_x_t, W, SILU)
        mask = (offs_t < last)[:, None] & mask_d[None, :]
        tl.store(out, y.to(y_ptr.dtype.element_ty), mask=mask)
        offs_t += BLOCK_T
        place += BLOCK_T * stride_x_t
        out += BLOCK_T * stride_y_t
    if WRITE_STATE:
        if unit.live & (unit.number == 0):
            if window_start_ptr is not None:
                keep_stream(
                    x_ptr, window_ptr, state_ptr + unit.write_slot * stride_state_p, unit.known,
                    unit.kept, unit.length, offs_d, mask_d, strides, L, W,
                )  # fmt: skip
            else:
                roll_window(
                    x_ptr, window_ptr, state_ptr + unit.write_slot * stride_state_p, unit.known,
                    unit.kept, unit.length, offs_d, mask_d, strides, L, BLOCK_L,
                )  # fmt: skip


@triton.jit(do_not_specialize=["N", "pad_slot", *COLUMNS], do_not_specialize_on_alignment=INDICES)
def conv_one_kernel(
    x_ptr,  # [N, 1, D]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    state_ptr,  # [P, D, L], read and written, L >= W - 1
    y_ptr,  # [N, 1, D]
    slots_ptr,  # [N]; None: row i is sequence i
    write_slots_ptr,  # [N]; None: slots
    has_state_ptr,  # [N]; None: all have
    N,
    pad_slot,
    stride_x_b,
    stride_x_d,
    stride_w_d,
    stride_w_w,
    stride_state_p,
    stride_state_d,
    stride_state_l,
    stride_y_b,
    stride_y_d,
    columns,  # programs side by side
    inverse_columns,  # of divide
    D,
    L: tl.constexpr,
    W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SILU: tl.constexpr,
    WRITE_STATE: tl.constexpr,
):
    number, column = divide(tl.program_id(0), columns, inverse_columns)
    begin()
    unit = locate(number, None, slots_ptr, write_slots_ptr, has_state_ptr, N, 1, pad_slot, 1)
    offs_d = (column * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    mask_d = offs_d < D
    weights = load_weights(weight_ptr, offs_d, mask_d, stride_w_d, stride_w_w, W, True)
    rolled_ptr = None
    if WRITE_STATE:
        rolled_ptr = state_ptr + unit.write_slot * stride_state_p
    y = convolve_one(
        x_ptr + unit.seq * stride_x_b, weights, bias_ptr, state_ptr + unit.slot * stride_state_p,
        rolled_ptr, unit.known, unit.kept, offs_d, mask_d,
        ConvStrides(0, stride_x_d, stride_state_d, stride_state_l), L, SILU,
    )  # fmt: skip
    y = tl.where(unit.live, y, 0.0).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + unit.seq * stride_y_b + offs_d[None, :] * stride_y_d, y, mask=mask_d[None, :])
