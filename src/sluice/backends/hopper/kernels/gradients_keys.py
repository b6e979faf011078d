"""The keys role of hopper_gradients_kernel: four warps make dK and dg.

gradients_kernel.py has the equations. This group needs no N or H until it has multiplied both
states, which is when the other group has made them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sluice.backends.hopper.kernels.chunks_gates import sigmoid, softplus
from sluice.backends.hopper.kernels.constants import GROUP_V, LOG2_E, C
from sluice.backends.hopper.kernels.gluon_api import barrier
from sluice.backends.hopper.kernels.gradients_args import advance
from sluice.backends.hopper.kernels.gradients_loader import low_e
from sluice.backends.hopper.kernels.gradients_parts import per_token, row_sums, store_gradient
from sluice.backends.hopper.kernels.gradients_queries import free_stages
from sluice.backends.hopper.kernels.layouts import accumulator


@gluon.jit
def run_keys(args):
    """Add up dK over the value heads that share a key head; make dg of each."""
    tiles = args.tiles
    barriers = args.barriers
    chunk = args.chunk
    sums = args.sums
    K: gl.constexpr = tiles.k.shape[1]
    DECAY: gl.constexpr = args.g2_ptr is not None
    acc_k: gl.constexpr = accumulator(K)
    by_row: gl.constexpr = gl.SliceLayout(1, acc_k)
    if chunk.count > 0:
        rows = gl.arange(0, C, by_row)
        dk = gl.zeros([C, K], gl.float32, acc_k)
        stage = 0
        phase = 0
        mbarrier.wait(barriers.keys_ready, 0)
        for head in range(chunk.heads):
            of_head = (chunk.first_head + head).to(gl.int64) * chunk.tokens + chunk.row
            beta = per_token(args.beta32_ptr, of_head, chunk.count, by_row)
            fade_out = beta * per_token(args.decay_out_ptr, of_head, chunk.count, by_row)
            fade_in = beta * per_token(args.decay_in_ptr, of_head, chunk.count, by_row)
            mbarrier.wait(barriers.stage_ready.index(stage), phase)
            first = stage
            stage, phase = advance(stage, phase, chunk.stages)
            mbarrier.wait(barriers.stage_ready.index(stage), phase)

            write = multiply_state(tiles, first, stage, 1, 1, K)
            if chunk.is_hard is not None:
                if chunk.is_hard:
                    mbarrier.wait(barriers.low_ready, head & 1)
                    write = warpgroup_mma(low_e(tiles, 0), tiles.states.index(2 * first + 1), write)
                    write = warpgroup_mma(low_e(tiles, 1), tiles.states.index(2 * stage + 1), write)
                    barrier()
                    mbarrier.arrive(barriers.low_free, count=1)
            write = write * gl.expand_dims(fade_out, 1)
            if DECAY:
                wrote = row_sums(write, tiles.k)
            dk = dk + write
            read = multiply_state(tiles, first, stage, 2, 0, K)
            read = read * gl.expand_dims(-fade_in, 1)
            if DECAY:
                asked = row_sums(read, tiles.k)
                kept = overlap(tiles, first, stage)
                kept = kept * gl.exp2(gl.load(args.g2_ptr + of_head + chunk.count - 1))
            dk = dk + read
            free_stages(barriers, stage, chunk.stages)
            stage, phase = advance(stage, phase, chunk.stages)
            if DECAY:  # the overlap of the states acts on each token's decay, from both sides
                kept = gl.convert_layout(kept, by_row)
                sums.wrote.store(gl.where(rows < chunk.count, wrote, 0.0) + kept)
                sums.asked.store(gl.where(rows < chunk.count, asked, 0.0) + kept)

            mbarrier.wait(barriers.pairs_ready, head & 1)
            dk = warpgroup_mma(tiles.n.permute((1, 0)), tiles.q, dk, is_async=True)
            dk = warpgroup_mma(tiles.h, tiles.k, dk, is_async=True)
            dk = warpgroup_mma(tiles.h.permute((1, 0)), tiles.k, dk, is_async=True)
            if DECAY:
                barrier()
                dg = sum_decays(sums)
                store_dg(args, dg, head)
            dk = warpgroup_mma_wait(0, deps=[dk])
            barrier()
            mbarrier.arrive(barriers.pairs_free, count=1)
        at = chunk.row.to(gl.int64) * chunk.heads_k + chunk.head_k
        r_k_ptr = args.r_k_ptr
        if r_k_ptr is not None:
            r_k_ptr += chunk.head_k.to(gl.int64) * chunk.tokens + chunk.row
        stride = chunk.heads_k * K
        store_gradient(args.dk_ptr + at * K, dk, tiles.k, r_k_ptr, 1, chunk.count, stride, K)


@gluon.jit
def multiply_state(
    tiles, first, second, row: gl.constexpr, state: gl.constexpr, K: gl.constexpr
):  # fmt: skip
    """A tile of rows [C, V] times a stored state [V, K], both in two stages."""
    acc = gl.zeros([C, K], gl.float32, accumulator(K))
    acc = warpgroup_mma(
        tiles.rows.index(3 * first + row), tiles.states.index(2 * first + state), acc,
        use_acc=False, is_async=True,
    )  # fmt: skip
    acc = warpgroup_mma(
        tiles.rows.index(3 * second + row), tiles.states.index(2 * second + state), acc,
        is_async=True,
    )  # fmt: skip
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def overlap(tiles, first, second):
    """⟨S, dS⟩ in GROUP_V parts: the diagonal of S dSᵀ, which needs no state in registers."""
    layout: gl.constexpr = accumulator(GROUP_V)
    x = gl.zeros([GROUP_V, GROUP_V], gl.float32, layout)
    states = tiles.states
    dS_t = states.index(2 * first + 1).permute((1, 0))
    x = warpgroup_mma(states.index(2 * first), dS_t, x, use_acc=False, is_async=True)
    dS_t = states.index(2 * second + 1).permute((1, 0))
    x = warpgroup_mma(states.index(2 * second), dS_t, x, is_async=True)
    x = warpgroup_mma_wait(0, deps=[x])
    i = gl.expand_dims(gl.arange(0, GROUP_V, gl.SliceLayout(1, layout)), 1)
    j = gl.expand_dims(gl.arange(0, GROUP_V, gl.SliceLayout(0, layout)), 0)
    return gl.sum(gl.where(i == j, x, 0.0), axis=1)


@gluon.jit
def sum_decays(sums):
    """What is asked of each decay: by pairs, by writes before it, by reads from it on."""
    layout: gl.constexpr = accumulator(C)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    t = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, layout)), 1)
    j = gl.expand_dims(gl.arange(0, C, by_column), 0)
    wrote = gl.expand_dims(sums.wrote.load(by_column), 0)
    asked = gl.expand_dims(sums.asked.load(by_column) + sums.by_query.load(by_column), 0)
    dg = gl.sum(gl.where(j < t, wrote, asked), axis=1)
    return dg + sums.by_pair.load(gl.SliceLayout(1, layout))


@gluon.jit
def store_dg(args, dg, head):
    """Store dg of a value head; of a raw gate, and this chunk's shares of dA_log and ddt_bias."""
    chunk = args.chunk
    rows = gl.arange(0, C, dg.type.layout)
    own = rows < chunk.count
    head_v = chunk.first_head + head
    HV = chunk.heads_k * chunk.heads
    if args.A_log_ptr is not None:
        at = rows.to(gl.int64) * args.stride_g_t + head_v * args.stride_g_h
        a = gl.load(args.g_ptr + at, mask=own, other=0.0).to(gl.float32)
        if args.dt_bias_ptr is not None:
            a += gl.load(args.dt_bias_ptr + head_v).to(gl.float32)
        rate = -gl.exp2(gl.load(args.A_log_ptr + head_v).to(gl.float32) * LOG2_E)
        dg = gl.where(own, dg, 0.0) * rate
        gl.store(args.by_gate_ptr + head_v, gl.sum(softplus(a) * dg, axis=0))
        dg = sigmoid(a) * dg
        gl.store(args.by_gate_ptr + HV + head_v, gl.sum(dg, axis=0))
    ptr = args.dg_ptr + chunk.row.to(gl.int64) * HV + head_v
    gl.store(ptr + rows * HV, dg.to(ptr.dtype.element_ty), mask=own)
