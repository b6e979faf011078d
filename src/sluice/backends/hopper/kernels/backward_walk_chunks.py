"""The warps of hopper_walk_kernel that hold X: 64 value columns, through all chunks of a program.

backward_walk_kernel.py has the equations. Products run in the order in which they are issued, so
those that the chain does not wait for (Pᵀ dO, Qᵀ dO) are issued after those that it waits for.

Two kinds of chunks are special. The last chunk of a sequence may be short: the rest of its tiles
belongs to another sequence, and is overwritten with zeros. In hard chunks
(triton/kernels/backward_chunks.py) P, X as a factor of keys, Bg and its operand, and the updates of
X have low terms, which take more products. The low terms of X, and of E or Y, are stored too.
"""

# ruff: noqa: SIM102 (constexpr branches stay apart)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sluice.backends.hopper.kernels.backward_walk_loader import token_of
from sluice.backends.hopper.kernels.constants import COPY_WIDTH, GROUP_V, C
from sluice.backends.hopper.kernels.gluon_api import async_store, barrier
from sluice.backends.hopper.kernels.layouts import accumulator, left_operand
from sluice.backends.hopper.kernels.state_args import advance
from sluice.backends.hopper.kernels.state_groups import (
    per_token,
    state_offsets,
    store_output,
    to_float16,
)
from sluice.backends.hopper.kernels.state_products import zero_after


@gluon.jit
def run_walk(args, sizes):
    """Take X through all chunks of the program."""
    BACK: gl.constexpr = sizes.BACK
    EFFECT: gl.constexpr = sizes.EFFECT
    acc_c: gl.constexpr = accumulator(C)
    acc_k: gl.constexpr = accumulator(sizes.K)
    left_c: gl.constexpr = left_operand(C)
    left_k: gl.constexpr = left_operand(sizes.K)
    tiles = args.tiles
    factors = args.factors
    dtype: gl.constexpr = tiles.k.dtype
    zero = gl.zeros([GROUP_V, C], gl.float32, acc_c)
    chunks = gl.cdiv(args.tokens, C)
    X = load_x(args, sizes)
    stage = 0
    phase = 0
    hard = is_hard(args, 0, chunks, sizes)
    for i in range(chunks):
        t = token_of(i, chunks, sizes)
        count = gl.minimum(args.tokens - t, C)
        this_hard = hard
        hard = is_hard(args, i + 1, chunks, sizes)  # loaded a chunk ahead of its use
        mbarrier.wait(args.barriers.tiles_ready.index(stage), phase)
        mbarrier.wait(args.barriers.factors_ready.index(stage), phase)
        if count < C:
            zero_tiles(tiles, sizes, stage, count)
        k_smem = tiles.k.index(stage)

        # K X, and meanwhile X to memory
        x_left = gl.convert_layout(X, left_c).to(dtype)
        u = warpgroup_mma(x_left, k_smem.permute((1, 0)), zero, use_acc=False, is_async=True)
        v = tiles.v.index(stage).permute((1, 0)).load(acc_c)
        if BACK:
            v_left = gl.convert_layout(v, left_c)
            r = warpgroup_mma(v_left, tiles.p.index(stage), zero, use_acc=False, is_async=True)
        if not EFFECT:
            tma.store_wait(2 if BACK else 1)  # of the chunk before: its X has left
            tiles.x.store(X.to(dtype))
            fence_async_shared()
            barrier()
            row_x = args.row_x + (t // C) * args.step_x
            async_store(args.x_desc, [row_x, 0], tiles.x)
        beta = per_token(factors.beta, stage)
        read = per_token(factors.read, stage)
        if BACK:
            u, r = warpgroup_mma_wait(0, deps=[u, r])
            if sizes.HARD:
                if this_hard:
                    u = add_low_state(u, X, args, sizes, k_smem, t, count)
                    r = add_low_pairs(r, v_left, args, args.row + t, count)
            r = r + u * read
        else:
            u = warpgroup_mma_wait(0, deps=[u])
            if sizes.HARD:
                if this_hard:
                    u = add_low_state(u, X, args, sizes, k_smem, t, count)
            v = v.to(gl.float32)
            if EFFECT:
                v = v * args.values.to(gl.float32)
            r = v + u * read

        # E, or Y
        r_left, up, down = to_float16(r * beta)
        b_smem = tiles.b.index(stage)
        if not BACK:
            b_smem = b_smem.permute((1, 0))
        y = warpgroup_mma(r_left, b_smem, zero, use_acc=False, is_async=True)
        decay_all = factors.decay_all.index(stage).load(gl.SliceLayout(1, acc_k))
        X = X * gl.expand_dims(decay_all, 1)
        b_down = factors.b_down.index(stage).load(gl.SliceLayout(1, acc_c))
        down = down * gl.expand_dims(b_down, 1)
        write = per_token(factors.write, stage)
        if BACK:
            decay_q = per_token(factors.decay_q, stage)
            v_out = gl.convert_layout(v.to(gl.float32) * decay_q, left_k).to(dtype)
            X = warpgroup_mma(v_out, tiles.q.index(stage), X, is_async=True)
            y = warpgroup_mma_wait(1, deps=[y])
        else:
            y = warpgroup_mma_wait(0, deps=[y])
        if sizes.HARD:
            if this_hard:
                rest = gl.convert_layout(r * beta * up, left_c) - r_left.to(gl.float32)
                y = warpgroup_mma(rest.to(gl.float16), b_smem, y)
                load_low_terms(args.b_low_ptr, tiles.b_low, args, args.row + t, count)
                b_low = tiles.b_low if BACK else tiles.b_low.permute((1, 0))
                y = warpgroup_mma(r_left, b_low, y)
        y = r - y * down
        d = y * beta

        # X after the chunk, and meanwhile E, or Y and dV, to memory
        d_left = gl.convert_layout(d * write, left_k).to(dtype)
        X = warpgroup_mma(d_left, k_smem, X, is_async=True)
        if not EFFECT:
            tma.store_wait(1)  # all but this chunk's X: what y and dv held has left
            tiles.y.permute((1, 0)).store(y.to(dtype))
            if BACK:
                tiles.dv.permute((1, 0)).store(d.to(dtype))
            fence_async_shared()
            barrier()
            if count == C:
                async_store(args.y_desc, [args.row + t, args.column_v], tiles.y)
                if BACK:
                    async_store(args.dv_desc, [args.row + t, args.column_v], tiles.dv)
            else:
                store_output(args.y_ptr, y.to(dtype), args.row + t, count, args.stride_v_t)
                if BACK:
                    store_output(args.dv_ptr, d.to(dtype), args.row + t, count, args.stride_v_t)
                tma.store_wait(0)  # the next waits count stores that were not made here
            if sizes.HARD:
                if this_hard:
                    low = (y - y.to(dtype).to(gl.float32)).to(dtype)
                    store_output(args.y_low_ptr, low, args.row + t, count, args.stride_v_t)
        X = warpgroup_mma_wait(0, deps=[X])
        if sizes.HARD:
            if this_hard:
                X = add_low_updates(X, d, args, sizes, stage)
        barrier()
        mbarrier.arrive(args.barriers.stage_free.index(stage), count=1)
        stage, phase = advance(stage, phase, sizes.STAGES)
    if not EFFECT:
        tma.store_wait(0)
    if args.target_ptr is not None:
        # The compiler cannot know that this is 0. If it did, it would keep the offsets of load_x
        # through the loop, in half of the registers.
        nothing = gl.minimum(args.tokens, 0)
        STATE_KV: gl.constexpr = sizes.STATE_KV and not EFFECT
        at = state_offsets(args.first_v + nothing, sizes.K, sizes.V, STATE_KV)
        X = X.to(args.target_ptr.dtype.element_ty)
        gl.store(args.target_ptr + at, X, mask=(at >= 0) & args.write)


@gluon.jit
def load_x(args, sizes):
    """X [64, K] before the first chunk. An effect begins with zeros, or with the identity."""
    K: gl.constexpr = sizes.K
    V: gl.constexpr = sizes.V
    layout: gl.constexpr = accumulator(K)
    if sizes.EFFECT:
        rows = args.first_v + gl.arange(0, GROUP_V, gl.SliceLayout(1, layout))
        columns = gl.arange(0, K, gl.SliceLayout(0, layout))
        diagonal = gl.expand_dims(rows, 1) == gl.expand_dims(columns, 0)
        X = diagonal.to(gl.float32) * (1 - args.values).to(gl.float32)
    else:
        X = gl.zeros([GROUP_V, K], gl.float32, layout)
        if args.source_ptr is not None:
            at = state_offsets(args.first_v, K, V, sizes.STATE_KV)
            on = (at >= 0) & args.has_source
            X += gl.load(args.source_ptr + at, mask=on, other=0.0).to(gl.float32)
        if args.segments_ptr is not None:
            at = state_offsets(args.first_v, K, V, False)
            X += gl.load(args.segments_ptr + at, mask=(at >= 0) & args.is_split, other=0.0)
    return X


@gluon.jit
def is_hard(args, i, chunks, sizes):
    """Whether the i-th chunk of the walk is hard; 0 after the last."""
    hard = i * 0
    if sizes.HARD:
        at = gl.maximum(token_of(i, chunks, sizes) // C, 0)
        hard = gl.load(args.hard_ptr + at, mask=i < chunks, other=0)
    return hard


@gluon.jit
def zero_tiles(tiles, sizes, stage, count):
    """Zeros in place of tokens after the end of a sequence, which are another sequence's."""
    for first in gl.static_range(0, sizes.K, COPY_WIDTH):
        zero_after(tiles.k.index(stage).slice(first, COPY_WIDTH, 1), count)
        if sizes.BACK:
            zero_after(tiles.q.index(stage).slice(first, COPY_WIDTH, 1), count)
    zero_after(tiles.v.index(stage), count)
    zero_after(tiles.b.index(stage), count)
    if sizes.BACK:
        zero_after(tiles.p.index(stage), count)
    fence_async_shared()
    barrier()


@gluon.jit
def add_low_updates(X, d, args, sizes, stage):
    """Add the low terms of the updates of X in a hard chunk."""
    left_k: gl.constexpr = left_operand(sizes.K)
    tiles = args.tiles
    dtype: gl.constexpr = tiles.k.dtype
    d = d * per_token(args.factors.write, stage)
    rest = gl.convert_layout(d - d.to(dtype).to(gl.float32), left_k).to(dtype)
    X = warpgroup_mma(rest, tiles.k.index(stage), X)
    if sizes.BACK:
        v = tiles.v.index(stage).permute((1, 0)).load(accumulator(C)).to(gl.float32)
        v = v * per_token(args.factors.decay_q, stage)
        rest = gl.convert_layout(v - v.to(dtype).to(gl.float32), left_k).to(dtype)
        X = warpgroup_mma(rest, tiles.q.index(stage), X)
    return X


@gluon.jit
def add_low_state(u, X, args, sizes, k_smem, t, count):
    """Add K times the low term of X to K X, in a hard chunk, and store that term.

    triton/kernels/backward_walk.py says why.
    """
    dtype: gl.constexpr = k_smem.dtype
    rest = (X - X.to(dtype).to(gl.float32)).to(dtype)
    if not sizes.EFFECT:
        if args.x_low_ptr is not None:
            row_x = args.row_x + (t // C) * args.step_x
            # 0, but the compiler cannot know: otherwise it would keep the offsets in registers
            at = state_offsets(gl.minimum(count, 0), sizes.K, sizes.V, False)
            gl.store(args.x_low_ptr + row_x.to(gl.int64) * sizes.K + at, rest, mask=at >= 0)
    return warpgroup_mma(gl.convert_layout(rest, left_operand(C)), k_smem.permute((1, 0)), u)


@gluon.jit
def add_low_pairs(r, v_left, args, t, count):
    """Add dOᵀ times the low terms of P to dOᵀ P, in a hard chunk."""
    load_low_terms(args.p_low_ptr, args.tiles.p_low, args, t, count)
    return warpgroup_mma(v_left, args.tiles.p_low, r)


@gluon.jit
def load_low_terms(ptr, tile, args, t, count):
    """Bring the low terms of P or Bg of a hard chunk, zeros from ``count`` tokens on.

    Once per chunk and tile: the barrier at a chunk's end is the one before the next time.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, layout)), 1)
    columns = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, layout)), 0)
    at = (t + rows).to(gl.int64) * args.stride_p_t + columns
    tile.store(gl.load(ptr + at, mask=(rows < count) & (columns >= 0), other=0.0))
    fence_async_shared()
    barrier()
