"""Convolution, split into heads, l2 norm and gates in one launch, docs/kernels/conv.md.

    y      = act(conv(x))            channels [Q | K | V]                    (V1)
    q, k   = y / |y| per head        1 / |y| = rsqrt(Σ y² + 1e-6)            (V2)
    g      = -exp(A_log) softplus(a + dt_bias),   beta = sigmoid(b)          (V3)

One program owns UNIT_T tokens of one sequence × one head of q, k or v, or the gates of all heads.
So no program crosses from Q to K or from K to V, whatever the head counts are. Most units are whole
and inside their sequence: they have a path of their own, with constant strides (``inner_unit``).
"""
# ruff: noqa: RUF005, SIM102 (Triton has no tuple unpacking; constexpr branches stay ifs)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from sluice.backends.triton.kernels.alignment import GATES, INDICES
from sluice.backends.triton.kernels.conv import FREE, locate
from sluice.backends.triton.kernels.math import NORM_EPS, begin, divide, exp, sigmoid, softplus
from sluice.backends.triton.kernels.window import (
    ConvStrides,
    keep_stream,
    load_weights,
    placed,
    roll_window,
)


class Gate(NamedTuple):
    """A raw gate [T, HV] and the gate made from it."""

    raw_ptr: Any
    out_ptr: Any  # None: not asked for
    raw_t: Any  # strides
    raw_h: Any
    out_t: Any
    out_h: Any


class Convolution(NamedTuple):
    """The constants of a unit. In a kernel: ``conv: tl.constexpr = Convolution(...)``."""

    W: Any
    UNIT_T: Any
    BLOCK_T: Any
    BLOCK_D: Any
    SILU: Any
    NORMALIZE_QK: Any


class Steps(NamedTuple):
    """Strides of tokens as constants: ``inner_unit``."""

    X: Any
    QK: Any
    V: Any


@triton.jit
def make_gates(
    decay,  # a Gate: a and g
    write,  # a Gate: b and beta
    A_log_ptr,
    dt_bias_ptr,
    beta_scale,
    offs_t,
    length,
    live,
    HV,
    BLOCK_H: tl.constexpr,
):
    """(V3): g and beta [BLOCK_T, HV] in float32; zeros where the row is padding."""
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < HV
    mask = (offs_t < length)[:, None] & mask_h[None, :]
    if decay.out_ptr is not None:
        at = decay.raw_ptr + offs_t[:, None] * decay.raw_t + offs_h[None, :] * decay.raw_h
        a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if dt_bias_ptr is not None:
            a += tl.load(dt_bias_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)[None, :]
        A_log = tl.load(A_log_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)
        g = tl.where(live, -exp(A_log)[None, :] * softplus(a), 0.0)
        at = decay.out_ptr + offs_t[:, None] * decay.out_t + offs_h[None, :] * decay.out_h
        tl.store(at, g.to(decay.out_ptr.dtype.element_ty), mask=mask)
    if write.out_ptr is not None:
        at = write.raw_ptr + offs_t[:, None] * write.raw_t + offs_h[None, :] * write.raw_h
        b = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        beta = tl.where(live, sigmoid(b) * beta_scale, 0.0)
        at = write.out_ptr + offs_t[:, None] * write.out_t + offs_h[None, :] * write.out_h
        tl.store(at, beta.to(write.out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_rows(place, left, mask, stride_x_t, BLOCK_T: tl.constexpr):
    """Inputs of BLOCK_T tokens, of which ``left`` exist, each [BLOCK_D] in their own dtype."""
    rows = ()
    for i in tl.static_range(BLOCK_T):
        rows = rows + (tl.load(place + i * stride_x_t, mask=mask & (i < left), other=0.0),)
    return rows


@triton.jit
def weighted(taps, weights, bias, W: tl.constexpr):
    """bias + Σ_w weight_w tap_w, one fma after the other; the usual four are one operation."""
    if is_cuda() and W == 4:
        y = tl.inline_asm_elementwise(
            """fma.rn.f32 $0, $1, $5, $9; fma.rn.f32 $0, $2, $6, $0;
            fma.rn.f32 $0, $3, $7, $0; fma.rn.f32 $0, $4, $8, $0;""",
            "=&f,f,f,f,f,f,f,f,f,f",
            [taps[0], taps[1], taps[2], taps[3]]
            + [weights[0], weights[1], weights[2], weights[3], bias],
            tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        y = bias
        for w in tl.static_range(W):
            y = tl.fma(taps[w], weights[w], y)
    return y


@triton.jit
def silu(x):
    """``math.silu`` with the same instructions, but as one operation of Triton's instead of five.

    The time of Triton's passes grows faster than the number of operations
    (docs/kernels/conv_log.md).
    """
    if is_cuda():
        y = tl.inline_asm_elementwise(
            """{ .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t; }""",
            "=f,f", [x], tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        y = x * sigmoid(x)
    return y


@triton.jit
def normalized(y):
    """A head over its length."""
    return y * tl.rsqrt(tl.sum(y * y, axis=0) + NORM_EPS)


@triton.jit
def normalized_rows(ys):
    """Each head over its length."""
    units = ()
    for i in tl.static_range(len(ys)):
        units = units + (normalized(ys[i]),)
    return units


@triton.jit
def convolve_row(row, taps, weights, bias, W: tl.constexpr, SILU: tl.constexpr):
    """One token of one head [BLOCK_D] in float32, and the taps of the token after it."""
    x = row.to(tl.float32)
    y = weighted(taps + (x,), weights, bias, W)
    if SILU:
        y = silu(y)
    moved = ()
    for w in tl.static_range(1, W - 1):
        moved = moved + (taps[w],)
    return y, moved + (x,)


@triton.jit
def convolve_rows(
    place,  # [BLOCK_D] addresses of the first token's inputs
    out,  # [BLOCK_D] addresses of its outputs
    taps,  # the W - 1 inputs before it, float32
    weights,
    bias,
    tokens,
    mask,
    is_key,  # whether the head is normalized, with NORMALIZE_QK
    stride_x_t,
    stride_out_t,
    conv: tl.constexpr,
):
    """``tokens`` tokens of one head; the last W - 1 inputs move along in registers.

    Each input is loaded and converted once, and the loads of the next tokens are under way
    meanwhile. Heads of q, k and v share this code, so it is compiled once.
    """
    BLOCK_T: tl.constexpr = conv.BLOCK_T
    ahead = load_rows(place, tokens, mask, stride_x_t, BLOCK_T)
    for t in range(0, tokens, BLOCK_T):
        rows = ahead
        place += BLOCK_T * stride_x_t
        ahead = load_rows(place, tokens - t - BLOCK_T, mask, stride_x_t, BLOCK_T)
        ys = ()
        for i in tl.static_range(BLOCK_T):
            y, taps = convolve_row(rows[i], taps, weights, bias, conv.W, conv.SILU)
            ys = ys + (y,)
        if conv.NORMALIZE_QK:
            if is_key:
                ys = normalized_rows(ys)
        for i in tl.static_range(BLOCK_T):
            y = ys[i].to(out.dtype.element_ty)
            tl.store(out + i * stride_out_t, y, mask=mask & (t + i < tokens))
        out += BLOCK_T * stride_out_t


@triton.jit
def convolve_unit(
    place,
    out,
    weights,
    bias,
    STEP_X: tl.constexpr,
    STEP_OUT: tl.constexpr,
    conv: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """``convolve_rows`` for UNIT_T tokens that all exist, as do the W - 1 before them.

    It has no masks and no loop, and each address is the first one plus a constant. The bits are the
    same.
    """
    W: tl.constexpr = conv.W
    BLOCK_T: tl.constexpr = conv.BLOCK_T
    taps = ()
    for w in tl.static_range(W - 1):
        taps = taps + (tl.load(place + (w - (W - 1)) * STEP_X).to(tl.float32),)
    ahead = ()
    for i in tl.static_range(BLOCK_T):
        ahead = ahead + (tl.load(place + i * STEP_X),)
    for t in tl.static_range(0, conv.UNIT_T, BLOCK_T):
        rows = ahead
        if t + BLOCK_T < conv.UNIT_T:
            ahead = ()
            for i in tl.static_range(BLOCK_T):
                ahead = ahead + (tl.load(place + (t + BLOCK_T + i) * STEP_X),)
        for i in tl.static_range(BLOCK_T):
            y, taps = convolve_row(rows[i], taps, weights, bias, W, conv.SILU)
            if NORMALIZE:
                y = normalized(y)
            tl.store(out + (t + i) * STEP_OUT, y.to(out.dtype.element_ty))


@triton.jit
def inner_unit(
    x_ptr,  # of the batch row, as the outputs
    weight_ptr,
    bias_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    token,
    part,
    HK,
    steps: tl.constexpr,
    conv: tl.constexpr,
):
    """A unit from ``token`` on, inside its sequence, of one head; K = V = BLOCK_D, dense heads."""
    BLOCK_D: tl.constexpr = conv.BLOCK_D
    channel = part * BLOCK_D
    offs = tl.arange(0, BLOCK_D)
    offs_d = channel + offs
    bias = tl.zeros([BLOCK_D], tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + offs_d).to(tl.float32)
    mask_d = tl.full((BLOCK_D,), True, tl.int1)
    weights = load_weights(weight_ptr, offs_d, mask_d, conv.W, 1, conv.W, True)
    place = x_ptr + token * steps.X + offs_d
    if part < 2 * HK:
        out = q_ptr + token * steps.QK + channel
        if part >= HK:
            out = k_ptr + token * steps.QK + (channel - HK * BLOCK_D)
        convolve_unit(place, out + offs, weights, bias, steps.X, steps.QK, conv, conv.NORMALIZE_QK)
    else:
        out = v_ptr + token * steps.V + (channel - 2 * HK * BLOCK_D)
        convolve_unit(place, out + offs, weights, bias, steps.X, steps.V, conv, False)


@triton.jit
def load_history(
    x_ptr,  # [BLOCK_D] addresses of token ``first``
    window_ptr,  # [D, L], or None
    known,
    first,
    length,
    offs_d,
    mask,
    stride_x_t,
    stride_window_d,
    stride_window_l,
    L: tl.constexpr,
    W: tl.constexpr,
):
    """The W - 1 inputs before token ``first``: of the sequence, of its window, or zeros."""
    taps = ()
    for w in tl.static_range(W - 1):
        at = first - (W - 1) + w
        place = x_ptr + (at - first) * stride_x_t
        x = tl.load(place, mask=mask & (at >= 0) & (at < length), other=0.0).to(tl.float32)
        if window_ptr is not None:
            place = window_ptr + offs_d * stride_window_d + (L + at) * stride_window_l
            x += tl.load(place, mask=mask & known & (at < 0), other=0.0).to(tl.float32)
        taps = taps + (x,)
    return taps


_FREE = FREE + [f"stride_{name}_{dim}" for name in ("a", "b", "g", "beta") for dim in "bth"]
_FREE += ["HK", "HV", "inverse_parts"]
_UNALIGNED = [*INDICES, *GATES, "a_ptr", "b_ptr"]


@triton.jit(do_not_specialize=_FREE, do_not_specialize_on_alignment=_UNALIGNED)
def conv_qkv_kernel(
    x_ptr,  # [B, T, D]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    a_ptr,  # [B, T, HV] or None
    b_ptr,  # [B, T, HV] or None
    A_log_ptr,  # [HV]
    dt_bias_ptr,  # [HV] or None
    state_ptr,  # [P, D, L], read and written, or None
    q_ptr,  # [B, T, HK, K]
    k_ptr,  # [B, T, HK, K]
    v_ptr,  # [B, T, HV, V]
    g_ptr,  # [B, T, HV] or None
    beta_ptr,  # [B, T, HV] or None
    slots_ptr,  # [N]; None: row i is sequence i
    write_slots_ptr,  # [N]; None: slots
    has_state_ptr,  # [N]; None: all have
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    window_start_ptr,  # [N]: left-aligned windows, read from this column on; None: right-aligned
    beta_scale,
    N,
    T,
    pad_slot,
    stride_x_b,
    stride_x_t,
    stride_x_d,
    stride_w_d,
    stride_w_w,
    stride_a_b,
    stride_a_t,
    stride_a_h,
    stride_b_b,
    stride_b_t,
    stride_b_h,
    stride_state_p,
    stride_state_d,
    stride_state_l,
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
    HK,
    HV,
    inverse_parts,  # for divide: heads and gates
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    W: tl.constexpr,
    UNIT_T: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    NORMALIZE_QK: tl.constexpr,
    SILU: tl.constexpr,
    WRITE_STATE: tl.constexpr,
    STEP_X: tl.constexpr,  # stride_x_t as a constant for ``inner_unit``; 0: it cannot be used
    STEP_QK: tl.constexpr,  # stride_q_t = stride_k_t
    STEP_V: tl.constexpr,  # stride_v_t
):
    GATES: tl.constexpr = 0 if g_ptr is None and beta_ptr is None else 1
    conv: tl.constexpr = Convolution(W, UNIT_T, BLOCK_T, BLOCK_D, SILU, NORMALIZE_QK)
    steps: tl.constexpr = Steps(STEP_X, STEP_QK, STEP_V)
    strides = ConvStrides(stride_x_t, stride_x_d, stride_state_d, stride_state_l)
    begin()
    row, part = divide(tl.program_id(0), 2 * HK + HV + GATES, inverse_parts)
    part = part.to(tl.int64)
    unit = locate(
        row, cu_seqlens_ptr, slots_ptr, write_slots_ptr, has_state_ptr, N, T, pad_slot,
        UNIT_T,
    )  # fmt: skip
    batch = unit.batch
    start = unit.start
    first = unit.number * UNIT_T
    last = tl.minimum(first + UNIT_T, unit.length)

    if part == 2 * HK + HV:
        if g_ptr is not None:
            a_ptr += batch * stride_a_b + start * stride_a_t
            g_ptr += batch * stride_g_b + start * stride_g_t
        if beta_ptr is not None:
            b_ptr += batch * stride_b_b + start * stride_b_t
            beta_ptr += batch * stride_beta_b + start * stride_beta_t
        for begins in range(first, last, BLOCK_T):
            make_gates(
                Gate(a_ptr, g_ptr, stride_a_t, stride_a_h, stride_g_t, stride_g_h),
                Gate(b_ptr, beta_ptr, stride_b_t, stride_b_h, stride_beta_t, stride_beta_h),
                A_log_ptr, dt_bias_ptr, beta_scale, (begins + tl.arange(0, BLOCK_T)).to(tl.int64),
                unit.length, unit.live, HV, BLOCK_H,
            )  # fmt: skip
    elif (STEP_X > 0) & unit.live & (first >= W - 1) & (last - first == UNIT_T):
        if STEP_X > 0:
            inner_unit(
                x_ptr + batch * stride_x_b, weight_ptr, bias_ptr, q_ptr + batch * stride_q_b,
                k_ptr + batch * stride_k_b, v_ptr + batch * stride_v_b, start + first, part,
                HK, steps, conv,
            )  # fmt: skip
    else:
        # where this head's channels begin, and where its output goes
        if part < HK:
            channel = part * K
            out_ptr = q_ptr + batch * stride_q_b + start * stride_q_t + part * stride_q_h
            stride_out_t = stride_q_t + start * 0
        elif part < 2 * HK:
            channel = part * K
            out_ptr = k_ptr + batch * stride_k_b + start * stride_k_t + (part - HK) * stride_k_h
            stride_out_t = stride_k_t + start * 0
        else:
            head = part - 2 * HK
            channel = 2 * HK * K + head * V
            out_ptr = v_ptr + batch * stride_v_b + start * stride_v_t + head * stride_v_h
            stride_out_t = stride_v_t + start * 0
        is_key = part < 2 * HK
        offs = tl.arange(0, BLOCK_D)
        if K == V and K == BLOCK_D:
            mask_d = tl.full((BLOCK_D,), True, tl.int1)
        else:
            mask_d = offs < tl.where(is_key, K, V)
        offs_d = (channel + offs).to(tl.int64)
        x_ptr += batch * stride_x_b + start * stride_x_t
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
        # int64: T·D passes 2**31 in long inputs
        place = x_ptr + first.to(tl.int64) * stride_x_t + offs_d * stride_x_d
        out = out_ptr + first.to(tl.int64) * stride_out_t + offs
        tokens = last - first
        if not unit.live:
            zeros = tl.zeros([BLOCK_D], q_ptr.dtype.element_ty)
            for t in range(tokens):
                tl.store(out + t * stride_out_t, zeros, mask=mask_d)
            tokens = 0
        weights = load_weights(weight_ptr, offs_d, mask_d, stride_w_d, stride_w_w, W, True)
        bias = tl.zeros([BLOCK_D], tl.float32)
        if bias_ptr is not None:
            bias += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        taps = load_history(
            place, window_ptr, unit.known, first, unit.length, offs_d, mask_d, stride_x_t,
            stride_state_d, stride_state_l, L, W,
        )  # fmt: skip
        convolve_rows(
            place, out, taps, weights, bias, tokens, mask_d, is_key, stride_x_t, stride_out_t, conv
        )
        if WRITE_STATE:
            if unit.live & (unit.number == 0):
                if window_start_ptr is not None:
                    keep_stream(
                        x_ptr, window_ptr, state_ptr + unit.write_slot * stride_state_p,
                        unit.known, unit.kept, unit.length, offs_d, mask_d, strides, L, W,
                    )  # fmt: skip
                else:
                    roll_window(
                        x_ptr, window_ptr, state_ptr + unit.write_slot * stride_state_p,
                        unit.known, unit.kept, unit.length, offs_d, mask_d, strides, L, BLOCK_L,
                    )  # fmt: skip
