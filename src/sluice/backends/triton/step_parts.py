"""Device functions of ``step``: the taps of the convolution, q and k made from them, products.

q and k are two halves of one tensor, and v the first half of another. With no fewer elements than a
program has threads, the compiler makes each once and moves it to where it is used; with fewer it
would load and compute it anew in every layout it is used in. The dimension that lies densest in
memory comes first, as the compiler assumes where it cannot see one; only with states [K, V] the
halves of q and k come before it, which keeps their layout from the state's.
"""
# ruff: noqa: RUF005 (what a kernel may not say, and constants decide)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.tiles import NORM_EPS, silu


@triton.jit
def load_taps(
    x_ptr,  # the row's first token
    window_ptr,  # the row's window [D, L]
    known,
    t,
    x_at,
    channel,
    mask,
    stride_x_t,
    stride_conv_d,
    stride_conv_l,
    ONE_TOKEN: tl.constexpr,
    L: tl.constexpr,
    W: tl.constexpr,
):
    """Inputs of some channels up to token t: the whole window and the only token, else W."""
    taps = ()
    if ONE_TOKEN:
        for l in tl.static_range(L):
            at = window_ptr + channel * stride_conv_d + l * stride_conv_l
            taps = taps + (tl.load(at, mask=mask & known, other=0.0),)
        taps = taps + (tl.load(x_ptr + x_at, mask=mask, other=0.0),)
    else:
        for w in tl.static_range(W):
            at = t + w - (W - 1)  # before the row's first token it is the window's
            column = window_ptr + channel * stride_conv_d + (L + at) * stride_conv_l
            old = tl.load(column, mask=mask & known & (at < 0), other=0.0).to(tl.float32)
            new = tl.load(x_ptr + at * stride_x_t + x_at, mask=mask & (at >= 0), other=0.0)
            taps = taps + (old + new.to(tl.float32),)
    return taps


@triton.jit
def conv_taps(taps, weights, bias_ptr, channel, mask, CONV_SILU: tl.constexpr):
    """The convolution of the last W taps, float32."""
    y = tl.zeros(channel.shape, tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    for w in tl.static_range(len(weights)):
        x = taps[len(taps) - len(weights) + w]
        y = tl.fma(x.to(tl.float32), weights[w].to(tl.float32), y)
    if CONV_SILU:
        y = silu(y)
    return y


@triton.jit
def load_weights(weight_ptr, channel, mask, stride_w_d, stride_w_w, W: tl.constexpr):
    """W weights of some channels, in the dtype they have."""
    weights = ()
    for w in tl.static_range(W):
        at = weight_ptr + channel * stride_w_d + w * stride_w_w
        weights = weights + (tl.load(at, mask=mask, other=0.0),)
    return weights


@triton.jit
def store_window(rolled_ptr, taps, channel, mask, stride_conv_d, stride_conv_l):
    """The window moved on by one token: every tap but the oldest."""
    for l in tl.static_range(1, len(taps)):
        at = rolled_ptr + channel * stride_conv_d + (l - 1) * stride_conv_l
        tl.store(at, taps[l].to(rolled_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_state(at, S, mask):
    """Round the tile [C, PIECES, BLOCK_V] to the pool's dtype, once, and store it."""
    x = tl.reshape(S, (S.shape[0], S.shape[1] * S.shape[2]))
    tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def load_gates(
    z_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, head_v, member, offs_v, mask_v, stride_a_h,
    stride_b_h, V: tl.constexpr,
):  # fmt: skip
    """A value head's z, a, b, A_log and dt_bias, as they lie in memory."""
    z = tl.load(z_ptr + member * V + offs_v, mask=mask_v, other=0.0)
    a = tl.load(a_ptr + member * stride_a_h)
    b = tl.load(b_ptr + member * stride_b_h)
    return z, a, b, tl.load(A_log_ptr + head_v), tl.load(dt_bias_ptr + head_v)


@triton.jit
def where_all(condition, taps):
    """The taps where ``condition``, else zeros."""
    y = ()
    for w in tl.static_range(len(taps)):
        y = y + (tl.where(condition, taps[w], 0.0),)
    return y


@triton.jit
def half_of(x, i: tl.constexpr, half, AXIS: tl.constexpr):
    """Half i of a tensor whose dimension AXIS is 2. As a sum, exact: what is added is zero."""
    return tl.sum(tl.where(half == i, x, 0.0), axis=AXIS)


@triton.jit
def make_keys(
    taps,
    weights,
    bias_ptr,
    channel,
    mask,
    half,
    AXIS: tl.constexpr,
    CONV_SILU: tl.constexpr,
    NORMALIZE_QK: tl.constexpr,
):
    """q and k [C, PIECES] from their taps, and the sum of both square norms.

    The halves lie along AXIS: [C, PIECES, 2] or [2, C, PIECES].
    """
    qk = conv_taps(taps, weights, bias_ptr, channel, mask, CONV_SILU)
    if AXIS == 0:
        norms = tl.sum(tl.sum(qk * qk, axis=2), axis=1)
        inverse = tl.rsqrt(norms + NORM_EPS)[:, None, None]
    else:
        norms = tl.sum(tl.sum(qk * qk, axis=0), axis=0)
        inverse = tl.rsqrt(norms + NORM_EPS)[None, None, :]
    if NORMALIZE_QK:
        qk = qk * inverse
    return half_of(qk, 0, half, AXIS), half_of(qk, 1, half, AXIS), tl.sum(norms, axis=0)


@triton.jit
def tile_dot3(S, k):
    """S k [BLOCK_V] for a tile [C, PIECES, BLOCK_V] and a vector [C, PIECES]."""
    return tl.sum(tl.sum(S * k[:, :, None], axis=1), axis=0)
