"""State tiles in registers, and the recurrence on them: decode, verify and commit.

A tile ``S`` holds BLOCK_V rows of one head's state [V, K]. It is a tuple of K / PIECE_K pieces
[BLOCK_V, PIECE_K], and a key vector is the matching tuple of [PIECE_K]. A dot product over K is a
chain of fma over the pieces and one reduction over PIECE_K, so PIECE_K alone decides the order of a
sum, not BLOCK_V. If a program has fewer threads than PIECE_K, Triton passes key vectors through
shared memory, with one barrier each; with more threads it loads them in the tile's layout.
"""
# ruff: noqa: RUF005, SIM108 (Triton has no tuple unpacking; constexpr branches stay if/else)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sluice.backends.triton.kernels.math import exp


class TileShape(NamedTuple):
    """The constants of a tile. In a kernel: ``shape: tl.constexpr = TileShape(...)``."""

    K: Any
    V: Any
    BLOCK_V: Any  # state rows per program
    PIECE_K: Any  # keys per piece
    STATE_KV: Any  # states lie [K, V] in memory, not [V, K]


@triton.jit
def load_block(ptr, offs, on, END: tl.constexpr, WHOLE: tl.constexpr):
    """``ptr[offs]``; zeros where not ``on``, and from END on unless the block is WHOLE.

    No mask is made where it cannot be false: ``on`` None means always on.
    """
    if WHOLE and on is None:
        x = tl.load(ptr + offs)
    elif WHOLE:
        x = tl.load(ptr + offs, mask=tl.broadcast_to(on, offs.shape), other=0.0)
    elif on is None:
        x = tl.load(ptr + offs, mask=offs < END, other=0.0)
    else:
        x = tl.load(ptr + offs, mask=on & (offs < END), other=0.0)
    return x


@triton.jit
def load_vector(ptr, on, K: tl.constexpr, PIECE_K: tl.constexpr):
    """A contiguous vector [K] as a tuple of [PIECE_K], in its own dtype, zeros beyond K."""
    x = ()
    for j in tl.static_range((K + PIECE_K - 1) // PIECE_K):
        offs_k = j * PIECE_K + tl.arange(0, PIECE_K)
        x = x + (load_block(ptr, offs_k, on, K, (j + 1) * PIECE_K <= K),)
    return x


@triton.jit
def load_tile(ptr, offs_v, live, shape: tl.constexpr, HINT: tl.constexpr):
    """Rows ``offs_v`` of a state [V, K] (or [K, V]) as float32 pieces, zeros where not ``live``.

    HINT is the eviction policy of the loads: "evict_first", "evict_last" or "".
    """
    S = ()
    for j in tl.static_range((shape.K + shape.PIECE_K - 1) // shape.PIECE_K):
        offs, mask = _piece(offs_v, live, j, shape)
        x = tl.load(ptr + offs, mask=mask, other=0.0, eviction_policy=HINT)
        S = S + (x.to(tl.float32),)
    return S


@triton.jit
def store_tile(ptr, S, offs_v, live, shape: tl.constexpr, HINT: tl.constexpr):
    """Round the tile to the pool's dtype, once, and store it where ``live``."""
    for j in tl.static_range((shape.K + shape.PIECE_K - 1) // shape.PIECE_K):
        offs, mask = _piece(offs_v, live, j, shape)
        tl.store(ptr + offs, S[j].to(ptr.dtype.element_ty), mask=mask, eviction_policy=HINT)


@triton.jit
def _piece(offs_v, live, j: tl.constexpr, shape: tl.constexpr):
    """Offsets and mask of piece j."""
    K: tl.constexpr = shape.K
    V: tl.constexpr = shape.V
    PIECE_K: tl.constexpr = shape.PIECE_K
    offs_k = j * PIECE_K + tl.arange(0, PIECE_K)
    if shape.STATE_KV:
        offs = offs_v[:, None] + offs_k[None, :] * V
    else:
        offs = offs_v[:, None] * K + offs_k[None, :]
    if V % shape.BLOCK_V == 0 and (j + 1) * PIECE_K <= K:
        mask = tl.broadcast_to(live, (shape.BLOCK_V, PIECE_K))
    else:
        mask = live & (offs_v < V)[:, None] & (offs_k < K)[None, :]
    return offs, mask


@triton.jit
def widen(x):
    """A vector in float32."""
    y = ()
    for j in tl.static_range(len(x)):
        y = y + (x[j].to(tl.float32),)
    return y


@triton.jit
def square_norm(x):
    """Σ x² of a float32 vector."""
    total = x[0] * x[0]
    for j in tl.static_range(1, len(x)):
        total = tl.fma(x[j], x[j], total)
    return tl.sum(total, axis=0)


@triton.jit
def decayed(S, g, DECAY_PER_KEY: tl.constexpr):
    """exp(g) S, with g a number or a vector over the keys."""
    y = ()
    for j in tl.static_range(len(S)):
        if DECAY_PER_KEY:
            y = y + (S[j] * exp(g[j])[None, :],)
        else:
            y = y + (S[j] * exp(g),)
    return y


@triton.jit
def tile_dot(S, k):
    """S k [BLOCK_V]."""
    total = S[0] * k[0][None, :]
    for j in tl.static_range(1, len(S)):
        total = tl.fma(S[j], tl.broadcast_to(k[j][None, :], S[j].shape), total)
    return tl.sum(total, axis=1)


@triton.jit
def rank_one(S, k, d):
    """S + d kᵀ."""
    y = ()
    for j in tl.static_range(len(S)):
        d_tile = tl.broadcast_to(d[:, None], S[j].shape)
        y = y + (tl.fma(d_tile, tl.broadcast_to(k[j][None, :], S[j].shape), S[j]),)
    return y
