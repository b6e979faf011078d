"""The parallel half of chunked prefill on Hopper, in Gluon: one program makes P and Ag of a chunk.

It owns a chunk of C = 64 tokens of a key head, makes Q Kᵀ and K Kᵀ once, and for each value head

    P  = scale lower(G ∘ Q Kᵀ)                     G_ij = exp(gc_i - gc_j), i >= j
    A  = (I + M)⁻¹, M = strictLower(diag(beta) K Kᵀ)
    Ag = (G ∘ A) diag(beta)

with gc the cumulative log decay in the chunk (docs/kernels/chunked.md). The inverse: M = D + N, D
its four diagonal blocks of 16 x 16. X = (I + D)⁻¹ by forward substitution in float32, one thread a
column, so that a step is one multiply-add and no thread waits for another; then, with E = X N,

    A = (I - E)(I + E²) X                          E⁴ = 0

in float16 products with float32 sums. E is no small number, but E² already is a sum over 16 tokens
of bounded terms, at most two such sums long, so nothing cancels (docs/numerics.md); a series over
single tokens would.
"""

# ruff: noqa: RUF005 (what a kernel may not say)

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

from sluice.backends.hopper.prefill_tiles import barrier, unit_span

C_TOKENS = gl.constexpr(64)
LOG2_E = gl.constexpr(1.4426950408889634)
NORM_EPS = gl.constexpr(1e-6)


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
def log2_decay(g_ptr, A_log_ptr, dt_bias_ptr, head_v, stride_g_t, count, offs):
    """A chunk's cumulative log2 decay [C]; 0 is added behind ``count``."""
    on = offs < count
    g = gl.load(g_ptr + offs.to(gl.int64) * stride_g_t, mask=on, other=0.0).to(gl.float32)
    if A_log_ptr is not None:
        if dt_bias_ptr is not None:
            g += gl.load(dt_bias_ptr + head_v).to(gl.float32)
        g = -gl.exp2(gl.load(A_log_ptr + head_v).to(gl.float32) * LOG2_E) * softplus(g)
    return gl.associative_scan(gl.where(on, g * LOG2_E, 0.0), 0, add)


@gluon.jit
def inverse_lengths(smem, offs, count, r_ptr, r_smem, H: gl.constexpr):
    """1 / sqrt(sum x² + eps) for each row of a tile, to memory and to shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    x = smem.load(layout).to(gl.float32)
    r = gl.rsqrt(gl.sum(x * x, axis=1) + NORM_EPS)
    r_smem.store(r)
    rows = gl.arange(0, C_TOKENS, gl.SliceLayout(1, layout))
    gl.store(r_ptr + rows.to(gl.int64) * H, r, mask=rows < count)


@gluon.jit
def store_square(ptr, x, count, stride):
    """Store the first ``count`` rows of [C, C], 16 bytes a thread."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x = gl.convert_layout(x, layout)
    rows = gl.arange(0, C_TOKENS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, C_TOKENS, gl.SliceLayout(0, layout))
    at = gl.expand_dims(rows.to(gl.int64) * stride, 1) + gl.expand_dims(columns, 0)
    mask = gl.expand_dims(rows < count, 1) & gl.expand_dims(columns < C_TOKENS, 0)
    gl.store(ptr + at, x, mask=mask)


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
def paired(X):
    """Half as many tensors: i and i + half side by side."""
    half: gl.constexpr = len(X) // 2
    pairs = ()
    for i in gl.static_range(half):
        pairs = pairs + (gl.join(X[i], X[i + half]),)
    return pairs


@gluon.jit
def stack(X):
    """Sixteen [4, 1, 16] as [4, 16, 16]: number i becomes row i."""
    X = paired(paired(paired(paired(X))))
    return gl.permute(gl.reshape(X[0], [4, 16, 16]), (0, 2, 1))


@gluon.jit
def invert_diagonal(d_smem):
    """X = (I + D)⁻¹ [4, 16, 16] for the four diagonal blocks of D.

    A thread has one column of a block: x_i = e_i - sum_j D_ij x_j.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 1], [2, 1, 16], [2, 1, 2], [2, 1, 0])
    of_block: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    column = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, of_block), 0), 1)
    zero = gl.zeros([4, 1, 16], gl.float32, layout)
    X = ()
    for i in gl.static_range(16):
        x = gl.where(column == i, zero + 1.0, zero)
        row = d_smem.slice(i, 1, 1)
        for j in gl.static_range(i):
            x = x - row.slice(j, 1, 2).load(layout) * X[j]
        X = X + (x,)
    return stack(X)


@gluon.jit
def invert(M, near, below, d_smem, x_smem, X_smem, N_smem, E_smem, acc: gl.constexpr,
           cube: gl.constexpr):  # fmt: skip
    """(I + M)⁻¹ [C, C] of a strictly lower M, in acc's layout.

    near: [C, 4, 1], whether a column block is the row's own; below: [C, C], whether it is earlier.
    """
    C: gl.constexpr = C_TOKENS
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc, k_width=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    none = gl.zeros([C, C], gl.float32, acc)
    D = gl.convert_layout(gl.reshape(M, [C, 4, 16]), cube)
    D = gl.sum(gl.where(near, D, 0.0), axis=1)
    d_smem._reinterpret(gl.float32, [C, 16], flat).store(D)
    N_smem.store(gl.where(below, M, 0.0).to(gl.float16))
    x_smem.store(invert_diagonal(d_smem))
    X = x_smem._reinterpret(gl.float32, [C, 16], flat).load(gl.SliceLayout(1, cube))
    X = gl.where(near, gl.expand_dims(X, 1), 0.0)
    X = gl.convert_layout(gl.reshape(X, [C, C]), acc)
    X_smem.store(X.to(gl.float16))
    fence_async_shared()
    barrier()
    E = warpgroup_mma(gl.convert_layout(X, left).to(gl.float16), N_smem, none, use_acc=False)
    E_smem.store(E.to(gl.float16))
    E_left = gl.convert_layout(E, left).to(gl.float16)
    fence_async_shared()
    barrier()
    F = warpgroup_mma(E_left, E_smem, none, use_acc=False)
    Y = warpgroup_mma(gl.convert_layout(F, left).to(gl.float16), X_smem, X)
    N_smem.store(Y.to(gl.float16))
    fence_async_shared()
    barrier()
    return warpgroup_mma(gl.convert_layout(-E, left).to(gl.float16), N_smem, Y)


@gluon.jit(do_not_specialize=["N", "T"])
def hopper_chunks_kernel(
    q_desc,  # [B * T, HK * K], block [C, K]
    k_desc,  # [B * T, HK * K], block [C, K]
    g_ptr,  # [B, T, HV]; None: no decay
    A_log_ptr,  # [HV]; None: g is no raw gate
    dt_bias_ptr,  # [HV]; None: 0
    beta_ptr,  # [B, T, HV]
    a_ptr,  # [B * T, HV, C]: Ag
    p_ptr,  # [B * T, HV, C]: P, times scale
    g2_ptr,  # [B * T, HV] float32: cumulative log2 decay; None without g
    r_q_ptr,  # [B * T, HK] float32: inverse lengths; None without norm
    r_k_ptr,  # [B * T, HK] float32
    o_ptr,  # [B * T, HV * V]: zeros for the tail
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    scale,
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
    HK: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    RAW_BETA: gl.constexpr,
):
    C: gl.constexpr = C_TOKENS
    R: gl.constexpr = HV // HK
    dtype: gl.constexpr = k_desc.dtype
    acc: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16]
    )
    # acc's layout of [C, C], seen as [C, 4, 16]
    cube: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 1, 0], [0, 2, 0]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[C, 4, 16],
    )
    by_row: gl.constexpr = gl.SliceLayout(1, acc)
    by_column: gl.constexpr = gl.SliceLayout(0, acc)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    blocks: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])

    pid = gl.program_id(0)
    head_k = pid % HK
    unit = pid // HK
    seq, start, chunk, end = unit_span(unit, cu_seqlens_ptr, N, T, C)
    row = start + chunk * C
    count = gl.minimum(end - row, C)
    if (count > 0) & (seq >= N):  # tokens behind the last sequence
        at = o_ptr + row.to(gl.int64) * stride_o_t + head_k * (R * V)
        zero_rows(at, count, stride_o_t, R * V)
    if (count > 0) & (seq < N):
        q_smem = gl.allocate_shared_memory(dtype, [C, K], q_desc.layout)
        k_smem = gl.allocate_shared_memory(dtype, [C, K], k_desc.layout)
        X_smem = gl.allocate_shared_memory(gl.float16, [C, C], k_desc.layout)
        N_smem = gl.allocate_shared_memory(gl.float16, [C, C], k_desc.layout)
        E_smem = gl.allocate_shared_memory(gl.float16, [C, C], k_desc.layout)
        d_smem = gl.allocate_shared_memory(gl.float32, [4, 16, 16], blocks)
        x_smem = gl.allocate_shared_memory(gl.float32, [4, 16, 16], blocks)
        g_smem = gl.allocate_shared_memory(gl.float32, [C], plain)
        b_smem = gl.allocate_shared_memory(gl.float32, [C], plain)
        bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(bar, count=1)
        fence_async_shared()
        mbarrier.expect(bar, 2 * 2 * C * K)
        tma.async_copy_global_to_shared(k_desc, [row, head_k * K], bar, k_smem)
        tma.async_copy_global_to_shared(q_desc, [row, head_k * K], bar, q_smem)

        batch = seq * 0
        t = row
        if cu_seqlens_ptr is None:
            batch = seq
            t = row - seq * T
        tokens = row.to(gl.int64)
        offs = gl.arange(0, C, gl.BlockedLayout([2], [32], [4], [0]))
        offs_i = gl.arange(0, C, by_row)
        offs_j = gl.arange(0, C, by_column)
        i = gl.expand_dims(offs_i, 1)
        j = gl.expand_dims(offs_j, 0)
        rows3 = gl.arange(0, C, gl.SliceLayout(1, gl.SliceLayout(2, cube)))
        blocks3 = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, cube)))
        own = gl.expand_dims(gl.expand_dims(rows3, 1), 2) // 16
        near = own == gl.expand_dims(gl.expand_dims(blocks3, 0), 2)

        none = gl.zeros([C, C], gl.float32, acc)
        mbarrier.wait(bar, 0)
        kk = warpgroup_mma(k_smem, k_smem.permute((1, 0)), none, use_acc=False, is_async=True)
        qk = warpgroup_mma(q_smem, k_smem.permute((1, 0)), none, use_acc=False, is_async=True)
        if r_k_ptr is not None:
            r_k_smem = gl.allocate_shared_memory(gl.float32, [C], plain)
            r_q_smem = gl.allocate_shared_memory(gl.float32, [C], plain)
            inverse_lengths(k_smem, offs, count, r_k_ptr + tokens * HK + head_k, r_k_smem, HK)
            inverse_lengths(q_smem, offs, count, r_q_ptr + tokens * HK + head_k, r_q_smem, HK)
        kk = warpgroup_mma_wait(1, deps=[kk])
        qk = warpgroup_mma_wait(0, deps=[qk])
        if r_k_ptr is not None:
            r_j = gl.expand_dims(r_k_smem.load(by_column), 0)
            kk = kk * gl.expand_dims(r_k_smem.load(by_row), 1) * r_j
            qk = qk * gl.expand_dims(r_q_smem.load(by_row), 1) * r_j
        # what other sequences' tokens hold must not come in, were it not a number
        kk = gl.where((i > j) & (i < count), kk, 0.0)
        qk = gl.where(i >= j, qk * scale, 0.0)

        for h in range(R):
            head_v = head_k * R + h
            at = beta_ptr + batch.to(gl.int64) * stride_beta_b + head_v * stride_beta_h
            at += t.to(gl.int64) * stride_beta_t
            on = offs < count
            beta = gl.load(at + offs.to(gl.int64) * stride_beta_t, mask=on, other=0.0)
            beta = beta.to(gl.float32)
            if RAW_BETA:
                beta = gl.where(on, sigmoid(beta) * beta_scale, 0.0)
            b_smem.store(beta)
            square = tokens * (HV * C) + head_v * C
            if g_ptr is not None:
                g_at = g_ptr + batch.to(gl.int64) * stride_g_b + head_v * stride_g_h
                g_at += t.to(gl.int64) * stride_g_t
                g2 = log2_decay(g_at, A_log_ptr, dt_bias_ptr, head_v, stride_g_t, count, offs)
                gl.store(g2_ptr + (tokens + offs) * HV + head_v, g2, mask=on)
                g_smem.store(g2)
                g_i = gl.expand_dims(g_smem.load(by_row), 1)
                g_j = gl.expand_dims(g_smem.load(by_column), 0)
                G = gl.exp2(gl.where(i >= j, g_i - g_j, 0.0))
                store_square(p_ptr + square, (qk * G).to(dtype), count, HV * C)
            else:
                G = none + 1.0
                store_square(p_ptr + square, qk.to(dtype), count, HV * C)
            M = kk * gl.expand_dims(b_smem.load(by_row), 1)
            A = invert(
                M, near, i // 16 > j // 16, d_smem, x_smem, X_smem, N_smem, E_smem, acc, cube
            )
            A = A * G * gl.expand_dims(b_smem.load(by_column), 0)
            store_square(a_ptr + square, gl.where(i >= j, A, 0.0).to(dtype), count, HV * C)
