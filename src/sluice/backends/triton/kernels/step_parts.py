"""Device functions of ``step``: the taps of the convolution, q and k made from them, products.

q and k are the two halves of one tensor, and v is the first half of another. A tensor with at least
as many elements as the program has threads is computed once and then moved to the layouts it is
used in; a smaller one the compiler would load and compute again in every layout. The dimension that
is densest in memory comes first, because the compiler assumes so where it cannot see one. With
states [K, V] the halves of q and k come before it instead, which keeps their layout apart from the
state's.
"""
# ruff: noqa: RUF005 (Triton has no tuple unpacking)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sluice.backends.triton.kernels.math import NORM_EPS, silu


class Channels(NamedTuple):
    """Some channels of the convolution."""

    index: Any  # in the weights and the window
    x_offs: Any  # where a token's inputs lie in the projection
    mask: Any


@triton.jit
def load_taps(
    x_ptr,  # the row's first token
    window_ptr,  # the row's window [D, L]
    known,
    t,
    channels,
    stride_x_t,
    stride_conv_d,
    stride_conv_l,
    ONE_TOKEN: tl.constexpr,
    L: tl.constexpr,
    W: tl.constexpr,
):
    """Inputs up to token t. ONE_TOKEN: the whole window and the token; else the last W inputs."""
    mask = channels.mask
    taps = ()
    if ONE_TOKEN:
        for l in tl.static_range(L):
            at = window_ptr + channels.index * stride_conv_d + l * stride_conv_l
            taps = taps + (tl.load(at, mask=mask & known, other=0.0),)
        taps = taps + (tl.load(x_ptr + channels.x_offs, mask=mask, other=0.0),)
    else:
        for w in tl.static_range(W):
            at = t + w - (W - 1)  # a negative position is in the window
            column = window_ptr + channels.index * stride_conv_d + (L + at) * stride_conv_l
            old = tl.load(column, mask=mask & known & (at < 0), other=0.0).to(tl.float32)
            new = tl.load(
                x_ptr + at * stride_x_t + channels.x_offs, mask=mask & (at >= 0), other=0.0
            )
            taps = taps + (old + new.to(tl.float32),)
    return taps


@triton.jit
def conv_taps(taps, weights, bias_ptr, channels, CONV_SILU: tl.constexpr):
    """The convolution of the last W taps, float32."""
    y = tl.zeros(channels.index.shape, tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + channels.index, mask=channels.mask, other=0.0).to(tl.float32)
    for w in tl.static_range(len(weights)):
        x = taps[len(taps) - len(weights) + w]
        y = tl.fma(x.to(tl.float32), weights[w].to(tl.float32), y)
    if CONV_SILU:
        y = silu(y)
    return y


@triton.jit
def store_window(rolled_ptr, taps, channels, live, stride_conv_d, stride_conv_l):
    """Store the window rolled by one token, every tap but the oldest, where ``live``."""
    mask = channels.mask & live
    for l in tl.static_range(1, len(taps)):
        at = rolled_ptr + channels.index * stride_conv_d + (l - 1) * stride_conv_l
        tl.store(at, taps[l].to(rolled_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_state(at, S, mask):
    """Round the tile [PIECE_K, PIECES, BLOCK_V] to the pool's dtype, once, and store it."""
    x = tl.reshape(S, (S.shape[0], S.shape[1] * S.shape[2]))
    tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def load_gates(
    z_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, head_v, member, offs_v, mask_v, stride_a_h,
    stride_b_h, V: tl.constexpr,
):  # fmt: skip
    """A value head's z, a, b, A_log and dt_bias, in their own dtypes."""
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
    """Half i of a tensor whose dimension AXIS has size 2. The sum is exact: it adds zeros."""
    return tl.sum(tl.where(half == i, x, 0.0), axis=AXIS)


@triton.jit
def make_keys(
    taps,
    weights,
    bias_ptr,
    channels,
    half,
    AXIS: tl.constexpr,
    CONV_SILU: tl.constexpr,
    NORMALIZE_QK: tl.constexpr,
):
    """q and k [PIECE_K, PIECES] from their taps, and the sum of both square norms.

    The halves lie along AXIS: [PIECE_K, PIECES, 2] or [2, PIECE_K, PIECES].
    """
    qk = conv_taps(taps, weights, bias_ptr, channels, CONV_SILU)
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
    """S k [BLOCK_V] for a tile [PIECE_K, PIECES, BLOCK_V] and a vector [PIECE_K, PIECES]."""
    return tl.sum(tl.sum(S * k[:, :, None], axis=1), axis=0)
