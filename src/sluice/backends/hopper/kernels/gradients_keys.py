"""The keys role of hopper_gradients_kernel: four warps make dK.

gradients_kernel.py has the equations. Each half of dK takes its terms from the states and right
after them those from N and H: ptxas would postpone sums that no product waits for, and keep their
terms in registers.
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

from sluice.backends.hopper.kernels.constants import COPY_WIDTH, C
from sluice.backends.hopper.kernels.gluon_api import barrier
from sluice.backends.hopper.kernels.gradients_args import (
    first_place,
    get_chunk,
    next_place,
    phase_of,
    place_of,
)
from sluice.backends.hopper.kernels.gradients_parts import (
    DSTATE,
    STATE,
    E,
    Y,
    key_columns,
    load_keys,
    low_e,
    multiply_state,
    nothing_of,
    per_token,
    state_of,
    store_gradient,
    wait_for_keys,
    without_norm,
)
from sluice.backends.hopper.kernels.layouts import accumulator


@gluon.jit
def run_keys(args):
    """Add up dK over the value heads that share a key head."""
    shared = args.shared
    tiles = shared.tiles
    barriers = shared.barriers
    sums = shared.sums
    K: gl.constexpr = tiles.qk.shape[2]
    acc_c: gl.constexpr = accumulator(C)
    by_row: gl.constexpr = gl.SliceLayout(1, acc_c)
    zero = gl.program_id(0) * 0
    number = zero
    item = zero
    place = first_place(zero)
    chunk = get_chunk(shared, number)
    while chunk.count > 0:
        dk_0 = gl.zeros([C, COPY_WIDTH], gl.float32, acc_c)
        dk_1 = gl.zeros([C, COPY_WIDTH], gl.float32, acc_c)
        for head in range(shared.heads):
            nothing = nothing_of(item)
            again = nothing_of(chunk.row)
            head_v = chunk.head_k * shared.heads + head
            of_head = head_v.to(gl.int64) * shared.tokens + chunk.row
            beta = per_token(args.beta32_ptr, of_head, chunk.count, by_row)
            fade_out = beta * per_token(args.decay_out_ptr, of_head, chunk.count, by_row)
            fade_in = beta * per_token(args.decay_in_ptr, of_head, chunk.count, by_row)
            at = place_of(place, chunk.is_hard)
            mbarrier.wait(barriers.rows_ready.index(at), phase_of(place, at))
            mbarrier.wait(barriers.states_ready, item & 1)
            if head == 0:
                wait_for_keys(barriers, chunk.count, number)
            if shared.LOWS:
                if chunk.is_hard:
                    mbarrier.wait(barriers.rows_ready.index(1), phase_of(place, 1))
            dk_0, wrote_0, asked_0 = use_states(
                args, dk_0, tiles.qk.index(1 + nothing), fade_out, fade_in, chunk, at, nothing, 0
            )
            mbarrier.wait(barriers.pairs_ready, item & 1)
            dk_0 = multiply_pairs(dk_0, tiles, nothing, 0)
            nothing += again
            dk_1, wrote_1, asked_1 = use_states(
                args, dk_1, tiles.qk.index(1 + nothing), fade_out, fade_in, chunk, at + again,
                nothing, 1,
            )  # fmt: skip
            barrier()
            mbarrier.arrive(barriers.rows_free.index(at), count=1)
            mbarrier.arrive(barriers.states_free, count=1)
            if shared.LOWS:
                if chunk.is_hard:
                    mbarrier.arrive(barriers.rows_free.index(1), count=1)
            dk_1 = multiply_pairs(dk_1, tiles, nothing, 1)
            if args.DECAY:
                own = gl.arange(0, C, by_row) < chunk.count
                mbarrier.wait(barriers.sums_free, (item & 1) ^ 1)
                sums.wrote.store(gl.where(own, wrote_0 + wrote_1, 0.0))
                sums.asked.store(gl.where(own, asked_0 + asked_1, 0.0))
                barrier()
                mbarrier.arrive(barriers.asked_ready, count=1)
            dk_0, dk_1 = warpgroup_mma_wait(0, deps=[dk_0, dk_1])
            barrier()
            mbarrier.arrive(barriers.pairs_free, count=1)
            item += 1
            place = next_place(place, chunk.is_hard)
        if args.r_k_ptr is not None:
            r_k_ptr = args.r_k_ptr + chunk.head_k.to(gl.int64) * shared.tokens + chunk.row
            dk_0, dk_1 = without_norm(dk_0, dk_1, tiles.qk.index(1), r_k_ptr, 1, chunk.count)
        barrier()
        mbarrier.arrive(barriers.keys_free, count=1)
        at = chunk.row.to(gl.int64) * shared.HK + chunk.head_k
        store_gradient(args.dk_ptr + at * K, dk_0, dk_1, chunk.count, shared.HK * K)
        number += 1
        chunk = get_chunk(shared, number)


@gluon.jit
def use_states(args, dk, k_smem, fade_out, fade_in, chunk, place, nothing, half: gl.constexpr):
    """Add D dSᵀ and dV Sᵀ, what keys write into states and read from them, to half of dK.

    Returns that half, and the terms of dg that come from writes and from reads.
    """
    tiles = args.shared.tiles
    write = multiply_state(tiles, place, nothing, E, DSTATE, half)
    read = multiply_state(tiles, place, nothing, Y, STATE, half)
    write, read = warpgroup_mma_wait(0, deps=[write, read])
    if args.shared.LOWS:
        if chunk.is_hard:
            dS = key_columns(state_of(tiles, nothing, DSTATE, 0), half)
            write = warpgroup_mma(low_e(tiles, 0, nothing), dS, write)
            dS = key_columns(state_of(tiles, nothing, DSTATE, 1), half)
            write = warpgroup_mma(low_e(tiles, 1, nothing), dS, write)
    write = write * gl.expand_dims(fade_out, 1)
    read = read * gl.expand_dims(-fade_in, 1)
    wrote = fade_out
    asked = fade_in
    if args.DECAY:
        k = load_keys(k_smem, half)
        wrote = gl.sum(write * k, axis=1)
        asked = gl.sum(read * k, axis=1)
    return dk + write + read, wrote, asked


@gluon.jit
def multiply_pairs(dk, tiles, nothing, half: gl.constexpr):
    """Start Nᵀ Q + (H + Hᵀ) K for half of dK."""
    q_smem = key_columns(tiles.qk.index(nothing), half)
    k_smem = key_columns(tiles.qk.index(1 + nothing), half)
    n_smem = tiles.pairs.index(nothing)
    h_smem = tiles.pairs.index(1 + nothing)
    dk = warpgroup_mma(n_smem.permute((1, 0)), q_smem, dk, is_async=True)
    dk = warpgroup_mma(h_smem, k_smem, dk, is_async=True)
    return warpgroup_mma(h_smem.permute((1, 0)), k_smem, dk, is_async=True)
