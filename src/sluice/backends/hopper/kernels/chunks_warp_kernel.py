"""The parallel half of chunked prefill on Hopper where each key head has one value head.

It computes what chunks_kernel.py computes. A program is one warp. It owns a chunk of C = 64 tokens
of one head and makes K Kᵀ in registers. No warp waits for another, and none is idle: a program of
chunks_kernel.py has four warps, one per value head, and some of them would have none here.

The tile of K takes 16 kB. Once K Kᵀ is made, the same memory holds its diagonal blocks, the two
terms of A_d, and Ag, which TMA stores. So twelve programs fit on an SM.
"""

# ruff: noqa: RUF005, SIM102 (Triton has no tuple unpacking; constexpr branches stay apart)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sluice.backends.hopper.kernels.chunks_gates import Gates, add, sigmoid, softplus
from sluice.backends.hopper.kernels.chunks_inverse import lower
from sluice.backends.hopper.kernels.chunks_warp_inverse import (
    block,
    columns,
    invert,
    invert_diagonal,
    kk_layout,
    products_of_keys,
    upper,
)
from sluice.backends.hopper.kernels.constants import LOG2_E, NORM_EPS, C
from sluice.backends.hopper.kernels.gluon_api import async_load, async_store, barrier, reinterpret
from sluice.backends.hopper.kernels.layouts import along
from sluice.backends.hopper.kernels.work_units import counted_span, tail_span
from sluice.backends.triton.kernels.alignment import GATES, INDICES


@gluon.constexpr_function
def diagonal_layout():
    """Ag in shared memory, as TMA stores it, as [4, 4, 16, 16]: block (i, j) is at [i xor j, i].

    So the diagonal blocks are at [0, i].
    """
    inner = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8]]
    outer = [[1, 0, 0, 0], [2, 0, 0, 0], [0, 0, 1, 8], [1, 0, 2, 0], [2, 0, 4, 0], [0, 0, 8, 0]]
    return gl.SharedLinearLayout([*inner, *outer, [1, 1, 0, 0], [2, 2, 0, 0]])


@gluon.jit(
    do_not_specialize=[
        "N",
        "T",
        "M",
        "every",
        "units",
        "stride_g_b",
        "stride_beta_b",
        "stride_gates_h",
    ],
    do_not_specialize_on_alignment=[*INDICES, *GATES],
)
def hopper_chunks_warp_kernel(
    k_desc,  # [B * T, HK * K], block [C, K]
    ag_desc,  # [B * T, HV * C], block [C, C]
    g_ptr,  # this and all that follow: as in chunks_kernel.py
    A_log_ptr,
    dt_bias_ptr,
    beta_ptr,
    ag_ptr,
    beta32_ptr,
    g2_ptr,
    r_k_ptr,
    hard_ptr,
    taken_ptr,
    o_ptr,
    cu_seqlens_ptr,
    checkpoint_positions_ptr,
    beta_scale,
    N,
    T,
    M,
    every,
    units,
    stride_g_b,
    stride_g_t,
    stride_g_h,
    stride_beta_b,
    stride_beta_t,
    stride_beta_h,
    stride_o_t,
    stride_gates_h,
    HK: gl.constexpr,
    HV: gl.constexpr,  # equal to HK
    K: gl.constexpr,
    V: gl.constexpr,
    RAW_BETA: gl.constexpr,
    TAILS: gl.constexpr,
):
    DECAY: gl.constexpr = g_ptr is not None
    dtype: gl.constexpr = k_desc.dtype
    by_token: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])

    k_smem = gl.allocate_shared_memory(dtype, [C, K], k_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    gdc_wait()  # for the kernels before this one, which make q, k and the gates
    gdc_launch_dependents()
    pid = gl.program_id(0)
    if pid == 0:
        gl.store(taken_ptr, 0)
    head = pid % HV
    unit = pid // HV
    if TAILS:
        tail = gl.maximum(unit - units, 0)
        unit = gl.minimum(unit, units - 1)
    seq, start, chunk, end = counted_span(unit, cu_seqlens_ptr, N, T, C)
    row = start + chunk * C
    made = row  # where the results for the chunk go
    if TAILS:
        if pid // HV >= units:
            seq, row, end = tail_span(tail, cu_seqlens_ptr, checkpoint_positions_ptr, every, T, M)
            made = stride_gates_h - N * M * C + tail * C
    count = gl.minimum(end - row, C)
    if (count > 0) & (seq >= N):  # tokens after the last sequence
        zero_output(o_ptr + row.to(gl.int64) * stride_o_t + head * V, count, stride_o_t, V)
    if (count > 0) & (seq < N):
        mbarrier.expect(bar, 2 * C * K)
        async_load(k_desc, [row, head * K], bar, k_smem)

        batch = seq * 0
        t = row
        if cu_seqlens_ptr is None:
            batch = seq
            t = row - seq * T
        beta_ptr += batch.to(gl.int64) * stride_beta_b + t.to(gl.int64) * stride_beta_t
        if DECAY:
            g_ptr += batch.to(gl.int64) * stride_g_b + t.to(gl.int64) * stride_g_t
        gates = Gates(
            g_ptr=g_ptr,
            A_log_ptr=A_log_ptr,
            dt_bias_ptr=dt_bias_ptr,
            beta_ptr=beta_ptr,
            beta_scale=beta_scale,
            stride_g_t=stride_g_t,
            stride_g_h=stride_g_h,
            stride_beta_t=stride_beta_t,
            stride_beta_h=stride_beta_h,
            RAW_BETA=RAW_BETA,
        )
        token = gl.arange(0, C, by_token)
        raw_g, raw_beta = read_gates(gates, token, head, count)

        gate_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        blocks_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        g2_smem = gl.allocate_shared_memory(gl.float32, [C], gate_layout)
        beta_smem = gl.allocate_shared_memory(gl.float32, [C], gate_layout)
        g2_blocks = reinterpret(g2_smem, gl.float32, [4, 16], blocks_layout)
        beta_blocks = reinterpret(beta_smem, gl.float32, [4, 16], blocks_layout)
        # in the memory of K, once K Kᵀ is made: Ag; diagonal blocks of K Kᵀ; A_d (in invert)
        ag_smem = k_smem.slice(0, C, 1)
        kk_blocks = reinterpret(k_smem, gl.float32, [4, 4, 16, 16], kk_layout()).index(2)
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        kk_rows = reinterpret(k_smem, gl.float32, [4, 4, 16, 16], plain).index(2)

        at = head.to(gl.int64) * stride_gates_h + made
        mbarrier.wait(bar, 0)
        if count < C:  # other sequences' tokens may be NaN
            clear_rows(k_smem, count, K)
        kks = products_of_keys(k_smem, K)
        barrier()
        if r_k_ptr is not None:
            kks = normalized(kks, g2_smem, r_k_ptr + at, token, count)
        kk_blocks.store(
            four_blocks(kks[upper(0, 0)], kks[upper(1, 1)], kks[upper(2, 2)], kks[upper(3, 3)])
        )
        hard = (count < C) | keys_repeat(kks, r_k_ptr is not None)
        gl.store(hard_ptr + at, hard.to(gl.int8))

        g2, beta = finish_gates(gates, raw_g, raw_beta, token, head, count)
        gl.store(beta32_ptr + at + token, beta, mask=token < count)
        beta_smem.store(beta)
        if DECAY:
            gl.store(g2_ptr + at + token, g2, mask=token < count)
            g2_smem.store(g2)
        barrier()
        a_d = invert_diagonal(kk_rows, beta_blocks)
        a = invert(kks, a_d, k_smem, beta_smem)
        if hard:
            keep_ag(ag_smem, a, a_d, g2_smem, g2_blocks, DECAY, True)
        else:
            keep_ag(ag_smem, a, a_d, g2_smem, g2_blocks, DECAY, False)
        if count == C:
            fence_async_shared()
            async_store(ag_desc, [made, head * C], ag_smem)
            tma.store_wait(0)
        else:
            barrier()
            store_rows(ag_ptr + (made.to(gl.int64) * HV + head) * C, ag_smem, count, HV)


@gluon.jit
def read_gates(gates, token, head, count):
    """g and beta of a value head as given; zeros after ``count`` tokens."""
    on = token < count
    at = token.to(gl.int64) * gates.stride_beta_t + head * gates.stride_beta_h
    beta = gl.load(gates.beta_ptr + at, mask=on, other=0.0).to(gl.float32)
    g = beta
    if gates.g_ptr is not None:
        at = token.to(gl.int64) * gates.stride_g_t + head * gates.stride_g_h
        g = gl.load(gates.g_ptr + at, mask=on, other=0.0).to(gl.float32)
    return g, beta


@gluon.jit
def finish_gates(gates, g, beta, token, head, count):
    """Cumulative log2 decays and betas. After ``count`` tokens the decay stays, and beta is 0."""
    on = token < count
    if gates.g_ptr is not None:
        if gates.A_log_ptr is not None:
            A_log = gl.load(gates.A_log_ptr + head).to(gl.float32)
            if gates.dt_bias_ptr is not None:
                g += gl.load(gates.dt_bias_ptr + head).to(gl.float32)
            g = -gl.exp2(A_log * LOG2_E) * softplus(g)
        g = gl.associative_scan(gl.where(on, g * LOG2_E, 0.0), 0, add)
    if gates.RAW_BETA:
        beta = gl.where(on, sigmoid(beta) * gates.beta_scale, 0.0)
    return g, beta


@gluon.jit
def clear_rows(k_smem, count, K: gl.constexpr):
    """Overwrite keys from ``count`` on with zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])
    for first in gl.static_range(0, C, 16):
        rows = k_smem.slice(first, 16, 0)
        on = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, layout)) + first < count, 1)
        k = rows.load(layout)
        rows.store(gl.where(on, k, gl.zeros([16, K], k_smem.dtype, layout)))
    barrier()


@gluon.jit
def diagonal(kk):
    """The numbers on the diagonal of a block, by row."""
    row = along(0, 16, block(), 2)
    column = along(1, 16, block(), 2)
    return gl.sum(gl.where(row == column, kk, 0.0), axis=1)


@gluon.jit
def normalized(kks, room, r_k_ptr, token, count):
    """K Kᵀ of normalised keys. Stores the keys' inverse lengths, which its diagonal gives.

    ``room``: shared memory [C] for these lengths.
    """
    for b in gl.static_range(4):
        r_k = gl.rsqrt(diagonal(kks[upper(b, b)]) + NORM_EPS)
        room.slice(16 * b, 16, 0).store(r_k)
    barrier()
    r_k = room.load(token.type.layout)
    gl.store(r_k_ptr + token, r_k, mask=token < count)
    scaled = ()
    for j in gl.static_range(4):
        r_j = gl.expand_dims(room.slice(16 * j, 16, 0).load(gl.SliceLayout(1, block())), 1)
        for i in gl.static_range(j, 4):
            r_i = room.slice(16 * i, 16, 0).load(gl.SliceLayout(0, block()))
            kk = kks[upper(j, i)] * r_j * gl.expand_dims(r_i, 0)
            scaled = scaled + (kk,)
    barrier()
    return scaled


@gluon.jit
def keys_repeat(kks, NORMALIZE_QK: gl.constexpr):
    """Whether the keys nearly repeat: the rule of chunks_hard.py, over the upper half of K Kᵀ.

    If a chunk has no close pair, one comparison says so, and nothing is counted.
    """
    row = along(0, 16, block(), 2)
    column = along(1, 16, block(), 2)
    largest = gl.zeros([16, 16], gl.float32, block())
    closest = largest
    for j in gl.static_range(4):
        kk = gl.abs(kks[upper(j, j)])
        if not NORMALIZE_QK:
            largest = gl.maximum(largest, kk)
        closest = gl.maximum(closest, gl.where(row == column, 0.0, kk))
        for i in gl.static_range(j + 1, 4):
            closest = gl.maximum(closest, gl.abs(kks[upper(j, i)]))
    least = 0.9
    if not NORMALIZE_QK:
        least = largest_of(largest) * 0.9
    found = largest_of(closest) > least
    if found:
        total = gl.zeros([16, 16], gl.int32, block())
        for j in gl.static_range(4):
            for i in gl.static_range(j, 4):
                kk = gl.abs(kks[upper(j, i)])
                total += gl.where(kk > least, 1 if i == j else 2, 0)
        found = gl.sum(gl.reshape(total, [256]), axis=0) >= 192
    return found


@gluon.jit
def largest_of(x):
    """The largest of a block of numbers that are not negative.

    Read as integers they have the same order, and one instruction reduces integers over a warp.
    """
    bits = gl.max(gl.reshape(x.to(gl.int32, bitcast=True), [256]), axis=0)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def keep_ag(
    ag_smem, a, a_d, g2_smem, g2_blocks, DECAY: gl.constexpr, HARD: gl.constexpr,
):  # fmt: skip
    """Put Ag into shared memory: first with zeros for its diagonal blocks, then these blocks."""
    dtype: gl.constexpr = ag_smem.dtype
    layout: gl.constexpr = columns()
    row = along(1, 16, layout, 3)
    column = along(2, 16, layout, 3)
    g2_row = row.to(gl.float32)
    if DECAY:
        g2_row = gl.expand_dims(g2_blocks.load(gl.SliceLayout(2, layout)), 2)
        g2_column = gl.expand_dims(g2_blocks.load(gl.SliceLayout(1, layout)), 1)
        a_d = a_d * gl.exp2(gl.where(row >= column, g2_row - g2_column, 0.0))
    a_d = as_stored(a_d, g2_row, row, dtype, DECAY, HARD)
    zeros = gl.zeros([16, 16], dtype, block())
    row = along(0, 16, block(), 2)
    rows = ()
    for i in gl.static_range(4):
        g2_row = row.to(gl.float32)
        if DECAY:
            g2_row = g2_smem.slice(16 * i, 16, 0).load(gl.SliceLayout(1, block()))
            g2_row = gl.expand_dims(g2_row, 1)
        blocks = ()
        for j in gl.static_range(4):
            if j < i:
                ag = a[lower(i, j)]
                if DECAY:
                    g2_column = g2_smem.slice(16 * j, 16, 0).load(gl.SliceLayout(0, block()))
                    ag = ag * gl.exp2(g2_row - gl.expand_dims(g2_column, 0))
                blocks = blocks + (as_stored(ag, g2_row, row, dtype, DECAY, HARD),)
            else:
                blocks = blocks + (zeros,)
        rows = rows + (four_blocks(blocks[0], blocks[1], blocks[2], blocks[3]),)
    whole = gl.join(gl.join(rows[0], rows[2]), gl.join(rows[1], rows[3]))  # [j, 16, 16, i]
    whole = gl.permute(gl.reshape(whole, [4, 16, 16, 4]), (3, 1, 0, 2))
    ag_smem.store(gl.reshape(whole, [C, C]))
    diagonal_smem = reinterpret(ag_smem, dtype, [4, 4, 16, 16], diagonal_layout()).slice(0, 1, 0)
    diagonal_smem.store(gl.reshape(a_d, [1, 4, 16, 16]))


@gluon.jit
def four_blocks(a, b, c, d):
    """Four blocks [16, 16] as [4, 16, 16]."""
    x = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [16, 16, 4])
    return gl.permute(x, (2, 0, 1))


@gluon.jit
def as_stored(ag, g2, row, dtype: gl.constexpr, DECAY: gl.constexpr, HARD: gl.constexpr):
    """Blocks of Ag in 16 bits; with HARD times 2⁸ in float16, as in chunks_hard.py."""
    if HARD:
        axis: gl.constexpr = len(ag.shape) - 2
        ag = gl.minimum(gl.maximum(ag * 256.0, -65504.0), 65504.0)
        error = ag - ag.to(gl.float16).to(gl.float32)
        if DECAY:
            g2_last = gl.sum(gl.where(row == 15, g2, 0.0), axis=axis)
            error = error * gl.exp2(gl.expand_dims(g2_last, axis) - g2)
        error = gl.expand_dims(gl.sum(gl.where(row == 15, 0.0, error), axis=axis), axis)
        ag = gl.where(row == 15, ag + error, ag).to(gl.float16).to(dtype, bitcast=True)
    else:
        ag = ag.to(dtype)
    return ag


@gluon.jit
def store_rows(ag_ptr, ag_smem, count, HV: gl.constexpr):
    """Copy the first ``count`` rows of Ag to memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    for first in gl.static_range(0, C, 16):
        rows = gl.arange(0, 16, gl.SliceLayout(1, layout)) + first
        columns = gl.arange(0, C, gl.SliceLayout(0, layout))
        at = gl.expand_dims(rows * (HV * C), 1) + gl.expand_dims(columns, 0)
        x = ag_smem.slice(first, 16, 0).load(layout)
        gl.store(ag_ptr + at, x, mask=gl.expand_dims(rows < count, 1) & (at >= 0))


@gluon.jit
def zero_output(o_ptr, count, stride_o_t, V: gl.constexpr):
    """Store zeros for ``count`` tokens that no sequence owns."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])
    columns = gl.arange(0, V, gl.SliceLayout(0, layout))
    zeros = gl.zeros([16, V], o_ptr.dtype.element_ty, layout)
    for first in range(0, count, 16):
        rows = gl.arange(0, 16, gl.SliceLayout(1, layout)) + first
        at = gl.expand_dims(rows.to(gl.int64) * stride_o_t, 1) + gl.expand_dims(columns, 0)
        mask = gl.expand_dims(rows < count, 1) & gl.expand_dims(columns < V, 0)
        gl.store(o_ptr + at, zeros, mask=mask)
