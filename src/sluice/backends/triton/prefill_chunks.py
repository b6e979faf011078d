"""The parallel half of chunked prefill: all that a chunk needs and no state decides.

For a chunk of C = 64 tokens of one value head, docs/kernels/chunked.md:

    P  = lower(G ∘ Q Kᵀ)                           G_ij = exp(gc_i - gc_j), i >= j
    A  = (I + strictLower(diag(beta) K Kᵀ))⁻¹      gate-free, in blocks of 16 x 16 and products
    Ag = G ∘ A

with gc the cumulative log decay in the chunk. Keys and queries are read as they are; with
``normalize_qk`` their inverse lengths are kept (one number a token) and multiplied in where needed.

P is kept in float16, whatever 16-bit type the inputs have, over a power of two a chunk: where keys
repeat, O is a sum of terms that nearly cancel, and bfloat16 would lose two bits of it
(docs/numerics.md). For float32 inputs it stays float32. What the serial half multiplies by token is
kept beside it, one vector a head: it has no time to spare for exponentials.

Ag is an operand of 16 bits, with ones on its diagonal. Beta as one of its factors would be rounded
with it, by the same error in each token that has the same beta; it goes along in float32 instead.
Where keys nearly repeat, errors of the other elements add up over tokens as well. Chunks of such
keys are *hard* (``repeats``), and marked so; the mark follows from a chunk's own keys: a row's bits
do not depend on its neighbours. Their Ag is kept in float16, times 2⁸, in the same memory, and in
each 16 rows the last one takes back what the rows above it lost. The rest is in prefill_walk.py.

For P one program owns one chunk of one key head and makes Q Kᵀ once for its value heads; for Ag one
chunk of one value head: K Kᵀ made again costs less than registers to keep it in (H200: 56 against
88 µs for 8192 tokens and 16/32 heads). The inverse is joined from halves, from 2 x 2 on: a product
of inverses of its own blocks is as good as they are, where a truncated or 16-bit series is wrong
for correlated keys (docs/numerics.md).
"""

# ruff: noqa: RUF005 (what a kernel may not say, and constants decide)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.arguments import GATES, INDICES
from sluice.backends.triton.tiles import NORM_EPS, begin, softplus

LOG2_E = tl.constexpr(1.4426950408889634)
NEAR = tl.constexpr(0.9)


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
    q_ptr, k, r_k, lower, scale, t, end, stride_q_t,
    K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """scale lower(Q Kᵀ) of one query head, normalised, and scale over the queries' lengths."""
    q = load_chunk(q_ptr, t, end, stride_q_t, K, BLOCK_K, k.shape[0])
    p = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    r_q = tl.full([k.shape[0]], 1.0, tl.float32) * scale
    if NORM:
        r_q *= inverse_lengths(q)
        p = p * r_k[None, :]
    return tl.where(lower, p * r_q[:, None], 0.0), r_q


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


_UNALIGNED = [*INDICES, *GATES]


@triton.jit(
    do_not_specialize=["N", "T", "tokens", "stride_g_b"], do_not_specialize_on_alignment=_UNALIGNED
)
def prefill_products_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    g_ptr,  # [B, T, HV]; None: no decay
    A_log_ptr,  # [HV]; None: g is no raw gate
    dt_bias_ptr,  # [HV]; None: 0
    p_ptr,  # [B * T, HO, C]: scale P, over lift
    lift_ptr,  # [HO, B * T] float32, at a chunk's first token: powers of two; None: ones
    forget_ptr,  # [HV, B * T] float32: e^gc, over the keys' lengths; None without g and norm
    keep_ptr,  # [HV, B * T] float32: e^(gl - gc), over the keys' lengths
    read_ptr,  # [HO, B * T] float32: scale e^gc, over the queries' lengths; None without norm
    g2_ptr,  # [HV, B * T] float32: cumulative log2 decay; None without g
    r_k_ptr,  # [B * T, HK] float32: inverse lengths; None without norm
    o_ptr,  # [B, T, HO, V]: zeros for the tail
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
        qk, r_q = products(
            q_ptr + head_k * stride_q_h, k, r_k, lower, scale, t, end, stride_q_t,
            K, BLOCK_K, PRECISION, r_k_ptr is not None,
        )  # fmt: skip
    for j in range(HO // HK):
        head_o = head_k * (HO // HK) + j
        head_v = head_o * HV // HO
        if HQ == HK:
            p = qk
        else:
            p, r_q = products(
                q_ptr + (head_o * HQ // HO) * stride_q_h, k, r_k, lower, scale, t, end, stride_q_t,
                K, BLOCK_K, PRECISION, r_k_ptr is not None,
            )  # fmt: skip
        of_value = head_v.to(tl.int64) * tokens + token
        of_output = head_o.to(tl.int64) * tokens + token
        decay = tl.full([C], 1.0, tl.float32)
        left = decay
        if g_ptr is not None:
            g2 = log2_decay(
                g_ptr + batch * stride_g_b + head_v * stride_g_h,
                A_log_ptr, dt_bias_ptr, head_v, t, end, stride_g_t, C,
            )  # fmt: skip
            tl.store(g2_ptr + of_value, g2, mask=rows)
            decay = tl.exp2(g2)
            left = tl.exp2(tl.sum(tl.where(offs_c == C - 1, g2, 0.0)) - g2)
            p = p * tl.exp2(tl.where(lower, g2[:, None] - g2[None, :], 0.0))
        if forget_ptr is not None:
            tl.store(forget_ptr + of_value, decay * r_k, mask=rows)
            tl.store(keep_ptr + of_value, left * r_k, mask=rows)
        if read_ptr is not None:
            tl.store(read_ptr + of_output, decay * r_q, mask=rows)
        if lift_ptr is not None:
            up, down = powers(tl.max(tl.abs(p)), 14)
            tl.store(lift_ptr + of_output, down + 0.0 * offs_c, mask=offs_c == 0)
            p = p * up
        p = p.to(p_ptr.dtype.element_ty)
        at = p_ptr + (token * HO + head_o)[:, None] * C + offs_c[None, :]
        tl.store(at, p, mask=rows[:, None])


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """x for a product: float16 for inputs of 16 bits.

    As many bits as tf32 has, rounded where tensor cores would cut tf32 off, and what a product
    leaves in registers is a left operand as it is. With ‖k‖ <= 1 nothing comes near its limits.
    """
    return x.to(tl.float16) if PRECISION == "tf32" else x


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """x y, in float32."""
    return tl.dot(operand(x, PRECISION), operand(y, PRECISION), input_precision=PRECISION)


@triton.jit
def join_halves(X, M, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of diagonal blocks twice the size HALF: below the ones in X stands -X M X."""
    rows = tl.arange(0, 16)[:, None] // HALF
    cols = tl.arange(0, 16)[None, :] // HALF
    below = tl.where((rows // 2 == cols // 2) & (rows > cols), M, 0.0)
    X_low = operand(X, PRECISION)
    return X - product(X_low, product(below, X_low, PRECISION), PRECISION)


@triton.jit
def invert_diagonal(kk, beta, PRECISION: tl.constexpr):
    """(I + strictLower(diag(beta) kk))⁻¹ for the four diagonal blocks.

    Of 2 x 2 it is I minus what stands below the diagonal; products join these to 4, 8 and 16. The
    blocks go side by side: one alone would wait for its own products.
    """
    rows = tl.arange(0, 16)[:, None]
    cols = tl.arange(0, 16)[None, :]
    one = tl.where(rows == cols, 1.0, 0.0)
    pair = (rows == cols + 1) & (rows % 2 == 1)
    M0 = kk[0] * beta[0][:, None]
    M1 = kk[2] * beta[1][:, None]
    M2 = kk[5] * beta[2][:, None]
    M3 = kk[9] * beta[3][:, None]
    X0 = tl.where(pair, -M0, one)
    X1 = tl.where(pair, -M1, one)
    X2 = tl.where(pair, -M2, one)
    X3 = tl.where(pair, -M3, one)
    for i in tl.static_range(1, 4):
        X0 = join_halves(X0, M0, 1 << i, PRECISION)
        X1 = join_halves(X1, M1, 1 << i, PRECISION)
        X2 = join_halves(X2, M2, 1 << i, PRECISION)
        X3 = join_halves(X3, M3, 1 << i, PRECISION)
    return X0, X1, X2, X3


@triton.jit
def repeats(kk, n):
    """Whether the n keys of a chunk nearly repeat, from the ten blocks of K Kᵀ.

    They do if |k_i · k_j| >= 0.9 m for n - 1 pairs of tokens or more, m the largest |k|²: as many
    as a last chunk of two tokens can have. Tokens behind the end are zeros, and no pair. Few chunks
    have any such pair: only in these they are counted.
    """
    rows = tl.arange(0, 16)[:, None]
    cols = tl.arange(0, 16)[None, :]
    # no product of two keys is larger than both of their squares
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
def gated_block(X, g_i, g_j, SAME: tl.constexpr):
    """X ∘ exp2(g_i - g_j), below the diagonal (with it) where the blocks are the SAME."""
    difference = g_i[:, None] - g_j[None, :]
    if SAME:
        keep = tl.arange(0, 16)[:, None] >= tl.arange(0, 16)[None, :]
        return tl.where(keep, X * tl.exp2(tl.where(keep, difference, 0.0)), 0.0)
    return X * tl.exp2(difference)


@triton.jit
def store_inverse(ptr, X, g2, t, end, stride_t, HARD: tl.constexpr):
    """Store a chunk's Ag from the blocks X of A: the rows before ``end``."""
    offs = tl.arange(0, 16)
    for i in tl.static_range(4):
        offs_t = t + 16 * i + offs
        last = tl.minimum(end - (t + 16 * i), 16) - 1
        for j in tl.static_range(4):
            block = tl.zeros([16, 16], tl.float32)
            if j <= i:
                block = gated_block(X[i * (i + 1) // 2 + j], g2[i], g2[j], i == j)
            if HARD:
                block = settled(block, g2[i], last).to(ptr.dtype.element_ty, bitcast=True)
            at = ptr + offs_t[:, None] * stride_t + 16 * j + offs[None, :]
            tl.store(at, block.to(ptr.dtype.element_ty), mask=(offs_t < end)[:, None])


@triton.jit
def merged_inverse(kk, beta, PRECISION: tl.constexpr):
    """The ten blocks of A = (I + strictLower(diag(beta) K Kᵀ))⁻¹, from those of K Kᵀ."""
    X00, X11, X22, X33 = invert_diagonal(kk, beta, PRECISION)
    Y00 = operand(X00, PRECISION)
    Y11 = operand(X11, PRECISION)
    Y22 = operand(X22, PRECISION)
    Y33 = operand(X33, PRECISION)
    M10 = operand(kk[1] * beta[1][:, None], PRECISION)
    M20 = operand(kk[3] * beta[2][:, None], PRECISION)
    M21 = operand(kk[4] * beta[2][:, None], PRECISION)
    M30 = operand(kk[6] * beta[3][:, None], PRECISION)
    M31 = operand(kk[7] * beta[3][:, None], PRECISION)
    M32 = operand(kk[8] * beta[3][:, None], PRECISION)
    X10 = -product(Y11, product(M10, Y00, PRECISION), PRECISION)
    X21 = -product(Y22, product(M21, Y11, PRECISION), PRECISION)
    X32 = -product(Y33, product(M32, Y22, PRECISION), PRECISION)
    Y10 = operand(X10, PRECISION)
    Y21 = operand(X21, PRECISION)
    X20 = product(M20, Y00, PRECISION) + product(M21, Y10, PRECISION)
    X20 = -product(Y22, X20, PRECISION)
    X31 = product(M31, Y11, PRECISION) + product(M32, Y21, PRECISION)
    X31 = -product(Y33, X31, PRECISION)
    X30 = product(M30, Y00, PRECISION) + product(M31, Y10, PRECISION)
    X30 += product(M32, X20, PRECISION)
    X30 = -product(Y33, X30, PRECISION)
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


@triton.jit(
    do_not_specialize=["N", "T", "tokens", "stride_beta_b"],
    do_not_specialize_on_alignment=_UNALIGNED,
)
def prefill_inverse_kernel(
    k_ptr,  # [B, T, HK, K]
    beta_ptr,  # [B, T, HV]
    g2_ptr,  # [HV, B * T] float32; None without g
    r_k_ptr,  # [B * T, HK] float32; None without norm
    a_ptr,  # [B * T, HV, C]: Ag
    b_ptr,  # [HV, B * T] float32: beta
    hard_ptr,  # [HV, B * T // C + N] int32: whether a chunk is hard; None: it makes no difference
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
        in_head = head_v.to(tl.int64) * tokens + token + 16 * i + offs
        tl.store(b_ptr + in_head, b, mask=mask)
        g = tl.zeros([16], tl.float32)
        if g2_ptr is not None:
            g = tl.load(g2_ptr + in_head, mask=mask, other=0.0)
        g2 = g2 + (g,)
    a_ptr += ((token - t) * HV + head_v) * C
    if hard_ptr is None:
        X = merged_inverse(kk, beta, PRECISION)
        store_inverse(a_ptr, X, g2, t, end, HV * C, False)
    else:
        hard = repeats(kk, tl.minimum(end - t, C))  # first: then the blocks of K Kᵀ are done with
        hard_ptr += head_v * (tokens // C + N) + token // C + seq
        tl.store(hard_ptr, hard.to(tl.int32))
        X = merged_inverse(kk, beta, PRECISION)
        if hard:
            store_inverse(a_ptr, X, g2, t, end, HV * C, True)
        else:
            store_inverse(a_ptr, X, g2, t, end, HV * C, False)
