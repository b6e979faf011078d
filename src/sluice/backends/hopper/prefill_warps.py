"""What a warpgroup of hopper_state_kernel does that holds 64 value columns of a state.

The equations are in prefill_state.py. Per chunk the tensor cores wait for the state three times;
all that is not in that chain (the output, its store, the next chunk's values) is done while they
work on the next chunk's first product.

P and Vd meet in float16, each with powers of two: P by token (prefill_maker.py), Vd by value
column, made here. In bfloat16 their sum would lose two bits where keys repeat (docs/numerics.md).
Hard chunks, whose keys nearly repeat, are taken by themselves, with more bits: ``hard_chunk``.
"""

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

from sluice.backends.hopper.prefill_loader import C_TOKENS, ROWS
from sluice.backends.hopper.prefill_tiles import barrier, state_offsets


@gluon.jit
def scaled(vd, left_c: gl.constexpr):
    """Vdᵀ in float16 as a left operand, its rows times powers of two; these and their inverses.

    The largest of a row lands in [2¹³, 2¹⁴), or lower where it is less than 2⁻⁴⁷: S Q is multiplied
    by the same power and must not overflow. Rows of zeros stay as they are.
    """
    bits = gl.max(gl.abs(vd), axis=1).to(gl.int32, bitcast=True) & 0x7F800000
    bits = gl.where(bits == 0, (127 + 13) * (1 << 23), gl.maximum(bits, (127 - 47) * (1 << 23)))
    up = (254 * (1 << 23) - bits + 13 * (1 << 23)).to(gl.float32, bitcast=True)
    down = (bits - 13 * (1 << 23)).to(gl.float32, bitcast=True)
    up = gl.expand_dims(up, 1)
    return gl.convert_layout(vd * up, left_c).to(gl.float16), up, gl.expand_dims(down, 1)


@gluon.jit
def ordinary(hard_ptr, chunks):
    """How many chunks from this one on are not hard, up to 256."""
    every: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])  # the same in each warp
    number = gl.arange(0, 256, every)
    on = number < chunks
    mark = gl.load(hard_ptr + number * C_TOKENS, mask=on, other=1)
    return gl.min(gl.where(mark != 0, number, 256), axis=0)


@gluon.jit
def store_rows(o_ptr, o, row, count, stride_o_t, acc_c: gl.constexpr):
    """Store the first ``count`` columns of Oᵀ [64, C] as tokens from ``row`` on."""
    offs_c = gl.arange(0, C_TOKENS, gl.SliceLayout(0, acc_c))
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, acc_c))
    at = gl.expand_dims((row + offs_c).to(gl.int64) * stride_o_t, 0) + gl.expand_dims(rows, 1)
    mask = gl.expand_dims(offs_c < count, 0) & gl.expand_dims(rows < ROWS, 1)
    gl.store(o_ptr + at, o, mask=mask)


@gluon.jit
def halves(uo, acc_c: gl.constexpr):
    """[64, 2 C] as two of [64, C], where they lie."""
    uo = gl.permute(gl.reshape(uo, [ROWS, 2, C_TOKENS]), (0, 2, 1))
    u, o = gl.split(uo)
    return gl.convert_layout(u, acc_c), gl.convert_layout(o, acc_c)


@gluon.jit
def consume(
    work,
    K: gl.constexpr, V: gl.constexpr, STATE_KV: gl.constexpr, HALF: gl.constexpr,
    HALVES: gl.constexpr, NUM_BUFFERS: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 value columns through all tokens of the program."""
    (
        kq_bufs, v_bufs, a_bufs, p_bufs, o_bufs, factors, ready, made, free, turn, o_desc,
        o_ptr, source_ptr, known, joined_ptr, split, target_ptr, keep,
        live, row, tokens, column_v, first_row, values, stride_o_t, hard_ptr,
    ) = work  # fmt: skip
    C: gl.constexpr = C_TOKENS
    dtype: gl.constexpr = kq_bufs.dtype
    acc_c: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16]
    )
    acc_k: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, K, 16]
    )
    left_c: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_c, k_width=2)
    left_k: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_k, k_width=2)
    by_token: gl.constexpr = gl.SliceLayout(0, acc_c)
    b, past, to_end, read, lift, whole = factors
    none = gl.zeros([ROWS, C], gl.float32, acc_c)
    start = none
    if OUTPUT:
        start = gl.zeros([ROWS, 2 * C], gl.float32, acc_k)
    given = gl.expand_dims(gl.arange(0, C, by_token) < values * C, 0)
    column_v += HALF * ROWS
    first_row += HALF * ROWS

    if OUTPUT and not live:  # a sequence without a slot: zeros
        for t in range(0, tokens, C):
            store_rows(o_ptr + column_v, none.to(dtype), row + t, tokens - t, stride_o_t, acc_c)
    if live:
        if OUTPUT:
            at = state_offsets(first_row, acc_k, ROWS, K, V, STATE_KV)
            s = gl.load(source_ptr + at, mask=(at >= 0) & known, other=0.0).to(gl.float32)
            if joined_ptr is not None:
                at = state_offsets(first_row, acc_k, ROWS, K, V + K, True)
                s += gl.load(joined_ptr + at, mask=(at >= 0) & split, other=0.0)
        else:  # a segment's effect: from zero, or from the identity
            rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, acc_k))
            columns = gl.arange(0, K, gl.SliceLayout(0, acc_k))
            own = gl.expand_dims(rows, 1) == gl.expand_dims(columns, 0)
            s = own.to(gl.float32) * (1 - values).to(gl.float32)

        chunks = gl.cdiv(tokens, C)
        chunk = 0
        turns = 0
        stage = 0
        phase = 0
        while chunk < chunks:
            run = ordinary(hard_ptr + row + chunk * C, chunks - chunk)
            mbarrier.wait(ready.index(stage), phase)
            mbarrier.wait(made.index(stage), phase)
            if run == 0:
                s, o = hard_chunk(
                    s, kq_bufs.index(stage), v_bufs.index(stage * HALVES + HALF),
                    a_bufs.index(stage), p_bufs.index(stage), factors, stage, start, given,
                    acc_c, left_c, left_k, OUTPUT,
                )  # fmt: skip
                barrier()
                mbarrier.arrive(free.index(stage), count=1)
                if OUTPUT:
                    first = row + chunk * C
                    left = tokens - chunk * C
                    store_rows(o_ptr + column_v, o.to(dtype), first, left, stride_o_t, acc_c)
                chunk += 1
                stage += 1
                if stage == NUM_BUFFERS:
                    stage = 0
                    phase = phase ^ 1
            else:
                first_left = gl.convert_layout(s, left_c).to(dtype)
                keys = kq_bufs.index(stage).permute((1, 0))
                u = warpgroup_mma(first_left, keys, start, use_acc=False)
                v = v_bufs.index(stage * HALVES + HALF).permute((1, 0)).load(acc_c).to(gl.float32)
                if not OUTPUT:
                    v = gl.where(given, v, 0.0)
                v = v * gl.expand_dims(b.index(stage).load(by_token), 0)
                decay = past.index(stage).load(by_token)
                for i in range(run):
                    if HALVES == 2:  # in turns: one computes where the other has the tensor cores
                        mine = turn.index(HALF)
                        number = turns + i
                        mbarrier.wait(mine, (number + 1 - HALF) % 2, pred=number >= 1 - HALF)
                    if OUTPUT:
                        u, o = halves(u, acc_c)
                    w = v - u * gl.expand_dims(decay, 0)
                    w_left = gl.convert_layout(w, left_c).to(dtype)
                    a_smem = a_bufs.index(stage).permute((1, 0))
                    vd = warpgroup_mma(w_left, a_smem, none, use_acc=False, is_async=True)
                    s = s * gl.expand_dims(whole.index(stage).load(gl.SliceLayout(1, acc_k)), 1)
                    end = gl.expand_dims(to_end.index(stage).load(by_token), 0)
                    next_stage = stage + 1
                    if next_stage == NUM_BUFFERS:
                        next_stage = 0
                        phase = phase ^ 1
                    vd = warpgroup_mma_wait(0, deps=[vd])
                    vd_k = gl.convert_layout(vd * end, left_k).to(dtype)
                    k_smem = kq_bufs.index(stage).slice(0, C, 0)
                    # alone a warpgroup has registers for the output's product behind the state's,
                    # which the chain waits for; of two each makes the output first and is rid of it
                    if HALVES == 1:
                        s = warpgroup_mma(vd_k, k_smem, s, is_async=True)
                    if OUTPUT:
                        vd_left, up, down = scaled(vd, left_c)
                        o = o * gl.expand_dims(read.index(stage).load(by_token), 0) * up
                        p_smem = p_bufs.index(stage).permute((1, 0))
                        o = warpgroup_mma(vd_left, p_smem, o, is_async=True)
                    if HALVES == 2:
                        s = warpgroup_mma(vd_k, k_smem, s, is_async=True)
                        mbarrier.arrive(turn.index(1 - HALF), count=1)
                        if OUTPUT:
                            o = warpgroup_mma_wait(1, deps=[o])
                            o = o * gl.expand_dims(lift.index(stage).load(by_token), 0) * down
                            tma.store_wait(0)
                            o_bufs.index(HALF).permute((1, 0)).store(o.to(dtype))
                            fence_async_shared()
                        s = warpgroup_mma_wait(0, deps=[s])
                    elif OUTPUT:
                        s = warpgroup_mma_wait(1, deps=[s])
                    else:
                        s = warpgroup_mma_wait(0, deps=[s])
                    # rounded anew in every chunk: carried along, 16-bit pairs would be taken apart
                    next_left = gl.convert_layout(s, left_c).to(dtype)
                    mbarrier.wait(ready.index(next_stage), phase, pred=i + 1 < run)
                    next_keys = kq_bufs.index(next_stage).permute((1, 0))
                    u = warpgroup_mma(next_left, next_keys, start, use_acc=False, is_async=True)
                    # while the tensor cores are at it: the output, the next chunk's gates, values
                    if OUTPUT and HALVES == 1:
                        o = warpgroup_mma_wait(1, deps=[o])
                        o = o * gl.expand_dims(lift.index(stage).load(by_token), 0) * down
                        tma.store_wait(0)
                        o_bufs.index(HALF).permute((1, 0)).store(o.to(dtype))
                        fence_async_shared()
                    barrier()
                    mbarrier.arrive(free.index(stage), count=1)
                    if OUTPUT:
                        tma.async_copy_shared_to_global(
                            o_desc, [row + (chunk + i) * C, column_v], o_bufs.index(HALF)
                        )
                    v = v_bufs.index(next_stage * HALVES + HALF).permute((1, 0)).load(acc_c)
                    v = v.to(gl.float32)
                    if not OUTPUT:
                        v = gl.where(given, v, 0.0)
                    mbarrier.wait(made.index(next_stage), phase, pred=i + 1 < run)
                    if HALVES == 1:
                        v = v * gl.expand_dims(b.index(next_stage).load(by_token), 0)
                        decay = past.index(next_stage).load(by_token)
                    u = warpgroup_mma_wait(0, deps=[u])
                    if HALVES == 2:  # only now are there registers for it
                        v = v * gl.expand_dims(b.index(next_stage).load(by_token), 0)
                        decay = past.index(next_stage).load(by_token)
                    stage = next_stage
                chunk += run
                turns += run
        if OUTPUT:
            tma.store_wait(0)

        if keep:
            # made anew, with a zero the compiler cannot see: kept through the loop the offsets
            # would fill half the registers
            zero = gl.minimum(tokens, 0)
            if OUTPUT:
                at = state_offsets(first_row + zero, acc_k, ROWS, K, V, STATE_KV)
            else:
                at = state_offsets(first_row + zero, acc_k, ROWS, K, V + K, True)
            gl.store(target_ptr + at, s.to(target_ptr.dtype.element_ty))


@gluon.jit
def hard_chunk(
    s, kq_smem, v_smem, a_smem, p_smem, factors, stage, start, given,
    acc_c: gl.constexpr, left_c: gl.constexpr, left_k: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """A hard chunk: the state behind it and Oᵀ [64, C].

    Ag's bits are float16's, times 2⁸; W meets it in float16, and the state takes Vd as two terms.
    """
    C: gl.constexpr = C_TOKENS
    dtype: gl.constexpr = kq_smem.dtype
    by_token: gl.constexpr = gl.SliceLayout(0, acc_c)
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.float16)
    b, past, to_end, read, lift, whole = factors
    s_left = gl.convert_layout(s, left_c).to(dtype)
    u = warpgroup_mma(s_left, kq_smem.permute((1, 0)), start, use_acc=False)
    o = u
    if OUTPUT:
        u, o = halves(u, acc_c)
    v = v_smem.permute((1, 0)).load(acc_c).to(gl.float32)
    if not OUTPUT:
        v = gl.where(given, v, 0.0)
    w = v * gl.expand_dims(b.index(stage).load(by_token), 0)
    w = w - u * gl.expand_dims(past.index(stage).load(by_token), 0)
    w_left, _, down = scaled(w, left_c)
    a_half = a_smem._reinterpret(gl.float16, [C, C], half).permute((1, 0))
    none = gl.zeros([ROWS, C], gl.float32, acc_c)
    vd = warpgroup_mma(w_left, a_half, none, use_acc=False) * (down / 256.0)
    if OUTPUT:
        vd_left, up, down = scaled(vd, left_c)
        o = o * gl.expand_dims(read.index(stage).load(by_token), 0) * up
        o = warpgroup_mma(vd_left, p_smem.permute((1, 0)), o)
        o = o * gl.expand_dims(lift.index(stage).load(by_token), 0) * down
    vd = vd * gl.expand_dims(to_end.index(stage).load(by_token), 0)
    s = s * gl.expand_dims(whole.index(stage).load(gl.SliceLayout(1, s.type.layout)), 1)
    k_smem = kq_smem.slice(0, C, 0)
    rest = vd - vd.to(dtype).to(gl.float32)
    s = warpgroup_mma(gl.convert_layout(rest, left_k).to(dtype), k_smem, s)
    s = warpgroup_mma(gl.convert_layout(vd, left_k).to(dtype), k_smem, s)
    return s, o
