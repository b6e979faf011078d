"""The products role of hopper_state_kernel: four warps make QKg before the state groups need it.

    QKg = G ∘ Q Kᵀ                                 G_ij = exp(γ_i - γ_j), 0 above the diagonal

of one head and one chunk is the same for every state group and does not depend on the state. It is
stored in float16. Each row is multiplied by the power of two that brings its largest entry to
[2¹⁰, 2¹¹) before the decays.

These warps also write zeros over tokens after the end of a sequence, in every tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sluice.backends.hopper.kernels.constants import COPY_WIDTH, NORM_EPS, C
from sluice.backends.hopper.kernels.gluon_api import barrier
from sluice.backends.hopper.kernels.layouts import accumulator
from sluice.backends.hopper.kernels.state_args import advance
from sluice.backends.hopper.kernels.state_items import scalar


@gluon.jit
def run_products(args, sizes):
    """Make QKg of every chunk that the loader brings."""
    stage = 0
    phase = 0
    left = wait_tiles(args, stage, phase)
    while left > 0:
        make_products(args, sizes, left, stage, phase)
        stage, phase = advance(stage, phase, sizes.STAGES)
        left = wait_tiles(args, stage, phase)


@gluon.jit
def wait_tiles(args, stage, phase):
    """Wait for the tiles of a chunk; how many tokens it has, 0 after the last chunk."""
    mbarrier.wait(args.barriers.tiles_ready.index(stage), phase)
    return scalar(args.tiles.left.index(stage), 4)


@gluon.jit
def make_products(args, sizes, count, stage, phase):
    """QKg of one chunk, of which ``count`` tokens are left."""
    tiles = args.tiles
    factors = args.factors
    barriers = args.barriers
    acc: gl.constexpr = accumulator(C)
    by_row: gl.constexpr = gl.SliceLayout(1, acc)
    by_column: gl.constexpr = gl.SliceLayout(0, acc)
    kq_smem = tiles.kq.index(stage)
    if count < C:
        for first in gl.static_range(0, sizes.K, COPY_WIDTH):
            zero_after(kq_smem.slice(0, C, 0).slice(first, COPY_WIDTH, 1), count)
            if sizes.OUTPUT:
                zero_after(kq_smem.slice(C, C, 0).slice(first, COPY_WIDTH, 1), count)
        zero_after(tiles.ag.index(stage), count)
        for group in gl.static_range(sizes.GROUPS):
            zero_after(tiles.v.index(stage * sizes.GROUPS + group), count)
        fence_async_shared()
        barrier()
    if sizes.OUTPUT:
        q_smem = kq_smem.slice(C, C, 0)
        k_t_smem = kq_smem.slice(0, C, 0).permute((1, 0))
        zero = gl.zeros([C, C], gl.float32, acc)
        qk = warpgroup_mma(q_smem, k_t_smem, zero, use_acc=False, is_async=True)
        if args.NORMALIZE_QK:
            store_inverse_lengths(q_smem, factors.r_q, sizes.K)
    mbarrier.wait(barriers.factors_ready.index(stage), phase)
    if sizes.OUTPUT:
        g2_smem = factors.g2.index(stage)
        g2 = g2_smem.load(by_row)
        if sizes.GROUPS == 1:  # before the wait: there are registers for it
            G = decay_between(g2, g2_smem, count >> 31, acc)
        qk = warpgroup_mma_wait(0, deps=[qk])
        if args.NORMALIZE_QK:
            qk = qk * gl.expand_dims(factors.r_k.index(stage).load(by_column), 0)
        up, down = float16_scale(qk)
        factors.qs_up.index(stage).store(gl.exp2(g2) * up)
        o_down = down * args.scale
        if args.NORMALIZE_QK:
            o_down = o_down * factors.r_q.load(by_row)
        factors.o_down.index(stage).store(o_down)
        qk = qk * gl.expand_dims(up, 1)
        if sizes.GROUPS == 2:
            G = decay_between(g2, g2_smem, count >> 31, acc)
        tiles.qkg.index(stage).store((qk * G).to(gl.float16))
        fence_async_shared()
        barrier()
    mbarrier.arrive(barriers.qkg_ready.index(stage), count=1)


@gluon.jit
def zero_after(smem, count):
    """Write zeros after the first ``count`` rows of a tile [C, 64]: other sequences' tokens."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, layout)), 1)
    for first in gl.static_range(0, C, 16):
        part = smem.slice(first, 16, 0)
        x = part.load(layout)
        zeros = gl.zeros([16, COPY_WIDTH], x.dtype, layout)
        part.store(gl.where(rows + first < count, x, zeros))


@gluon.jit
def store_inverse_lengths(q_smem, r_q_smem, K: gl.constexpr):
    """Store 1 / sqrt(sum q² + eps) of each query."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    total = gl.zeros([C], gl.float32, gl.SliceLayout(1, layout))
    for first in gl.static_range(0, K, COPY_WIDTH):
        x = q_smem.slice(first, COPY_WIDTH, 1).load(layout).to(gl.float32)
        total = total + gl.sum(x * x, axis=1)
    r_q_smem.store(gl.rsqrt(total + NORM_EPS))
    barrier()


@gluon.jit
def decay_between(g2, g2_smem, zero, acc: gl.constexpr):
    """G [C, C].

    The compiler cannot know that ``zero`` is 0. If it did, it would keep the mask of the diagonal
    in registers from chunk to chunk.
    """
    by_column: gl.constexpr = gl.SliceLayout(0, acc)
    i = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, acc)), 1) + zero
    j = gl.expand_dims(gl.arange(0, C, by_column), 0)
    difference = gl.expand_dims(g2, 1) - gl.expand_dims(g2_smem.load(by_column), 0)
    return gl.exp2(gl.where(i >= j, difference, float("-inf")))


@gluon.jit
def float16_scale(qk):
    """The power of two that brings a row's largest entry to [2¹⁰, 2¹¹), and its inverse.

    Both are 1 for a row of zeros.
    """
    largest = gl.max(gl.abs(qk), axis=1)
    bits = (largest.to(gl.int32, bitcast=True) & 0x7F800000) - (10 << 23)
    bits = gl.minimum(gl.maximum(bits, 1 << 23), 253 << 23)
    bits = gl.where(largest == 0.0, 127 << 23, bits)
    return (0x7F000000 - bits).to(gl.float32, bitcast=True), bits.to(gl.float32, bitcast=True)
