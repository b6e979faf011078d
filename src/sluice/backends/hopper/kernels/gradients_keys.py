"""The keys role of hopper_gradients_kernel: four warps make dK and dg.

gradients_kernel.py has the equations. The other group makes N and H first; meanwhile this one makes
the overlap of the states. Then each half of dK takes what it gets from the states and, at once, the
products of N and H: ptxas would put off sums that no product waits for, and keep their terms.
"""
# ruff: noqa: SIM102 (constexpr branches stay apart)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sluice.backends.hopper.kernels.chunks_gates import sigmoid, softplus
from sluice.backends.hopper.kernels.constants import COPY_WIDTH, GROUP_V, LOG2_E, C
from sluice.backends.hopper.kernels.gluon_api import barrier
from sluice.backends.hopper.kernels.gradients_args import advance
from sluice.backends.hopper.kernels.gradients_loader import low_e
from sluice.backends.hopper.kernels.gradients_parts import (
    DSTATE,
    STATE,
    E,
    Y,
    free_head,
    key_columns,
    load_keys,
    multiply_state,
    nothing_of,
    per_token,
    square,
    state_of,
    store_gradient,
    wait_for_head,
)
from sluice.backends.hopper.kernels.layouts import accumulator


@gluon.jit
def run_keys(args):
    """Add up dK over the value heads that share a key head; make dg of each."""
    tiles = args.tiles
    barriers = args.barriers
    chunk = args.chunk
    sums = args.sums
    K: gl.constexpr = tiles.qk.shape[2]
    DECAY: gl.constexpr = args.g2_ptr is not None
    acc_c: gl.constexpr = accumulator(C)
    by_row: gl.constexpr = gl.SliceLayout(1, acc_c)
    if chunk.count > 0:
        own = gl.arange(0, C, by_row) < chunk.count
        dk_0 = gl.zeros([C, COPY_WIDTH], gl.float32, acc_c)
        dk_1 = gl.zeros([C, COPY_WIDTH], gl.float32, acc_c)
        stage = 0
        phase = 0
        mbarrier.wait(barriers.keys_ready, 0)
        for head in range(chunk.heads):
            nothing = nothing_of(stage)
            again = nothing_of(chunk.row)
            q_smem = tiles.qk.index(nothing)
            k_smem = tiles.qk.index(1 + nothing)
            n_smem = tiles.pairs.index(nothing)
            h_smem = tiles.pairs.index(1 + nothing)
            of_head = (chunk.first_head + head).to(gl.int64) * chunk.tokens + chunk.row
            beta = per_token(args.beta32_ptr, of_head, chunk.count, by_row)
            fade_out = beta * per_token(args.decay_out_ptr, of_head, chunk.count, by_row)
            fade_in = beta * per_token(args.decay_in_ptr, of_head, chunk.count, by_row)
            first, stage, phase = wait_for_head(barriers, stage, phase, chunk.stages)
            if DECAY:
                kept = overlap(tiles, first, stage, sums.columns)
                fade = gl.exp2(gl.load(args.g2_ptr + of_head + chunk.count - 1))
                sums.kept.store(kept * fade)
            mbarrier.wait(barriers.pairs_ready, head & 1)
            dk_0, wrote_0, asked_0 = use_states(
                args, dk_0, k_smem, fade_out, fade_in, first, stage, head, nothing, 0
            )
            dk_0 = multiply_pairs(dk_0, n_smem, h_smem, q_smem, k_smem, 0)
            k_smem = tiles.qk.index(1 + nothing + again)
            dk_1, wrote_1, asked_1 = use_states(
                args, dk_1, k_smem, fade_out, fade_in, first + again, stage + again, head, nothing,
                1,
            )  # fmt: skip
            n_smem = tiles.pairs.index(nothing + again)
            h_smem = tiles.pairs.index(1 + nothing + again)
            dk_1 = multiply_pairs(dk_1, n_smem, h_smem, q_smem, k_smem, 1)
            free_head(barriers, first, stage)
            stage, phase = advance(stage, phase, chunk.stages)
            if chunk.LOWS:
                if chunk.is_hard:
                    mbarrier.arrive(barriers.low_free, count=1)
            if DECAY:
                sums.wrote.store(gl.where(own, wrote_0 + wrote_1, 0.0))
                sums.asked.store(gl.where(own, asked_0 + asked_1, 0.0))
                mbarrier.wait(barriers.asked_ready, head & 1)
                barrier()
                store_dg(args, sum_decays(sums), head)
            dk_0, dk_1 = warpgroup_mma_wait(0, deps=[dk_0, dk_1])
            barrier()
            mbarrier.arrive(barriers.pairs_free, count=1)
        at = chunk.row.to(gl.int64) * chunk.heads_k + chunk.head_k
        r_k_ptr = args.r_k_ptr
        if r_k_ptr is not None:
            r_k_ptr += chunk.head_k.to(gl.int64) * chunk.tokens + chunk.row
        stride = chunk.heads_k * K
        store_gradient(
            args.dk_ptr + at * K, dk_0, dk_1, tiles.qk.index(1), r_k_ptr, 1, chunk.count, stride
        )


@gluon.jit
def use_states(
    args, dk, k_smem, fade_out, fade_in, first, second, head, nothing, half: gl.constexpr
):  # fmt: skip
    """Add what keys write into the state after the chunk and read of the one before it to half of
    dK; what each of it asks of decays."""
    tiles = args.tiles
    write = multiply_state(tiles, first, second, E, DSTATE, half)
    read = multiply_state(tiles, first, second, Y, STATE, half)
    write, read = warpgroup_mma_wait(0, deps=[write, read])
    if args.chunk.LOWS:
        if args.chunk.is_hard:
            mbarrier.wait(args.barriers.low_ready, head & 1)
            dS = key_columns(state_of(tiles, first, DSTATE), half)
            write = warpgroup_mma(low_e(tiles, 0, nothing), dS, write)
            dS = key_columns(state_of(tiles, second, DSTATE), half)
            write = warpgroup_mma(low_e(tiles, 1, nothing), dS, write)
    write = write * gl.expand_dims(fade_out, 1)
    read = read * gl.expand_dims(-fade_in, 1)
    wrote = fade_out
    asked = fade_in
    if args.g2_ptr is not None:
        k = load_keys(k_smem, half)
        wrote = gl.sum(write * k, axis=1)
        asked = gl.sum(read * k, axis=1)
    return dk + write + read, wrote, asked


@gluon.jit
def multiply_pairs(dk, n_smem, h_smem, q_smem, k_smem, half: gl.constexpr):
    """Start Nᵀ Q + (H + Hᵀ) K for half of dK."""
    dk = warpgroup_mma(n_smem.permute((1, 0)), key_columns(q_smem, half), dk, is_async=True)
    dk = warpgroup_mma(h_smem, key_columns(k_smem, half), dk, is_async=True)
    return warpgroup_mma(h_smem.permute((1, 0)), key_columns(k_smem, half), dk, is_async=True)


@gluon.jit
def overlap(tiles, first, second, columns_smem):
    """⟨S, dS⟩ in GROUP_V parts: the diagonal of S dSᵀ, which needs no state in registers."""
    layout: gl.constexpr = accumulator(GROUP_V)
    x = gl.zeros([GROUP_V, GROUP_V], gl.float32, layout)
    dS_t = state_of(tiles, first, DSTATE).permute((1, 0))
    x = warpgroup_mma(state_of(tiles, first, STATE), dS_t, x, use_acc=False, is_async=True)
    dS_t = state_of(tiles, second, DSTATE).permute((1, 0))
    x = warpgroup_mma(state_of(tiles, second, STATE), dS_t, x, is_async=True)
    x = warpgroup_mma_wait(0, deps=[x])
    i, j = square(columns_smem)
    return gl.sum(gl.where(i == j, x, 0.0), axis=1)


@gluon.jit
def sum_decays(sums):
    """What is asked of each decay: by pairs, by writes before it, by reads from it on."""
    layout: gl.constexpr = accumulator(C)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    t, j = square(sums.columns)
    wrote = gl.expand_dims(sums.wrote.load(by_column), 0)
    asked = sums.asked.load(by_column) + sums.by_query.load(by_column)
    kept = gl.expand_dims(sums.kept.load(by_column), 0)  # acts on each decay
    dg = gl.sum(gl.where(j < t, wrote, gl.expand_dims(asked, 0)) + kept, axis=1)
    return dg + sums.by_pair.load(gl.SliceLayout(1, layout))


@gluon.jit
def store_dg(args, dg, head):
    """Store dg of a value head; of a raw gate, and this chunk's shares of dA_log and ddt_bias."""
    chunk = args.chunk
    layout: gl.constexpr = dg.type.layout
    rows = gl.arange(0, C, layout)
    own = rows < chunk.count
    head_v = chunk.first_head + head
    HV = chunk.heads_k * chunk.heads
    if chunk.LOWS:
        if chunk.is_hard:
            at = head_v.to(gl.int64) * chunk.tokens + chunk.row
            dg += per_token(args.by_low_ptr, at, chunk.count, layout)
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
