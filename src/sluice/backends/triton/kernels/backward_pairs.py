"""The backward of prefill, after the walks: the gradients' terms from pairs of tokens of a chunk.

For a chunk of C tokens of one value head, docs/kernels/backward.md (G6), (G9). With r_q and r_k the
inverse lengths of queries and keys, or ones:

    N = s r_q (dO Dᵀ ∘ Γ) r_k,     H = −r_k strictLower(dV Dᵀ ∘ Γ) r_k

Both are stored for the gradients of queries and keys (backward_gradients.py); in float16 with a
power of two per chunk, because a small beta would leave few of their bits. With D = beta E and
dV = beta Y, dbeta is the diagonal of Y Eᵀ. The gradient of a token's log decay is a sum of the
pairs that span the token, not a difference of two larger sums.
"""
# ruff: noqa: SIM102 (what a pointer decides is an if of its own)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import INDICES
from sluice.backends.triton.kernels.backward_chunks import load_tile
from sluice.backends.triton.kernels.math import begin, float16_scale
from sluice.backends.triton.kernels.prefill_chunks import C
from sluice.backends.triton.kernels.work_units import unit_span


@triton.jit
def fade(g2, low, EXACT: tl.constexpr):
    """Γ_ij = e^(γ_i - γ_j) for i >= j, else 0. EXACT: γ has a second term."""
    offs = tl.arange(0, C)
    x = g2[:, None] - g2[None, :]
    if EXACT:
        x += low[:, None] - low[None, :]
    some = offs[:, None] >= offs[None, :]
    return tl.where(some, tl.exp2(tl.where(some, x, 0.0)), 0.0)


@triton.jit
def load_vector(ptr, at, rows):
    """One number per token; ones without a pointer."""
    if ptr is None:
        x = tl.full(at.shape, 1.0, tl.float32)
    else:
        x = tl.load(ptr + at, mask=rows, other=0.0).to(tl.float32)
    return x


@triton.jit
def load_decay(g2_ptr, at, rows, count):
    """The cumulative log2 decay of a chunk of ``count`` tokens, constant after them."""
    g2 = tl.zeros([C], tl.float32)
    if g2_ptr is not None:
        g2 = tl.load(g2_ptr + at, mask=rows, other=0.0)
        g2 = tl.where(rows, g2, tl.sum(tl.where(tl.arange(0, C) == count - 1, g2, 0.0)))
    return g2


@triton.jit
def spanned(pairs, EXACT: tl.constexpr):
    """What spans each token t: Σ_{i >= t > j} pairs_ij.

    The sums over j are products with ones, of two float16 terms that hold 22 bits of each pair. A
    scan of 64 rows takes thousands of instructions; EXACT takes one all the same.
    """
    offs = tl.arange(0, C)
    below = offs[:, None] > offs[None, :]
    pairs = tl.where(below, pairs, 0.0)
    if EXACT:
        sums = tl.cumsum(pairs, axis=0, reverse=True)
        total = tl.sum(tl.where(below, sums, 0.0), axis=1)
    else:
        up, back = float16_scale(tl.max(tl.abs(pairs), axis=1), 80)
        pairs = pairs * up[:, None]
        high = pairs.to(tl.float16)
        low = (pairs - high.to(tl.float32)).to(tl.float16)
        ones = tl.where(offs[:, None] < offs[None, :], 1.0, 0.0).to(tl.float16)
        sums = tl.dot(low, ones, acc=tl.dot(high, ones)) * back[:, None]
        total = tl.sum(tl.where(offs[:, None] >= offs[None, :], sums, 0.0), axis=0)
    return total


@triton.jit
def row_products(
    x_ptr, y_ptr, t, end, stride_x_t, stride_y_t, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X Yᵀ of two chunks of rows."""
    xy = tl.zeros([C, C], tl.float32)
    for d in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
        x = load_tile(x_ptr, t, end, d, stride_x_t, SIZE, BLOCK)
        y = load_tile(y_ptr, t, end, d, stride_y_t, SIZE, BLOCK)
        xy = tl.dot(x, tl.trans(y), acc=xy, input_precision=PRECISION)
    return xy


@triton.jit
def to_float16(x, down_ptr, head, chunk_slot, chunk_slots):
    """x over a power of two that float16 suits; stores that power, of a chunk of a head."""
    up, down = float16_scale(tl.max(tl.abs(x)), 14)
    tl.store(down_ptr + head.to(tl.int64) * chunk_slots + chunk_slot, down)
    return x * up


@triton.jit
def is_hard(hard_ptr, head_v, chunk_slot, chunk_slots):
    """Whether a chunk is hard. Asked only where there is a ``hard_ptr``: low terms come with it."""
    return tl.load(hard_ptr + head_v.to(tl.int64) * chunk_slots + chunk_slot) != 0


@triton.jit(do_not_specialize=["N", "T", "tokens"], do_not_specialize_on_alignment=INDICES)
def backward_pairs_kernel(
    k_ptr,  # [B, T, HK, K]
    do_ptr,  # [B, T, HO, V]; None: zeros
    d_ptr,  # [B, T, HV, V]: E; v without beta
    d_low_ptr,  # [B * T, HV, V]: low terms of E in hard chunks; None: there are none
    y_ptr,  # [B * T, HV, V]: Y; None without beta
    y_low_ptr,  # its low terms in hard chunks
    p_ptr,  # [B * T, HO, C]: P; None without dO
    p_low_ptr,  # its low terms in hard chunks
    hard_ptr,  # [HV, B * T // C + N] int32; None: no chunk is hard
    beta32_ptr,  # [HV, B * T] float32; None without beta
    g2_ptr,  # [HV, B * T] float32; None without g
    g2_low_ptr,  # the same; None: zeros
    r_k_ptr,  # [HK, B * T] float32; None without norm
    r_q_ptr,  # [B * T, HQ] float32
    n_ptr,  # [B * T, HO, C]: N; None without dO
    n_low_ptr,  # its low terms in hard chunks
    n_down_ptr,  # [HO, B * T // C + N] float32: N is stored over this power of two; None: 1
    h_ptr,  # [B * T, HV, C]: H; None without beta
    h_down_ptr,  # [HV, B * T // C + N] float32, likewise
    by_pair_ptr,  # [HV, B * T] float32: what pairs ask of decays; None without g
    dbeta_ptr,  # [B, T, HV]; None without beta
    cu_seqlens_ptr,
    scale,
    beta_scale,
    N,
    T,
    tokens,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_d_b,
    stride_d_t,
    stride_d_h,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    RAW_BETA: tl.constexpr,
):
    HO: tl.constexpr = HQ if HQ > HV else HV
    READERS: tl.constexpr = HO // HV
    begin()
    pid = tl.program_id(0)
    head_v = pid % HV
    head_k = head_v // (HV // HK)
    seq, batch, start, chunk, end = unit_span((pid // HV).to(tl.int64), cu_seqlens_ptr, N, T, C)
    t = start + chunk * C
    if (seq == N) | (t >= end):
        return
    offs_c = tl.arange(0, C)
    rows = t + offs_c < end
    in_row = batch * T
    token = in_row + t + offs_c  # in the workspace
    chunk_slot = (in_row + t) // C + seq
    of_value = head_v.to(tl.int64) * tokens + token
    r_k = load_vector(r_k_ptr, head_k.to(tl.int64) * tokens + token, rows)
    by_column = load_vector(beta32_ptr, of_value, rows) * r_k
    g2 = load_decay(g2_ptr, of_value, rows, tl.minimum(end - t, C))
    low = load_decay(g2_low_ptr, of_value, rows, tl.minimum(end - t, C))
    d_at = d_ptr + batch * stride_d_b + head_v * stride_d_h  # D without beta, which is a factor
    low_at = d_low_ptr
    if hard_ptr is not None:
        low_at += (in_row * HV + head_v) * V
    in_chunk = offs_c[:, None] * (HO * C) + offs_c[None, :]
    pairs = tl.zeros([C, C], tl.float32)
    if do_ptr is not None:
        for reader in tl.static_range(READERS):
            head_o = head_v * READERS + reader
            do_at = do_ptr + (in_row * HO + head_o) * V
            n = row_products(do_at, d_at, t, end, HO * V, stride_d_t, V, BLOCK_V, STAGES, PRECISION)
            if hard_ptr is not None:
                if is_hard(hard_ptr, head_v, chunk_slot, tokens // C + N):
                    n += row_products(do_at, low_at, t, end, HO * V, HV * V, V, BLOCK_V, 1, "tf32")
            in_n = ((in_row + t) * HO + head_o) * C
            if g2_ptr is not None:
                beta = load_vector(beta32_ptr, of_value, rows)
                p = tl.load(p_ptr + in_n + in_chunk, mask=rows[:, None], other=0.0).to(tl.float32)
                if hard_ptr is not None:
                    if is_hard(hard_ptr, head_v, chunk_slot, tokens // C + N):
                        p += tl.load(p_low_ptr + in_n + in_chunk, mask=rows[:, None], other=0.0)
                pairs += n * p * beta[None, :]
            r_q = load_vector(r_q_ptr, token * HQ + head_o * HQ // HO, rows)
            n = n * fade(g2, low, g2_low_ptr is not None)
            n = n * (r_q * scale)[:, None] * by_column[None, :]
            if n_down_ptr is not None:
                n = to_float16(n, n_down_ptr, head_o, chunk_slot, tokens // C + N)
            high = n.to(n_ptr.dtype.element_ty)
            tl.store(n_ptr + in_n + in_chunk, high, mask=rows[:, None])
            if hard_ptr is not None:
                if is_hard(hard_ptr, head_v, chunk_slot, tokens // C + N):
                    rest = (n - high.to(tl.float32)).to(n_low_ptr.dtype.element_ty)
                    tl.store(n_low_ptr + in_n + in_chunk, rest, mask=rows[:, None])
    if h_ptr is not None:
        y_at = y_ptr + (in_row * HV + head_v) * V
        h = row_products(y_at, d_at, t, end, HV * V, stride_d_t, V, BLOCK_V, STAGES, PRECISION)
        if hard_ptr is not None:
            if is_hard(hard_ptr, head_v, chunk_slot, tokens // C + N):
                y_low = y_low_ptr + (in_row * HV + head_v) * V
                h += row_products(y_at, low_at, t, end, HV * V, HV * V, V, BLOCK_V, 1, "tf32")
                h += row_products(y_low, d_at, t, end, HV * V, stride_d_t, V, BLOCK_V, 1, "tf32")
        dbeta = tl.sum(tl.where(offs_c[:, None] == offs_c[None, :], h, 0.0), axis=1)
        if RAW_BETA:
            beta = load_vector(beta32_ptr, of_value, rows)
            dbeta *= beta * (1.0 - beta / beta_scale)
        at = dbeta_ptr + token * HV + head_v
        tl.store(at, dbeta.to(dbeta_ptr.dtype.element_ty), mask=rows)
        h = h * -fade(g2, low, g2_low_ptr is not None)
        h = h * by_column[:, None] * by_column[None, :]
        h = tl.where(offs_c[:, None] > offs_c[None, :], h, 0.0)
        at = h_ptr + ((in_row + t) * HV + head_v) * C + offs_c[:, None] * (HV * C) + offs_c[None, :]
        stored = h
        if h_down_ptr is not None:
            stored = to_float16(h, h_down_ptr, head_v, chunk_slot, tokens // C + N)
        tl.store(at, stored.to(h_ptr.dtype.element_ty), mask=rows[:, None])
        if g2_ptr is not None:
            k_at = k_ptr + batch * stride_k_b + head_k * stride_k_h
            PIECE: tl.constexpr = 16 if k_ptr.dtype.element_ty == tl.float32 else BLOCK_K
            kk = row_products(k_at, k_at, t, end, stride_k_t, stride_k_t, K, PIECE, 1, PRECISION)
            pairs += h * kk
    if g2_ptr is not None:
        EXACT: tl.constexpr = k_ptr.dtype.element_ty == tl.float32
        tl.store(by_pair_ptr + of_value, spanned(pairs, EXACT), mask=rows)
