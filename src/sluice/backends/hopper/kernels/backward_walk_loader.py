"""The loader role of hopper_walk_kernel: one warp brings tiles and factors, STAGES chunks ahead."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sluice.backends.hopper.kernels.constants import GROUP_V, C
from sluice.backends.hopper.kernels.gluon_api import async_load, barrier
from sluice.backends.hopper.kernels.state_args import advance


@gluon.jit
def run_walk_loader(args, sizes):
    """Load all chunks of the program, in the order in which they are walked."""
    chunks = gl.cdiv(args.tokens, C)
    for i in range(gl.minimum(chunks, sizes.STAGES)):
        copy_tiles(args, sizes, args.row + token_of(i, chunks, sizes), i)
    stage = 0
    phase = 1
    for i in range(chunks):
        t = token_of(i, chunks, sizes)
        if i >= sizes.STAGES:
            mbarrier.wait(args.barriers.stage_free.index(stage), phase)
            copy_tiles(args, sizes, args.row + t, stage)
        store_walk_factors(args, sizes, args.row + t, gl.minimum(args.tokens - t, C), stage)
        stage, phase = advance(stage, phase, sizes.STAGES)


@gluon.jit
def token_of(i, chunks, sizes):
    """The first token of the i-th chunk of a walk, counted from the program's first."""
    return (chunks - 1 - i if sizes.BACK else i) * C


@gluon.jit
def copy_tiles(args, sizes, t, stage):
    """Start the TMA copies of a chunk. They arrive at ``tiles_ready``."""
    K: gl.constexpr = sizes.K
    ELEMENTS: gl.constexpr = C * (2 * K + GROUP_V + 2 * C if sizes.BACK else K + GROUP_V + C)
    ready = args.barriers.tiles_ready.index(stage)
    mbarrier.expect(ready, 2 * ELEMENTS)
    async_load(args.k_desc, [t, args.column_k], ready, args.tiles.k.index(stage))
    async_load(args.v_desc, [t, args.column_v], ready, args.tiles.v.index(stage))
    async_load(args.b_desc, [t, args.column_c], ready, args.tiles.b.index(stage))
    if sizes.BACK:
        async_load(args.p_desc, [t, args.column_c], ready, args.tiles.p.index(stage))
        async_load(args.q_desc, [t, args.column_q], ready, args.tiles.q.index(stage))


@gluon.jit
def store_walk_factors(args, sizes, t, count, stage):
    """Load the factors of a chunk of ``count`` tokens and store them in shared memory."""
    factors = args.factors
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    at = gl.arange(0, C, layout)
    on = at < count
    at = t + at
    decay_in = gl.load(args.decay_in_ptr + at, mask=on, other=0.0)
    decay_out = gl.load(args.decay_out_ptr + at, mask=on, other=0.0)
    beta = gl.load(args.beta32_ptr + at, mask=on, other=0.0)
    one = gl.full([C], 1.0, gl.float32, layout)
    decay_all = one
    if args.g2_ptr is not None:
        decay_all = one * gl.exp2(gl.load(args.g2_ptr + t + count - 1))
    if sizes.BACK:
        decay_q = gl.load(args.decay_q_ptr + at, mask=on, other=0.0)
        factors.decay_q.index(stage).store(decay_q)
        factors.read.index(stage).store(decay_out)
        factors.write.index(stage).store(-decay_in)
    else:
        factors.read.index(stage).store(-decay_in)
        factors.write.index(stage).store(decay_out)
    factors.beta.index(stage).store(beta)
    factors.decay_all.index(stage).store(decay_all)
    factors.b_down.index(stage).store(one * gl.load(args.b_down_ptr + t))
    barrier()
    mbarrier.arrive(args.barriers.factors_ready.index(stage), count=1)
