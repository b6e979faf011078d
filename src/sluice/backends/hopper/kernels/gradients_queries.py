"""The queries role of hopper_gradients_kernel: four warps make dQ and dg.

gradients_kernel.py has the equations. ⟨S, dS⟩ is made while N is not ready yet. dg is the sum of
terms that all groups make.
"""
# ruff: noqa: SIM102 (constexpr branches stay apart)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sluice.backends.hopper.kernels.chunks_gates import sigmoid, softplus
from sluice.backends.hopper.kernels.constants import COPY_WIDTH, GROUP_V, LOG2_E, C
from sluice.backends.hopper.kernels.gluon_api import barrier
from sluice.backends.hopper.kernels.gradients_args import (
    first_place,
    get_chunk,
    next_place,
    phase_of,
    place_of,
    place_of_gates,
)
from sluice.backends.hopper.kernels.gradients_parts import (
    DO,
    DSTATE,
    STATE,
    key_columns,
    load_keys,
    low_n,
    multiply_state,
    nothing_of,
    per_token,
    square,
    state_of,
    store_gradient,
    without_norm,
)
from sluice.backends.hopper.kernels.layouts import accumulator
from sluice.backends.hopper.kernels.state_products import zero_after


@gluon.jit
def run_queries(args):
    """Add up dQ over the value heads that share a query head; make dg of each."""
    shared = args.shared
    tiles = shared.tiles
    barriers = shared.barriers
    sums = shared.sums
    K: gl.constexpr = tiles.qk.shape[2]
    DECAY: gl.constexpr = args.g2_ptr is not None
    acc_c: gl.constexpr = accumulator(C)
    by_row: gl.constexpr = gl.SliceLayout(1, acc_c)
    zero = gl.program_id(0) * 0
    number = zero
    item = zero
    place = first_place(zero)
    chunk = get_chunk(shared, number)
    while chunk.count > 0:
        dq_0 = gl.zeros([C, COPY_WIDTH], gl.float32, acc_c)
        dq_1 = gl.zeros([C, COPY_WIDTH], gl.float32, acc_c)
        for head in range(shared.heads):
            nothing = nothing_of(item)
            again = nothing_of(chunk.row)
            head_v = chunk.head_k * shared.heads + head
            of_head = head_v.to(gl.int64) * shared.tokens + chunk.row
            decay_q = per_token(args.decay_q_ptr, of_head, chunk.count, by_row)
            mbarrier.wait(barriers.states_ready, item & 1)
            if DECAY:
                fade = gl.exp2(gl.load(args.g2_ptr + of_head + chunk.count - 1))
                kept = overlap(tiles, nothing, sums.columns) * fade
            if head == 0:
                own_keys(shared, chunk.count, number)
            at = place_of(place, chunk.is_hard)
            mbarrier.wait(barriers.rows_ready.index(at), phase_of(place, at))
            q_smem = tiles.qk.index(nothing)
            dq_0, asked_0 = read_state(args, dq_0, q_smem, decay_q, at, nothing, 0)
            mbarrier.wait(barriers.pairs_ready, item & 1)
            k_smem = tiles.qk.index(1 + nothing)
            n_smem = tiles.pairs.index(nothing)
            dq_0 = warpgroup_mma(n_smem, key_columns(k_smem, 0), dq_0, is_async=True)
            nothing += again
            q_smem = tiles.qk.index(nothing)
            dq_1, asked_1 = read_state(args, dq_1, q_smem, decay_q, at + again, nothing, 1)
            barrier()
            mbarrier.arrive(barriers.rows_free.index(at), count=1)
            mbarrier.arrive(barriers.states_free, count=1)
            k_smem = tiles.qk.index(1 + nothing)
            n_smem = tiles.pairs.index(nothing)
            dq_1 = warpgroup_mma(n_smem, key_columns(k_smem, 1), dq_1, is_async=True)
            if DECAY:
                own = gl.arange(0, C, by_row) < chunk.count
                sums.by_query.store(gl.where(own, asked_0 + asked_1, 0.0))
                sums.kept.store(kept)
            dq_0, dq_1 = warpgroup_mma_wait(0, deps=[dq_0, dq_1])
            if shared.LOWS:
                if chunk.is_hard:
                    n_smem = low_n(tiles, nothing)
                    dq_0 = warpgroup_mma(n_smem, key_columns(k_smem, 0), dq_0)
                    dq_1 = warpgroup_mma(n_smem, key_columns(k_smem, 1), dq_1)
                    barrier()
                    mbarrier.arrive(barriers.rows_free.index(1), count=1)
            barrier()
            mbarrier.arrive(barriers.pairs_free, count=1)
            if DECAY:
                mbarrier.wait(barriers.asked_ready, item & 1)
                mbarrier.wait(barriers.spans_ready, item & 1)
                dg = sum_decays(sums)
                barrier()
                mbarrier.arrive(barriers.sums_free, count=1)
                store_dg(args, dg, chunk, head)
            item += 1
            place = next_place(place, chunk.is_hard)
        at = chunk.row.to(gl.int64) * shared.HK + chunk.head_k
        if args.r_q_ptr is not None:
            dq_0, dq_1 = without_norm(
                dq_0, dq_1, tiles.qk.index(0), args.r_q_ptr + at, shared.HK, chunk.count
            )
        barrier()
        mbarrier.arrive(barriers.keys_free, count=1)
        store_gradient(args.dq_ptr + at * K, dq_0, dq_1, chunk.count, shared.HK * K)
        number += 1
        chunk = get_chunk(shared, number)


@gluon.jit
def own_keys(shared, count, number):
    """Wait for queries and keys, and put zeros in place of other sequences' tokens."""
    K: gl.constexpr = shared.tiles.qk.shape[2]
    mbarrier.wait(shared.barriers.keys_loaded, number & 1)
    if count < C:
        for first in gl.static_range(0, K, COPY_WIDTH):
            zero_after(shared.tiles.qk.index(0).slice(first, COPY_WIDTH, 1), count)
            zero_after(shared.tiles.qk.index(1).slice(first, COPY_WIDTH, 1), count)
        fence_async_shared()
        barrier()
    mbarrier.arrive(shared.barriers.keys_ready, count=1)


@gluon.jit
def read_state(args, dq, q_smem, decay_q, place, nothing, half: gl.constexpr):
    """Add dO Sᵀ to half of dQ. Returns that half, and what outputs ask of decays."""
    read = multiply_state(args.shared.tiles, place, nothing, DO, STATE, half)
    read = warpgroup_mma_wait(0, deps=[read]) * gl.expand_dims(decay_q, 1)
    asked = decay_q
    if args.g2_ptr is not None:
        asked = gl.sum(read * load_keys(q_smem, half), axis=1)
    return dq + read, asked


@gluon.jit
def overlap(tiles, nothing, columns_smem):
    """⟨S, dS⟩ in GROUP_V parts: the diagonal of S dSᵀ. So no state has to be in registers."""
    layout: gl.constexpr = accumulator(GROUP_V)
    x = gl.zeros([GROUP_V, GROUP_V], gl.float32, layout)
    dS_t = state_of(tiles, nothing, DSTATE, 0).permute((1, 0))
    x = warpgroup_mma(state_of(tiles, nothing, STATE, 0), dS_t, x, use_acc=False, is_async=True)
    dS_t = state_of(tiles, nothing, DSTATE, 1).permute((1, 0))
    x = warpgroup_mma(state_of(tiles, nothing, STATE, 1), dS_t, x, is_async=True)
    x = warpgroup_mma_wait(0, deps=[x])
    i, j = square(columns_smem)
    return gl.sum(gl.where(i == j, x, 0.0), axis=1)


@gluon.jit
def sum_decays(sums):
    """dg of each token: from pairs that span it, writes before it, and reads at it or later."""
    layout: gl.constexpr = accumulator(C)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    t, j = square(sums.columns)
    wrote = gl.expand_dims(sums.wrote.load(by_column), 0)
    asked = sums.asked.load(by_column) + sums.by_query.load(by_column)
    kept = gl.expand_dims(sums.kept.load(by_column), 0)  # acts on each decay
    dg = gl.sum(gl.where(j < t, wrote, gl.expand_dims(asked, 0)) + kept, axis=1)
    return dg + sums.by_pair.load(gl.SliceLayout(1, layout))


@gluon.jit
def store_dg(args, dg, chunk, head):
    """Store dg of a value head; of a raw gate, and this chunk's shares of dA_log and ddt_bias."""
    layout: gl.constexpr = dg.type.layout
    rows = gl.arange(0, C, layout)
    own = rows < chunk.count
    head_v = chunk.head_k * args.shared.heads + head
    HV = args.shared.HK * args.shared.heads
    if args.shared.LOWS:
        if chunk.is_hard:
            at = head_v.to(gl.int64) * args.shared.tokens + chunk.row
            dg += per_token(args.by_low_ptr, at, chunk.count, layout)
    if args.A_log_ptr is not None:
        unit, batch, t = place_of_gates(args.shared, chunk)
        at = batch.to(gl.int64) * args.stride_g_b + t.to(gl.int64) * args.stride_g_t
        g_ptr = args.g_ptr + at + head_v * args.stride_g_h
        a = gl.load(g_ptr + rows.to(gl.int64) * args.stride_g_t, mask=own, other=0.0)
        a = a.to(gl.float32)
        if args.dt_bias_ptr is not None:
            a += gl.load(args.dt_bias_ptr + head_v).to(gl.float32)
        rate = -gl.exp2(gl.load(args.A_log_ptr + head_v).to(gl.float32) * LOG2_E)
        by_gate_ptr = args.by_gate_ptr + unit.to(gl.int64) * (2 * HV) + head_v
        dg = gl.where(own, dg, 0.0) * rate
        gl.store(by_gate_ptr, gl.sum(softplus(a) * dg, axis=0))
        dg = sigmoid(a) * dg
        gl.store(by_gate_ptr + HV, gl.sum(dg, axis=0))
    ptr = args.dg_ptr + chunk.row.to(gl.int64) * HV + head_v
    gl.store(ptr + rows * HV, dg.to(ptr.dtype.element_ty), mask=own)
