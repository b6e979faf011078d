"""The backward of the causal convolutions, docs/contract.md (C5), (C11).

With z_t = bias + Σ_w weight_w x_(t − W + 1 + w) and y = act(z):

    dz = act'(z) dy
    dx_s = Σ_w weight_w dz_(s + W − 1 − w),   dweight_w = Σ_t dz_t x_(t − W + 1 + w)

A program owns UNIT_T tokens of one sequence × BLOCK_D channels, BLOCK_T tokens at a time. It
computes z again, also of the W − 1 tokens after its own, so no program waits for another. Its sums
for weight and bias go into its own row of parts. Positions before a sequence are its window. The
first unit of a sequence makes the window's gradient.

For ``conv_qkv`` the channels of a program are one head, and the gradient by y comes from the one by
ŷ = y / ‖y‖ where q and k are divided by their lengths.
"""
# ruff: noqa: RUF005, SIM102, B007 (Triton has no tuple unpacking; constexpr branches stay ifs)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import GATES, INDICES
from sluice.backends.triton.kernels.math import NORM_EPS, begin, sigmoid, softplus
from sluice.backends.triton.kernels.work_units import unit_span


class Line(NamedTuple):
    """One sequence's inputs and gradients, from its first token on, and its window."""

    x_ptr: Any
    window_ptr: Any  # None: zeros
    dy_ptr: Any  # None: zeros
    dwindow_ptr: Any  # None: zeros
    x_t: Any  # strides
    x_d: Any
    window_d: Any
    window_l: Any
    dy_t: Any
    dwindow_d: Any
    dwindow_l: Any
    length: Any


@triton.jit
def load_line(line, pos, offs_d, mask_d, L: tl.constexpr):
    """x at positions [R] of a sequence, in float32; the window before it, zeros after it."""
    inside = (pos >= 0) & (pos < line.length)
    at = line.x_ptr + pos[:, None] * line.x_t + offs_d[None, :] * line.x_d
    x = tl.load(at, mask=inside[:, None] & mask_d[None, :], other=0.0).to(tl.float32)
    if line.window_ptr is not None:
        before = (pos < 0) & (pos >= -L)
        at = line.window_ptr + offs_d[None, :] * line.window_d + (pos + L)[:, None] * line.window_l
        x += tl.load(at, mask=before[:, None] & mask_d[None, :], other=0.0).to(tl.float32)
    return x


@triton.jit
def by_sum(
    line, taps, weights, bias, pos, offs_y, mask_y,
    W: tl.constexpr, SILU: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """dz at positions [R]; zeros outside of the sequence."""
    z = bias[None, :] + tl.zeros(taps[0].shape, tl.float32)
    for w in tl.static_range(W):
        z += weights[w][None, :] * taps[w]
    gate = sigmoid(z)
    inside = (pos >= 0) & (pos < line.length)
    at = line.dy_ptr + pos[:, None] * line.dy_t + offs_y[None, :]
    dy = tl.load(at, mask=inside[:, None] & mask_y[None, :], other=0.0).to(tl.float32)
    if NORMALIZE:
        y = z * gate if SILU else z
        y = tl.where(mask_y[None, :], y, 0.0)
        rho = tl.rsqrt(tl.sum(y * y, axis=1) + NORM_EPS)[:, None]
        dy = rho * (dy - y * (rho * rho * tl.sum(y * dy, axis=1)[:, None]))
    if SILU:
        dy = dy * gate * (1.0 + z * (1.0 - gate))
    return tl.where(inside[:, None] & mask_y[None, :], dy, 0.0)


@triton.jit
def gradients(
    line, weights, bias, pos, offs_d, offs_y, mask_d,
    L: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """dx at positions [R], dz there, and the W inputs of each sum there."""
    taps = ()
    for i in tl.static_range(2 * W - 1):
        taps = taps + (load_line(line, pos + (i - W + 1), offs_d, mask_d, L),)
    dx = tl.zeros(taps[0].shape, tl.float32)
    dz_here = dx
    if line.dy_ptr is not None:
        for j in tl.static_range(W):
            dz = by_sum(
                line, taps[j : j + W], weights, bias, pos + j, offs_y, mask_d, W, SILU, NORMALIZE
            )
            if j == 0:
                dz_here = dz
            dx += weights[W - 1 - j][None, :] * dz
    if line.dwindow_ptr is not None:
        column = pos - line.length + L
        some = (column >= 0) & (column < L)
        at = line.dwindow_ptr + offs_d[None, :] * line.dwindow_d
        at += column[:, None] * line.dwindow_l
        dx += tl.load(at, mask=some[:, None] & mask_d[None, :], other=0.0).to(tl.float32)
    return dx, dz_here, taps[0:W]


@triton.jit
def conv_backward_loop(
    line, weights, bias, dx_ptr, dstate_ptr, first, is_first, offs_d, offs_y, mask_d,
    stride_dx_t, stride_dstate_d,
    L: tl.constexpr, W: tl.constexpr, UNIT_T: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_L: tl.constexpr, SILU: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Store dx of a unit, and the window's gradient; the sums for weights and bias."""
    by_weight = ()
    for w in tl.static_range(W):
        by_weight = by_weight + (tl.zeros([offs_d.shape[0]], tl.float32),)
    by_bias = tl.zeros([offs_d.shape[0]], tl.float32)
    last = tl.minimum(first + UNIT_T, line.length)
    for t in range(first, last, BLOCK_T):
        pos = t + tl.arange(0, BLOCK_T).to(tl.int64)
        dx, dz, taps = gradients(
            line, weights, bias, pos, offs_d, offs_y, mask_d, L, W, SILU, NORMALIZE
        )
        own = pos < last
        dz = tl.where(own[:, None], dz, 0.0)
        more = ()
        for w in tl.static_range(W):
            more = more + (by_weight[w] + tl.sum(dz * taps[w], axis=0),)
        by_weight = more
        by_bias += tl.sum(dz, axis=0)
        at = dx_ptr + pos[:, None] * stride_dx_t + offs_d[None, :]
        tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=own[:, None] & mask_d[None, :])
    if dstate_ptr is not None:
        if is_first:
            column = tl.arange(0, BLOCK_L).to(tl.int64)
            dx, _, _ = gradients(
                line, weights, bias, column - L, offs_d, offs_y, mask_d, L, W, SILU, NORMALIZE
            )
            at = dstate_ptr + offs_d[None, :] * stride_dstate_d + column[:, None]
            mask = (column < L)[:, None] & mask_d[None, :]
            tl.store(at, dx.to(dstate_ptr.dtype.element_ty), mask=mask)
    return by_weight, by_bias


@triton.jit(do_not_specialize=["N", "T"], do_not_specialize_on_alignment=INDICES)
def conv_backward_kernel(
    x_ptr,  # [B, T, D]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    state_ptr,  # [N, D, L]: the windows; None: zeros
    dy_ptr,  # [B, T, D]; None: zeros. For conv_qkv: the gradient by q
    dk_ptr,  # [B, T, HK, K] for conv_qkv, else None
    dv_ptr,  # [B, T, HV, V] for conv_qkv, else None
    dwindow_ptr,  # [N, D, L]; None: zeros
    dx_ptr,  # [B, T, D]
    dstate_ptr,  # [N, D, L], or None
    parts_ptr,  # [units, W + 1, D] float32: shares of dweight and dbias
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    N,
    T,
    stride_x_b,
    stride_x_t,
    stride_x_d,
    stride_w_d,
    stride_w_w,
    stride_state_p,
    stride_state_d,
    stride_state_l,
    D: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    W: tl.constexpr,
    UNIT_T: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    SILU: tl.constexpr,
    NORMALIZE_QK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D if dk_ptr is None else 2 * HK + HV
    begin()
    pid = tl.program_id(0)
    block = pid % BLOCKS
    unit = (pid // BLOCKS).to(tl.int64)
    seq, batch, start, number, end = unit_span(unit, cu_seqlens_ptr, N, T, UNIT_T)
    offs = tl.arange(0, BLOCK_D)
    if dk_ptr is None:
        offs_d = block * BLOCK_D + offs
        mask_d = offs_d < D
        offs_y = offs_d
        stride_dy_t = D
        dy_at = dy_ptr
    else:
        width = tl.where(block < 2 * HK, K, V)
        of_key = tl.minimum(block, 2 * HK)
        offs_d = of_key * K + (block - of_key) * V + offs
        mask_d = offs < width
        stride_dy_t = tl.where(block < 2 * HK, HK * K, HV * V)
        head = tl.where(block < 2 * HK, block % HK, block - 2 * HK)
        dy_at = tl.where(block < HK, dy_ptr, tl.where(block < 2 * HK, dk_ptr, dv_ptr))
        offs_y = head * width + offs
    first = number * UNIT_T
    length = end - start
    parts_ptr += unit * ((W + 1) * D) + offs_d
    if (seq == N) & (first < length):  # tokens after the last sequence
        for t in range(first, tl.minimum(first + UNIT_T, length)):
            at = dx_ptr + (start + t) * D + offs_d
            tl.store(at, tl.zeros([BLOCK_D], dx_ptr.dtype.element_ty), mask=mask_d)
    if (seq == N) | ((first >= length) & (number > 0)):
        for w in tl.static_range(W + 1):
            tl.store(parts_ptr + w * D, tl.zeros([BLOCK_D], tl.float32), mask=mask_d)
        return
    weights = ()
    for w in tl.static_range(W):
        at = weight_ptr + offs_d * stride_w_d + w * stride_w_w
        weights = weights + (tl.load(at, mask=mask_d, other=0.0).to(tl.float32),)
    bias = tl.zeros([BLOCK_D], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    row = batch * T + start  # in dense tensors
    line = Line(
        x_ptr + batch * stride_x_b + start * stride_x_t,
        None if state_ptr is None else state_ptr + seq * stride_state_p,
        None if dy_ptr is None else dy_at + row * stride_dy_t,
        None if dwindow_ptr is None else dwindow_ptr + seq * (D * L),
        stride_x_t,
        stride_x_d,
        stride_state_d,
        stride_state_l,
        stride_dy_t,
        L,
        1,
        length,
    )
    dx_ptr += row * D
    if dstate_ptr is not None:
        dstate_ptr += seq * (D * L)
    if NORMALIZE_QK:
        if block < 2 * HK:
            by_weight, by_bias = conv_backward_loop(
                line, weights, bias, dx_ptr, dstate_ptr, first, number == 0, offs_d, offs_y,
                mask_d, D, L, L, W, UNIT_T, BLOCK_T, BLOCK_L, SILU, True,
            )  # fmt: skip
        else:
            by_weight, by_bias = conv_backward_loop(
                line, weights, bias, dx_ptr, dstate_ptr, first, number == 0, offs_d, offs_y,
                mask_d, D, L, L, W, UNIT_T, BLOCK_T, BLOCK_L, SILU, False,
            )  # fmt: skip
    else:
        by_weight, by_bias = conv_backward_loop(
            line, weights, bias, dx_ptr, dstate_ptr, first, number == 0, offs_d, offs_y,
            mask_d, D, L, L, W, UNIT_T, BLOCK_T, BLOCK_L, SILU, False,
        )  # fmt: skip
    for w in tl.static_range(W):
        tl.store(parts_ptr + w * D, by_weight[w], mask=mask_d)
    tl.store(parts_ptr + W * D, by_bias, mask=mask_d)


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["dbias_ptr"])
def conv_weights_kernel(
    parts_ptr,  # [parts, W + 1, D] float32
    dweight_ptr,  # [D, W]
    dbias_ptr,  # [D] or None
    parts,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    begin()
    pid = tl.program_id(0)
    w = pid % (W + 1)
    offs_d = (pid // (W + 1)) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for first in range(0, parts, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        at = parts_ptr + (part.to(tl.int64) * (W + 1) + w)[:, None] * D + offs_d[None, :]
        total += tl.load(at, mask=(part < parts)[:, None] & (offs_d < D)[None, :], other=0.0)
    made = tl.sum(total, axis=0)
    if w < W:
        at = dweight_ptr + offs_d * W + w
        tl.store(at, made.to(dweight_ptr.dtype.element_ty), mask=offs_d < D)
    elif dbias_ptr is not None:
        tl.store(dbias_ptr + offs_d, made.to(dbias_ptr.dtype.element_ty), mask=offs_d < D)


@triton.jit(
    do_not_specialize=["N", "T", "tokens", "stride_a_b", "stride_b_b"],
    do_not_specialize_on_alignment=[*INDICES, *GATES],
)
def gates_backward_kernel(
    a_ptr,  # [B, T, HV]; None: no decay
    b_ptr,  # [B, T, HV]; None: no beta
    A_log_ptr,  # [HV]
    dt_bias_ptr,  # [HV] or None
    dg_ptr,  # [B, T, HV]
    dbeta_ptr,
    da_ptr,  # [B, T, HV]
    db_ptr,
    parts_ptr,  # [programs, 2, HV] float32: Σ g dg and Σ da; None without a
    cu_seqlens_ptr,
    beta_scale,
    N,
    T,
    tokens,  # B * T
    stride_a_b,
    stride_a_t,
    stride_a_h,
    stride_b_b,
    stride_b_t,
    stride_b_h,
    HV: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    begin()
    pid = tl.program_id(0)
    token = pid.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.arange(0, BLOCK_H)
    batch = (token // T)[:, None]
    t = (token % T)[:, None]
    mask = (token < tokens)[:, None] & (head < HV)[None, :]
    owned = mask
    if cu_seqlens_ptr is not None:
        owned = mask & (token < tl.load(cu_seqlens_ptr + N))[:, None]
    at = token[:, None] * HV + head[None, :]
    if a_ptr is not None:
        a_at = a_ptr + batch * stride_a_b + t * stride_a_t + head[None, :] * stride_a_h
        a = tl.load(a_at, mask=owned, other=0.0).to(tl.float32)
        if dt_bias_ptr is not None:
            a += tl.load(dt_bias_ptr + head, mask=head < HV, other=0.0).to(tl.float32)[None, :]
        rate = tl.exp(tl.load(A_log_ptr + head, mask=head < HV, other=0.0).to(tl.float32))
        dg = -tl.load(dg_ptr + at, mask=owned, other=0.0).to(tl.float32) * rate[None, :]
        da = dg * sigmoid(a)
        tl.store(da_ptr + at, da.to(da_ptr.dtype.element_ty), mask=mask)
        parts_at = parts_ptr + pid.to(tl.int64) * (2 * HV) + head
        tl.store(parts_at, tl.sum(dg * softplus(a), axis=0), mask=head < HV)
        tl.store(parts_at + HV, tl.sum(da, axis=0), mask=head < HV)
    if b_ptr is not None:
        b_at = b_ptr + batch * stride_b_b + t * stride_b_t + head[None, :] * stride_b_h
        gate = sigmoid(tl.load(b_at, mask=owned, other=0.0).to(tl.float32))
        db = tl.load(dbeta_ptr + at, mask=owned, other=0.0).to(tl.float32)
        db = db * beta_scale * gate * (1.0 - gate)
        tl.store(db_ptr + at, db.to(db_ptr.dtype.element_ty), mask=mask)
