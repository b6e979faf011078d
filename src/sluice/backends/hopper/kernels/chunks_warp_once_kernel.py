"""As chunks_warp_kernel.py with one unit per program: to be measured beside it, then deleted."""

# ruff: noqa: SIM102 (Triton has no tuple unpacking; constexpr branches stay apart)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sluice.backends.hopper.kernels.chunks_gates import Gates
from sluice.backends.hopper.kernels.chunks_warp_inverse import (
    invert,
    invert_diagonal,
    kk_layout,
    products_of_keys,
    upper,
)
from sluice.backends.hopper.kernels.chunks_warp_kernel import (
    clear_rows,
    finish_gates,
    four_blocks,
    keep_ag,
    keys_repeat,
    normalized,
    read_gates,
    store_rows,
)
from sluice.backends.hopper.kernels.constants import C
from sluice.backends.hopper.kernels.gluon_api import async_load, async_store, barrier, reinterpret
from sluice.backends.hopper.kernels.work_units import counted_span, tail_span
from sluice.backends.triton.kernels.alignment import GATES, INDICES


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
def hopper_chunks_warp_once_kernel(
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
