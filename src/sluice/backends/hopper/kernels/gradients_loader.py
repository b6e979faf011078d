"""The loader role of hopper_gradients_kernel: one warp brings tiles, up to three stages ahead."""
# ruff: noqa: SIM102 (constexpr branches stay apart)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sluice.backends.hopper.kernels.constants import GROUP_V, C
from sluice.backends.hopper.kernels.gluon_api import async_load
from sluice.backends.hopper.kernels.gradients_args import advance


@gluon.jit
def run_loader(args):
    """Load queries and keys once, and two stages for each value head."""
    K: gl.constexpr = args.tiles.qk.shape[2]
    chunk = args.chunk
    barriers = args.barriers
    stage = 0
    phase = 1
    if chunk.count > 0:
        for half in range(2 * chunk.heads):
            mbarrier.wait(barriers.stage_free.index(stage), phase)
            copy_half(args, half, stage)
            if half == 0:
                mbarrier.expect(barriers.keys_loaded, 2 * 2 * C * K)
                column = chunk.head_k * K
                at = [chunk.row, column]
                async_load(args.q_desc, at, barriers.keys_loaded, args.tiles.qk.index(0))
                async_load(args.k_desc, at, barriers.keys_loaded, args.tiles.qk.index(1))
            if chunk.LOWS:
                if chunk.is_hard & (half % 2 == 0):
                    copy_low(args, half // 2)
            stage, phase = advance(stage, phase, chunk.stages)


@gluon.jit
def copy_half(args, half, stage):
    """Start the copies of half a head: GROUP_V value columns of dO, E and Y, so many rows of S."""
    K: gl.constexpr = args.tiles.qk.shape[2]
    ready = args.barriers.stage_ready.index(stage)
    mbarrier.expect(ready, 2 * GROUP_V * (3 * C + 2 * K))
    row = args.chunk.row
    column = args.chunk.first_head * (2 * GROUP_V) + half * GROUP_V
    rows = args.tiles.rows
    async_load(args.do_desc, [row, column], ready, rows.index(3 * stage))
    async_load(args.e_desc, [row, column], ready, rows.index(3 * stage + 1))
    in_states = args.slot * args.HV * (2 * GROUP_V) + column
    async_load(args.before_desc, [in_states, 0], ready, args.tiles.states.index(2 * stage))
    async_load(args.y_desc, [row, column], ready, rows.index(3 * stage + 2))
    async_load(args.after_desc, [in_states, 0], ready, args.tiles.states.index(2 * stage + 1))


@gluon.jit
def copy_low(args, head):
    """Start the copies of the low terms of E and Y of a head, into the last stage."""
    barriers = args.barriers
    mbarrier.wait(barriers.low_free, (head & 1) ^ 1)
    mbarrier.expect(barriers.low_ready, 2 * C * 4 * GROUP_V)
    column = (args.chunk.first_head + head) * (2 * GROUP_V)
    for half in gl.static_range(2):
        at = [args.chunk.row, column + half * GROUP_V]
        async_load(args.e_low_desc, at, barriers.low_ready, low_e(args.tiles, half, 0))
        async_load(args.y_low_desc, at, barriers.low_ready, low_y(args.tiles, half, 0))


@gluon.jit
def low_e(tiles, half: gl.constexpr, nothing):
    """Where the low terms of E lie: half of their columns."""
    return tiles.rows.index(6 + half + nothing)


@gluon.jit
def low_y(tiles, half: gl.constexpr, nothing):
    """Where the low terms of Y lie."""
    return tiles.states.index(4 + nothing).slice(half * GROUP_V, GROUP_V, 1)
