"""The pairs role of hopper_gradients_kernel: four warps make N, H and dbeta.

gradients_kernel.py has the equations. N and H go to shared memory, where the other groups use them
as operands. Pairs of tokens add N ∘ Q Kᵀ + H ∘ K Kᵀ to the gradients of decays, in float32.
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

from sluice.backends.hopper.kernels.constants import C
from sluice.backends.hopper.kernels.gluon_api import barrier
from sluice.backends.hopper.kernels.gradients_args import (
    first_place,
    get_chunk,
    next_place,
    phase_of,
    place_of,
)
from sluice.backends.hopper.kernels.gradients_parts import (
    DO,
    E,
    Y,
    low_e,
    low_n,
    low_y,
    nothing_of,
    per_token,
    rows_of,
    square,
    wait_for_keys,
)
from sluice.backends.hopper.kernels.layouts import accumulator, left_operand
from sluice.backends.hopper.kernels.state_groups import row_scale


@gluon.jit
def run_pairs(args):
    """Make N and H of each value head."""
    shared = args.shared
    tiles = shared.tiles
    barriers = shared.barriers
    sums = shared.sums
    DECAY: gl.constexpr = args.g2_ptr is not None
    zero = gl.program_id(0) * 0
    number = zero
    item = zero
    place = first_place(zero)
    if DECAY:
        i, j = square(sums.columns)
        tiles.ones.store((i < j).to(gl.float16))
        fence_async_shared()
    chunk = get_chunk(shared, number)
    while chunk.count > 0:
        for head in range(shared.heads):
            nothing = nothing_of(item)
            factors = load_factors(args, chunk, head)
            at = place_of(place, chunk.is_hard)
            mbarrier.wait(barriers.rows_ready.index(at), phase_of(place, at))
            n, h = multiply_errors(tiles, at)
            if shared.LOWS:
                if chunk.is_hard:
                    mbarrier.wait(barriers.rows_ready.index(1), phase_of(place, 1))
                    n, h = add_low(tiles, n, h, at, nothing)
            barrier()
            mbarrier.arrive(barriers.rows_free.index(at), count=1)
            store_dbeta(args, h, factors, chunk, head)
            n, h = scale_pairs(args, n, h, factors, chunk)
            mbarrier.wait(barriers.pairs_free, (item & 1) ^ 1)
            high = n.to(tiles.pairs.dtype)
            tiles.pairs.index(nothing).store(high)
            tiles.pairs.index(1 + nothing).store(h.to(tiles.pairs.dtype))
            if shared.LOWS:
                if chunk.is_hard:
                    low_n(tiles, nothing).store((n - high.to(gl.float32)).to(high.dtype))
            fence_async_shared()
            barrier()
            mbarrier.arrive(barriers.pairs_ready, count=1)
            if shared.LOWS:
                if chunk.is_hard:
                    mbarrier.arrive(barriers.rows_free.index(1), count=1)
            if head == 0:
                wait_for_keys(barriers, chunk.count, number)
            if DECAY:
                q_smem = tiles.qk.index(nothing)
                k_smem = tiles.qk.index(1 + nothing)
                pairs = ask_pairs(sums.columns, q_smem, k_smem, n, h)
                span = spanned(sums.columns, pairs, tiles.ones)
                mbarrier.wait(barriers.sums_free, (item & 1) ^ 1)
                sums.by_pair.store(span)
                barrier()
                mbarrier.arrive(barriers.spans_ready, count=1)
            item += 1
            place = next_place(place, chunk.is_hard)
        barrier()
        mbarrier.arrive(barriers.keys_free, count=1)
        number += 1
        chunk = get_chunk(shared, number)


@gluon.jit
def load_factors(args, chunk, head):
    """beta r_k and scale r_q of each token, beta, and γ; loaded long before they are needed."""
    shared = args.shared
    by_row: gl.constexpr = gl.SliceLayout(1, accumulator(C))
    head_v = chunk.head_k * shared.heads + head
    at = head_v.to(gl.int64) * shared.tokens + chunk.row
    beta = per_token(args.beta32_ptr, at, chunk.count, by_row)
    g2 = beta
    if args.g2_ptr is not None:
        g2 = per_token(args.g2_ptr, at, chunk.count, by_row)
    write = beta
    read = gl.full([C], 1.0, gl.float32, by_row) * args.scale
    if args.r_k_ptr is not None:
        at = chunk.head_k.to(gl.int64) * shared.tokens + chunk.row
        write = write * per_token(args.r_k_ptr, at, chunk.count, by_row)
        rows = gl.arange(0, C, by_row)
        r_q_ptr = args.r_q_ptr + chunk.row.to(gl.int64) * shared.HK + chunk.head_k
        on = rows < chunk.count
        read = read * gl.load(r_q_ptr + rows * shared.HK, mask=on, other=0.0)
    return write, read, beta, g2


@gluon.jit
def multiply_errors(tiles, place):
    """dO Eᵀ and Y Eᵀ [C, C]."""
    n = gl.zeros([C, C], gl.float32, accumulator(C))
    h = gl.zeros([C, C], gl.float32, accumulator(C))
    e_t = rows_of(tiles, place, E, 0).permute((1, 0))
    n = warpgroup_mma(rows_of(tiles, place, DO, 0), e_t, n, use_acc=False, is_async=True)
    h = warpgroup_mma(rows_of(tiles, place, Y, 0), e_t, h, use_acc=False, is_async=True)
    e_t = rows_of(tiles, place, E, 1).permute((1, 0))
    n = warpgroup_mma(rows_of(tiles, place, DO, 1), e_t, n, is_async=True)
    h = warpgroup_mma(rows_of(tiles, place, Y, 1), e_t, h, is_async=True)
    return warpgroup_mma_wait(0, deps=[n, h])


@gluon.jit
def add_low(tiles, n, h, place, nothing):
    """Add the low terms: dO E_lowᵀ to dO Eᵀ, and Y E_lowᵀ + Y_low Eᵀ to Y Eᵀ."""
    for half in gl.static_range(2):
        e_low_t = low_e(tiles, half, nothing).permute((1, 0))
        e_t = rows_of(tiles, place, E, half).permute((1, 0))
        n = warpgroup_mma(rows_of(tiles, place, DO, half), e_low_t, n)
        h = warpgroup_mma(rows_of(tiles, place, Y, half), e_low_t, h)
        h = warpgroup_mma(low_y(tiles, half, nothing), e_t, h)
    return n, h


@gluon.jit
def store_dbeta(args, h, factors, chunk, head):
    """dbeta is the diagonal of Y Eᵀ."""
    shared = args.shared
    rows = gl.arange(0, C, gl.SliceLayout(1, h.type.layout))
    i, j = square(shared.sums.columns)
    dbeta = gl.sum(gl.where(i == j, h, 0.0), axis=1)
    if args.RAW_BETA:
        dbeta = dbeta * factors[2] * (1.0 - factors[2] / args.beta_scale)
    HV = shared.HK * shared.heads
    at = chunk.row.to(gl.int64) * HV + chunk.head_k * shared.heads + head
    ptr = args.dbeta_ptr + at
    gl.store(ptr + rows * HV, dbeta.to(ptr.dtype.element_ty), mask=rows < chunk.count)


@gluon.jit
def scale_pairs(args, n, h, factors, chunk):
    """N and H of dO Eᵀ and Y Eᵀ."""
    sums = args.shared.sums
    layout: gl.constexpr = n.type.layout
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    i, j = square(sums.columns)
    sums.by_column.store(factors[0])
    if args.g2_ptr is not None:
        sums.g2.store(factors[3])
    barrier()
    fade = gl.expand_dims(sums.by_column.load(by_column), 0)
    if args.g2_ptr is not None:
        g2 = gl.expand_dims(factors[3], 1)
        fade = fade * gl.exp2(g2 - gl.expand_dims(sums.g2.load(by_column), 0))
    # a select, no product with 0: above the diagonal Γ may be inf, after the tokens E may be NaN
    own = i < chunk.count
    n = gl.where((i >= j) & own, n * (fade * gl.expand_dims(factors[1], 1)), 0.0)
    h = gl.where((i > j) & own, h * (fade * gl.expand_dims(-factors[0], 1)), 0.0)
    return n, h


@gluon.jit
def ask_pairs(columns_smem, q_smem, k_smem, n, h):
    """What pairs below the diagonal ask of decays: N ∘ Q Kᵀ + H ∘ K Kᵀ.

    One product after the other: there are no registers for both at once.
    """
    layout: gl.constexpr = n.type.layout
    zero = gl.zeros([C, C], gl.float32, layout)
    k_t = k_smem.permute((1, 0))
    pairs = h * warpgroup_mma(k_smem, k_t, zero, use_acc=False)
    qk = warpgroup_mma(q_smem, k_t, zero, use_acc=False)
    i, j = square(columns_smem)
    return pairs + gl.where(i > j, n * qk, 0.0)


@gluon.jit
def spanned(columns_smem, pairs, ones_smem):
    """The pairs that span each token t: Σ_{i >= t > j} pairs_ij, of pairs below the diagonal.

    The sums over j are products with ones. Pairs are two float16 terms there, 22 bits in all.
    """
    layout: gl.constexpr = pairs.type.layout
    left: gl.constexpr = left_operand(C)
    up, down = row_scale(pairs)
    pairs = pairs * up
    high = pairs.to(gl.float16)
    low = (pairs - high.to(gl.float32)).to(gl.float16)
    zero = gl.zeros([C, C], gl.float32, layout)
    sums = warpgroup_mma(gl.convert_layout(low, left), ones_smem, zero, use_acc=False)
    sums = warpgroup_mma(gl.convert_layout(high, left), ones_smem, sums)
    i, j = square(columns_smem)
    sums = gl.where(i >= j, sums * down, 0.0)
    return gl.sum(sums, axis=0)
