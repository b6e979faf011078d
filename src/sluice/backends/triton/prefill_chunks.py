"""The parallel half of chunked prefill: all that a chunk needs and no state decides.

For a chunk of C = 64 tokens of one value head, docs/kernels/chunked.md:

    P  = lower(G ∘ Q Kᵀ)                           G_ij = exp(gc_i - gc_j), i >= j
    A  = (I + strictLower(diag(beta) K Kᵀ))⁻¹      gate-free, in blocks of 16 x 16 and products
    Ag = (G ∘ A) diag(beta)

with gc the cumulative log decay in the chunk. Keys and queries are read as they are; with
``normalize_qk`` their inverse lengths are kept (one number a token) and multiplied in where needed.

P is kept in float16, whatever 16-bit type the inputs have, and a power of two a token: where keys
repeat, O is a sum of terms that nearly cancel, and bfloat16 would lose two bits of it
(docs/numerics.md). For float32 inputs it stays float32.

For P one program owns one chunk of one key head and makes Q Kᵀ once for its value heads; for Ag one
chunk of one value head: K Kᵀ made again costs less than registers to keep it in (H200: 56 against
88 µs for 8192 tokens and 16/32 heads). The
diagonal blocks are inverted by forward substitution in float32: a truncated or 16-bit series is
wrong for correlated keys (docs/numerics.md).
"""

# ruff: noqa: RET505, RUF005 (what a kernel may not say, and constants decide)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.tiles import NORM_EPS, begin, is_cuda, softplus

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_sequence(slot, cu_seqlens_ptr, N, size):
    """The sequence that owns work unit ``slot``, and the unit's number in it.

    Sequence i owns the units from cu_seqlens[i] // size + i on: enough for its tokens in units of
    size, whatever its length, without a list made beforehand. N stands for the tail.
    """
    low = slot * 0
    high = low + N
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(cu_seqlens_ptr + middle).to(tl.int64) // size + middle
        if first <= slot:
            low = middle
        else:
            high = middle - 1
    return low, slot - (tl.load(cu_seqlens_ptr + low).to(tl.int64) // size + low)


@triton.jit
def unit_span(slot, cu_seqlens_ptr, N, T, size):
    """Sequence, batch row, first token of the unit, the unit's number, and the sequence's end."""
    if cu_seqlens_ptr is None:
        units = tl.maximum((T + size - 1) // size, 1)
        seq = slot // units
        unit = slot % units
        batch = seq
        start = seq * 0
        end = start + T
    else:
        seq, unit = find_sequence(slot, cu_seqlens_ptr, N, size)
        batch = seq * 0
        start = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
        end = batch + T
        if seq < N:
            end = tl.load(cu_seqlens_ptr + seq + 1).to(tl.int64)
    return seq, batch, start, unit, end


@triton.jit
def load_chunk(ptr, t, end, stride_t, K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr):
    """Token rows [ROWS, BLOCK_K] from token t on, zeros at or behind ``end``."""
    offs_t = t + tl.arange(0, ROWS)
    offs_k = tl.arange(0, BLOCK_K)
    mask = (offs_t < end)[:, None] & (offs_k < K)[None, :]
    return tl.load(ptr + offs_t[:, None] * stride_t + offs_k[None, :], mask=mask, other=0.0)


@triton.jit
def inverse_lengths(x):
    """1 / sqrt(sum x² + eps) for each row."""
    x32 = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x32 * x32, axis=1) + NORM_EPS)


@triton.jit
def log2_decay(g_ptr, A_log_ptr, dt_bias_ptr, head_v, t, end, stride_g_t, C: tl.constexpr):
    """A chunk's cumulative log2 decay [C]; 0 is added behind ``end``."""
    offs_t = t + tl.arange(0, C)
    mask = offs_t < end
    g = tl.load(g_ptr + offs_t * stride_g_t, mask=mask, other=0.0).to(tl.float32)
    if A_log_ptr is not None:
        if dt_bias_ptr is not None:
            g += tl.load(dt_bias_ptr + head_v).to(tl.float32)
        g = -tl.exp(tl.load(A_log_ptr + head_v).to(tl.float32)) * softplus(g)
    return tl.cumsum(tl.where(mask, g * LOG2_E, 0.0), axis=0)


@triton.jit
def zero_tail(o_ptr, t, end, head, stride_o_t, stride_o_h, HEADS: tl.constexpr, V: tl.constexpr):
    """Zeros for a chunk of tokens that no sequence owns."""
    offs_v = tl.arange(0, 64)
    for token in range(t, tl.minimum(t + 64, end)):
        for h in range(head * HEADS, (head + 1) * HEADS):
            for v in range(0, V, 64):
                at = o_ptr + token * stride_o_t + h * stride_o_h + v + offs_v
                tl.store(at, tl.zeros([64], o_ptr.dtype.element_ty), mask=v + offs_v < V)


@triton.jit
def products(
    q_ptr, k, r_k, r_q_ptr, head_q, t, end, token, rows, stride_q_t, stride_q_h,
    HQ: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Q Kᵀ [C, C] of one query head, normalised; its inverse lengths are stored."""
    q = load_chunk(q_ptr + head_q * stride_q_h, t, end, stride_q_t, K, BLOCK_K, k.shape[0])
    p = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if r_q_ptr is not None:
        r_q = inverse_lengths(q)
        tl.store(r_q_ptr + token * HQ + head_q, r_q, mask=rows)
        p = p * r_q[:, None] * r_k[None, :]
    return p


@triton.jit
def powers(largest, LEAST: tl.constexpr):
    """Powers of two that bring the largest numbers to [2¹³, 2¹⁴), as float16 likes them; inverses.

    Nothing below 2^(LEAST - 127) is brought up further: the powers, and what else is multiplied by
    them, must stay in float32's range. 1 for zeros.
    """
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.where(bits == 0, 140 * (1 << 23), tl.maximum(bits, LEAST * (1 << 23)))
    up = (254 * (1 << 23) - bits + 13 * (1 << 23)).to(tl.float32, bitcast=True)
    return up, (bits - 13 * (1 << 23)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["N", "T", "stride_g_b"])
def prefill_products_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    g_ptr,  # [B, T, HV]; None: no decay
    A_log_ptr,  # [HV]; None: g is no raw gate
    dt_bias_ptr,  # [HV]; None: 0
    p_ptr,  # [B * T, HO, C]: P, over p_scale
    p_scale_ptr,  # [B * T, HO] float32: powers of two; None: ones
    g2_ptr,  # [B * T, HV] float32: cumulative log2 decay; None without g
    r_q_ptr,  # [B * T, HQ] float32: inverse lengths; None without norm
    r_k_ptr,  # [B * T, HK] float32
    o_ptr,  # [B, T, HO, V]: zeros for the tail
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    N,
    T,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_g_b,
    stride_g_t,
    stride_g_h,
    stride_o_t,
    stride_o_h,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    C: tl.constexpr = 64
    HO: tl.constexpr = HQ if HQ > HV else HV
    begin()
    pid = tl.program_id(0)
    head_k = pid % HK
    seq, batch, start, chunk, end = unit_span((pid // HK).to(tl.int64), cu_seqlens_ptr, N, T, C)
    t = start + chunk * C
    if t >= end:
        return
    if seq == N:  # tokens behind the last sequence
        zero_tail(o_ptr, t, end, head_k, stride_o_t, stride_o_h, HO // HK, V)
        return
    offs_c = tl.arange(0, C)
    rows = t + offs_c < end
    token = batch * T + t + offs_c  # of the workspace
    lower = offs_c[:, None] >= offs_c[None, :]
    q_ptr += batch * stride_q_b
    k = load_chunk(
        k_ptr + batch * stride_k_b + head_k * stride_k_h, t, end, stride_k_t, K, BLOCK_K, C
    )
    r_k = tl.full([C], 1.0, tl.float32)
    if r_k_ptr is not None:
        r_k = inverse_lengths(k)
        tl.store(r_k_ptr + token * HK + head_k, r_k, mask=rows)
    if HQ == HK:  # the usual case: one product serves the group
        qk = products(q_ptr, k, r_k, r_q_ptr, head_k, t, end, token, rows,
                      stride_q_t, stride_q_h, HQ, K, BLOCK_K, PRECISION)  # fmt: skip
    for j in range(HO // HK):
        head_o = head_k * (HO // HK) + j
        head_v = head_o * HV // HO
        if HQ == HK:
            p = qk
        else:
            p = products(q_ptr, k, r_k, r_q_ptr, head_o * HQ // HO, t, end, token, rows,
                         stride_q_t, stride_q_h, HQ, K, BLOCK_K, PRECISION)  # fmt: skip
        if g_ptr is not None:
            g2 = log2_decay(
                g_ptr + batch * stride_g_b + head_v * stride_g_h,
                A_log_ptr, dt_bias_ptr, head_v, t, end, stride_g_t, C,
            )  # fmt: skip
            tl.store(g2_ptr + token * HV + head_v, g2, mask=rows)
            p = p * tl.exp2(tl.where(lower, g2[:, None] - g2[None, :], 0.0))
        p = tl.where(lower, p, 0.0)
        if p_scale_ptr is not None:
            up, down = powers(tl.max(tl.abs(p), axis=1), 14)
            tl.store(p_scale_ptr + token * HO + head_o, down, mask=rows)
            p = p * up[:, None]
        p = p.to(p_ptr.dtype.element_ty)
        at = p_ptr + (token * HO + head_o)[:, None] * C + offs_c[None, :]
        tl.store(at, p, mask=rows[:, None])


@triton.jit
def substitute(X, M_t, i):
    """Row i of both 8 x 8 inverses in X: e_i - sum_j M_ij (row j).

    M_t is M transposed, so the multipliers of row i lie in a column of it; X has nothing outside
    its two blocks, so one sum over all rows serves both.
    """
    rows = tl.arange(0, 16)[:, None]
    cols = tl.arange(0, 16)[None, :]
    m = tl.sum(tl.where(cols == i + rows // 8 * 8, M_t, 0.0), axis=1)
    row = tl.sum(m[:, None] * X, axis=0)
    return tl.where(rows == i + cols // 8 * 8, X - row[None, :], X)


@triton.jit
def join_halves(X, kk, beta):
    """The 16 x 16 inverse from its 8 x 8 ones: below them stands -X M X."""
    below = (tl.arange(0, 16)[:, None] >= 8) & (tl.arange(0, 16)[None, :] < 8)
    M = tl.where(below, kk * beta[:, None], 0.0)
    if is_cuda():
        Y = tl.dot(M, X, input_precision="tf32x3")
        return X - tl.dot(X, Y, input_precision="tf32x3")
    else:
        Y = tl.dot(M, X, input_precision="ieee")
        return X - tl.dot(X, Y, input_precision="ieee")


@triton.jit
def invert_diagonal(kk, beta):
    """(I + strictLower(diag(beta) kk))⁻¹ for the four diagonal blocks, by forward substitution.

    kk is symmetric, so its transpose costs nothing. The blocks go side by side: one alone would
    wait for its own reductions. Substitution stops at 8 rows; a product joins the halves, in three
    passes of tf32 so that it is as good as float32.
    """
    rows = tl.arange(0, 16)[:, None]
    cols = tl.arange(0, 16)[None, :]
    upper = (rows < cols) & (rows // 8 == cols // 8)
    one = tl.where(rows == cols, 1.0, 0.0)
    M0 = tl.where(upper, kk[0] * beta[0][None, :], 0.0)
    M1 = tl.where(upper, kk[2] * beta[1][None, :], 0.0)
    M2 = tl.where(upper, kk[5] * beta[2][None, :], 0.0)
    M3 = tl.where(upper, kk[9] * beta[3][None, :], 0.0)
    X0 = one
    X1 = one
    X2 = one
    X3 = one
    for i in range(1, 8):
        X0 = substitute(X0, M0, i)
        X1 = substitute(X1, M1, i)
        X2 = substitute(X2, M2, i)
        X3 = substitute(X3, M3, i)
    X0 = join_halves(X0, kk[0], beta[0])
    X1 = join_halves(X1, kk[2], beta[1])
    X2 = join_halves(X2, kk[5], beta[2])
    X3 = join_halves(X3, kk[9], beta[3])
    return X0, X1, X2, X3


@triton.jit
def store_block(ptr, X, t, end, stride_t, column: tl.constexpr):
    """Store 16 rows of a chunk's matrix, those before ``end``."""
    offs_t = t + tl.arange(0, 16)
    at = ptr + offs_t[:, None] * stride_t + column + tl.arange(0, 16)[None, :]
    tl.store(at, X.to(ptr.dtype.element_ty), mask=(offs_t < end)[:, None])


@triton.jit
def gated_block(X, g_i, g_j, SAME: tl.constexpr):
    """X ∘ exp2(g_i - g_j), below the diagonal (with it) where the blocks are the SAME."""
    difference = g_i[:, None] - g_j[None, :]
    if SAME:
        keep = tl.arange(0, 16)[:, None] >= tl.arange(0, 16)[None, :]
        return tl.where(keep, X * tl.exp2(tl.where(keep, difference, 0.0)), 0.0)
    return X * tl.exp2(difference)


@triton.jit
def merged_inverse(kk, beta, PRECISION: tl.constexpr):
    """The ten blocks of A = (I + strictLower(diag(beta) K Kᵀ))⁻¹, from those of K Kᵀ."""
    X00, X11, X22, X33 = invert_diagonal(kk, beta)
    M10 = kk[1] * beta[1][:, None]
    M20 = kk[3] * beta[2][:, None]
    M21 = kk[4] * beta[2][:, None]
    M30 = kk[6] * beta[3][:, None]
    M31 = kk[7] * beta[3][:, None]
    M32 = kk[8] * beta[3][:, None]
    X10 = -tl.dot(X11, tl.dot(M10, X00, input_precision=PRECISION), input_precision=PRECISION)
    X21 = -tl.dot(X22, tl.dot(M21, X11, input_precision=PRECISION), input_precision=PRECISION)
    X32 = -tl.dot(X33, tl.dot(M32, X22, input_precision=PRECISION), input_precision=PRECISION)
    Y20 = tl.dot(M20, X00, input_precision=PRECISION)
    Y20 = tl.dot(M21, X10, acc=Y20, input_precision=PRECISION)
    X20 = -tl.dot(X22, Y20, input_precision=PRECISION)
    Y31 = tl.dot(M31, X11, input_precision=PRECISION)
    Y31 = tl.dot(M32, X21, acc=Y31, input_precision=PRECISION)
    X31 = -tl.dot(X33, Y31, input_precision=PRECISION)
    Y30 = tl.dot(M30, X00, input_precision=PRECISION)
    Y30 = tl.dot(M31, X10, acc=Y30, input_precision=PRECISION)
    Y30 = tl.dot(M32, X20, acc=Y30, input_precision=PRECISION)
    X30 = -tl.dot(X33, Y30, input_precision=PRECISION)
    return X00, X10, X11, X20, X21, X22, X30, X31, X32, X33


@triton.jit
def load_keys(
    k_ptr, r_k_ptr, t, token, end, head_k, i: tl.constexpr, stride_k_t,
    HK: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Block i of a chunk's keys, and their inverse lengths."""
    k = load_chunk(k_ptr, t + 16 * i, end, stride_k_t, K, BLOCK_K, 16)
    r = tl.full([16], 1.0, tl.float32)
    if r_k_ptr is not None:
        offs = 16 * i + tl.arange(0, 16)
        r = tl.load(r_k_ptr + (token + offs) * HK + head_k, mask=t + offs < end, other=0.0)
    return k, r


@triton.jit(do_not_specialize=["N", "T", "stride_beta_b"])
def prefill_inverse_kernel(
    k_ptr,  # [B, T, HK, K]
    beta_ptr,  # [B, T, HV]
    g2_ptr,  # [B * T, HV] float32; None without g
    r_k_ptr,  # [B * T, HK] float32; None without norm
    a_ptr,  # [B * T, HV, C]: Ag
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    beta_scale,
    N,
    T,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_beta_b,
    stride_beta_t,
    stride_beta_h,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    RAW_BETA: tl.constexpr,
):
    C: tl.constexpr = 64
    begin()
    pid = tl.program_id(0)
    head_v = pid % HV
    head_k = head_v // (HV // HK)
    seq, batch, start, chunk, end = unit_span((pid // HV).to(tl.int64), cu_seqlens_ptr, N, T, C)
    t = start + chunk * C
    if seq == N or t >= end:
        return
    token = batch * T + t  # of the workspace
    offs = tl.arange(0, 16)
    k_ptr += batch * stride_k_b + head_k * stride_k_h
    kk = ()
    for i in tl.static_range(4):
        k_i, r_i = load_keys(k_ptr, r_k_ptr, t, token, end, head_k, i, stride_k_t, HK, K, BLOCK_K)
        for j in tl.static_range(i + 1):
            # loaded again, not kept: four blocks of keys would fill the registers
            k_j, r_j = load_keys(
                k_ptr, r_k_ptr, t, token, end, head_k, j, stride_k_t, HK, K, BLOCK_K
            )
            product = tl.dot(k_i, tl.trans(k_j), input_precision=PRECISION)
            if r_k_ptr is not None:
                product = product * r_i[:, None] * r_j[None, :]
            kk = kk + (product,)

    beta = ()
    g2 = ()
    for i in tl.static_range(4):
        mask = t + 16 * i + offs < end
        at = beta_ptr + batch * stride_beta_b + head_v * stride_beta_h
        b = tl.load(at + (t + 16 * i + offs) * stride_beta_t, mask=mask, other=0.0)
        b = b.to(tl.float32)
        if RAW_BETA:
            b = tl.where(mask, tl.sigmoid(b) * beta_scale, 0.0)
        beta = beta + (b,)
        g = tl.zeros([16], tl.float32)
        if g2_ptr is not None:
            at = g2_ptr + (token + 16 * i + offs) * HV + head_v
            g = tl.load(at, mask=mask, other=0.0)
        g2 = g2 + (g,)
    X = merged_inverse(kk, beta, PRECISION)
    base = a_ptr + ((token - t) * HV + head_v) * C
    for i in tl.static_range(4):
        for j in tl.static_range(4):
            block = tl.zeros([16, 16], tl.float32)
            if j <= i:
                block = gated_block(X[i * (i + 1) // 2 + j], g2[i], g2[j], i == j)
                block = block * beta[j][None, :]
            store_block(base, block, t + 16 * i, end, HV * C, 16 * j)
