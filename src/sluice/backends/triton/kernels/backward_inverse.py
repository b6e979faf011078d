"""The backward of prefill, before the walks: the matrix by which both walks solve a chunk.

For a chunk of C tokens of one value head, docs/kernels/backward.md:

    Bg  = Γ ∘ G (I + beta G)⁻¹,  G = strictLower(K Kᵀ)                             (G10)

With R the values less what the state predicts, E = R − Bg (beta R), and the gradient goes back by
Y = dD − Bgᵀ (beta dD): one matrix for both walks, nothing is divided by beta, and the ones on the
diagonal of the inverse are never rounded. Bg is float16 for 16-bit inputs, divided by a power of
two per chunk.

Where one beta near 1 meets keys that repeat, the rounding errors of Bg agree, and the gradient of a
decay is small beside its terms. So in hard chunks (backward_chunks.py) Bg is a sum of two float16
terms over the same power of two, from products as precise as float32. A kernel of its own makes
it, with tiles of a whole chunk: so precise, the products of 16 x 16 blocks that one warp of
backward_inverse_kernel makes would be three times as many, and take Triton a minute to compile.
"""

# ruff: noqa: RUF005 (Triton has no tuple unpacking)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import INDICES
from sluice.backends.triton.kernels.math import begin, float16_scale
from sluice.backends.triton.kernels.prefill_chunks import (
    C,
    gated_block,
    load_chunk,
    load_keys,
    merged_inverse,
    product,
)
from sluice.backends.triton.kernels.work_units import unit_span


@triton.jit
def resolvent(kk, a, PRECISION: tl.constexpr):
    """The ten blocks of G A, rows first, from those of K Kᵀ and of A (G10)."""
    below = tl.arange(0, 16)[:, None] > tl.arange(0, 16)[None, :]
    made = ()
    for i in tl.static_range(4):
        for j in tl.static_range(i + 1):
            block = tl.zeros([16, 16], tl.float32)
            for m in tl.static_range(j, i + 1):
                g = kk[i * (i + 1) // 2 + m]
                if i == m:
                    g = tl.where(below, g, 0.0)
                block += product(g, a[m * (m + 1) // 2 + j], PRECISION)
            made = made + (block,)
    return made


@triton.jit
def store_resolvent(
    k_ptr, beta32_ptr, g2_ptr, g2_low_ptr, r_k_ptr, b_ptr, b_down_ptr,
    head_v, batch, t, end, T, tokens, stride_k_b, stride_k_t, stride_k_h,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Make and store the Bg of the chunk at token t."""
    head_k = head_v // (HV // HK)
    token = batch * T + t  # in the workspace
    offs = tl.arange(0, 16)
    k_ptr += batch * stride_k_b + head_k * stride_k_h
    if r_k_ptr is not None:
        r_k_ptr += head_k.to(tl.int64) * tokens + token
    kk = ()
    beta = ()
    g2 = ()
    g2_low = ()
    for i in tl.static_range(4):
        k_i, r_i = load_keys(k_ptr, r_k_ptr, t, end, i, stride_k_t, K, BLOCK_K)
        for j in tl.static_range(i + 1):
            # loaded again: four blocks of keys would fill the registers
            k_j, r_j = load_keys(k_ptr, r_k_ptr, t, end, j, stride_k_t, K, BLOCK_K)
            kk_ij = tl.dot(k_i, tl.trans(k_j), input_precision=PRECISION)
            if r_k_ptr is not None:
                kk_ij = kk_ij * r_i[:, None] * r_j[None, :]
            kk = kk + (kk_ij,)
        mask = t + 16 * i + offs < end
        of_value = head_v.to(tl.int64) * tokens + token + 16 * i + offs
        beta = beta + (tl.load(beta32_ptr + of_value, mask=mask, other=0.0),)
        g2_i = tl.zeros([16], tl.float32)
        low_i = g2_i
        if g2_ptr is not None:
            g2_i = tl.load(g2_ptr + of_value, mask=mask, other=0.0)
        if g2_low_ptr is not None:
            low_i = tl.load(g2_low_ptr + of_value, mask=mask, other=0.0)
        g2 = g2 + (g2_i,)
        g2_low = g2_low + (low_i,)
    b = resolvent(kk, merged_inverse(kk, beta, PRECISION), PRECISION)
    up = 1.0
    if b_down_ptr is not None:
        most = tl.zeros([16, 16], tl.float32)
        for i in tl.static_range(10):
            most = tl.maximum(most, tl.abs(b[i]))
        up, down = float16_scale(tl.max(most), 14)
        tl.store(b_down_ptr + head_v.to(tl.int64) * tokens + token, down)
    b_ptr += (token * HV + head_v) * C
    for i in tl.static_range(4):
        for j in tl.static_range(4):
            block = tl.zeros([16, 16], tl.float32)
            if j <= i:
                # rows after the end have the decay of no token
                block = b[i * (i + 1) // 2 + j]
                block = gated_block(block * up, g2[i], g2[j], i == j)
                if g2_low_ptr is not None:  # small: above the diagonal it does no harm
                    block *= tl.exp2(g2_low[i][:, None] - g2_low[j][None, :])
            at = b_ptr + (16 * i + offs)[:, None] * (HV * C) + 16 * j + offs[None, :]
            mask = (t + 16 * i + offs < end)[:, None]
            tl.store(at, block.to(b_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N", "T", "tokens"], do_not_specialize_on_alignment=INDICES)
def backward_inverse_kernel(
    k_ptr,  # [B, T, HK, K]
    beta32_ptr,  # [HV, B * T] float32
    g2_ptr,  # [HV, B * T] float32; None without g
    g2_low_ptr,  # the same; None: zeros
    r_k_ptr,  # [HK, B * T] float32; None without norm
    b_ptr,  # [B * T, HV, C]: Bg / b_down
    b_down_ptr,  # [HV, B * T] float32, at a chunk's first token: a power of two; None: 1
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    N,
    T,
    tokens,  # B * T
    stride_k_b,
    stride_k_t,
    stride_k_h,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Bg as one term, of all chunks."""
    begin()
    pid = tl.program_id(0)
    head_v = pid % HV
    seq, batch, start, chunk, end = unit_span((pid // HV).to(tl.int64), cu_seqlens_ptr, N, T, C)
    t = start + chunk * C
    if seq == N or t >= end:
        return
    store_resolvent(
        k_ptr, beta32_ptr, g2_ptr, g2_low_ptr, r_k_ptr, b_ptr, b_down_ptr,
        head_v, batch, t, end, T, tokens, stride_k_b, stride_k_t, stride_k_h,
        HK, HV, K, BLOCK_K, PRECISION,
    )  # fmt: skip


@triton.jit
def chunk_inverse(l, PRECISION: tl.constexpr):
    """(I + l)⁻¹ of a strictly lower l [C, C], joined from halves (K26): 2 x 2 blocks, 4 x 4, ..."""
    rows = tl.arange(0, C)[:, None]
    cols = tl.arange(0, C)[None, :]
    a = tl.where(rows == cols, 1.0, 0.0) - tl.where(rows // 2 == cols // 2, l, 0.0)
    for i in tl.static_range(1, 6):
        below = (rows >> i) % 2 == 1
        below = below & (rows >> i == (cols >> i) + 1)
        across = tl.dot(tl.where(below, l, 0.0), a, input_precision=PRECISION)
        a -= tl.dot(a, across, input_precision=PRECISION)
    return a


@triton.jit
def store_two_terms(
    k_ptr, beta32_ptr, g2_ptr, r_k_ptr, b_ptr, b_low_ptr, b_down_ptr,
    head_v, batch, t, end, T, tokens, stride_k_b, stride_k_t, stride_k_h,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Make and store the Bg of the chunk at token t as two terms."""
    head_k = head_v // (HV // HK)
    token = batch * T + t  # in the workspace
    offs = tl.arange(0, C)
    here = t + offs < end
    k = load_chunk(
        k_ptr + batch * stride_k_b + head_k * stride_k_h, t, end, stride_k_t, K, BLOCK_K, C
    )
    g = tl.dot(k, tl.trans(k))  # of 16-bit numbers: exact but for the sum
    if r_k_ptr is not None:
        r = tl.load(r_k_ptr + head_k.to(tl.int64) * tokens + token + offs, mask=here, other=0.0)
        g = g * r[:, None] * r[None, :]
    strictly = offs[:, None] > offs[None, :]
    g = tl.where(strictly, g, 0.0)
    of_value = head_v.to(tl.int64) * tokens + token
    beta = tl.load(beta32_ptr + of_value + offs, mask=here, other=0.0)
    a = chunk_inverse(g * beta[:, None], PRECISION)
    b = tl.dot(g, a, input_precision=PRECISION)
    up, down = float16_scale(tl.max(tl.abs(b)), 14)
    tl.store(b_down_ptr + of_value, down)
    b *= up
    if g2_ptr is not None:
        g2 = tl.load(g2_ptr + of_value + offs, mask=here, other=0.0)
        b *= tl.exp2(tl.where(strictly & here[:, None], g2[:, None] - g2[None, :], 0.0))
    high = b.to(b_ptr.dtype.element_ty)
    at = (token * HV + head_v) * C + offs[:, None] * (HV * C) + offs[None, :]
    tl.store(b_ptr + at, high, mask=here[:, None])
    low = (b - high.to(tl.float32)).to(b_low_ptr.dtype.element_ty)
    tl.store(b_low_ptr + at, low, mask=here[:, None])


@triton.jit(do_not_specialize=["N", "T", "tokens"], do_not_specialize_on_alignment=INDICES)
def backward_hard_inverse_kernel(
    k_ptr,  # [B, T, HK, K]
    beta32_ptr,  # [HV, B * T] float32
    g2_ptr,  # [HV, B * T] float32; None without g
    r_k_ptr,  # [HK, B * T] float32; None without norm
    b_ptr,  # [B * T, HV, C]: the high term of Bg / b_down
    b_low_ptr,  # [B * T, HV, C]: the low term
    b_down_ptr,  # [HV, B * T] float32, at a chunk's first token: a power of two
    hard_ptr,  # [HV, B * T // C + N] int32
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    N,
    T,
    tokens,  # B * T
    stride_k_b,
    stride_k_t,
    stride_k_h,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    UNITS: tl.constexpr,  # chunks that a program looks at
):
    """Bg as two terms, of hard chunks only, in place of what backward_inverse_kernel stored."""
    begin()
    pid = tl.program_id(0)
    head_v = pid % HV
    hard_ptr += head_v.to(tl.int64) * (tokens // C + N)
    for i in range(UNITS):
        unit = (pid // HV * UNITS + i).to(tl.int64)
        seq, batch, start, chunk, end = unit_span(unit, cu_seqlens_ptr, N, T, C)
        t = start + chunk * C
        here = (seq < N) & (t < end)
        if tl.load(hard_ptr + (batch * T + t) // C + seq, mask=here, other=0) != 0:
            store_two_terms(
                k_ptr, beta32_ptr, g2_ptr, r_k_ptr, b_ptr, b_low_ptr, b_down_ptr,
                head_v, batch, t, end, T, tokens, stride_k_b, stride_k_t, stride_k_h,
                HK, HV, K, BLOCK_K, PRECISION,
            )  # fmt: skip
