"""The backward of prefill: what the low terms of hard chunks add to the gradients of decays.

The gradient of a token's log decay has ⟨S, dS⟩ as a term, and terms of reads from states and of
writes into them, docs/kernels/backward.md (G9). Where keys repeat these terms nearly cancel, and
⟨S, dS⟩ by itself may nearly vanish; then 16-bit states have too few bits. In a hard chunk
(backward_chunks.py) both states are two terms. With x' for the low term of x this kernel makes

    e^γ_C (⟨S', dS + dS'⟩ + ⟨S, dS'⟩) + Σ_{j < t} k_j · e^(γ_C−γ_j) dS' (D_j + D'_j)
    + Σ_{i ≥ t} (q_i · e^γ_i S' dO_i − k_i · e^γ_i (S' (dV_i + dV'_i) + S dV'_i))

and what pairs of tokens ask with Y' E'ᵀ. The kernels of the other gradients make all other terms
and add this to them. Products of two low terms are not too small to count: where keys repeat and
beta is near 1, what they add is percents of dg. A program owns a chunk of a value head, and does
nothing unless the chunk is hard.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import INDICES
from sluice.backends.triton.kernels.backward_gradients import overlap, row_sums, state_products
from sluice.backends.triton.kernels.backward_pairs import (
    fade,
    is_hard,
    load_decay,
    load_vector,
    row_products,
    spanned,
)
from sluice.backends.triton.kernels.math import begin
from sluice.backends.triton.kernels.prefill_chunks import C
from sluice.backends.triton.kernels.work_units import unit_span


@triton.jit
def products_by_row(
    x_ptr, S_ptr, y_ptr, t, end, stride_x_t, stride_y_t,
    K: tl.constexpr, V: tl.constexpr, PIECE: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y_i · (S x_i) for a chunk's rows X [C, V] and Y [C, K], and a stored state."""
    total = tl.zeros([C], tl.float32)
    for d in range(0, K, PIECE):
        x = state_products(
            tl.zeros([C, PIECE], tl.float32), x_ptr, S_ptr, t, end, d, stride_x_t,
            K, V, PIECE, BLOCK_V, 1, PRECISION,
        )  # fmt: skip
        total += row_sums(x, y_ptr, t, end, d, stride_y_t, K, PIECE)
    return total


@triton.jit(do_not_specialize=["N", "T", "tokens"], do_not_specialize_on_alignment=INDICES)
def backward_lows_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    do_ptr,  # [B, T, HO, V]; None: zeros
    e_ptr,  # [B * T, HV, V]: E
    e_low_ptr,  # its low terms
    y_ptr,  # [B * T, HV, V]: Y
    y_low_ptr,  # its low terms
    hard_ptr,  # [HV, B * T // C + N] int32
    S_ptr,  # [B * T // C + N, HV, V, K]
    S_low_ptr,
    dS_ptr,
    dS_low_ptr,
    beta32_ptr,  # [HV, B * T] float32
    g2_ptr,  # [HV, B * T] float32
    r_k_ptr,  # [HK, B * T] float32; None without norm
    decay_in_ptr,  # [HV, B * T] float32: e^γ r_k
    decay_out_ptr,  # [HV, B * T] float32: e^(γ_C - γ) r_k
    decay_q_ptr,  # [HO, B * T] float32: scale e^γ r_q
    by_low_ptr,  # [HV, B * T] float32
    cu_seqlens_ptr,
    N,
    T,
    tokens,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    HO: tl.constexpr = HQ if HQ > HV else HV
    READERS: tl.constexpr = HO // HV
    begin()
    pid = tl.program_id(0)
    head_v = pid % HV
    seq, batch, start, chunk, end = unit_span((pid // HV).to(tl.int64), cu_seqlens_ptr, N, T, C)
    t = start + chunk * C
    if (seq == N) | (t >= end):
        return
    in_row = batch * T
    chunk_slot = (in_row + t) // C + seq
    if is_hard(hard_ptr, head_v, chunk_slot, tokens // C + N):
        offs_c = tl.arange(0, C)
        rows = t + offs_c < end
        token = in_row + t + offs_c  # in the workspace
        of_value = head_v.to(tl.int64) * tokens + token
        state = (chunk_slot * HV + head_v) * (K * V)
        S_ptr += state
        S_low_ptr += state
        dS_ptr += state
        dS_low_ptr += state
        in_v = (in_row * HV + head_v) * V
        head_k = head_v // (HV // HK)
        k_ptr += batch * stride_k_b + head_k * stride_k_h
        beta = load_vector(beta32_ptr, of_value, rows)
        kept = overlap(S_low_ptr, dS_ptr, K, V, BLOCK_K, BLOCK_V, 1, PRECISION)
        kept += overlap(S_ptr, dS_low_ptr, K, V, BLOCK_K, BLOCK_V, 1, PRECISION)
        kept += overlap(S_low_ptr, dS_low_ptr, K, V, BLOCK_K, BLOCK_V, 1, PRECISION)
        last = head_v.to(tl.int64) * tokens + in_row + tl.minimum(t + C, end) - 1
        kept *= tl.exp2(tl.load(g2_ptr + last))
        wrote = products_by_row(
            e_ptr + in_v, dS_low_ptr, k_ptr, t, end, HV * V, stride_k_t,
            K, V, PIECE, BLOCK_V, PRECISION,
        )  # fmt: skip
        wrote += products_by_row(
            e_low_ptr + in_v, dS_low_ptr, k_ptr, t, end, HV * V, stride_k_t,
            K, V, PIECE, BLOCK_V, PRECISION,
        )  # fmt: skip
        wrote *= beta * load_vector(decay_out_ptr, of_value, rows)
        asked = products_by_row(
            y_ptr + in_v, S_low_ptr, k_ptr, t, end, HV * V, stride_k_t,
            K, V, PIECE, BLOCK_V, PRECISION,
        )  # fmt: skip
        asked += products_by_row(
            y_low_ptr + in_v, S_low_ptr, k_ptr, t, end, HV * V, stride_k_t,
            K, V, PIECE, BLOCK_V, PRECISION,
        )  # fmt: skip
        asked += products_by_row(
            y_low_ptr + in_v, S_ptr, k_ptr, t, end, HV * V, stride_k_t,
            K, V, PIECE, BLOCK_V, PRECISION,
        )  # fmt: skip
        asked *= -beta * load_vector(decay_in_ptr, of_value, rows)
        if do_ptr is not None:
            for reader in range(READERS):
                head_o = head_v * READERS + reader
                q_at = q_ptr + batch * stride_q_b + (head_o * HQ // HO) * stride_q_h
                read = products_by_row(
                    do_ptr + (in_row * HO + head_o) * V, S_low_ptr, q_at, t, end, HO * V,
                    stride_q_t, K, V, PIECE, BLOCK_V, PRECISION,
                )  # fmt: skip
                asked += read * load_vector(decay_q_ptr, head_o.to(tl.int64) * tokens + token, rows)
        before = offs_c[None, :] < offs_c[:, None]
        dg = kept + tl.sum(tl.where(before, wrote[None, :], asked[None, :]), axis=1)
        h = row_products(
            y_low_ptr + in_v, e_low_ptr + in_v, t, end, HV * V, HV * V, V, BLOCK_V, 1, PRECISION
        )
        g2 = load_decay(g2_ptr, of_value, rows, tl.minimum(end - t, C))
        write = beta * load_vector(r_k_ptr, head_k.to(tl.int64) * tokens + token, rows)
        h = h * -fade(g2, g2, False) * write[:, None] * write[None, :]
        kk = row_products(k_ptr, k_ptr, t, end, stride_k_t, stride_k_t, K, PIECE, 1, PRECISION)
        dg += spanned(h * kk, False)
        tl.store(by_low_ptr + of_value, dg, mask=rows)
