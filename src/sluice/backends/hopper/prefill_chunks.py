"""The parallel half of chunked prefill on Hopper, in Gluon: one program makes Ag of a chunk.

It owns a chunk of C = 64 tokens of one or two key heads, makes K Kᵀ once, and for each value head,
four at a time, a warp each,

    A  = (I + M)⁻¹, M = strictLower(diag(beta) K Kᵀ)
    Ag = G ∘ A                                     G_ij = exp(gc_i - gc_j), i >= j

with gc the cumulative log decay in the chunk (docs/kernels/chunked.md); A: prefill_inverse. Ag is
an operand of 16 bits and has ones on its diagonal; beta as one of its factors would be rounded with
it, by the same error in each token that has the same beta. It goes along in float32 instead.

Where keys nearly repeat, errors of Ag add up over tokens (docs/numerics.md): such a chunk is called
hard, and its Ag kept in float16, whatever 16-bit type the inputs have. So is that of a chunk that
is not whole: the serial half takes both by themselves.
"""

# ruff: noqa: RUF005, SIM102 (what a kernel may not say)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sluice.backends.hopper.prefill_hard import in_float16, repeating
from sluice.backends.hopper.prefill_inverse import (
    along,
    axis_of,
    block_offsets,
    by_block,
    by_warp,
    invert,
    unmixed,
)
from sluice.backends.hopper.prefill_tiles import barrier, unit_span
from sluice.backends.triton.arguments import GATES, INDICES

C_TOKENS = gl.constexpr(64)
LOG2_E = gl.constexpr(1.4426950408889634)
NORM_EPS = gl.constexpr(1e-6)


@gluon.constexpr_function
def key_heads(HK, HV):
    """Key heads a program has, of which it takes four value heads at a time."""
    return 2 if HV <= 2 * HK and HK % 2 == 0 else 1


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp2(x * -LOG2_E))


@gluon.jit
def softplus(x):
    """log(1 + exp(x)) to float32's precision on both sides of zero, as in the Triton kernels."""
    e = gl.exp2(gl.abs(x) * -LOG2_E)
    s = e / (2.0 + e)
    s2 = s * s
    series = s2 * (1.0 / 13.0) + (1.0 / 11.0)
    series = s2 * series + (1.0 / 9.0)
    series = s2 * series + (1.0 / 7.0)
    series = s2 * series + (1.0 / 5.0)
    series = s2 * series + (1.0 / 3.0)
    series = s2 * series + 1.0
    return gl.maximum(x, 0.0) + 2.0 * s * series


@gluon.jit
def gather_gates(
    g_ptr, A_log_ptr, dt_bias_ptr, beta_ptr, g_smem, b_smem, head, heads, count, beta_scale,
    stride_g_t, stride_g_h, stride_beta_t, stride_beta_h, R: gl.constexpr, KH: gl.constexpr,
    RAW_BETA: gl.constexpr,
):  # fmt: skip
    """Cumulative log2 decays and betas of four value heads from ``head`` on, a warp a head.

    They go to shared memory as [4 blocks of tokens, KH, 4 / KH, 16]. Behind ``count`` the decay
    stays and beta is 0, where a key head has no more than ``heads`` value heads both are.
    """
    C: gl.constexpr = C_TOKENS
    H: gl.constexpr = 4 // KH
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    offs = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, layout)), 0)
    item = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, layout)), 1)
    own = item % H < heads
    item = head + item // H * R + item % H
    on = (offs < count) & own
    at = offs.to(gl.int64) * stride_beta_t + item * stride_beta_h
    beta = gl.load(beta_ptr + at, mask=on, other=0.0).to(gl.float32)
    if g_ptr is not None:
        at = offs.to(gl.int64) * stride_g_t + item * stride_g_h
        g = gl.load(g_ptr + at, mask=on, other=0.0).to(gl.float32)
        if A_log_ptr is not None:
            A = gl.load(A_log_ptr + item, mask=own, other=0.0).to(gl.float32)
            if dt_bias_ptr is not None:
                g += gl.load(dt_bias_ptr + item, mask=own, other=0.0).to(gl.float32)
            g = -gl.exp2(A * LOG2_E) * softplus(g)
        g2 = gl.associative_scan(gl.where(on, g * LOG2_E, 0.0), 1, add)
        g_smem.store(gl.permute(gl.reshape(g2, [KH, H, 4, 16]), (2, 0, 1, 3)))
    if RAW_BETA:
        beta = gl.where(on, sigmoid(beta) * beta_scale, 0.0)
    b_smem.store(gl.permute(gl.reshape(beta, [KH, H, 4, 16]), (2, 0, 1, 3)))


@gluon.jit
def store_rows(ptr, smem, count, heads, stride_h, R: gl.constexpr, KH: gl.constexpr):
    """Store a number a head and token, [4 blocks of tokens, KH, 4 / KH, 16]."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2, 1],
        [1, 1, 2, 16] if KH == 1 else [1, 2, 1, 16],
        [4, 1, 1, 1],
        [2, 1, 3, 0],
    )
    row = along(0, 4, layout, 4) * 16 + along(3, 16, layout, 4)
    h = along(2, 4 // KH, layout, 4)
    on = (row < count) & (h < heads) & (along(1, KH, layout, 4) < KH)
    x = gl.where(on, smem.load(layout), 0.0)
    head = (along(1, KH, layout, 4) * R + h).to(gl.int64)
    gl.store(ptr + head * stride_h + row, x, mask=on)


@gluon.jit
def inverse_lengths(smem, count, r_ptr, r_smem):
    """1 / sqrt(sum x² + eps) for each row of a tile, to memory and to shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    x = smem.load(layout).to(gl.float32)
    r = gl.rsqrt(gl.sum(x * x, axis=1) + NORM_EPS)
    r_smem.store(r)
    rows = gl.arange(0, C_TOKENS, gl.SliceLayout(1, layout))
    gl.store(r_ptr + rows, r, mask=rows < count)


@gluon.jit
def zero_rows(o_ptr, count, stride_o_t, WIDTH: gl.constexpr):
    """Zeros for ``count`` tokens that no sequence owns."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = gl.arange(0, C_TOKENS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 128, gl.SliceLayout(0, layout))
    at = gl.expand_dims(rows.to(gl.int64) * stride_o_t, 1) + gl.expand_dims(columns, 0)
    mask = gl.expand_dims(rows < count, 1) & gl.expand_dims(columns < 128, 0)
    zeros = gl.zeros([C_TOKENS, 128], o_ptr.dtype.element_ty, layout)
    for column in range(0, WIDTH, 128):
        gl.store(o_ptr + column + at, zeros, mask=mask)


@gluon.jit
def store_inverse(
    a_ptr, A, X, g_rows, hard, count, heads, quads: gl.constexpr,
    HV: gl.constexpr, R: gl.constexpr, KH: gl.constexpr, DECAY: gl.constexpr, HARD: gl.constexpr,
):  # fmt: skip
    """Ag of four value heads, block by block of [16, 16], zeros above the diagonal.

    With HARD one key head of the program or both have keys that repeat.
    """
    C: gl.constexpr = C_TOKENS
    dtype: gl.constexpr = a_ptr.dtype.element_ty
    by_row: gl.constexpr = gl.SliceLayout(3, quads)
    by_column: gl.constexpr = gl.SliceLayout(2, quads)
    kh = along(0, KH, quads, 4)
    h = along(1, 4 // KH, quads, 4)
    row = along(2, 16, quads, 4)
    column = along(3, 16, quads, 4)
    at = row * (HV * C) + (kh * R + h) * C + column
    zeros = gl.zeros([KH, 4 // KH, 16, 16], dtype, quads)
    if HARD:
        own = gl.convert_layout(hard, axis_of(quads, 0, 4))
        for axis in gl.static_range(1, 4):
            own = gl.expand_dims(own, axis)
    for i in gl.static_range(4):
        on = (row + 16 * i < count) & (h < heads) & (kh < KH) & (column < 16)
        g_i = row.to(gl.float32)
        if DECAY:
            g_i = gl.expand_dims(g_rows.index(i).load(by_row), 3)
        for j in gl.static_range(4):
            to = at + (16 * i * HV * C + 16 * j)
            if j > i:
                gl.store(a_ptr + to, zeros, mask=on)
            else:
                if i == j:
                    a = X.index(i).load(quads)
                else:
                    a = unmixed(A[i * (i - 1) // 2 + j], quads, KH)
                if DECAY:
                    g = g_i - gl.expand_dims(g_rows.index(j).load(by_column), 2)
                    if i == j:
                        g = gl.where(row >= column, g, 0.0)
                    a = a * gl.exp2(g)
                if HARD:
                    half = in_float16(a, g_i, row, DECAY).to(gl.int16, bitcast=True)
                    a = gl.where(own, half, a.to(dtype).to(gl.int16, bitcast=True))
                    gl.store(a_ptr + to, a.to(dtype, bitcast=True), mask=on)
                else:
                    gl.store(a_ptr + to, a.to(dtype), mask=on)


@gluon.jit(
    do_not_specialize=["N", "T", "stride_g_b", "stride_beta_b", "stride_gates_h"],
    do_not_specialize_on_alignment=[*INDICES, *GATES],
)
def hopper_chunks_kernel(
    k_desc,  # [B * T, HK * K], block [C, K]
    g_ptr,  # [B, T, HV]; None: no decay
    A_log_ptr,  # [HV]; None: g is no raw gate
    dt_bias_ptr,  # [HV]; None: 0
    beta_ptr,  # [B, T, HV]
    a_ptr,  # [B * T, HV, C]: Ag
    b_ptr,  # [HV, B * T] float32: beta
    g2_ptr,  # [HV, B * T] float32: cumulative log2 decay; None without g
    r_k_ptr,  # [HK, B * T] float32: inverse lengths; None without norm
    hard_ptr,  # [HK, B * T] int8, at a chunk's first token: whether its Ag is float16
    o_ptr,  # [B * T, HV * V]: zeros for the tail
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    beta_scale,
    N,
    T,
    stride_g_b,
    stride_g_t,
    stride_g_h,
    stride_beta_b,
    stride_beta_t,
    stride_beta_h,
    stride_o_t,
    stride_gates_h,  # of b, g2, r_k and hard
    HK: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    RAW_BETA: gl.constexpr,
):
    C: gl.constexpr = C_TOKENS
    R: gl.constexpr = HV // HK
    KH: gl.constexpr = key_heads(HK, HV)
    H: gl.constexpr = 4 // KH
    dtype: gl.constexpr = k_desc.dtype
    acc: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16]
    )
    # a block [16, 16] of each of four value heads: four neighbours of a row a thread, a warp a head
    warps: gl.constexpr = by_warp(KH)
    quads: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 8, 0]],
        lane_bases=[[0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        warp_bases=warps,
        block_bases=[],
        shape=[KH, H, 16, 16],
    )
    # what a product needs of a transposed block, rows mixed
    upright: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 2, 0], [0, 0, 0, 8]],
        lane_bases=[[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 4, 0], [0, 0, 8, 0]],
        warp_bases=warps,
        block_bases=[],
        shape=[KH, H, 16, 16],
    )
    by_row: gl.constexpr = gl.SliceLayout(1, acc)
    by_column: gl.constexpr = gl.SliceLayout(0, acc)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    blocks: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    turned: gl.constexpr = gl.SharedLinearLayout(
        block_offsets([4, 4, KH, 16, 16], (2, 8), (4, 0), turned=True)
    )
    every: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    block: gl.constexpr = gl.SharedLinearLayout(block_offsets([KH, 16, 16], (2, 8), (4, 0)))
    inverses: gl.constexpr = gl.SharedLinearLayout(
        block_offsets([4, KH, H, 16, 16], (2, 8), (5, 0))
    )
    inverse: gl.constexpr = gl.SharedLinearLayout(block_offsets([KH, H, 16, 16], (2, 8), (5, 0)))
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])

    gdc_wait()  # for the kernels before this one, which make q, k and the gates
    gdc_launch_dependents()
    pid = gl.program_id(0)
    group = pid % (HK // KH)
    unit = pid // (HK // KH)
    seq, start, chunk, end = unit_span(unit, cu_seqlens_ptr, N, T, C)
    row = start + chunk * C
    count = gl.minimum(end - row, C)
    if (count > 0) & (seq >= N):  # tokens behind the last sequence
        at = o_ptr + row.to(gl.int64) * stride_o_t + group * (KH * R * V)
        zero_rows(at, count, stride_o_t, KH * R * V)
    if (count > 0) & (seq < N):
        k_smem = gl.allocate_shared_memory(dtype, [KH, C, K], k_desc.layout)
        g_smem = gl.allocate_shared_memory(gl.float32, [4, KH, H, 16], blocks)
        b_smem = gl.allocate_shared_memory(gl.float32, [4, KH, H, 16], blocks)
        bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(bar, count=1)
        fence_async_shared()
        mbarrier.expect(bar, KH * 2 * C * K)
        for kh in gl.static_range(KH):
            column = (group * KH + kh) * K
            tma.async_copy_global_to_shared(k_desc, [row, column], bar, k_smem.index(kh))
        barrier()  # no copy is put off behind the gates

        batch = seq * 0
        t = row
        if cu_seqlens_ptr is None:
            batch = seq
            t = row - seq * T
        tokens = row.to(gl.int64)
        beta_ptr += batch.to(gl.int64) * stride_beta_b + t.to(gl.int64) * stride_beta_t
        if g_ptr is not None:
            g_ptr += batch.to(gl.int64) * stride_g_b + t.to(gl.int64) * stride_g_t
        gather_gates(
            g_ptr, A_log_ptr, dt_bias_ptr, beta_ptr, g_smem, b_smem, group * (KH * R), R, count,
            beta_scale, stride_g_t, stride_g_h, stride_beta_t, stride_beta_h, R, KH, RAW_BETA,
        )  # fmt: skip
        i = gl.expand_dims(gl.arange(0, C, by_row), 1)
        j = gl.expand_dims(gl.arange(0, C, by_column), 0)
        none = gl.zeros([C, C], gl.float32, acc)
        # K is done with after its products, which take its place
        d_smem = k_smem._reinterpret(gl.float32, [4, 4, KH, 16, 16], every).slice(0, 1, 1)
        kk_smem = k_smem._reinterpret(gl.float32, [16, KH, 16, 16], block)
        x_smem = gl.allocate_shared_memory(gl.float32, [4, KH, H, 16, 16], inverses)
        X = x_smem._reinterpret(gl.float32, [4, KH, H, 16, 16], inverse)
        g_rows = g_smem._reinterpret(gl.float32, [4, KH, H, 16], rows)
        b_rows = b_smem._reinterpret(gl.float32, [4, KH, H, 16], rows)
        mbarrier.wait(bar, 0)
        if r_k_ptr is not None:
            r_k_smem = gl.allocate_shared_memory(gl.float32, [KH, C], plain)
            for kh in gl.static_range(KH):
                at = (group * KH + kh).to(gl.int64) * stride_gates_h + row
                inverse_lengths(k_smem.index(kh), count, r_k_ptr + at, r_k_smem.index(kh))
        kks = ()
        for kh in gl.static_range(KH):
            k_tile = k_smem.index(kh)
            kk = warpgroup_mma(k_tile, k_tile.permute((1, 0)), none, use_acc=False)
            if r_k_ptr is not None:
                r_j = gl.expand_dims(r_k_smem.index(kh).load(by_column), 0)
                kk = kk * gl.expand_dims(r_k_smem.index(kh).load(by_row), 1) * r_j
            # what other sequences' tokens hold must not come in, were it not a number
            if count < C:
                kk = gl.where((i < count) & (j < count), kk, 0.0)
            kks = kks + (kk,)
        barrier()
        k_smem._reinterpret(gl.float32, [4, 4, KH, 16, 16], turned).store(by_block(kks))
        hard = repeating(kks, r_k_ptr is not None) | (count < C)
        key_head = group * KH + gl.arange(0, KH, hard.type.layout)
        mark_ptr = hard_ptr + key_head.to(gl.int64) * stride_gates_h + row
        gl.store(mark_ptr, hard.to(gl.int8))
        some = gl.max(hard.to(gl.int32), axis=0) != 0

        for first in range(0, R, H):
            head = group * (KH * R) + first
            heads = R - first
            if R > H:
                if first > 0:
                    barrier()
                    gather_gates(
                        g_ptr, A_log_ptr, dt_bias_ptr, beta_ptr, g_smem, b_smem, head, heads, count,
                        beta_scale, stride_g_t, stride_g_h, stride_beta_t, stride_beta_h, R, KH,
                        RAW_BETA,
                    )  # fmt: skip
                    barrier()
            at = head.to(gl.int64) * stride_gates_h + row
            store_rows(b_ptr + at, b_smem, count, heads, stride_gates_h, R, KH)
            if g_ptr is not None:
                store_rows(g2_ptr + at, g_smem, count, heads, stride_gates_h, R, KH)
            A = invert(kk_smem, d_smem, b_smem, x_smem, X, b_rows, quads, upright, KH)
            target = a_ptr + (tokens * HV + head) * C
            if some:
                store_inverse(
                    target, A, X, g_rows, hard, count, heads, quads, HV, R, KH,
                    g_ptr is not None, True,
                )  # fmt: skip
            else:
                store_inverse(
                    target, A, X, g_rows, hard, count, heads, quads, HV, R, KH,
                    g_ptr is not None, False,
                )  # fmt: skip
