"""The parallel half of chunked prefill on Hopper, in Gluon: one program makes Ag of a chunk.

A program owns a chunk of C = 64 tokens of one or two key heads. It makes K Kᵀ once, and then, for
four value heads at a time, one per warp,

    A  = (I + L)⁻¹                                 L = strictLower(diag(beta) K Kᵀ)
    Ag = G ∘ A                                     G_ij = exp(γ_i - γ_j), 0 above the diagonal

with γ the cumulative log decay in the chunk (docs/kernels/symbols.md). chunks_inverse.py makes A.
Where each key head has one value head, chunks_warp_kernel.py serves instead.

Ag is a 16-bit operand with ones on its diagonal. It does not contain beta: rounded with Ag, beta
would have the same error in every token with the same beta. It is passed on in float32 instead.

Where keys nearly repeat, errors of Ag add up over tokens (docs/numerics.md). Such a chunk is *hard*
(chunks_hard.py), and its Ag is float16, whatever 16-bit type the inputs have. A chunk of fewer than
64 tokens counts as hard too, so that the serial half treats both alike.
"""

# ruff: noqa: RUF005, SIM102, SIM108 (Triton has no tuple unpacking; constexpr branches stay apart)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sluice.backends.hopper.kernels import sizes
from sluice.backends.hopper.kernels.chunks_gates import Gates, load_gates, store_gates
from sluice.backends.hopper.kernels.chunks_hard import float16_block, keys_repeat
from sluice.backends.hopper.kernels.chunks_inverse import (
    gate_blocks,
    inverse_blocks,
    inverse_layout,
    invert,
    lower,
    quads,
    store_kk,
    unmixed,
)
from sluice.backends.hopper.kernels.constants import NORM_EPS, C
from sluice.backends.hopper.kernels.gluon_api import async_load, barrier
from sluice.backends.hopper.kernels.layouts import accumulator, along, axis_layout
from sluice.backends.hopper.kernels.work_units import tail_span, unit_span
from sluice.backends.triton.kernels.alignment import GATES, INDICES

key_heads = gluon.constexpr_function(sizes.key_heads)


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
def hopper_chunks_kernel(
    k_desc,  # [B * T, HK * K], block [C, K]
    g_ptr,  # [B, T, HV]; None: no decay
    A_log_ptr,  # [HV]; None: g is not a raw gate
    dt_bias_ptr,  # [HV]; None: 0
    beta_ptr,  # [B, T, HV]
    ag_ptr,  # [B * T, HV, C]
    beta32_ptr,  # [HV, B * T] float32
    g2_ptr,  # [HV, B * T] float32: γ in powers of two; None without g
    r_k_ptr,  # [HK, B * T] float32: inverse lengths of the keys; None without norm
    hard_ptr,  # [HK, B * T] int8, at a chunk's first token: whether its Ag is float16
    taken_ptr,  # [1] int32: the counter of hopper_state_kernel, set to zero
    o_ptr,  # [B * T, HV * V]: zeros for tokens after the last sequence
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    checkpoint_positions_ptr,  # [N, M]; None without tails, or after every ``every`` tokens
    beta_scale,
    N,
    T,
    M,
    every,
    units,  # of chunks; tails of checkpoints come after them
    stride_g_b,
    stride_g_t,
    stride_g_h,
    stride_beta_b,
    stride_beta_t,
    stride_beta_h,
    stride_o_t,
    stride_gates_h,  # of beta32, g2, r_k and hard
    HK: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    RAW_BETA: gl.constexpr,
    TAILS: gl.constexpr,  # whether a checkpoint may lie inside a chunk
):
    R: gl.constexpr = HV // HK
    KH: gl.constexpr = key_heads(HK, HV)
    H: gl.constexpr = 4 // KH
    DECAY: gl.constexpr = g_ptr is not None
    NORMALIZE_QK: gl.constexpr = r_k_ptr is not None
    dtype: gl.constexpr = k_desc.dtype
    acc: gl.constexpr = accumulator(C)
    by_row: gl.constexpr = gl.SliceLayout(1, acc)
    by_column: gl.constexpr = gl.SliceLayout(0, acc)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    gate_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])

    gdc_wait()  # for the kernels before this one, which make q, k and the gates
    gdc_launch_dependents()
    pid = gl.program_id(0)
    if pid == 0:
        gl.store(taken_ptr, 0)
    group = pid % (HK // KH)
    unit = pid // (HK // KH)
    if TAILS:
        tail = gl.maximum(unit - units, 0)
        unit = gl.minimum(unit, units - 1)
    seq, start, chunk, end = unit_span(unit, cu_seqlens_ptr, N, T, C)
    row = start + chunk * C
    made = row  # where the results for the chunk go
    if TAILS:
        if pid // (HK // KH) >= units:
            seq, row, end = tail_span(tail, cu_seqlens_ptr, checkpoint_positions_ptr, every, T, M)
            made = stride_gates_h - N * M * C + tail * C
    count = gl.minimum(end - row, C)
    if (count > 0) & (seq >= N):  # tokens after the last sequence
        at = o_ptr + row.to(gl.int64) * stride_o_t + group * (KH * R * V)
        zero_output(at, count, stride_o_t, KH * R * V)
    if (count > 0) & (seq < N):
        k_smem = gl.allocate_shared_memory(dtype, [KH, C, K], k_desc.layout)
        g2_smem = gl.allocate_shared_memory(gl.float32, [4, KH, H, 16], gate_layout)
        beta_smem = gl.allocate_shared_memory(gl.float32, [4, KH, H, 16], gate_layout)
        bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(bar, count=1)
        fence_async_shared()
        mbarrier.expect(bar, KH * 2 * C * K)
        for kh in gl.static_range(KH):
            column = (group * KH + kh) * K
            async_load(k_desc, [row, column], bar, k_smem.index(kh))
        barrier()  # else the compiler may start a copy after the loads of the gates

        batch = seq * 0
        t = row
        if cu_seqlens_ptr is None:
            batch = seq
            t = row - seq * T
        tokens = made.to(gl.int64)
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
        load_gates(gates, g2_smem, beta_smem, group * (KH * R), R, count, R, KH)
        i = gl.expand_dims(gl.arange(0, C, by_row), 1)
        j = gl.expand_dims(gl.arange(0, C, by_column), 0)
        zero = gl.zeros([C, C], gl.float32, acc)
        inv_diag_smem = gl.allocate_shared_memory(
            gl.float32, [4, KH, H, 16, 16], inverse_layout(KH)
        )
        mbarrier.wait(bar, 0)
        if NORMALIZE_QK:
            r_k_smem = gl.allocate_shared_memory(gl.float32, [KH, C], plain)
            for kh in gl.static_range(KH):
                at = (group * KH + kh).to(gl.int64) * stride_gates_h + made
                store_inverse_lengths(k_smem.index(kh), count, r_k_ptr + at, r_k_smem.index(kh))
        kks = ()
        for kh in gl.static_range(KH):
            k_tile = k_smem.index(kh)
            kk = warpgroup_mma(k_tile, k_tile.permute((1, 0)), zero, use_acc=False)
            if NORMALIZE_QK:
                r_j = gl.expand_dims(r_k_smem.index(kh).load(by_column), 0)
                kk = kk * gl.expand_dims(r_k_smem.index(kh).load(by_row), 1) * r_j
            if count < C:  # mask other sequences' tokens: they may be NaN
                kk = gl.where((i < count) & (j < count), kk, 0.0)
            kks = kks + (kk,)
        barrier()
        store_kk(k_smem, kks, KH)
        hard = keys_repeat(kks, NORMALIZE_QK) | (count < C)
        key_head = group * KH + gl.arange(0, KH, hard.type.layout)
        mark_ptr = hard_ptr + key_head.to(gl.int64) * stride_gates_h + made
        gl.store(mark_ptr, hard.to(gl.int8))
        any_hard = gl.max(hard.to(gl.int32), axis=0) != 0

        for first in range(0, R, H):
            head = group * (KH * R) + first
            heads = R - first
            if R > H and first > 0:
                barrier()
                load_gates(gates, g2_smem, beta_smem, head, heads, count, R, KH)
                barrier()
            at = head.to(gl.int64) * stride_gates_h + made
            store_gates(beta32_ptr + at, beta_smem, count, heads, stride_gates_h, R, KH)
            if DECAY:
                store_gates(g2_ptr + at, g2_smem, count, heads, stride_gates_h, R, KH)
            a = invert(k_smem, beta_smem, inv_diag_smem, KH)
            ag_at = ag_ptr + (tokens * HV + head) * C
            if any_hard:
                store_ag(
                    ag_at, a, inv_diag_smem, g2_smem, hard, count, heads, HK, HV, DECAY, True
                )  # fmt: skip
            else:
                store_ag(
                    ag_at, a, inv_diag_smem, g2_smem, hard, count, heads, HK, HV, DECAY, False
                )  # fmt: skip


@gluon.jit
def store_inverse_lengths(k_smem, count, r_k_ptr, r_k_smem):
    """Store 1 / sqrt(sum k² + eps) of each key to memory and to shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    k = k_smem.load(layout).to(gl.float32)
    r_k = gl.rsqrt(gl.sum(k * k, axis=1) + NORM_EPS)
    r_k_smem.store(r_k)
    rows = gl.arange(0, C, gl.SliceLayout(1, layout))
    gl.store(r_k_ptr + rows, r_k, mask=rows < count)


@gluon.jit
def zero_output(o_ptr, count, stride_o_t, WIDTH: gl.constexpr):
    """Store zeros for ``count`` tokens that no sequence owns."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 128, gl.SliceLayout(0, layout))
    at = gl.expand_dims(rows.to(gl.int64) * stride_o_t, 1) + gl.expand_dims(columns, 0)
    mask = gl.expand_dims(rows < count, 1) & gl.expand_dims(columns < 128, 0)
    zeros = gl.zeros([C, 128], o_ptr.dtype.element_ty, layout)
    for column in range(0, WIDTH, 128):
        gl.store(o_ptr + column + at, zeros, mask=mask)


@gluon.jit
def store_ag(
    ag_ptr, a, inv_diag_smem, g2_smem, hard, count, heads,
    HK: gl.constexpr, HV: gl.constexpr, DECAY: gl.constexpr, ANY_HARD: gl.constexpr,
):  # fmt: skip
    """Store Ag of four value heads, block by block of [16, 16], zeros above the diagonal.

    With ANY_HARD at least one key head of the program has a hard chunk; ``hard`` says which.
    """
    R: gl.constexpr = HV // HK
    KH: gl.constexpr = key_heads(HK, HV)
    dtype: gl.constexpr = ag_ptr.dtype.element_ty
    layout: gl.constexpr = quads(KH)
    by_row: gl.constexpr = gl.SliceLayout(3, layout)
    by_column: gl.constexpr = gl.SliceLayout(2, layout)
    inv_diag = inverse_blocks(inv_diag_smem, KH)
    g2_rows = gate_blocks(g2_smem, KH)
    kh = along(0, KH, layout, 4)
    h = along(1, 4 // KH, layout, 4)
    row = along(2, 16, layout, 4)
    column = along(3, 16, layout, 4)
    at = row * (HV * C) + (kh * R + h) * C + column
    zeros = gl.zeros([KH, 4 // KH, 16, 16], dtype, layout)
    if ANY_HARD:
        is_hard = gl.convert_layout(hard, axis_layout(layout, 0, 4))
        for axis in gl.static_range(1, 4):
            is_hard = gl.expand_dims(is_hard, axis)
    for i in gl.static_range(4):
        on = (row + 16 * i < count) & (h < heads) & (kh < KH) & (column < 16)
        g2_i = row.to(gl.float32)
        if DECAY:
            g2_i = gl.expand_dims(g2_rows.index(i).load(by_row), 3)
        for j in gl.static_range(4):
            block_at = at + (16 * i * HV * C + 16 * j)
            if j > i:
                gl.store(ag_ptr + block_at, zeros, mask=on)
            else:
                if i == j:
                    ag = inv_diag.index(i).load(layout)
                else:
                    ag = unmixed(a[lower(i, j)], KH)
                if DECAY:
                    difference = g2_i - gl.expand_dims(g2_rows.index(j).load(by_column), 2)
                    if i == j:
                        difference = gl.where(row >= column, difference, 0.0)
                    ag = ag * gl.exp2(difference)
                if ANY_HARD:
                    half = float16_block(ag, g2_i, row, DECAY).to(gl.int16, bitcast=True)
                    bits = gl.where(is_hard, half, ag.to(dtype).to(gl.int16, bitcast=True))
                    gl.store(ag_ptr + block_at, bits.to(dtype, bitcast=True), mask=on)
                else:
                    gl.store(ag_ptr + block_at, ag.to(dtype), mask=on)
