"""The loader role of hopper_state_kernel: one warp brings tiles and gates, STAGES chunks ahead.

It has a warp to itself for two reasons: no other role waits for its loads, and the compiler puts a
barrier after each copy, which costs one warp less than four.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from sluice.backends.hopper.kernels.constants import COPY_WIDTH, GROUP_V, C
from sluice.backends.hopper.kernels.gluon_api import aggregate, async_load, barrier
from sluice.backends.hopper.kernels.state_args import advance
from sluice.backends.hopper.kernels.state_checkpoints import candidates, checkpoints_of, tail_of
from sluice.backends.hopper.kernels.state_items import (
    BEFORE,
    COLUMN_Q,
    FIRST_V,
    FLAGS,
    HEAD_K,
    HEAD_V,
    LIVE,
    ROW,
    SEQ,
    TOKENS,
    VALUES,
    put,
    wait_item,
    word,
)


@aggregate
class Columns:
    """Where the tiles of an item lie, and whose gates it has."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    ag: gl.tensor
    has_values: gl.tensor | gl.constexpr  # False for a segment's transition
    head_v: gl.tensor
    head_k: gl.tensor


@gluon.jit
def run_loader(args, sizes):
    """Load all chunks of the program's items."""
    gdc_wait()
    items = args.items
    n = 0
    stage = 0
    phase = 1
    wait_item(items, n)
    tokens = word(items, n, TOKENS, 1)
    while tokens >= 0:
        flags = word(items, n, FLAGS, 1)
        tokens = gl.where((flags & LIVE) != 0, tokens, 0)
        row = word(items, n, ROW, 1)
        at = columns_of(args, sizes, n, flags)
        chunks = gl.cdiv(tokens, C)
        ahead = 0
        if n == 0:  # no stage is in use yet: start the first copies before any gates are loaded
            ahead = gl.minimum(chunks, sizes.STAGES)
            for chunk in range(ahead):
                t = row + chunk * C
                copy_chunk(args, at, sizes, t, t, tokens - chunk * C, chunk)
        for chunk in range(chunks):
            t = row + chunk * C
            mbarrier.arrive(items.asked.index(0), count=1, pred=chunk + 1 == chunks)
            if chunk >= ahead:
                mbarrier.wait(args.barriers.stage_free.index(stage), phase)
                copy_chunk(args, at, sizes, t, t, tokens - chunk * C, stage)
            store_factors(args, at, t, tokens - chunk * C, stage)
            stage, phase = advance(stage, phase, sizes.STAGES)
        if args.saves.TAILS:
            saves = checkpoints_of(
                args.saves,
                word(items, n, SEQ, 1),
                word(items, n, BEFORE, 1),
                tokens,
                at.head_v,
                sizes.V * sizes.K,
            )
            begin, stop = candidates(saves, 0, tokens)
            for j in range(begin, stop):
                before, count = tail_of(saves, j)
                if count > 0:
                    mbarrier.wait(args.barriers.stage_free.index(stage), phase)
                    tail_row = saves.tail_row + j * C
                    copy_chunk(args, at, sizes, row + before * C, tail_row, count, stage)
                    store_factors(args, at, tail_row, count, stage)
                    stage, phase = advance(stage, phase, sizes.STAGES)
        mbarrier.arrive(items.asked.index(0), count=1, pred=chunks == 0)
        n += 1
        wait_item(items, n)
        tokens = word(items, n, TOKENS, 1)
    mbarrier.wait(args.barriers.stage_free.index(stage), phase)
    put(args.tiles.left.index(stage), 0)
    barrier()
    mbarrier.arrive(args.barriers.tiles_ready.index(stage), count=1)


@gluon.jit
def columns_of(args, sizes, n, flags):
    """Where the tiles and gates of the program's n-th item lie."""
    head_v = word(args.items, n, HEAD_V, 1)
    head_k = word(args.items, n, HEAD_K, 1)
    return Columns(
        q=word(args.items, n, COLUMN_Q, 1),
        k=head_k * sizes.K,
        v=head_v * sizes.V + word(args.items, n, FIRST_V, 1),
        ag=head_v * C,
        has_values=(flags & VALUES) != 0,
        head_v=head_v,
        head_k=head_k,
    )


@gluon.jit
def copy_chunk(args, at, sizes, t, made, left, stage):
    """Start the TMA copies of a chunk from token ``t`` on. They arrive at ``tiles_ready``.

    ``made``: the row where the parallel half has put its results for the chunk. ``left``: tokens
    from ``t`` to the end of the item.
    """
    K: gl.constexpr = sizes.K
    BLOCK_V: gl.constexpr = sizes.GROUPS * GROUP_V
    COMMON: gl.constexpr = 2 * C * (2 * K + C if sizes.OUTPUT else K + C)  # bytes
    ready = args.barriers.tiles_ready.index(stage)
    put(args.tiles.left.index(stage), left)
    barrier()
    if at.has_values:
        mbarrier.expect(ready, COMMON + 2 * C * BLOCK_V)
    else:
        mbarrier.expect(ready, COMMON)
    kq_smem = args.tiles.kq.index(stage)
    copy_rows(args.k_desc, kq_smem.slice(0, C, 0), t, at.k, ready, K)
    if sizes.OUTPUT:
        copy_rows(args.q_desc, kq_smem.slice(C, C, 0), t, at.q, ready, K)
    for group in gl.static_range(sizes.GROUPS):
        v_smem = args.tiles.v.index(stage * sizes.GROUPS + group)
        column = at.v + group * GROUP_V
        async_load(args.v_desc, [t, column], ready, v_smem, pred=at.has_values)
    ag_smem = args.tiles.ag.index(stage)
    async_load(args.ag_desc, [made, at.ag], ready, ag_smem)


@gluon.jit
def copy_rows(desc, smem, row, column, bar, K: gl.constexpr):
    """Start the copies of a tile [C, K], which is part of a taller one: COPY_WIDTH columns each."""
    for first in gl.static_range(0, K, COPY_WIDTH):
        piece = smem.slice(first, COPY_WIDTH, 1)
        async_load(desc, [row, column + first], bar, piece)


@gluon.jit
def store_factors(args, item, t, left, stage):
    """Load the gates of a chunk and store the factors that follow from them.

    The gates begin at ``t`` in the workspace, and ``left`` tokens are left. After the last of them
    the decay stays as it is.
    """
    factors = args.factors
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    count = gl.minimum(left, C)
    at = gl.minimum(gl.arange(0, C, layout), count - 1)
    gates = item.head_v.to(gl.int64) * args.stride_gates_h + t
    one = gl.full([C], 1.0, gl.float32, layout)
    decay_in = one
    decay_out = one
    decay_all = one
    g2 = one * 0.0
    if args.g2_ptr is not None:
        g2 = gl.load(args.g2_ptr + gates + at)
        last = gl.load(args.g2_ptr + gates + count - 1)
        decay_in = gl.exp2(g2)
        decay_out = gl.exp2(last - g2)
        decay_all = one * gl.exp2(last)
    factors.g2.index(stage).store(g2)
    if args.r_k_ptr is not None:
        keys = item.head_k.to(gl.int64) * args.stride_gates_h + t
        r_k = gl.load(args.r_k_ptr + keys + at)
        decay_in = decay_in * r_k
        decay_out = decay_out * r_k
        factors.r_k.index(stage).store(r_k)
    beta = gl.load(args.beta32_ptr + gates + at)
    factors.beta.index(stage).store(beta)
    factors.beta_decay_in.index(stage).store(decay_in * beta)
    factors.decay_out.index(stage).store(decay_out)
    factors.decay_all.index(stage).store(decay_all)
    barrier()
    mbarrier.arrive(args.barriers.factors_ready.index(stage), count=1)
