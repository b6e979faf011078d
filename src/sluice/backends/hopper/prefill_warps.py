"""What the warps of hopper_state_kernel do: one asks for tiles, one or two groups of four compute.

The equations are in prefill_state.py. Per chunk the tensor cores wait for the state three times;
all that is not in that chain (the output, its store, the next chunk's gates and values) is done
while they work on the next chunk's first product.
"""

# ruff: noqa: SIM108 (what a kernel may not say, and constants decide)

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

from sluice.backends.hopper.prefill_tiles import barrier, fill, state_offsets

ROWS = gl.constexpr(64)  # value columns of a warpgroup
C_TOKENS = gl.constexpr(64)


@gluon.jit
def produce(
    request,
    K: gl.constexpr,
    BLOCK_V: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Ask for all whole chunks, each as soon as its buffers are free."""
    (
        q_desc, k_desc, v_desc, a_desc, p_desc, q_bufs, k_bufs, v_bufs, a_bufs, p_bufs, ready, free,
        chunks, row, head_q, head_k, head_v, column_v, values,
    ) = request  # fmt: skip
    C: gl.constexpr = C_TOKENS
    HALVES: gl.constexpr = BLOCK_V // ROWS
    COMMON: gl.constexpr = 2 * C * (2 * K + 2 * C if OUTPUT else K + C)
    stage = 0
    phase = 1
    for chunk in range(chunks):
        bar = ready.index(stage)
        mbarrier.wait(free.index(stage), phase)
        t = row + chunk * C
        if values:
            mbarrier.expect(bar, COMMON + 2 * C * BLOCK_V)
        else:
            mbarrier.expect(bar, COMMON)
        tma.async_copy_global_to_shared(k_desc, [t, head_k * K], bar, k_bufs.index(stage))
        for half in gl.static_range(HALVES):
            v_smem = v_bufs.index(stage * HALVES + half)
            at = column_v + half * ROWS
            tma.async_copy_global_to_shared(v_desc, [t, at], bar, v_smem, pred=values)
        tma.async_copy_global_to_shared(a_desc, [t, head_v * C], bar, a_bufs.index(stage))
        if OUTPUT:
            tma.async_copy_global_to_shared(q_desc, [t, head_q * K], bar, q_bufs.index(stage))
            tma.async_copy_global_to_shared(p_desc, [t, head_v * C], bar, p_bufs.index(stage))
        stage += 1
        if stage == NUM_BUFFERS:
            stage = 0
            phase = phase ^ 1


@gluon.jit
def load_gates(g2_at, g2_ptr, r_q_at, r_k_at, row, count, offs, HV: gl.constexpr):
    """Log2 decays of a chunk of ``count`` tokens, the last of them, and inverse lengths."""
    on = offs < count
    g2 = offs.to(gl.float32) * 0.0
    g2_last = 0.0
    r_k = g2 + 1.0
    r_q = r_k
    if g2_ptr is not None:
        g2 = gl.load(g2_at, mask=on, other=0.0)
        last = g2_ptr + (row + count - 1).to(gl.int64) * HV
        g2_last = gl.load(last, mask=count > 0, other=0.0)
    if r_k_at is not None:
        r_k = gl.load(r_k_at, mask=on, other=0.0)
        r_q = gl.load(r_q_at, mask=on, other=0.0)
    return g2, g2_last, r_q, r_k


@gluon.jit
def keep_gates(
    past, to_end, read, g2, g2_last, r_q, r_k, scale, HALF: gl.constexpr, OUTPUT: gl.constexpr
):
    """Put a chunk's factors of U, of Vd for the state, and of S Q into shared memory."""
    decay = gl.exp2(g2)
    past.index(HALF).store(decay * r_k)
    to_end.index(HALF).store(gl.exp2(g2_last - g2) * r_k)
    if OUTPUT:
        read.index(HALF).store(decay * r_q * scale)


@gluon.jit
def store_rows(o_ptr, o, row, count, stride_o_t, acc_c: gl.constexpr):
    """Store the first ``count`` columns of Oᵀ [64, C] as tokens from ``row`` on."""
    offs_c = gl.arange(0, C_TOKENS, gl.SliceLayout(0, acc_c))
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, acc_c))
    at = gl.expand_dims((row + offs_c).to(gl.int64) * stride_o_t, 0) + gl.expand_dims(rows, 1)
    mask = gl.expand_dims(offs_c < count, 0) & gl.expand_dims(rows < ROWS, 1)
    gl.store(o_ptr + at, o, mask=mask)


@gluon.jit
def consume(
    work,
    HQ: gl.constexpr, HK: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    STATE_KV: gl.constexpr, HALF: gl.constexpr, HALVES: gl.constexpr, NUM_BUFFERS: gl.constexpr,
    OUTPUT: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 value columns through all tokens of the program."""
    (
        q_bufs, k_bufs, v_bufs, a_bufs, p_bufs, o_bufs, past, to_end, read, ready, free, o_desc,
        q_ptr, k_ptr, v_ptr, a_ptr, p_ptr, o_ptr, g2_ptr, r_q_ptr, r_k_ptr,
        source_ptr, known, joined_ptr, segment, target_ptr, keep,
        scale, live, row, tokens, head_q, head_k, head_v, column_v, first_row, values,
        stride_q_t, stride_k_t, stride_v_t, stride_o_t,
    ) = work  # fmt: skip
    C: gl.constexpr = C_TOKENS
    dtype: gl.constexpr = k_bufs.dtype
    acc_c: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16]
    )
    acc_k: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, K, 16]
    )
    left_c: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_c, k_width=2)
    left_k: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_k, k_width=2)
    by_token: gl.constexpr = gl.SliceLayout(0, acc_c)
    offs = gl.arange(0, C, gl.BlockedLayout([1], [32], [4], [0]))
    none = gl.zeros([ROWS, C], gl.float32, acc_c)
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
                s += gl.load(joined_ptr + at, mask=(at >= 0) & (segment > 0), other=0.0)
        else:  # a segment's effect: from zero, or from the identity
            rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, acc_k))
            columns = gl.arange(0, K, gl.SliceLayout(0, acc_k))
            own = gl.expand_dims(rows, 1) == gl.expand_dims(columns, 0)
            s = own.to(gl.float32) * (1 - values).to(gl.float32)

        chunks = tokens // C
        g2_at = None
        r_q_at = None
        r_k_at = None
        if g2_ptr is not None:
            g2_at = g2_ptr + (row + offs).to(gl.int64) * HV
        if r_k_ptr is not None:
            r_q_at = r_q_ptr + (row + offs).to(gl.int64) * HQ
            r_k_at = r_k_ptr + (row + offs).to(gl.int64) * HK
        g2, g2_last, r_q, r_k = load_gates(
            g2_at, g2_ptr, r_q_at, r_k_at, row, gl.minimum(tokens, C), offs, HV
        )
        keep_gates(past, to_end, read, g2, g2_last, r_q, r_k, scale, HALF, OUTPUT)
        # from here on those of the next chunk: a load's latency is not to sit in the chain
        if g2_ptr is not None:
            g2_at += C * HV
        if r_k_ptr is not None:
            r_q_at += C * HQ
            r_k_at += C * HK
        g2, g2_next, r_q, r_k = load_gates(
            g2_at, g2_ptr, r_q_at, r_k_at, row + C, gl.minimum(tokens - C, C), offs, HV
        )
        first_left = gl.convert_layout(s, left_c).to(dtype)
        mbarrier.wait(ready.index(0), 0, pred=chunks > 0)
        u = warpgroup_mma(first_left, k_bufs.index(0).permute((1, 0)), none, use_acc=False)
        v = v_bufs.index(HALF).permute((1, 0)).load(acc_c).to(gl.float32)
        if not OUTPUT:
            v = gl.where(given, v, 0.0)
        decay = past.index(HALF).load(by_token)
        stage = 0
        phase = 0
        for chunk in range(chunks):
            w = v - u * gl.expand_dims(decay, 0)
            w_left = gl.convert_layout(w, left_c).to(dtype)
            a_smem = a_bufs.index(stage).permute((1, 0))
            vd = warpgroup_mma(w_left, a_smem, none, use_acc=False, is_async=True)
            if OUTPUT:
                # rounded again: carried from chunk to chunk, 16-bit pairs would be taken apart
                s_left = gl.convert_layout(s, left_c).to(dtype)
                q_smem = q_bufs.index(stage).permute((1, 0))
                o = warpgroup_mma(s_left, q_smem, none, use_acc=False, is_async=True)
            s = s * gl.exp2(g2_last)
            end = gl.expand_dims(to_end.index(HALF).load(by_token), 0)
            next_stage = stage + 1
            if next_stage == NUM_BUFFERS:
                next_stage = 0
                phase = phase ^ 1
            if OUTPUT:
                vd = warpgroup_mma_wait(1, deps=[vd])
            else:
                vd = warpgroup_mma_wait(0, deps=[vd])
            vd_k = gl.convert_layout(vd * end, left_k).to(dtype)
            s = warpgroup_mma(vd_k, k_bufs.index(stage), s, is_async=True)
            if OUTPUT:
                vd_left = gl.convert_layout(vd, left_c).to(dtype)
                factor = gl.expand_dims(read.index(HALF).load(by_token), 0)
                o = warpgroup_mma_wait(1, deps=[o])
                o = o * factor
                p_smem = p_bufs.index(stage).permute((1, 0))
                o = warpgroup_mma(vd_left, p_smem, o, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
            else:
                s = warpgroup_mma_wait(0, deps=[s])
            next_left = gl.convert_layout(s, left_c).to(dtype)
            mbarrier.wait(ready.index(next_stage), phase, pred=chunk + 1 < chunks)
            k_next = k_bufs.index(next_stage).permute((1, 0))
            u = warpgroup_mma(next_left, k_next, none, use_acc=False, is_async=True)
            # while the tensor cores are at it: the output, the next chunk's gates and values
            if OUTPUT:
                o = warpgroup_mma_wait(1, deps=[o])
                tma.store_wait(0)
                o_bufs.index(HALF).permute((1, 0)).store(o.to(dtype))
                fence_async_shared()
            keep_gates(past, to_end, read, g2, g2_next, r_q, r_k, scale, HALF, OUTPUT)
            barrier()
            mbarrier.arrive(free.index(stage), count=1)
            if OUTPUT:
                tma.async_copy_shared_to_global(
                    o_desc, [row + chunk * C, column_v], o_bufs.index(HALF)
                )
            v = v_bufs.index(next_stage * HALVES + HALF).permute((1, 0)).load(acc_c)
            v = v.to(gl.float32)
            if not OUTPUT:
                v = gl.where(given, v, 0.0)
            decay = past.index(HALF).load(by_token)
            stage = next_stage
            g2_last = g2_next
            if g2_ptr is not None:
                g2_at += C * HV
            if r_k_ptr is not None:
                r_q_at += C * HQ
                r_k_at += C * HK
            ahead = (chunk + 2) * C
            g2, g2_next, r_q, r_k = load_gates(
                g2_at, g2_ptr, r_q_at, r_k_at, row + ahead, gl.minimum(tokens - ahead, C), offs, HV
            )
            u = warpgroup_mma_wait(0, deps=[u])
        if OUTPUT:
            tma.store_wait(0)

        rest = tokens - chunks * C
        if rest > 0:
            mbarrier.wait(free.index(stage), phase ^ 1)  # the other warpgroup's products too
            first = (row + chunks * C).to(gl.int64)
            k_smem = k_bufs.index(stage)
            a_smem = a_bufs.index(stage)
            v_smem = v_bufs.index(stage * HALVES + HALF)
            fill(k_smem, k_ptr + first * stride_k_t + head_k * K, stride_k_t, rest, C, K)
            fill(v_smem, v_ptr + first * stride_v_t + column_v, stride_v_t, rest, C, ROWS)
            fill(a_smem, a_ptr + first * (HV * C) + head_v * C, HV * C, rest, C, C)
            if OUTPUT:
                q_smem = q_bufs.index(stage)
                p_smem = p_bufs.index(stage)
                fill(q_smem, q_ptr + first * stride_q_t + head_q * K, stride_q_t, rest, C, K)
                fill(p_smem, p_ptr + first * (HV * C) + head_v * C, HV * C, rest, C, C)
            fence_async_shared()
            barrier()
            s, o = last_chunk(
                s, q_bufs.index(stage), k_smem, v_smem, a_smem, p_bufs.index(stage),
                past, to_end, read, g2_last, acc_c, left_c, left_k, HALF, OUTPUT,
            )  # fmt: skip
            if OUTPUT:
                store_rows(o_ptr + column_v, o.to(dtype), first, rest, stride_o_t, acc_c)

        if keep:
            # made anew, with a zero the compiler cannot see: kept through the loop the offsets
            # would fill half the registers
            zero = gl.minimum(rest, 0)
            if OUTPUT:
                at = state_offsets(first_row + zero, acc_k, ROWS, K, V, STATE_KV)
            else:
                at = state_offsets(first_row + zero, acc_k, ROWS, K, V + K, True)
            gl.store(target_ptr + at, s.to(target_ptr.dtype.element_ty))


@gluon.jit
def last_chunk(
    s, q_smem, k_smem, v_smem, a_smem, p_smem, past, to_end, read, g2_last,
    acc_c: gl.constexpr, left_c: gl.constexpr, left_k: gl.constexpr,
    HALF: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """One chunk by itself: the state behind it and Oᵀ [64, C]."""
    C: gl.constexpr = C_TOKENS
    dtype: gl.constexpr = k_smem.dtype
    by_token: gl.constexpr = gl.SliceLayout(0, acc_c)
    none = gl.zeros([ROWS, C], gl.float32, acc_c)
    s_left = gl.convert_layout(s, left_c).to(dtype)
    u = warpgroup_mma(s_left, k_smem.permute((1, 0)), none, use_acc=False)
    v = v_smem.permute((1, 0)).load(acc_c).to(gl.float32)
    w = v - u * gl.expand_dims(past.index(HALF).load(by_token), 0)
    w_left = gl.convert_layout(w, left_c).to(dtype)
    vd = warpgroup_mma(w_left, a_smem.permute((1, 0)), none, use_acc=False)
    o = none
    if OUTPUT:
        o = warpgroup_mma(s_left, q_smem.permute((1, 0)), none, use_acc=False)
        o = o * gl.expand_dims(read.index(HALF).load(by_token), 0)
        vd_left = gl.convert_layout(vd, left_c).to(dtype)
        o = warpgroup_mma(vd_left, p_smem.permute((1, 0)), o)
    end = gl.expand_dims(to_end.index(HALF).load(by_token), 0)
    vd_k = gl.convert_layout(vd * end, left_k).to(dtype)
    s = warpgroup_mma(vd_k, k_smem, s * gl.exp2(g2_last))
    return s, o
