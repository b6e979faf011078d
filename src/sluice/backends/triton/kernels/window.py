"""Device functions of the convolution: taps, weights, the rolling window.

A conv window [D, L] holds a sequence's last L raw inputs, oldest first. Window and tokens form one
stream: position p >= 0 is token p of the sequence, and p < 0 is column L + p of the window.
"""
# ruff: noqa: RUF005, SIM108 (Triton has no tuple unpacking; constexpr branches stay if/else)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sluice.backends.triton.kernels.math import silu

FIRST = tl.constexpr(4)  # rows of the tile with a sequence's first W - 1 tokens


class ConvStrides(NamedTuple):
    """Strides of the inputs [T, D] and of a window [D, L]."""

    x_t: Any
    x_d: Any
    window_d: Any
    window_l: Any


class Unit(NamedTuple):
    """A work unit: its sequence, and the pool rows that hold the sequence's window."""

    seq: Any
    number: Any  # of the unit in its sequence
    batch: Any  # batch row
    start: Any  # the sequence's first token
    length: Any  # the sequence's tokens
    live: Any  # whether the sequence is not padding
    slot: Any
    known: Any  # whether the window at ``slot`` is read
    write_slot: Any
    kept: Any  # whether the window at ``write_slot`` is written


@triton.jit
def load_weights(
    weight_ptr, offs_d, mask_d, stride_w_d, stride_w_w, W: tl.constexpr, FLOAT32: tl.constexpr
):
    """The W weights of some channels, in float32 or in their own dtype."""
    weights = ()
    for w in tl.static_range(W):
        at = weight_ptr + offs_d * stride_w_d + w * stride_w_w
        weight = tl.load(at, mask=mask_d, other=0.0)
        if FLOAT32:
            weights = weights + (weight.to(tl.float32),)
        else:
            weights = weights + (weight,)
    return weights


@triton.jit
def weigh(taps, weights, bias_ptr, offs_d, mask_d, SILU: tl.constexpr):
    """act(bias + Σ_w weight_w tap_w), in float32."""
    y = tl.zeros(taps[0].shape, tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    for w in tl.static_range(len(taps)):
        y = tl.fma(taps[w], tl.broadcast_to(weights[w][None, :], taps[w].shape), y)
    if SILU:
        y = silu(y)
    return y


@triton.jit
def convolve(
    place,  # [BLOCK_T, BLOCK_D] addresses of the tokens' oldest taps
    weights,
    bias_ptr,  # [D] or None
    offs_t,  # [BLOCK_T] the tokens, counted in their sequence
    length,
    offs_d,  # [BLOCK_D]
    mask_d,
    stride_x_t,
    W: tl.constexpr,
    SILU: tl.constexpr,
):
    """(V1) for some tokens, with zeros before the sequence, float32.

    The taps overlap and come from the L1 cache: each input is read from device memory once.
    """
    taps = ()
    for w in tl.static_range(W):
        inside = ((offs_t >= W - 1 - w) & (offs_t < length))[:, None] & mask_d[None, :]
        x = tl.load(place + w * stride_x_t, mask=inside, other=0.0)
        taps = taps + (x.to(tl.float32),)
    return weigh(taps, weights, bias_ptr, offs_d, mask_d, SILU)


@triton.jit
def convolve_first(
    x_ptr,
    weights,
    bias_ptr,
    window_ptr,  # [D, L]
    offs_t,
    length,
    offs_d,
    mask_d,
    strides,
    L: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
):
    """(V1) for a sequence's first tokens, with its window before them, float32."""
    mask_t = offs_t < length
    taps = ()
    for w in tl.static_range(W):
        at = offs_t - (W - 1) + w
        place = x_ptr + at[:, None] * strides.x_t + offs_d[None, :] * strides.x_d
        inside = ((at >= 0) & mask_t)[:, None] & mask_d[None, :]
        x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        column = (L + at)[:, None] * strides.window_l
        x += tl.load(
            window_ptr + offs_d[None, :] * strides.window_d + column,
            mask=((at < 0) & mask_t)[:, None] & mask_d[None, :],
            other=0.0,
        ).to(tl.float32)
        taps = taps + (x,)
    return weigh(taps, weights, bias_ptr, offs_d, mask_d, SILU)


@triton.jit
def convolve_one(
    x_ptr,
    weights,
    bias_ptr,
    window_ptr,  # [D, L], read where ``known``
    rolled_ptr,  # [D, L], written where ``kept``; may be the same. None: the window stays
    known,
    kept,
    offs_d,
    mask_d,
    strides,
    L: tl.constexpr,
    SILU: tl.constexpr,
):
    """(V1) for a sequence's only token, [1, BLOCK_D] in float32; its window is rolled.

    ``convolve_first`` and ``roll_window`` in one, for a window of W - 1 columns or more. Each
    column is read once.
    """
    W: tl.constexpr = len(weights)
    x = tl.load(x_ptr + offs_d * strides.x_d, mask=mask_d, other=0.0)
    columns = ()
    for i in tl.static_range(L):
        at = window_ptr + offs_d * strides.window_d + i * strides.window_l
        columns = columns + (tl.load(at, mask=mask_d & known, other=0.0),)
    taps = ()
    for w in tl.static_range(W - 1):
        taps = taps + (columns[L - W + 1 + w].to(tl.float32)[None, :],)
    y = weigh(taps + (x.to(tl.float32)[None, :],), weights, bias_ptr, offs_d, mask_d, SILU)
    if rolled_ptr is not None:
        columns = columns + (x.to(columns[0].dtype),)
        tl.debug_barrier()  # as in roll_window
        for i in tl.static_range(L):
            at = rolled_ptr + offs_d * strides.window_d + i * strides.window_l
            tl.store(at, columns[i + 1], mask=mask_d & kept)
    return y


@triton.jit
def roll_window(
    x_ptr,  # the sequence's first token
    window_ptr,  # [D, L], read where ``known``
    rolled_ptr,  # [D, L], written where ``kept``; may be the same
    known,
    kept,
    count,
    offs_d,
    mask_d,
    strides,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Write the window after ``count`` tokens, which may be more or fewer than L."""
    offs_l = tl.arange(0, BLOCK_L)
    source = (offs_l + count).to(tl.int64)  # in the stream of L old columns, then the tokens
    inside = mask_d[:, None] & (offs_l < L)[None, :]
    old = tl.load(
        window_ptr + offs_d[:, None] * strides.window_d + source[None, :] * strides.window_l,
        mask=inside & (source < L)[None, :] & known,
        other=0.0,
    )
    new = tl.load(
        x_ptr + (source - L)[None, :] * strides.x_t + offs_d[:, None] * strides.x_d,
        mask=inside & (source >= L)[None, :] & kept,
        other=0.0,
    )
    window = tl.where((source < L)[None, :], old, new.to(old.dtype))
    tl.debug_barrier()  # columns may move between threads: read all before writing any
    at = rolled_ptr + offs_d[:, None] * strides.window_d + offs_l[None, :] * strides.window_l
    tl.store(at, window, mask=inside & kept)


@triton.jit
def placed(window_ptr, window_start_ptr, seq, known, stride_l, L: tl.constexpr, W: tl.constexpr):
    """Where a window [D, L] would begin if its last W - 1 columns were those from its start on."""
    start = tl.load(window_start_ptr + seq, mask=known, other=0).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), L - W + 1)
    return window_ptr + (start - (L - W + 1)) * stride_l


@triton.jit
def keep_stream(
    x_ptr,  # the sequence's first token
    window_ptr,  # [D, L], from ``placed``; read where ``known``
    state_ptr,  # [D, L] left-aligned, written where ``kept``; may be the same memory
    known,
    kept,
    length,
    offs_d,
    mask_d,
    strides,
    L: tl.constexpr,
    W: tl.constexpr,
):
    """Write the window without its oldest column, then all tokens, from column 0 on (C12).

    One column at a time: a tile of all columns would not fit into the registers beside the rest.
    """
    old = ()
    for w in tl.static_range(W - 1):
        at = window_ptr + offs_d * strides.window_d + (L - W + 1 + w) * strides.window_l
        old = old + (tl.load(at, mask=mask_d & known, other=0.0),)
    tl.debug_barrier()  # as in roll_window
    first = tl.minimum(length, 1)  # a sequence without tokens keeps its whole window
    mask = mask_d & kept
    out = state_ptr + offs_d * strides.window_d
    for w in tl.static_range(W - 1):
        tl.store(out + (w - first) * strides.window_l, old[w], mask=mask & (w >= first))
    for t in range(tl.minimum(length, L - W + 2)):
        x = tl.load(x_ptr + t * strides.x_t + offs_d * strides.x_d, mask=mask, other=0.0)
        tl.store(out + (W - 2 + t) * strides.window_l, x.to(out.dtype.element_ty), mask=mask)
