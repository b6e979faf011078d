"""Device functions of the convolution: whose tokens a block holds, the taps, the rolling window.

A conv window [D, L] holds a sequence's last L raw inputs, oldest first. In front of the sequence's
own tokens it makes one stream: position p < 0 is column L + p of the window.
"""
# ruff: noqa: RUF005 (what a kernel may not say, and constants decide)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.tiles import silu

FIRST = tl.constexpr(4)  # rows of the tile with a sequence's first W - 1 tokens


@triton.jit
def find_sequence(cu_seqlens_ptr, block, N, T, BLOCK: tl.constexpr):
    """The packed sequence that a block of tokens belongs to: its index, which of its blocks this
    is, its first token and its length.

    Sequence i begins at block cu_seqlens[i] // BLOCK + i, which leaves it room enough and, even if
    it is empty, one block; so no block holds two sequences, and T // BLOCK + N + 1 blocks cover T
    tokens. N stands for the tail of tokens that no sequence owns. The search has 32 probes a step:
    one load finds the place among 30 sequences, two among 900. The last step, where probes stand
    side by side, sees both bounds of the sequence.
    """
    seq = 0
    start = 0
    inner = block
    length = T
    size = N + 1
    probes = tl.arange(0, 32)
    while size > 0:
        step = size // 32 + 1
        end = seq + size
        at = seq + probes * step
        bounds = tl.load(cu_seqlens_ptr + at, mask=at <= N, other=0).to(tl.int32)
        found = tl.sum(((at < end) & (bounds // BLOCK + at <= block)).to(tl.int32), axis=0)
        seq += (found - 1) * step
        start = tl.sum(tl.where(at == seq, bounds, 0), axis=0)
        after = tl.sum(tl.where(at == seq + 1, bounds, 0), axis=0)
        inner = block - (start // BLOCK + seq)
        length = tl.where(seq < N, after, T) - start
        size = tl.where(step > 1, tl.minimum(step, end - seq), 0)
    return seq, inner, start, length


@triton.jit
def load_weights(weight_ptr, offs_d, mask_d, stride_w_d, stride_w_w, W: tl.constexpr):
    """The taps' weights, W vectors [BLOCK_D] in float32."""
    weights = ()
    for w in tl.static_range(W):
        at = weight_ptr + offs_d * stride_w_d + w * stride_w_w
        weights = weights + (tl.load(at, mask=mask_d, other=0.0).to(tl.float32),)
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
    place,  # [BLOCK_T, BLOCK_D] where the oldest taps of some tokens lie
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
    """The convolution of some tokens, with zeros before the sequence, float32.

    The taps overlap and come from the L1 cache: each input leaves device memory once.
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
    stride_x_t,
    stride_x_d,
    stride_window_d,
    stride_window_l,
    L: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
):
    """The convolution of a sequence's first tokens, with its window before them, float32."""
    mask_t = offs_t < length
    taps = ()
    for w in tl.static_range(W):
        at = offs_t - (W - 1) + w
        place = x_ptr + at[:, None] * stride_x_t + offs_d[None, :] * stride_x_d
        inside = ((at >= 0) & mask_t)[:, None] & mask_d[None, :]
        x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        column = (L + at)[:, None] * stride_window_l
        x += tl.load(
            window_ptr + offs_d[None, :] * stride_window_d + column,
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
    stride_x_d,
    stride_window_d,
    stride_window_l,
    L: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
):
    """The convolution of a sequence's only token, [1, BLOCK_D] in float32, and its window rolled.

    ``convolve_first`` and ``roll_window`` in one, for a window of W - 1 columns or more, each of
    which is read once.
    """
    x = tl.load(x_ptr + offs_d * stride_x_d, mask=mask_d, other=0.0)
    columns = ()
    for i in tl.static_range(L):
        at = window_ptr + offs_d * stride_window_d + i * stride_window_l
        columns = columns + (tl.load(at, mask=mask_d & known, other=0.0),)
    taps = ()
    for w in tl.static_range(W - 1):
        taps = taps + (columns[L - W + 1 + w].to(tl.float32)[None, :],)
    y = weigh(taps + (x.to(tl.float32)[None, :],), weights, bias_ptr, offs_d, mask_d, SILU)
    if rolled_ptr is not None:
        columns = columns + (x.to(columns[0].dtype),)
        tl.debug_barrier()  # as in roll_window
        for i in tl.static_range(L):
            at = rolled_ptr + offs_d * stride_window_d + i * stride_window_l
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
    stride_x_t,
    stride_x_d,
    stride_window_d,
    stride_window_l,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """The window after ``count`` tokens, which may be more or fewer than L."""
    offs_l = tl.arange(0, BLOCK_L)
    source = (offs_l + count).to(tl.int64)  # in the stream of L old columns, then the tokens
    inside = mask_d[:, None] & (offs_l < L)[None, :]
    old = tl.load(
        window_ptr + offs_d[:, None] * stride_window_d + source[None, :] * stride_window_l,
        mask=inside & (source < L)[None, :] & known,
        other=0.0,
    )
    new = tl.load(
        x_ptr + (source - L)[None, :] * stride_x_t + offs_d[:, None] * stride_x_d,
        mask=inside & (source >= L)[None, :] & kept,
        other=0.0,
    )
    window = tl.where((source < L)[None, :], old, new.to(old.dtype))
    tl.debug_barrier()  # columns move within the program: all are read before one is written
    at = rolled_ptr + offs_d[:, None] * stride_window_d + offs_l[None, :] * stride_window_l
    tl.store(at, window, mask=inside & kept)


@triton.jit
def save_windows(
    x_ptr,
    state_ptr,  # [P, D, L] the pool
    window_ptr,  # [D, L] the sequence's own row
    known,
    kept,
    length,
    seq,
    block,
    checkpoint_slots_ptr,  # [N, M] or None
    checkpoint_positions_ptr,  # [N, M]; None: after every ``every`` tokens
    write_slot,
    every,
    M,
    pad_slot,
    offs_d,
    mask_d,
    stride_x_t,
    stride_x_d,
    stride_state_p,
    stride_state_d,
    stride_state_l,
    L: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Write checkpoints and, last, the sequence's final window.

    A sequence's first block is the only one that reads its old window, so it alone may write the
    new one, and the checkpoints that still hold old columns. Its blocks share the others.
    """
    if checkpoint_slots_ptr is not None:
        blocks = tl.maximum((length + CHUNK - 1) // CHUNK, 1)
        for m in range(M):
            at = seq * M + m
            position = (m + 1) * every
            if checkpoint_positions_ptr is not None:
                position = tl.load(checkpoint_positions_ptr + at).to(tl.int32)
            owner = tl.where(position < L, 0, m % blocks)
            if (owner == block) & (position <= length):
                slot = tl.load(checkpoint_slots_ptr + at).to(tl.int64)
                roll_window(
                    x_ptr, window_ptr, state_ptr + slot * stride_state_p, known, slot > pad_slot,
                    position, offs_d, mask_d, stride_x_t, stride_x_d, stride_state_d,
                    stride_state_l, L, BLOCK_L,
                )  # fmt: skip
    if block == 0:
        roll_window(
            x_ptr, window_ptr, state_ptr + write_slot * stride_state_p, known, kept, length,
            offs_d, mask_d, stride_x_t, stride_x_d, stride_state_d, stride_state_l, L, BLOCK_L,
        )  # fmt: skip
