"""Conv windows at checkpoints, for both convolutions, docs/kernels/conv.md.

It runs before the convolution, which overwrites the windows that early checkpoints read. One
program owns BLOCK_D channels of one checkpoint, and no convolution looks for checkpoints.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import INDICES
from sluice.backends.triton.kernels.math import begin, divide
from sluice.backends.triton.kernels.window import placed

_FREE = ["T", "M", "every", "pad_slot", "columns", "inverse_columns", "inverse_M"]


@triton.jit(do_not_specialize=_FREE, do_not_specialize_on_alignment=INDICES)
def conv_checkpoints_kernel(
    x_ptr,  # [B, T, D]
    state_ptr,  # [P, D, L], read at a sequence's slot and written at the checkpoint's
    slots_ptr,  # [N]; None: row i is sequence i
    has_state_ptr,  # [N]; None: all have
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    checkpoint_slots_ptr,  # [N, M]
    checkpoint_positions_ptr,  # [N, M]; None: after every ``every`` tokens
    window_start_ptr,  # [N]: windows are left-aligned and read from this column on; None: are not
    T,
    M,
    every,
    pad_slot,
    stride_x_b,
    stride_x_t,
    stride_x_d,
    stride_state_p,
    stride_state_d,
    stride_state_l,
    columns,  # programs side by side
    inverse_columns,  # of divide
    inverse_M,
    D,
    L: tl.constexpr,
    W: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    number, column = divide(tl.program_id(0), columns, inverse_columns)
    begin()
    row, m = divide(number, M, inverse_M)
    seq = row.to(tl.int64)
    kept_slot = tl.load(checkpoint_slots_ptr + number).to(tl.int64)
    if checkpoint_positions_ptr is not None:
        position = tl.load(checkpoint_positions_ptr + number).to(tl.int64)
    else:
        position = (m + 1).to(tl.int64) * every
    slot = seq
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + seq).to(tl.int64)
    live = kept_slot > pad_slot
    if slots_ptr is not None:
        live = live & (slot > pad_slot)
    known = live
    if has_state_ptr is not None:
        known = live & (tl.load(has_state_ptr + seq) != 0)
    batch = seq
    start = seq * 0
    length = start + T
    if cu_seqlens_ptr is not None:
        batch = seq * 0
        start = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
        length = tl.load(cu_seqlens_ptr + seq + 1).to(tl.int64) - start
    if live & (position <= length):
        offs_d = (column * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
        mask_d = offs_d < D
        window_ptr = state_ptr + slot * stride_state_p
        if window_start_ptr is not None:
            window_ptr = placed(window_ptr, window_start_ptr, seq, known, stride_state_l, L, W)
        old_columns = window_ptr + offs_d * stride_state_d
        tokens = x_ptr + batch * stride_x_b + start * stride_x_t + offs_d * stride_x_d
        out = state_ptr + kept_slot * stride_state_p + offs_d * stride_state_d
        for i in tl.static_range(L):
            # in the stream of L old columns, then the tokens
            source = position + i
            old = tl.load(
                old_columns + source * stride_state_l, mask=mask_d & known & (source < L), other=0.0
            )
            new = tl.load(
                tokens + (source - L) * stride_x_t, mask=mask_d & (source >= L), other=0.0
            )
            value = tl.where(source < L, old, new.to(old.dtype))
            tl.store(out + i * stride_state_l, value, mask=mask_d)
