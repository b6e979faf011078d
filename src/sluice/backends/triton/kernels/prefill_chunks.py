"""The parallel half of chunked prefill: everything that does not depend on the state.

For a chunk of C = 64 tokens of one value head, docs/kernels/prefill.md:

    QKg = G ∘ Q Kᵀ                   G_ij = e^(γ_i - γ_j) for i >= j, else 0
    L   = strictLower(diag(beta) K Kᵀ)                                       (K4)
    A   = (I + L)⁻¹                  in blocks of 16 x 16                    (K6)
    Ag  = G ∘ A

with γ the cumulative log decay in the chunk. Keys and queries are read as given. With
``normalize_qk`` the inverse length of each key is stored, one number per token, and multiplied in
where a product needs it.

QKg is stored in float16, whatever 16-bit type the inputs have, divided by a power of two per chunk
(``qkg_down``). Where keys repeat, O is a sum of terms that nearly cancel, and bfloat16 would lose
two of its bits (docs/numerics.md). For float32 inputs QKg is float32. The factors by which the
serial half multiplies each token are stored too, one vector per head: the serial half has no time
for exponentials.

Ag is a 16-bit operand with ones on its diagonal. It does not contain beta: rounded with Ag, beta
would have the same error in every token with the same beta. It is stored in float32 instead.
Where keys nearly repeat, errors of the other elements also add up over tokens. Chunks of such keys
are *hard* and marked so (``repeats``). A mark depends only on the chunk's own keys, so a row's bits
do not depend on its neighbours. The Ag of a hard chunk is float16, times 2⁸, in the same memory,
and in each 16 rows the last row takes back what the rows above it lost by rounding. The rest of the
method is in prefill_chunk_loop.py.

For QKg one program owns a chunk of one key head and computes Q Kᵀ once for its value heads. For Ag
it owns a chunk of one value head: computing K Kᵀ again costs less than the registers to keep it
(H200: 56 against 88 µs for 8,192 tokens and 16/32 heads). The inverse is joined from halves, from
2 x 2 on. Such a product of inverses is as precise as they are. A truncated series, or one in 16
bits, is wrong for correlated keys (docs/numerics.md).
"""

# ruff: noqa: RUF005 (Triton has no tuple unpacking)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import GATES, INDICES
from sluice.backends.triton.kernels.math import (
    LOG2_E,
    NORM_EPS,
    begin,
    divide,
    float16_scale,
    softplus,
)
from sluice.backends.triton.kernels.work_units import unit_span
from sluice.contract.chunk_length import CHUNK

C = tl.constexpr(CHUNK)
NEAR = tl.constexpr(0.9)


@triton.jit
def load_chunk(ptr, t, end, stride_t, K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr):
    """Token rows [ROWS, BLOCK_K] from token t on, zeros from ``end`` on."""
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
def log2_decay(g_ptr, A_log_ptr, dt_bias_ptr, head_v, t, end, stride_g_t):
    """A chunk's cumulative log2 decay g2 [C], constant from ``end`` on."""
    offs_t = t + tl.arange(0, C)
    mask = offs_t < end
    g = tl.load(g_ptr + offs_t * stride_g_t, mask=mask, other=0.0).to(tl.float32)
    if A_log_ptr is not None:
        if dt_bias_ptr is not None:
            g += tl.load(dt_bias_ptr + head_v).to(tl.float32)
        g = -tl.exp(tl.load(A_log_ptr + head_v).to(tl.float32)) * softplus(g)
    return tl.cumsum(tl.where(mask, g * LOG2_E, 0.0), axis=0)


@triton.jit
def zero_tail(o_ptr, t, end, head, stride_o_t, stride_o_h, heads, V: tl.constexpr):
    """Zeros for up to 64 tokens that no sequence owns, in the ``heads`` output heads of a head."""
    offs_v = tl.arange(0, 64)
    for token in range(t, tl.minimum(t + 64, end)):
        for h in range(head * heads, (head + 1) * heads):
            for v in range(0, V, 64):
                at = o_ptr + token * stride_o_t + h * stride_o_h + v + offs_v
                tl.store(at, tl.zeros([64], o_ptr.dtype.element_ty), mask=v + offs_v < V)


@triton.jit
def products(
    q_ptr, k, r_k, lower, scale, t, end, stride_q_t,
    K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, NORMALIZE_QK: tl.constexpr,
):  # fmt: skip
    """scale lower(Q Kᵀ) of one query head, normalised, and scale over the queries' lengths."""
    q = load_chunk(q_ptr, t, end, stride_q_t, K, BLOCK_K, k.shape[0])
    qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    r_q = tl.full([k.shape[0]], 1.0, tl.float32) * scale
    if NORMALIZE_QK:
        r_q *= inverse_lengths(q)
        qk = qk * r_k[None, :]
    return tl.where(lower, qk * r_q[:, None], 0.0), r_q


_UNALIGNED = [*INDICES, *GATES]
# Sizes that differ from call to call and from model to model, and strides of single numbers, which
# cannot make a load wider: no variant is compiled for their values.
_SIZES = ["N", "T", "tokens", "R_K"]
_OF_PRODUCTS = [*_SIZES, "HK", "R_Q", "inverse_HK", "inverse_R_Q", "stride_g_b", "stride_g_t"]
_OF_INVERSE = [*_SIZES, "HV", "inverse_HV", "inverse_R_K", "stride_beta_b", "stride_beta_t"]


@triton.jit(do_not_specialize=_OF_PRODUCTS, do_not_specialize_on_alignment=_UNALIGNED)
def prefill_products_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    g_ptr,  # [B, T, HV]; None: no decay
    A_log_ptr,  # [HV]; given: g is a raw gate
    dt_bias_ptr,  # [HV]; None: 0
    qkg_ptr,  # [HO, B * T, C]: scale QKg / qkg_down
    qkg_down_ptr,  # [HO, B * T] float32, at a chunk's first token: a power of two; None: 1
    decay_in_ptr,  # [HV, B * T] float32: e^γ r_k; None without g and norm
    decay_out_ptr,  # [HV, B * T] float32: e^(γ_C - γ) r_k
    decay_q_ptr,  # [HO, B * T] float32: scale e^γ r_q; None without norm
    g2_ptr,  # [HV, B * T] float32: cumulative log2 decay; None without g
    r_k_ptr,  # [HK, B * T] float32: inverse lengths of keys; None without norm
    o_ptr,  # [B, T, HO, V]: zeros for tokens after the last sequence
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    scale,
    N,
    T,
    tokens,  # B * T
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
    HK,
    R_Q,  # value heads per query head; 1 if there are fewer
    R_K,  # value heads per key head
    inverse_HK,  # for divide, as is the next one
    inverse_R_Q,
    READERS: tl.constexpr,  # query heads per value head; 1 if there are fewer
    SHARED: tl.constexpr,  # whether there are as many query heads as key heads
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    unit, head_k = divide(pid, HK, inverse_HK)
    begin()
    seq, batch, start, chunk, end = unit_span(unit.to(tl.int64), cu_seqlens_ptr, N, T, C)
    t = start + chunk * C
    if t >= end:
        return
    if seq == N:  # tokens after the last sequence
        zero_tail(o_ptr, t, end, head_k, stride_o_t, stride_o_h, R_K * READERS, V)
        return
    offs_c = tl.arange(0, C)
    left = tl.minimum(end - t, C).to(tl.int32)
    rows = offs_c < left
    token = batch * T + t  # in the workspace
    lower = offs_c[:, None] >= offs_c[None, :]
    q_ptr += batch * stride_q_b
    k = load_chunk(
        k_ptr + batch * stride_k_b + head_k * stride_k_h, t, end, stride_k_t, K, BLOCK_K, C
    )
    r_k = tl.full([C], 1.0, tl.float32)
    if r_k_ptr is not None:
        r_k = inverse_lengths(k)
        tl.store(r_k_ptr + (head_k.to(tl.int64) * tokens + token) + offs_c, r_k, mask=rows)
    if SHARED:  # the usual case: one product serves all value heads of the key head
        qk, r_q = products(
            q_ptr + head_k * stride_q_h, k, r_k, lower, scale, t, end, stride_q_t,
            K, BLOCK_K, PRECISION, r_k_ptr is not None,
        )  # fmt: skip
    for head_o in range(head_k * (R_K * READERS), (head_k + 1) * (R_K * READERS)):
        head_v = head_o // READERS
        if SHARED:
            qkg = qk
        else:
            head_q, _ = divide(tl.cast(head_o, tl.int32), R_Q, inverse_R_Q)
            qkg, r_q = products(
                q_ptr + head_q * stride_q_h, k, r_k, lower, scale, t, end, stride_q_t,
                K, BLOCK_K, PRECISION, r_k_ptr is not None,
            )  # fmt: skip
        of_value = tl.cast(head_v, tl.int64) * tokens + token
        of_output = tl.cast(head_o, tl.int64) * tokens + token
        decay_in = tl.full([C], 1.0, tl.float32)
        decay_out = decay_in
        if g_ptr is not None:
            g2 = log2_decay(
                g_ptr + batch * stride_g_b + head_v * stride_g_h,
                A_log_ptr, dt_bias_ptr, head_v, t, end, stride_g_t,
            )  # fmt: skip
            tl.store(g2_ptr + of_value + offs_c, g2, mask=rows)
            decay_in = tl.exp2(g2)
            # of the last token, not of C - 1: cumsum may round that sum in another order, and a
            # checkpoint after this token has no other sum
            decay_out = tl.exp2(tl.sum(tl.where(offs_c == left - 1, g2, 0.0)) - g2)
            qkg = qkg * tl.exp2(tl.where(lower, g2[:, None] - g2[None, :], 0.0))
        if decay_in_ptr is not None:
            tl.store(decay_in_ptr + of_value + offs_c, decay_in * r_k, mask=rows)
            tl.store(decay_out_ptr + of_value + offs_c, decay_out * r_k, mask=rows)
        if decay_q_ptr is not None:
            tl.store(decay_q_ptr + of_output + offs_c, decay_in * r_q, mask=rows)
        if qkg_down_ptr is not None:
            up, down = float16_scale(tl.max(tl.abs(qkg)), 14)
            tl.store(qkg_down_ptr + of_output, down)
            qkg = qkg * up
        qkg = qkg.to(qkg_ptr.dtype.element_ty)
        at = qkg_ptr + of_output * C + (offs_c[:, None] * C + offs_c[None, :])
        tl.store(at, qkg, mask=rows[:, None])


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """x as an operand of a product: float16 for 16-bit inputs.

    float16 has as many bits as tf32. It is rounded, while tensor cores truncate tf32, and a product
    in registers can be a left operand directly. With ‖k‖ <= 1 nothing comes near its limits.
    """
    return x.to(tl.float16) if PRECISION == "tf32" else x


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """x y, in float32."""
    return tl.dot(operand(x, PRECISION), operand(y, PRECISION), input_precision=PRECISION)


@triton.jit
def join_halves(a, l, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """From inverses ``a`` of diagonal blocks of size HALF, those of twice the size: a - a l a.

    Of ``l`` only the square below each pair of blocks is used.
    """
    rows = tl.arange(0, 16)[:, None] // HALF
    cols = tl.arange(0, 16)[None, :] // HALF
    below = tl.where((rows // 2 == cols // 2) & (rows > cols), l, 0.0)
    a_low = operand(a, PRECISION)
    return a - product(a_low, product(below, a_low, PRECISION), PRECISION)


@triton.jit
def invert_diagonal(kk, beta, PRECISION: tl.constexpr):
    """(I + strictLower(diag(beta) kk))⁻¹ for the four diagonal blocks.

    The inverse of a 2 x 2 block is I minus what stands below its diagonal; products join these to
    4, 8 and 16. All four blocks are computed side by side: one alone would wait for its products.
    """
    rows = tl.arange(0, 16)[:, None]
    cols = tl.arange(0, 16)[None, :]
    one = tl.where(rows == cols, 1.0, 0.0)
    pair = (rows == cols + 1) & (rows % 2 == 1)
    l_00 = kk[0] * beta[0][:, None]
    l_11 = kk[2] * beta[1][:, None]
    l_22 = kk[5] * beta[2][:, None]
    l_33 = kk[9] * beta[3][:, None]
    a_00 = tl.where(pair, -l_00, one)
    a_11 = tl.where(pair, -l_11, one)
    a_22 = tl.where(pair, -l_22, one)
    a_33 = tl.where(pair, -l_33, one)
    for i in tl.static_range(1, 4):
        a_00 = join_halves(a_00, l_00, 1 << i, PRECISION)
        a_11 = join_halves(a_11, l_11, 1 << i, PRECISION)
        a_22 = join_halves(a_22, l_22, 1 << i, PRECISION)
        a_33 = join_halves(a_33, l_33, 1 << i, PRECISION)
    return a_00, a_11, a_22, a_33


@triton.jit
def repeats(kk, n):
    """Whether the n keys of a chunk nearly repeat, from the ten blocks of K Kᵀ.

    They do if |k_i · k_j| >= 0.9 m for at least n - 1 pairs i > j, with m the largest |k|² (a chunk
    of two tokens has one pair). Tokens after the end are zeros and form no pair. Few chunks have
    any such pair, so pairs are counted only in these.
    """
    rows = tl.arange(0, 16)[:, None]
    cols = tl.arange(0, 16)[None, :]
    # no product of two keys is larger than both their squares
    m = tl.max(tl.maximum(tl.maximum(kk[0], kk[2]), tl.maximum(kk[5], kk[9])))
    near = tl.where(m > 0.0, m * NEAR, float("inf"))
    most = tl.maximum(tl.abs(kk[0]), tl.abs(kk[2]))
    most = tl.maximum(most, tl.maximum(tl.abs(kk[5]), tl.abs(kk[9])))
    most = tl.where(rows == cols, 0.0, most)
    for i in tl.static_range(1, 4):
        for j in tl.static_range(i):
            most = tl.maximum(most, tl.abs(kk[i * (i + 1) // 2 + j]))
    pairs = 0
    if tl.max(most) >= near:
        found = tl.zeros([16, 16], tl.int32)
        for i in tl.static_range(4):
            for j in tl.static_range(i + 1):
                close = tl.abs(kk[i * (i + 1) // 2 + j]) >= near
                if i == j:
                    close = close & (rows > cols)
                found += close.to(tl.int32)
        pairs = tl.sum(found)
    return (pairs > 0) & (pairs >= n - 1)


@triton.jit
def settled(block, g, last):
    """A block times 2⁸ in float16; row ``last`` takes what those above it lost, decayed to it."""
    rows = tl.arange(0, 16)
    block = tl.minimum(tl.maximum(block * 256, -65504.0), 65504.0)
    g_last = tl.sum(tl.where(rows == last, g, 0.0))
    lost = (block - block.to(tl.float16).to(tl.float32)) * tl.exp2(g_last - g)[:, None]
    lost = tl.sum(tl.where((rows < last)[:, None], lost, 0.0), axis=0)
    return tl.where((rows == last)[:, None], block + lost[None, :], block).to(tl.float16)


@triton.jit
def gated_block(a, g_i, g_j, DIAGONAL: tl.constexpr):
    """a ∘ exp2(g_i - g_j) for a block of A; a DIAGONAL block is zero above its diagonal."""
    difference = g_i[:, None] - g_j[None, :]
    if DIAGONAL:
        lower = tl.arange(0, 16)[:, None] >= tl.arange(0, 16)[None, :]
        return tl.where(lower, a * tl.exp2(tl.where(lower, difference, 0.0)), 0.0)
    return a * tl.exp2(difference)


@triton.jit
def store_inverse(ptr, a, g2, t, end, HARD: tl.constexpr):
    """Store a chunk's Ag, the rows before ``end``, from the ten blocks of A."""
    offs = tl.arange(0, 16)
    for i in tl.static_range(4):
        offs_t = t + 16 * i + offs
        last = tl.minimum(end - (t + 16 * i), 16) - 1
        for j in tl.static_range(4):
            block = tl.zeros([16, 16], tl.float32)
            if j <= i:
                block = gated_block(a[i * (i + 1) // 2 + j], g2[i], g2[j], i == j)
            if HARD:
                block = settled(block, g2[i], last).to(ptr.dtype.element_ty, bitcast=True)
            at = ptr + offs_t[:, None] * C + 16 * j + offs[None, :]
            tl.store(at, block.to(ptr.dtype.element_ty), mask=(offs_t < end)[:, None])


@triton.jit
def merged_inverse(kk, beta, PRECISION: tl.constexpr):
    """The ten blocks of A from those of K Kᵀ, rows first: a_00, a_10, a_11, a_20 .. a_33 (K26)."""
    a_00, a_11, a_22, a_33 = invert_diagonal(kk, beta, PRECISION)
    a_00_low = operand(a_00, PRECISION)
    a_11_low = operand(a_11, PRECISION)
    a_22_low = operand(a_22, PRECISION)
    a_33_low = operand(a_33, PRECISION)
    l_10 = operand(kk[1] * beta[1][:, None], PRECISION)
    l_20 = operand(kk[3] * beta[2][:, None], PRECISION)
    l_21 = operand(kk[4] * beta[2][:, None], PRECISION)
    l_30 = operand(kk[6] * beta[3][:, None], PRECISION)
    l_31 = operand(kk[7] * beta[3][:, None], PRECISION)
    l_32 = operand(kk[8] * beta[3][:, None], PRECISION)
    a_10 = -product(a_11_low, product(l_10, a_00_low, PRECISION), PRECISION)
    a_21 = -product(a_22_low, product(l_21, a_11_low, PRECISION), PRECISION)
    a_32 = -product(a_33_low, product(l_32, a_22_low, PRECISION), PRECISION)
    a_10_low = operand(a_10, PRECISION)
    a_21_low = operand(a_21, PRECISION)
    a_20 = product(l_20, a_00_low, PRECISION) + product(l_21, a_10_low, PRECISION)
    a_20 = -product(a_22_low, a_20, PRECISION)
    a_31 = product(l_31, a_11_low, PRECISION) + product(l_32, a_21_low, PRECISION)
    a_31 = -product(a_33_low, a_31, PRECISION)
    a_30 = product(l_30, a_00_low, PRECISION) + product(l_31, a_10_low, PRECISION)
    a_30 += product(l_32, a_20, PRECISION)
    a_30 = -product(a_33_low, a_30, PRECISION)
    return a_00, a_10, a_11, a_20, a_21, a_22, a_30, a_31, a_32, a_33


@triton.jit
def load_keys(
    k_ptr, r_k_ptr, t, end, i: tl.constexpr, stride_k_t, K: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Block i of a chunk's keys, and their inverse lengths; r_k_ptr is at the chunk's first."""
    k = load_chunk(k_ptr, t + 16 * i, end, stride_k_t, K, BLOCK_K, 16)
    r = tl.full([16], 1.0, tl.float32)
    if r_k_ptr is not None:
        offs = 16 * i + tl.arange(0, 16)
        r = tl.load(r_k_ptr + offs, mask=t + offs < end, other=0.0)
    return k, r


@triton.jit(do_not_specialize=_OF_INVERSE, do_not_specialize_on_alignment=_UNALIGNED)
def prefill_inverse_kernel(
    k_ptr,  # [B, T, HK, K]
    beta_ptr,  # [B, T, HV]
    g2_ptr,  # [HV, B * T] float32; None without g
    r_k_ptr,  # [HK, B * T] float32; None without norm
    ag_ptr,  # [HV, B * T, C]: Ag
    beta32_ptr,  # [HV, B * T] float32: beta
    hard_ptr,  # [HV, B * T // C + N] int32: whether a chunk is hard; None: float32 inputs
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    beta_scale,
    N,
    T,
    tokens,  # B * T
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_beta_b,
    stride_beta_t,
    stride_beta_h,
    HV,
    R_K,  # value heads per key head
    inverse_HV,  # for divide, as is the next one
    inverse_R_K,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    RAW_BETA: tl.constexpr,
):
    pid = tl.program_id(0)
    unit, head_v = divide(pid, HV, inverse_HV)
    head_k, _ = divide(head_v, R_K, inverse_R_K)
    begin()
    seq, batch, start, chunk, end = unit_span(unit.to(tl.int64), cu_seqlens_ptr, N, T, C)
    t = start + chunk * C
    if seq == N or t >= end:
        return
    token = batch * T + t  # in the workspace
    offs = tl.arange(0, 16)
    k_ptr += batch * stride_k_b + head_k * stride_k_h
    if r_k_ptr is not None:
        r_k_ptr += head_k.to(tl.int64) * tokens + token
    kk = ()
    for i in tl.static_range(4):
        k_i, r_i = load_keys(k_ptr, r_k_ptr, t, end, i, stride_k_t, K, BLOCK_K)
        for j in tl.static_range(i + 1):
            # loaded again: four blocks of keys would fill the registers
            k_j, r_j = load_keys(k_ptr, r_k_ptr, t, end, j, stride_k_t, K, BLOCK_K)
            kk_ij = tl.dot(k_i, tl.trans(k_j), input_precision=PRECISION)
            if r_k_ptr is not None:
                kk_ij = kk_ij * r_i[:, None] * r_j[None, :]
            kk = kk + (kk_ij,)

    beta = ()
    g2 = ()
    for i in tl.static_range(4):
        mask = t + 16 * i + offs < end
        at = beta_ptr + batch * stride_beta_b + head_v * stride_beta_h
        beta_i = tl.load(at + (t + 16 * i + offs) * stride_beta_t, mask=mask, other=0.0)
        beta_i = beta_i.to(tl.float32)
        if RAW_BETA:
            beta_i = tl.where(mask, tl.sigmoid(beta_i) * beta_scale, 0.0)
        beta = beta + (beta_i,)
        of_value = head_v.to(tl.int64) * tokens + token + 16 * i + offs
        tl.store(beta32_ptr + of_value, beta_i, mask=mask)
        g2_i = tl.zeros([16], tl.float32)
        if g2_ptr is not None:
            g2_i = tl.load(g2_ptr + of_value, mask=mask, other=0.0)
        g2 = g2 + (g2_i,)
    ag_ptr += (head_v.to(tl.int64) * tokens + token - t) * C
    if hard_ptr is None:
        a = merged_inverse(kk, beta, PRECISION)
        store_inverse(ag_ptr, a, g2, t, end, False)
    else:
        hard = repeats(kk, tl.minimum(end - t, C))  # before the inverse: then kk is no longer live
        hard_ptr += head_v * (tokens // C + N) + token // C + seq
        tl.store(hard_ptr, hard.to(tl.int32))
        a = merged_inverse(kk, beta, PRECISION)
        if hard:
            store_inverse(ag_ptr, a, g2, t, end, True)
        else:
            store_inverse(ag_ptr, a, g2, t, end, False)
