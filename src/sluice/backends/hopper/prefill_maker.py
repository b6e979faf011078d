"""The four warps of hopper_state_kernel that work ahead: they make P.

    P = lower(G ∘ Q Kᵀ)                            G_ij = exp(gc_i - gc_j), i >= j

of one head and one chunk is needed by both warpgroups that hold its state, and waits for neither.
It goes to float16 in shared memory, each row times a power of two that brings its largest product
to [2¹⁰, 2¹¹), before its gates. Tiles that reach beyond a sequence get zeros there.
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

from sluice.backends.hopper.prefill_loader import C_TOKENS, ROWS
from sluice.backends.hopper.prefill_tiles import barrier

NORM_EPS = gl.constexpr(1e-6)


@gluon.jit
def make(
    work, K: gl.constexpr, BLOCK_V: gl.constexpr, NUM_BUFFERS: gl.constexpr, OUTPUT: gl.constexpr
):
    """All chunks of a program, each a chunk or more before the warps that wait for it."""
    tiles, g2, r_k, r_q, read, lift, p_bufs, gated, made, scale, r_k_ptr = work
    kq_bufs, v_bufs, a_bufs, ready, _, row, tokens = tiles[4:11]
    C: gl.constexpr = C_TOKENS
    HALVES: gl.constexpr = BLOCK_V // ROWS
    NORM: gl.constexpr = r_k_ptr is not None
    acc: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16]
    )
    stage = 0
    phase = 0
    for chunk in range(gl.cdiv(tokens, C)):
        mbarrier.wait(ready.index(stage), phase)
        kq_smem = kq_bufs.index(stage)
        count = tokens - chunk * C
        if count < C:
            for piece in gl.static_range(K // ROWS):
                end_rows(kq_smem.slice(0, C, 0).slice(piece * ROWS, ROWS, 1), count)
                if OUTPUT:
                    end_rows(kq_smem.slice(C, C, 0).slice(piece * ROWS, ROWS, 1), count)
            end_rows(a_bufs.index(stage), count)
            for half in gl.static_range(HALVES):
                end_rows(v_bufs.index(stage * HALVES + half), count)
            fence_async_shared()
            barrier()
        if OUTPUT:
            q_smem = kq_smem.slice(C, C, 0)
            k_t = kq_smem.slice(0, C, 0).permute((1, 0))
            none = gl.zeros([C, C], gl.float32, acc)
            p = warpgroup_mma(q_smem, k_t, none, use_acc=False, is_async=True)
            if NORM:
                keep_lengths(q_smem, r_q, K)
        mbarrier.wait(gated.index(stage), phase)
        if OUTPUT:
            g_i = g2.index(stage).load(gl.SliceLayout(1, acc))
            if HALVES == 1:  # there are registers for it
                G = decay_between(g_i, g2.index(stage), row >> 31, acc)
            p = warpgroup_mma_wait(0, deps=[p])
            if NORM:
                p = p * gl.expand_dims(r_k.index(stage).load(gl.SliceLayout(0, acc)), 0)
            up, down = row_scale(p)
            # factors: of S Q before P Vd is added to it, and of the sum
            read.index(stage).store(gl.exp2(g_i) * up)
            down = down * scale
            if NORM:
                down = down * r_q.load(gl.SliceLayout(1, acc))
            lift.index(stage).store(down)
            p = p * gl.expand_dims(up, 1)
            if HALVES == 2:
                G = decay_between(g_i, g2.index(stage), row >> 31, acc)
            p_bufs.index(stage).store((p * G).to(gl.float16))
            fence_async_shared()
            barrier()
        mbarrier.arrive(made.index(stage), count=1)
        stage += 1
        if stage == NUM_BUFFERS:
            stage = 0
            phase = phase ^ 1


@gluon.jit
def end_rows(smem, count):
    """Zeros behind the first ``count`` rows of a tile [C, 64]: those tokens belong to others."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, layout)), 1)
    for first in gl.static_range(0, C_TOKENS, 16):
        part = smem.slice(first, 16, 0)
        x = part.load(layout)
        part.store(gl.where(rows + first < count, x, gl.zeros([16, ROWS], x.dtype, layout)))


@gluon.jit
def keep_lengths(q_smem, r_q, K: gl.constexpr):
    """Inverse lengths of the queries."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    total = gl.zeros([C_TOKENS], gl.float32, gl.SliceLayout(1, layout))
    for piece in gl.static_range(K // ROWS):
        x = q_smem.slice(piece * ROWS, ROWS, 1).load(layout).to(gl.float32)
        total = total + gl.sum(x * x, axis=1)
    r_q.store(gl.rsqrt(total + NORM_EPS))
    barrier()


@gluon.jit
def decay_between(g_i, g2, zero, acc: gl.constexpr):
    """G, zero above the diagonal.

    ``zero`` is one the compiler cannot see: else it keeps what lies below the diagonal in registers
    from chunk to chunk.
    """
    by_column: gl.constexpr = gl.SliceLayout(0, acc)
    i = gl.expand_dims(gl.arange(0, C_TOKENS, gl.SliceLayout(1, acc)), 1) + zero
    j = gl.expand_dims(gl.arange(0, C_TOKENS, by_column), 0)
    g = gl.expand_dims(g_i, 1) - gl.expand_dims(g2.load(by_column), 0)
    return gl.exp2(gl.where(i >= j, g, float("-inf")))


@gluon.jit
def row_scale(p):
    """The power of two that brings a row's largest to [2¹⁰, 2¹¹), and its inverse; 1 for zeros."""
    largest = gl.max(gl.abs(p), axis=1)
    bits = (largest.to(gl.int32, bitcast=True) & 0x7F800000) - (10 << 23)
    bits = gl.minimum(gl.maximum(bits, 1 << 23), 253 << 23)
    bits = gl.where(largest == 0.0, 127 << 23, bits)
    return (0x7F000000 - bits).to(gl.float32, bitcast=True), bits.to(gl.float32, bitcast=True)
