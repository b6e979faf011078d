"""The loader role of hopper_state_kernel: one warp brings tiles and gates, STAGES chunks ahead.

It has a warp to itself for two reasons. Nobody else waits for its loads. And the compiler puts a
barrier after each copy, which is cheaper for one warp than for four.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sluice.backends.hopper.kernels.constants import COPY_WIDTH, GROUP_V, C
from sluice.backends.hopper.kernels.gluon_api import async_load, barrier
from sluice.backends.hopper.kernels.state_args import advance
from sluice.backends.hopper.kernels.state_checkpoints import candidates, tail_of


@gluon.jit
def run_loader(args, sizes):
    """Load all chunks of the program."""
    chunks = gl.cdiv(args.tokens, C)
    for chunk in range(gl.minimum(chunks, sizes.STAGES)):
        t = args.row + chunk * C
        copy_chunk(args, sizes, t, t, chunk)
    stage = 0
    phase = 1
    for chunk in range(chunks):
        if chunk >= sizes.STAGES:
            mbarrier.wait(args.barriers.stage_free.index(stage), phase)
            t = args.row + chunk * C
            copy_chunk(args, sizes, t, t, stage)
        store_factors(args, args.row + chunk * C, args.tokens - chunk * C, stage)
        stage, phase = advance(stage, phase, sizes.STAGES)
    if args.saves.TAILS:
        item = chunks
        begin, stop = candidates(args.saves, 0, args.tokens)
        for j in range(begin, stop):
            before, count = tail_of(args.saves, j)
            if count > 0:
                if item >= sizes.STAGES:
                    mbarrier.wait(args.barriers.stage_free.index(stage), phase)
                tail_row = args.saves.tail_row + j * C
                copy_chunk(args, sizes, args.row + before * C, tail_row, stage)
                store_factors(args, tail_row, count, stage)
                stage, phase = advance(stage, phase, sizes.STAGES)
                item += 1


@gluon.jit
def copy_chunk(args, sizes, t, made, stage):
    """Start the TMA copies of a chunk from token ``t`` on. They arrive at ``tiles_ready``.

    ``made``: where the parallel half has put its results for the chunk.
    """
    K: gl.constexpr = sizes.K
    BLOCK_V: gl.constexpr = sizes.GROUPS * GROUP_V
    COMMON: gl.constexpr = 2 * C * (2 * K + C if sizes.OUTPUT else K + C)  # bytes
    ready = args.barriers.tiles_ready.index(stage)
    if args.has_values:
        mbarrier.expect(ready, COMMON + 2 * C * BLOCK_V)
    else:
        mbarrier.expect(ready, COMMON)
    kq_smem = args.tiles.kq.index(stage)
    copy_rows(args.k_desc, kq_smem.slice(0, C, 0), t, args.column_k, ready, K)
    if sizes.OUTPUT:
        copy_rows(args.q_desc, kq_smem.slice(C, C, 0), t, args.column_q, ready, K)
    for group in gl.static_range(sizes.GROUPS):
        v_smem = args.tiles.v.index(stage * sizes.GROUPS + group)
        column = args.column_v + group * GROUP_V
        async_load(args.v_desc, [t, column], ready, v_smem, pred=args.has_values)
    ag_smem = args.tiles.ag.index(stage)
    async_load(args.ag_desc, [made, args.column_ag], ready, ag_smem)


@gluon.jit
def copy_rows(desc, smem, row, column, bar, K: gl.constexpr):
    """Start the copies of a tile [C, K], which is part of a taller one: COPY_WIDTH columns each."""
    for first in gl.static_range(0, K, COPY_WIDTH):
        piece = smem.slice(first, COPY_WIDTH, 1)
        async_load(desc, [row, column + first], bar, piece)


@gluon.jit
def store_factors(args, t, left, stage):
    """Load the gates of a chunk and store the factors that follow from them.

    The gates begin at ``t`` in the workspace, and ``left`` tokens are left. After the last of them
    the decay stays as it is.
    """
    factors = args.factors
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    count = gl.minimum(left, C)
    at = gl.minimum(gl.arange(0, C, layout), count - 1)
    one = gl.full([C], 1.0, gl.float32, layout)
    decay_in = one
    decay_out = one
    decay_all = one
    g2 = one * 0.0
    if args.g2_ptr is not None:
        g2 = gl.load(args.g2_ptr + t + at)
        last = gl.load(args.g2_ptr + t + count - 1)
        decay_in = gl.exp2(g2)
        decay_out = gl.exp2(last - g2)
        decay_all = one * gl.exp2(last)
    factors.g2.index(stage).store(g2)
    if args.r_k_ptr is not None:
        r_k = gl.load(args.r_k_ptr + t + at)
        decay_in = decay_in * r_k
        decay_out = decay_out * r_k
        factors.r_k.index(stage).store(r_k)
    beta = gl.load(args.beta32_ptr + t + at)
    factors.beta.index(stage).store(beta)
    factors.beta_decay_in.index(stage).store(decay_in * beta)
    factors.decay_out.index(stage).store(decay_out)
    factors.decay_all.index(stage).store(decay_all)
    barrier()
    mbarrier.arrive(args.barriers.factors_ready.index(stage), count=1)
