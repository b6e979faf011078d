"""Device functions that several kernels share: activations, gates, the recurrence on state tiles.

Arithmetic is float32. Every launch turns ``enable_fp_fusion`` off, so that a product and a sum are
one rounding only where ``tl.fma`` says so: the same bits in decode, verify and commit, whatever the
compiler would rather do.

A state tile ``S`` is a tuple of K / C pieces [BLOCK_V, C], a key vector the matching tuple of [C].
A dot product over K is then a chain of fma over the pieces and one reduction over C, in an order
that C alone decides, not BLOCK_V. With fewer than C threads in a program, Triton would take key
vectors through shared memory, one barrier each; with more it loads them into the tile's layout.
"""
# ruff: noqa: RUF005, SIM108 (what a kernel may not say, and constants decide)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq, is_cuda

NORM_EPS = tl.constexpr(1e-6)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def begin():
    """Wait for the kernels before this one, and let the next one come as far as its own wait.

    From Hopper on, a kernel's programs may be put on the SMs while the kernel before it still runs
    (programmatic dependent launch): a microsecond less between two kernels. Nothing may be read or
    written before the wait.
    """
    if cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def exp(x, SCALE: tl.constexpr = LOG2_E):
    """exp(x), to 2 ulp and the rounding of x · log2(e); below 2**-126 it is zero.

    With a SCALE of -LOG2_E it is exp(-x) and the sign costs nothing.

    ``tl.exp`` spends three more instructions on results that are not normal numbers, and a division
    four more than the reciprocal: in a convolution that is as much time as the memory takes.
    """
    if is_cuda():
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * SCALE], tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp2(x * SCALE)
    return y


@triton.jit
def reciprocal(x):
    """1 / x, to 1 ulp."""
    if is_cuda():
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 / x
    return y


@triton.jit
def sigmoid(x):
    return reciprocal(1.0 + exp(x, -LOG2_E))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to float32's precision on both sides of zero.

    With e = exp(-|x|) and s = e / (2 + e) <= 1/3: log(1 + e) = 2 atanh(s), a series in s². The
    hardware's logarithm loses all relative precision near 1, where slow heads have their gates.
    """
    e = exp(tl.abs(x), -LOG2_E)
    s = e * reciprocal(2.0 + e)
    s2 = s * s
    series = s2 * (1.0 / 13.0) + (1.0 / 11.0)
    series = s2 * series + (1.0 / 9.0)
    series = s2 * series + (1.0 / 7.0)
    series = s2 * series + (1.0 / 5.0)
    series = s2 * series + (1.0 / 3.0)
    series = s2 * series + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def silu(x):
    """x · sigmoid(x)."""
    return x * sigmoid(x)


@triton.jit
def load_block(ptr, offs, on, END: tl.constexpr, WHOLE: tl.constexpr):
    """``ptr[offs]``; zeros at or beyond END unless the block is WHOLE, and where not ``on``.

    Masks that cannot be false are not made: ``on`` None is always on.
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
def load_vector(ptr, on, K: tl.constexpr, C: tl.constexpr):
    """A contiguous vector [K] as a tuple of [C], in the dtype it has, zeros beyond K."""
    x = ()
    for j in tl.static_range((K + C - 1) // C):
        x = x + (load_block(ptr, j * C + tl.arange(0, C), on, K, (j + 1) * C <= K),)
    return x


@triton.jit
def load_tile(
    ptr,
    offs_v,
    live,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    HINT: tl.constexpr,
    STATE_KV: tl.constexpr,
):
    """Rows ``offs_v`` of a state [V, K] (or [K, V]) as float32 pieces, zeros where not ``live``.

    HINT is how long the cache is to keep these lines: "evict_first", "evict_last" or "".
    """
    S = ()
    for j in tl.static_range((K + C - 1) // C):
        offs, mask = _piece(offs_v, live, j, K, V, BLOCK_V, C, STATE_KV)
        x = tl.load(ptr + offs, mask=mask, other=0.0, eviction_policy=HINT)
        S = S + (x.to(tl.float32),)
    return S


@triton.jit
def store_tile(
    ptr,
    S,
    offs_v,
    live,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    HINT: tl.constexpr,
    STATE_KV: tl.constexpr,
):
    """Round the tile to the pool's dtype, once, and store it where ``live``."""
    for j in tl.static_range((K + C - 1) // C):
        offs, mask = _piece(offs_v, live, j, K, V, BLOCK_V, C, STATE_KV)
        tl.store(ptr + offs, S[j].to(ptr.dtype.element_ty), mask=mask, eviction_policy=HINT)


@triton.jit
def _piece(
    offs_v,
    live,
    j: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    STATE_KV: tl.constexpr,
):
    """Offsets and mask of piece j."""
    offs_k = j * C + tl.arange(0, C)
    if STATE_KV:
        offs = offs_v[:, None] + offs_k[None, :] * V
    else:
        offs = offs_v[:, None] * K + offs_k[None, :]
    if V % BLOCK_V == 0 and (j + 1) * C <= K:
        mask = tl.broadcast_to(live, (BLOCK_V, C))
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
