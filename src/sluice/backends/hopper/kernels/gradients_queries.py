"""The queries role of hopper_gradients_kernel: four warps make N, H, dQ and dbeta.

gradients_kernel.py has the equations. N and H go to shared memory, from which both groups multiply
them. What pairs of tokens ask of decays is N ∘ Q Kᵀ + H ∘ K Kᵀ, in float32.
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

from sluice.backends.hopper.kernels.constants import COPY_WIDTH, C
from sluice.backends.hopper.kernels.gluon_api import barrier, reinterpret
from sluice.backends.hopper.kernels.gradients_args import advance
from sluice.backends.hopper.kernels.gradients_loader import low_e, low_y
from sluice.backends.hopper.kernels.gradients_parts import (
    DO,
    STATE,
    E,
    Y,
    free_head,
    key_columns,
    load_keys,
    multiply_state,
    nothing_of,
    per_token,
    rows_of,
    square,
    store_gradient,
    wait_for_head,
)
from sluice.backends.hopper.kernels.layouts import accumulator, left_operand
from sluice.backends.hopper.kernels.state_products import zero_after


@gluon.jit
def run_queries(args):
    """Make N and H of each value head, and dQ of the query head that they share."""
    tiles = args.tiles
    barriers = args.barriers
    chunk = args.chunk
    K: gl.constexpr = tiles.qk.shape[2]
    DECAY: gl.constexpr = args.g2_ptr is not None
    acc_c: gl.constexpr = accumulator(C)
    by_row: gl.constexpr = gl.SliceLayout(1, acc_c)
    if chunk.count > 0:
        wait_for_keys(args, K)
        own = gl.arange(0, C, by_row) < chunk.count
        dq_0 = gl.zeros([C, COPY_WIDTH], gl.float32, acc_c)
        dq_1 = gl.zeros([C, COPY_WIDTH], gl.float32, acc_c)
        stage = 0
        phase = 0
        for head in range(chunk.heads):
            nothing = nothing_of(stage)
            again = nothing_of(chunk.row)
            q_smem = tiles.qk.index(nothing)
            k_smem = tiles.qk.index(1 + nothing)
            n_smem = tiles.pairs.index(nothing)
            h_smem = tiles.pairs.index(1 + nothing)
            of_head = (chunk.first_head + head).to(gl.int64) * chunk.tokens + chunk.row
            decay_q = per_token(args.decay_q_ptr, of_head, chunk.count, by_row)
            first, stage, phase = wait_for_head(barriers, stage, phase, chunk.stages)
            n, h = multiply_errors(tiles, first, stage)
            if chunk.LOWS:
                if chunk.is_hard:
                    mbarrier.wait(barriers.low_ready, head & 1)
                    n, h = add_low(tiles, n, h, first, stage, nothing)
                    barrier()
                    mbarrier.arrive(barriers.low_free, count=1)
            store_dbeta(args, h, head, of_head)
            n, h = scale_pairs(args, n, h, of_head)
            if DECAY:
                pairs = ask_pairs(args.sums.columns, q_smem, k_smem, n, h)
            mbarrier.wait(barriers.pairs_free, (head & 1) ^ 1)
            h_smem.store(h.to(h_smem.dtype))
            if DECAY:
                store_ones(args.sums.columns, n_smem)
                fence_async_shared()
                barrier()
                args.sums.by_pair.store(spanned(args.sums.columns, pairs, n_smem))
                barrier()  # N takes the place of the ones
            high = n.to(n_smem.dtype)
            n_smem.store(high)
            fence_async_shared()
            barrier()
            mbarrier.arrive(barriers.pairs_ready, count=1)

            dq_0, asked_0 = read_state(args, dq_0, q_smem, decay_q, first, stage, 0)
            dq_0 = warpgroup_mma(n_smem, key_columns(k_smem, 0), dq_0, is_async=True)
            n_smem = tiles.pairs.index(nothing + again)
            k_smem = tiles.qk.index(1 + nothing + again)
            q_smem = tiles.qk.index(nothing + again)
            dq_1, asked_1 = read_state(args, dq_1, q_smem, decay_q, first + again, stage + again, 1)
            dq_1 = warpgroup_mma(n_smem, key_columns(k_smem, 1), dq_1, is_async=True)
            free_head(barriers, first, stage)
            stage, phase = advance(stage, phase, chunk.stages)
            if DECAY:
                args.sums.by_query.store(gl.where(own, asked_0 + asked_1, 0.0))
                barrier()
                mbarrier.arrive(barriers.asked_ready, count=1)
            dq_0, dq_1 = warpgroup_mma_wait(0, deps=[dq_0, dq_1])
            if chunk.LOWS:
                if chunk.is_hard:
                    low = gl.convert_layout(n - high.to(gl.float32), left_operand(C))
                    low = low.to(k_smem.dtype)
                    dq_0 = warpgroup_mma(low, key_columns(k_smem, 0), dq_0)
                    dq_1 = warpgroup_mma(low, key_columns(k_smem, 1), dq_1)
        HQ = chunk.heads_k
        at = chunk.row.to(gl.int64) * HQ + chunk.head_k
        r_q_ptr = args.r_q_ptr
        if r_q_ptr is not None:
            r_q_ptr += at
        store_gradient(
            args.dq_ptr + at * K, dq_0, dq_1, tiles.qk.index(0), r_q_ptr, HQ, chunk.count, HQ * K
        )


@gluon.jit
def wait_for_keys(args, K: gl.constexpr):
    """Wait for queries and keys, and put zeros in place of other sequences' tokens."""
    mbarrier.wait(args.barriers.keys_loaded, 0)
    if args.chunk.count < C:
        for first in gl.static_range(0, K, COPY_WIDTH):
            zero_after(args.tiles.qk.index(0).slice(first, COPY_WIDTH, 1), args.chunk.count)
            zero_after(args.tiles.qk.index(1).slice(first, COPY_WIDTH, 1), args.chunk.count)
        fence_async_shared()
        barrier()
    mbarrier.arrive(args.barriers.keys_ready, count=1)


@gluon.jit
def read_state(args, dq, q_smem, decay_q, first, second, half: gl.constexpr):
    """Add what outputs read of the state to half of dQ; what they ask of decays."""
    read = multiply_state(args.tiles, first, second, DO, STATE, half)
    read = warpgroup_mma_wait(0, deps=[read]) * gl.expand_dims(decay_q, 1)
    asked = decay_q
    if args.g2_ptr is not None:
        asked = gl.sum(read * load_keys(q_smem, half), axis=1)
    return dq + read, asked


@gluon.jit
def multiply_errors(tiles, first, second):
    """dO Eᵀ and Y Eᵀ [C, C]."""
    n = gl.zeros([C, C], gl.float32, accumulator(C))
    h = gl.zeros([C, C], gl.float32, accumulator(C))
    e_t = rows_of(tiles, first, E).permute((1, 0))
    n = warpgroup_mma(rows_of(tiles, first, DO), e_t, n, use_acc=False, is_async=True)
    h = warpgroup_mma(rows_of(tiles, first, Y), e_t, h, use_acc=False, is_async=True)
    e_t = rows_of(tiles, second, E).permute((1, 0))
    n = warpgroup_mma(rows_of(tiles, second, DO), e_t, n, is_async=True)
    h = warpgroup_mma(rows_of(tiles, second, Y), e_t, h, is_async=True)
    return warpgroup_mma_wait(0, deps=[n, h])


@gluon.jit
def add_low(tiles, n, h, first, second, nothing):
    """Add the low terms: dO E_lowᵀ to dO Eᵀ, and Y E_lowᵀ + Y_low Eᵀ to Y Eᵀ."""
    for half in gl.static_range(2):
        stage = second
        if half == 0:
            stage = first
        e_low_t = low_e(tiles, half, nothing).permute((1, 0))
        e_t = rows_of(tiles, stage, E).permute((1, 0))
        n = warpgroup_mma(rows_of(tiles, stage, DO), e_low_t, n)
        h = warpgroup_mma(rows_of(tiles, stage, Y), e_low_t, h)
        h = warpgroup_mma(low_y(tiles, half, nothing), e_t, h)
    return n, h


@gluon.jit
def store_dbeta(args, h, head, of_head):
    """dbeta is the diagonal of Y Eᵀ."""
    chunk = args.chunk
    layout: gl.constexpr = h.type.layout
    rows = gl.arange(0, C, gl.SliceLayout(1, layout))
    i, j = square(args.sums.columns)
    dbeta = gl.sum(gl.where(i == j, h, 0.0), axis=1)
    if args.RAW_BETA:
        beta = per_token(args.beta32_ptr, of_head, chunk.count, gl.SliceLayout(1, layout))
        dbeta = dbeta * beta * (1.0 - beta / args.beta_scale)
    HV = chunk.heads_k * chunk.heads
    at = chunk.row.to(gl.int64) * HV + chunk.first_head + head
    ptr = args.dbeta_ptr + at
    gl.store(ptr + rows * HV, dbeta.to(ptr.dtype.element_ty), mask=rows < chunk.count)


@gluon.jit
def scale_pairs(args, n, h, of_head):
    """N and H of dO Eᵀ and Y Eᵀ."""
    chunk = args.chunk
    layout: gl.constexpr = n.type.layout
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    rows = gl.arange(0, C, by_row)
    i, j = square(args.sums.columns)
    write_i = per_token(args.beta32_ptr, of_head, chunk.count, by_row)
    read_i = gl.full([C], 1.0, gl.float32, by_row) * args.scale
    if args.r_k_ptr is not None:
        at = chunk.head_k.to(gl.int64) * chunk.tokens + chunk.row
        write_i = write_i * per_token(args.r_k_ptr, at, chunk.count, by_row)
        at = chunk.row.to(gl.int64) * chunk.heads_k + chunk.head_k
        r_q_ptr = args.r_q_ptr + at + rows * chunk.heads_k
        read_i = read_i * gl.load(r_q_ptr, mask=rows < chunk.count, other=0.0)
    sums = args.sums
    sums.by_column.store(write_i)
    if args.g2_ptr is not None:
        g2 = per_token(args.g2_ptr, of_head, chunk.count, by_row)
        sums.g2.store(g2)
    barrier()
    fade = gl.expand_dims(sums.by_column.load(by_column), 0)
    if args.g2_ptr is not None:
        fade = fade * gl.exp2(gl.expand_dims(g2, 1) - gl.expand_dims(sums.g2.load(by_column), 0))
    # a select, no product with 0: above the diagonal Γ may be inf, after the tokens E may be NaN
    own = i < chunk.count
    n = gl.where((i >= j) & own, n * (fade * gl.expand_dims(read_i, 1)), 0.0)
    h = gl.where((i > j) & own, h * (fade * gl.expand_dims(-write_i, 1)), 0.0)
    return n, h


@gluon.jit
def ask_pairs(columns_smem, q_smem, k_smem, n, h):
    """What pairs below the diagonal ask of decays: N ∘ Q Kᵀ + H ∘ K Kᵀ.

    One product after the other: registers hold no more.
    """
    layout: gl.constexpr = n.type.layout
    zero = gl.zeros([C, C], gl.float32, layout)
    k_t = k_smem.permute((1, 0))
    pairs = h * warpgroup_mma(k_smem, k_t, zero, use_acc=False)
    qk = warpgroup_mma(q_smem, k_t, zero, use_acc=False)
    i, j = square(columns_smem)
    return pairs + gl.where(i > j, n * qk, 0.0)


@gluon.jit
def as_ones(smem):
    """Tile [C, C] of any 16-bit type as one of float16."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.float16)
    return reinterpret(smem, gl.float16, [C, C], layout)


@gluon.jit
def store_ones(columns_smem, smem):
    """Store what ``spanned`` multiplies by: ones above the diagonal."""
    i, j = square(columns_smem)
    as_ones(smem).store((i < j).to(gl.float16))


@gluon.jit
def spanned(columns_smem, pairs, ones_smem):
    """What spans each token t: Σ_{i >= t > j} pairs_ij, of pairs below the diagonal.

    The sums over j are products with ones, of two float16 terms that hold 22 bits of each pair.
    """
    layout: gl.constexpr = pairs.type.layout
    left: gl.constexpr = left_operand(C)
    bits = gl.max(gl.abs(pairs), axis=1).to(gl.int32, bitcast=True) & 0x7F800000
    bits = gl.where(bits == 0, (127 + 13) * (1 << 23), gl.maximum(bits, (127 - 47) * (1 << 23)))
    up = (254 * (1 << 23) - bits + 13 * (1 << 23)).to(gl.float32, bitcast=True)
    down = (bits - 13 * (1 << 23)).to(gl.float32, bitcast=True)
    pairs = pairs * gl.expand_dims(up, 1)
    high = pairs.to(gl.float16)
    low = (pairs - high.to(gl.float32)).to(gl.float16)
    zero = gl.zeros([C, C], gl.float32, layout)
    sums = warpgroup_mma(gl.convert_layout(low, left), as_ones(ones_smem), zero, use_acc=False)
    sums = warpgroup_mma(gl.convert_layout(high, left), as_ones(ones_smem), sums)
    i, j = square(columns_smem)
    sums = gl.where(i >= j, sums * gl.expand_dims(down, 1), 0.0)
    return gl.sum(sums, axis=0)
