"""The parallel half of chunked prefill on Hopper, in Gluon: one program makes Ag of a chunk.

A unit is a chunk of C = 64 tokens of one or two key heads. A program goes from unit to unit
(chunks_units.py). It makes K Kᵀ once, and then, for four value heads at a time, one per warp,

    A  = (I + L)⁻¹                                 L = strictLower(diag(beta) K Kᵀ)
    Ag = G ∘ A                                     G_ij = exp(γ_i - γ_j), 0 above the diagonal

with γ the cumulative log decay in the chunk (docs/kernels/symbols.md). chunks_inverse.py makes A.
Where each key head has one value head, chunks_warp_kernel.py serves instead.

Ag is a 16-bit operand with ones on its diagonal. It does not contain beta: rounded with Ag, beta
would have the same error in every token with the same beta. It is passed on in float32 instead.

Where keys nearly repeat, errors of Ag add up over tokens (docs/numerics.md). Such a chunk is *hard*
(chunks_hard.py), and its Ag is float16, whatever 16-bit type the inputs have. A chunk of fewer than
64 tokens counts as hard too, so that the serial half treats both alike.

K Kᵀ takes the memory of K, and nobody reads it once A is made. Then the next unit's keys come there
while Ag of this one is stored, and its gates into registers.
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
from sluice.backends.hopper.kernels.chunks_gates import (
    Gates,
    keep_gates,
    load_gates,
    read_gates,
    store_gates,
)
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
from sluice.backends.hopper.kernels.chunks_units import (
    Units,
    find_unit,
    gates_from,
    prefetch_keys,
)
from sluice.backends.hopper.kernels.constants import NORM_EPS, C
from sluice.backends.hopper.kernels.gluon_api import async_load, barrier
from sluice.backends.hopper.kernels.layouts import accumulator, along, axis_layout
from sluice.backends.triton.kernels.alignment import GATES, INDICES

key_heads = gluon.constexpr_function(sizes.key_heads)


@gluon.jit(
    do_not_specialize=[
        "N",
        "T",
        "M",
        "every",
        "units",
        "stride_k_t",
        "stride_g_b",
        "stride_beta_b",
        "stride_gates_h",
    ],
    do_not_specialize_on_alignment=[*INDICES, *GATES, "k_ptr"],
)
def hopper_chunks_kernel(
    k_desc,  # [B * T, HK * K], block [C, K]
    k_ptr,  # the same tensor
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
    units,  # of chunks, at most; tails of checkpoints come after them
    stride_k_t,
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
    PREFETCH: gl.constexpr,  # whether the next keys come into the L2 cache first
):
    R: gl.constexpr = HV // HK
    KH: gl.constexpr = key_heads(HK, HV)
    H: gl.constexpr = 4 // KH
    GROUPS: gl.constexpr = HK // KH
    DECAY: gl.constexpr = g_ptr is not None
    NORMALIZE_QK: gl.constexpr = r_k_ptr is not None
    dtype: gl.constexpr = k_desc.dtype
    acc: gl.constexpr = accumulator(C)
    by_row: gl.constexpr = gl.SliceLayout(1, acc)
    by_column: gl.constexpr = gl.SliceLayout(0, acc)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    gate_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    k_smem = gl.allocate_shared_memory(dtype, [KH, C, K], k_desc.layout)
    g2_smem = gl.allocate_shared_memory(gl.float32, [4, KH, H, 16], gate_layout)
    beta_smem = gl.allocate_shared_memory(gl.float32, [4, KH, H, 16], gate_layout)
    inv_diag_smem = gl.allocate_shared_memory(gl.float32, [4, KH, H, 16, 16], inverse_layout(KH))
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()

    gdc_wait()  # for the kernels before this one, which make q, k and the gates
    gdc_launch_dependents()  # after the wait: see state_kernel.py
    if gl.program_id(0) == 0:
        gl.store(taken_ptr, 0)
    of = Units(
        cu_seqlens_ptr=cu_seqlens_ptr, positions_ptr=checkpoint_positions_ptr, every=every,
        N=N, T=T, M=M, units=units, rows=stride_gates_h, o_ptr=o_ptr, stride_o_t=stride_o_t,
        GROUPS=GROUPS, WIDTH=KH * R * V, WARPS=4, TAILS=TAILS,
    )  # fmt: skip
    gates = Gates(
        g_ptr=g_ptr, A_log_ptr=A_log_ptr, dt_bias_ptr=dt_bias_ptr, beta_ptr=beta_ptr,
        beta_scale=beta_scale, stride_g_t=stride_g_t, stride_g_h=stride_g_h,
        stride_beta_t=stride_beta_t, stride_beta_h=stride_beta_h, RAW_BETA=RAW_BETA,
    )  # fmt: skip
    number, seq, row, made, count = find_unit(of, gl.program_id(0))
    group = number % GROUPS
    copy_keys(k_desc, k_smem, bar, row, group * (KH * K), count > 0, KH, K)
    barrier()  # else the compiler may start a copy after the loads of the gates
    here = gates_from(gates, seq, row, of, stride_g_b, stride_beta_b)
    g, beta = read_gates(here, group * (KH * R), R, count, R, KH)
    phase = number * 0
    while count > 0:
        next_number, next_seq, next_row, next_made, next_count = find_unit(
            of, number + gl.num_programs(0)
        )
        next_group = next_number % GROUPS
        if PREFETCH:
            if next_count > 0:
                k_at = k_ptr + next_group * (KH * K)
                prefetch_keys(k_at, next_row, next_count, stride_k_t, KH * K, 4)
        keep_gates(gates, g, beta, g2_smem, beta_smem, group * (KH * R), R, count, R, KH)
        i = gl.expand_dims(gl.arange(0, C, by_row), 1)
        j = gl.expand_dims(gl.arange(0, C, by_column), 0)
        zero = gl.zeros([C, C], gl.float32, acc)
        mbarrier.wait(bar, phase)
        phase = phase ^ 1
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
                here = gates_from(gates, seq, row, of, stride_g_b, stride_beta_b)
                load_gates(here, g2_smem, beta_smem, head, heads, count, R, KH)
                barrier()
            at = head.to(gl.int64) * stride_gates_h + made
            store_gates(beta32_ptr + at, beta_smem, count, heads, stride_gates_h, R, KH)
            if DECAY:
                store_gates(g2_ptr + at, g2_smem, count, heads, stride_gates_h, R, KH)
            a = invert(k_smem, beta_smem, inv_diag_smem, KH)
            if first + H >= R:  # nobody reads K Kᵀ any more: the next keys come in its place
                fence_async_shared()
                barrier()
                copy_keys(
                    k_desc, k_smem, bar, next_row, next_group * (KH * K), next_count > 0, KH, K
                )
                barrier()
                here = gates_from(gates, next_seq, next_row, of, stride_g_b, stride_beta_b)
                g, beta = read_gates(here, next_group * (KH * R), R, next_count, R, KH)
            ag_at = ag_ptr + (made.to(gl.int64) * HV + head) * C
            if any_hard:
                store_ag(
                    ag_at, a, inv_diag_smem, g2_smem, hard, count, heads, HK, HV, DECAY, True
                )  # fmt: skip
            else:
                store_ag(
                    ag_at, a, inv_diag_smem, g2_smem, hard, count, heads, HK, HV, DECAY, False
                )  # fmt: skip
        number = next_number
        group = next_group
        seq = next_seq
        row = next_row
        made = next_made
        count = next_count


@gluon.jit
def copy_keys(k_desc, k_smem, bar, row, column, on, KH: gl.constexpr, K: gl.constexpr):
    """Start the copies of a unit's keys, if it is there. They arrive at ``bar``."""
    mbarrier.expect(bar, KH * 2 * C * K, pred=on)
    for kh in gl.static_range(KH):
        async_load(k_desc, [row, column + kh * K], bar, k_smem.index(kh), pred=on)


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
