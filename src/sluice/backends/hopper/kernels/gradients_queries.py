"""The queries role of hopper_gradients_kernel: four warps make N, H, dQ and dbeta.

gradients_kernel.py has the equations. N and H go to shared memory, from which both groups multiply
them. What pairs of tokens ask of decays is N ∘ Q Kᵀ + H ∘ K Kᵀ, in float32.
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

from sluice.backends.hopper.kernels.constants import COPY_WIDTH, C
from sluice.backends.hopper.kernels.gluon_api import barrier, reinterpret
from sluice.backends.hopper.kernels.gradients_args import advance
from sluice.backends.hopper.kernels.gradients_loader import low_e, low_y
from sluice.backends.hopper.kernels.gradients_parts import per_token, row_sums, store_gradient
from sluice.backends.hopper.kernels.layouts import accumulator, left_operand
from sluice.backends.hopper.kernels.state_products import zero_after


@gluon.jit
def run_queries(args):
    """Make N and H of each value head, and dQ of the query head that they share."""
    tiles = args.tiles
    barriers = args.barriers
    chunk = args.chunk
    K: gl.constexpr = tiles.k.shape[1]
    DECAY: gl.constexpr = args.g2_ptr is not None
    acc_c: gl.constexpr = accumulator(C)
    acc_k: gl.constexpr = accumulator(K)
    by_row: gl.constexpr = gl.SliceLayout(1, acc_c)
    if chunk.count > 0:
        wait_for_keys(args, K)
        dq = gl.zeros([C, K], gl.float32, acc_k)
        stage = 0
        phase = 0
        for head in range(chunk.heads):
            of_head = (chunk.first_head + head).to(gl.int64) * chunk.tokens + chunk.row
            decay_q = per_token(args.decay_q_ptr, of_head, chunk.count, gl.SliceLayout(1, acc_k))
            n, h, read, stage, phase = multiply_values(args, stage, phase, K)
            if chunk.is_hard is not None:
                if chunk.is_hard:
                    mbarrier.wait(barriers.low_ready, head & 1)
                    n, h = add_low(tiles, n, h, stage, chunk.stages)
                    barrier()
                    mbarrier.arrive(barriers.low_free, count=1)
            free_stages(barriers, stage, chunk.stages)
            stage, phase = advance(stage, phase, chunk.stages)

            read = read * gl.expand_dims(decay_q, 1)
            asked = decay_q
            if DECAY:
                asked = row_sums(read, tiles.q)
            dq = dq + read
            store_dbeta(args, h, head, of_head)
            n, h, pairs = make_pairs(args, n, h, of_head)

            mbarrier.wait(barriers.pairs_free, (head & 1) ^ 1)
            if DECAY:
                rows = gl.arange(0, C, asked.type.layout)
                args.sums.by_query.store(gl.where(rows < chunk.count, asked, 0.0))
                args.sums.by_pair.store(spanned(pairs, tiles.h))
                barrier()  # H takes the place of the ones
            high = n.to(tiles.n.dtype)
            tiles.n.store(high)
            tiles.h.store(h.to(tiles.h.dtype))
            fence_async_shared()
            barrier()
            mbarrier.arrive(barriers.pairs_ready, count=1)
            dq = warpgroup_mma(tiles.n, tiles.k, dq)
            if chunk.is_hard is not None:
                if chunk.is_hard:
                    low = gl.convert_layout(n - high.to(gl.float32), left_operand(K))
                    dq = warpgroup_mma(low.to(tiles.k.dtype), tiles.k, dq)
        HQ = chunk.heads_k
        at = chunk.row.to(gl.int64) * HQ + chunk.head_k
        r_q_ptr = args.r_q_ptr
        if r_q_ptr is not None:
            r_q_ptr += at
        store_gradient(args.dq_ptr + at * K, dq, tiles.q, r_q_ptr, HQ, chunk.count, HQ * K, K)


@gluon.jit
def wait_for_keys(args, K: gl.constexpr):
    """Wait for queries and keys, and put zeros in place of other sequences' tokens."""
    mbarrier.wait(args.barriers.keys_loaded, 0)
    if args.chunk.count < C:
        for first in gl.static_range(0, K, COPY_WIDTH):
            zero_after(args.tiles.q.slice(first, COPY_WIDTH, 1), args.chunk.count)
            zero_after(args.tiles.k.slice(first, COPY_WIDTH, 1), args.chunk.count)
        fence_async_shared()
        barrier()
    mbarrier.arrive(args.barriers.keys_ready, count=1)


@gluon.jit
def multiply_values(args, stage, phase, K: gl.constexpr):
    """dO Eᵀ, Y Eᵀ [C, C] and dO Sᵀ [C, K] of a head, and its second stage."""
    tiles = args.tiles
    ready = args.barriers.stage_ready
    n = gl.zeros([C, C], gl.float32, accumulator(C))
    h = gl.zeros([C, C], gl.float32, accumulator(C))
    read = gl.zeros([C, K], gl.float32, accumulator(K))
    for half in gl.static_range(2):
        if half == 1:
            stage, phase = advance(stage, phase, args.chunk.stages)
        mbarrier.wait(ready.index(stage), phase)
        do = tiles.rows.index(3 * stage)
        e_t = tiles.rows.index(3 * stage + 1).permute((1, 0))
        y = tiles.rows.index(3 * stage + 2)
        n = warpgroup_mma(do, e_t, n, use_acc=half == 1, is_async=True)
        h = warpgroup_mma(y, e_t, h, use_acc=half == 1, is_async=True)
        S = tiles.states.index(2 * stage)
        read = warpgroup_mma(do, S, read, use_acc=half == 1, is_async=True)
    n, h, read = warpgroup_mma_wait(0, deps=[n, h, read])
    return n, h, read, stage, phase


@gluon.jit
def first_stage(stage, stages):
    """The stage before ``stage``."""
    return gl.where(stage == 0, stages, stage) - 1


@gluon.jit
def free_stages(barriers, stage, stages):
    """Tell the loader that this group has read both stages of a head, of which this is the last."""
    barrier()
    mbarrier.arrive(barriers.stage_free.index(first_stage(stage, stages)), count=1)
    mbarrier.arrive(barriers.stage_free.index(stage), count=1)


@gluon.jit
def add_low(tiles, n, h, stage, stages):
    """Add the low terms: dO E_lowᵀ to dO Eᵀ, and Y E_lowᵀ + Y_low Eᵀ to Y Eᵀ."""
    for half in gl.static_range(2):
        at = stage
        if half == 0:
            at = first_stage(stage, stages)
        e_low_t = low_e(tiles, half).permute((1, 0))
        e_t = tiles.rows.index(3 * at + 1).permute((1, 0))
        n = warpgroup_mma(tiles.rows.index(3 * at), e_low_t, n)
        h = warpgroup_mma(tiles.rows.index(3 * at + 2), e_low_t, h)
        h = warpgroup_mma(low_y(tiles, half), e_t, h)
    return n, h


@gluon.jit
def store_dbeta(args, h, head, of_head):
    """dbeta is the diagonal of Y Eᵀ."""
    chunk = args.chunk
    layout: gl.constexpr = h.type.layout
    rows = gl.arange(0, C, gl.SliceLayout(1, layout))
    i = gl.expand_dims(rows, 1)
    j = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, layout)), 0)
    dbeta = gl.sum(gl.where(i == j, h, 0.0), axis=1)
    if args.RAW_BETA:
        beta = per_token(args.beta32_ptr, of_head, chunk.count, gl.SliceLayout(1, layout))
        dbeta = dbeta * beta * (1.0 - beta / args.beta_scale)
    HV = chunk.heads_k * chunk.heads
    at = chunk.row.to(gl.int64) * HV + chunk.first_head + head
    ptr = args.dbeta_ptr + at
    gl.store(ptr + rows * HV, dbeta.to(ptr.dtype.element_ty), mask=rows < chunk.count)


@gluon.jit
def make_pairs(args, n, h, of_head):
    """N and H of dO Eᵀ and Y Eᵀ, and what pairs below the diagonal ask of decays."""
    tiles = args.tiles
    chunk = args.chunk
    layout: gl.constexpr = n.type.layout
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    zero = gl.zeros([C, C], gl.float32, layout)
    k_t = tiles.k.permute((1, 0))
    pairs = zero
    if args.g2_ptr is not None:
        qk = warpgroup_mma(tiles.q, k_t, zero, use_acc=False, is_async=True)
        kk = warpgroup_mma(tiles.k, k_t, zero, use_acc=False, is_async=True)
    rows = gl.arange(0, C, by_row)
    i = gl.expand_dims(rows, 1)
    j = gl.expand_dims(gl.arange(0, C, by_column), 0)
    write_i = per_token(args.beta32_ptr, of_head, chunk.count, by_row)
    write_j = per_token(args.beta32_ptr, of_head, chunk.count, by_column)
    read = rows.to(gl.float32) * 0.0 + args.scale
    if args.r_k_ptr is not None:
        at = chunk.head_k.to(gl.int64) * chunk.tokens + chunk.row
        write_i = write_i * per_token(args.r_k_ptr, at, chunk.count, by_row)
        write_j = write_j * per_token(args.r_k_ptr, at, chunk.count, by_column)
        at = chunk.row.to(gl.int64) * chunk.heads_k + chunk.head_k
        r_q_ptr = args.r_q_ptr + at + rows * chunk.heads_k
        read = read * gl.load(r_q_ptr, mask=rows < chunk.count, other=0.0)
    fade = gl.expand_dims(write_j, 0) + zero
    if args.g2_ptr is not None:
        g2_i = per_token(args.g2_ptr, of_head, chunk.count, by_row)
        g2_j = per_token(args.g2_ptr, of_head, chunk.count, by_column)
        fade = fade * gl.exp2(gl.expand_dims(g2_i, 1) - gl.expand_dims(g2_j, 0))
    # a select, no product with 0: above the diagonal Γ may be inf, after the tokens E may be NaN
    own = i < chunk.count
    n = gl.where((i >= j) & own, n * fade * gl.expand_dims(read, 1), 0.0)
    h = gl.where((i > j) & own, h * fade * gl.expand_dims(-write_i, 1), 0.0)
    if args.g2_ptr is not None:
        qk, kk = warpgroup_mma_wait(0, deps=[qk, kk])
        pairs = gl.where(i > j, n * qk, 0.0) + h * kk
    return n, h, pairs


@gluon.jit
def spanned(pairs, free_smem):
    """What spans each token t: Σ_{i >= t > j} pairs_ij, of pairs below the diagonal.

    The sums over j are products with ones, of two float16 terms that hold 22 bits of each pair.
    ``free_smem`` [C, C] holds the ones.
    """
    layout: gl.constexpr = pairs.type.layout
    left: gl.constexpr = left_operand(C)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.float16)
    i = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, layout)), 1)
    j = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, layout)), 0)
    ones = reinterpret(free_smem, gl.float16, [C, C], square)
    ones.store((i < j).to(gl.float16))
    fence_async_shared()
    barrier()
    bits = gl.max(gl.abs(pairs), axis=1).to(gl.int32, bitcast=True) & 0x7F800000
    bits = gl.where(bits == 0, (127 + 13) * (1 << 23), gl.maximum(bits, (127 - 47) * (1 << 23)))
    up = (254 * (1 << 23) - bits + 13 * (1 << 23)).to(gl.float32, bitcast=True)
    down = (bits - 13 * (1 << 23)).to(gl.float32, bitcast=True)
    pairs = pairs * gl.expand_dims(up, 1)
    high = pairs.to(gl.float16)
    low = (pairs - high.to(gl.float32)).to(gl.float16)
    zero = gl.zeros([C, C], gl.float32, layout)
    sums = warpgroup_mma(gl.convert_layout(low, left), ones, zero, use_acc=False)
    sums = warpgroup_mma(gl.convert_layout(high, left), ones, sums)
    sums = gl.where(i >= j, sums * gl.expand_dims(down, 1), 0.0)
    return gl.sum(sums, axis=0)
