"""The backward of prefill, last: gradients of queries, keys and gates.

Two kernels over chunks of C tokens, docs/kernels/backward.md (G7) to (G9). With S the state before
the chunk, dS the gradient of the state after it, and N and H of backward_pairs.py:

    r_q dQ̂ = s r_q e^γ dO Sᵀ + N K
    r_k dK̂ = Nᵀ Q + (H + Hᵀ) K + r_k e^(γ_C−γ) D dSᵀ − r_k e^γ dV Sᵀ

where x̂ = r x. The gradient of x is then r dx̂ minus its component along x̂.

A program of the first kernel owns a query head, one of the second a key head. It goes through the
value heads that share that head one after another, so sums over heads are made in registers and in
a fixed order. In a single kernel, the two gradients would not fit into registers.

Left operands are tiles as they were loaded, or their transposes. None is the transpose of what a
product made: Triton 3.4 to 3.7.0 compiles such products wrongly for Hopper.
"""
# ruff: noqa: RUF005, SIM102 (Triton has no tuple unpacking; a pointer decides alone)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import GATES, INDICES
from sluice.backends.triton.kernels.backward_chunks import load_tile, tile_at
from sluice.backends.triton.kernels.backward_pairs import is_hard, load_vector
from sluice.backends.triton.kernels.math import begin, sigmoid, softplus
from sluice.backends.triton.kernels.prefill_chunks import C
from sluice.backends.triton.kernels.work_units import unit_span


@triton.jit
def load_state(
    ptr, v, d, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Rows v to v + BLOCK_V, columns d to d + BLOCK_K of a stored state [V, K]."""
    offs_v = tl.arange(0, BLOCK_V)
    offs_k = tl.arange(0, BLOCK_K)
    at = ptr + v * K + d + (offs_v[:, None] * K + offs_k[None, :])
    if (V % BLOCK_V == 0) and (K % BLOCK_K == 0):
        state = tl.load(at)
    else:
        mask = (v + offs_v < V)[:, None] & (d + offs_k < K)[None, :]
        state = tl.load(at, mask=mask, other=0.0)
    return state


@triton.jit
def state_products(
    acc, x_ptr, S_ptr, t, end, d, stride_t,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + X Sᵀ for a chunk's rows X [C, V] and columns d to d + BLOCK_K of a stored state."""
    for v in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        x = load_tile(x_ptr, t, end, v, stride_t, V, BLOCK_V)
        S = load_state(S_ptr, v, d, K, V, BLOCK_K, BLOCK_V)
        acc = tl.dot(x, S, acc=acc, input_precision=PRECISION)
    return acc


@triton.jit
def plus_product(acc, x, y, down_ptr, head, chunk_slot, chunk_slots, PRECISION: tl.constexpr):
    """acc + x y, where x is stored over a power of two of its chunk and head, if at all."""
    if down_ptr is None:
        acc = tl.dot(x, y, acc=acc, input_precision=PRECISION)
    else:
        acc += tl.dot(x, y) * tl.load(down_ptr + head.to(tl.int64) * chunk_slots + chunk_slot)
    return acc


@triton.jit
def overlap(
    S_ptr, dS_ptr,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """⟨S, dS⟩ of two stored states: the trace of S dSᵀ, which needs no state in registers."""
    x = tl.zeros([BLOCK_V, BLOCK_V], tl.float32)
    for v in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        S = load_state(S_ptr, v, 0, K, V, BLOCK_K, BLOCK_V)
        dS = load_state(dS_ptr, v, 0, K, V, BLOCK_K, BLOCK_V)
        x = tl.dot(S, tl.trans(dS), acc=x, input_precision=PRECISION)
    rows = tl.arange(0, BLOCK_V)
    return tl.sum(tl.where(rows[:, None] == rows[None, :], x, 0.0))


@triton.jit
def load_again(ptr, t, end, d, stride_t, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """``load_tile`` of what the L1 cache holds, in float32.

    The compiler may not see that it is the same: it would keep the tile in registers meanwhile.
    """
    first, at, mask = tile_at(t, end, d, stride_t, SIZE, BLOCK)
    return tl.load(ptr + first + at, mask=mask, other=0.0, cache_modifier=".ca").to(tl.float32)


@triton.jit
def row_sums(x, y_ptr, t, end, d, stride_t, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Σ_c x_ic y_ic of each row, for columns d to d + BLOCK of rows Y in memory."""
    return tl.sum(x * load_again(y_ptr, t, end, d, stride_t, SIZE, BLOCK), axis=1)


@triton.jit
def store_gradient(
    ptr, pieces, x_ptr, r, t, end, stride_t, stride_x_t,
    K: tl.constexpr, BLOCK: tl.constexpr, NORMALIZE_QK: tl.constexpr,
):  # fmt: skip
    """Store the gradient by x; ``pieces`` of BLOCK columns are r times the one by x̂ = r x."""
    along = tl.zeros([C], tl.float32)
    if NORMALIZE_QK:
        for i in tl.static_range(len(pieces)):
            along += row_sums(pieces[i], x_ptr, t, end, i * BLOCK, stride_x_t, K, BLOCK)
        along *= r * r
    for i in tl.static_range(len(pieces)):
        piece = pieces[i]
        if NORMALIZE_QK:
            x = load_again(x_ptr, t, end, i * BLOCK, stride_x_t, K, BLOCK)
            piece = piece - x * along[:, None]
        first, at, mask = tile_at(t, end, i * BLOCK, stride_t, K, BLOCK)
        tl.store(ptr + first + at, piece.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_of_parts(ptr, at, rows, step, PARTS: tl.constexpr):
    """The sum of what PARTS programs left for each token."""
    total = tl.load(ptr + at, mask=rows, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(ptr + at + part * step, mask=rows, other=0.0)
    return total


@triton.jit(do_not_specialize=["N", "T", "tokens"], do_not_specialize_on_alignment=INDICES)
def backward_queries_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    do_ptr,  # [B, T, HO, V]; None: zeros
    n_ptr,  # [B * T, HO, C]: N; None without dO
    n_low_ptr,  # its low terms in hard chunks; None: there are none
    n_down_ptr,  # [HO, B * T // C + N] float32: N is stored over this power of two; None: 1
    hard_ptr,  # [HV, B * T // C + N] int32; None: no chunk is hard
    S_ptr,  # [B * T // C + N, HV, V, K]
    decay_q_ptr,  # [HO, B * T] float32: scale e^γ r_q
    r_q_ptr,  # [B * T, HQ] float32; None without norm
    dq_ptr,  # [B, T, HQ, K]
    by_query_ptr,  # [HO, B * T] float32: what each output asks of decays; None without g
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
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    HO: tl.constexpr = HQ if HQ > HV else HV
    begin()
    pid = tl.program_id(0)
    head_q = pid % HQ
    seq, batch, start, chunk, end = unit_span((pid // HQ).to(tl.int64), cu_seqlens_ptr, N, T, C)
    t = start + chunk * C
    if (seq == N) | (t >= end):
        return
    rows = t + tl.arange(0, C) < end
    in_row = batch * T
    token = in_row + t + tl.arange(0, C)  # in the workspace
    chunk_slot = (in_row + t) // C + seq
    k_ptr += batch * stride_k_b
    q_at = q_ptr + batch * stride_q_b + head_q * stride_q_h
    dq = tl.zeros([C, BLOCK_K], tl.float32)
    for j in range(HO // HQ):
        head_o = head_q * (HO // HQ) + j
        head_v = head_o * HV // HO
        of_output = head_o.to(tl.int64) * tokens + token
        if do_ptr is None:
            if by_query_ptr is not None:
                tl.store(by_query_ptr + of_output, tl.zeros([C], tl.float32), mask=rows)
        else:
            S_at = S_ptr + (chunk_slot * HV + head_v) * (K * V)
            do_at = do_ptr + (in_row * HO + head_o) * V
            read = state_products(
                tl.zeros([C, BLOCK_K], tl.float32), do_at, S_at, t, end, 0, HO * V,
                K, V, BLOCK_K, BLOCK_V, STAGES, PRECISION,
            )  # fmt: skip
            read = read * load_vector(decay_q_ptr, of_output, rows)[:, None]
            if by_query_ptr is not None:
                asked = row_sums(read, q_at, t, end, 0, stride_q_t, K, BLOCK_K)
                tl.store(by_query_ptr + of_output, asked, mask=rows)
            dq += read
            n_at = n_ptr + (in_row * HO + head_o) * C
            n = load_tile(n_at, t, end, 0, HO * C, C, C)
            k_at = k_ptr + (head_v // (HV // HK)) * stride_k_h
            k = load_tile(k_at, t, end, 0, stride_k_t, K, BLOCK_K)
            chunk_slots = tokens // C + N
            dq = plus_product(dq, n, k, n_down_ptr, head_o, chunk_slot, chunk_slots, PRECISION)
            if hard_ptr is not None:
                if is_hard(hard_ptr, head_v, chunk_slot, chunk_slots):
                    n_at = n_low_ptr + (in_row * HO + head_o) * C
                    n = load_tile(n_at, t, end, 0, HO * C, C, C)
                    dq = plus_product(
                        dq, n, k, n_down_ptr, head_o, chunk_slot, chunk_slots, PRECISION
                    )
    at = dq_ptr + (in_row * HQ + head_q) * K
    r_q = load_vector(r_q_ptr, token * HQ + head_q, rows)
    store_gradient(
        at, (dq,), q_at, r_q, t, end, HQ * K, stride_q_t, K, BLOCK_K, r_q_ptr is not None
    )


@triton.jit(
    do_not_specialize=["N", "T", "tokens", "stride_g_b"],
    do_not_specialize_on_alignment=[*INDICES, *GATES],
)
def backward_keys_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    g_ptr,  # [B, T, HV]; read if it is a raw gate
    A_log_ptr,
    dt_bias_ptr,
    d_ptr,  # [B, T, HV, V]: E; v without beta
    d_low_ptr,  # [B * T, HV, V]: low terms of E in hard chunks; None: there are none
    n_ptr,  # [B * T, HO, C]: N; None without dO
    n_down_ptr,  # [HO, B * T // C + N] float32: N is stored over this power of two; None: 1
    h_ptr,  # [B * T, HV, C]: H; None without beta
    h_down_ptr,  # [HV, B * T // C + N] float32, likewise
    hard_ptr,  # [HV, B * T // C + N] int32; None: no chunk is hard
    by_low_ptr,  # [HV, B * T] float32: what low terms add to dg in hard chunks; None without g too
    S_ptr,  # [B * T // C + N, HV, V, K]
    dS_ptr,
    by_pair_ptr,  # [HV, B * T] float32; None without g
    by_query_ptr,  # [HO, B * T] float32; None without g
    beta32_ptr,  # [HV, B * T] float32; None without beta
    g2_ptr,  # None without g
    decay_in_ptr,  # [HV, B * T] float32: e^γ r_k
    decay_out_ptr,  # [HV, B * T] float32: e^(γ_C - γ) r_k
    r_k_ptr,  # [HK, B * T] float32; None without norm
    dk_ptr,  # [B, T, HK, K]
    y_ptr,  # [B * T, HV, V]: Y; None without beta
    dg_ptr,  # [B, T, HV]; None without g
    by_gate_ptr,  # [units, 2, HV] float32: Σ g dg and Σ da of each chunk; None: no raw gates
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
    stride_d_b,
    stride_d_t,
    stride_d_h,
    stride_g_b,
    stride_g_t,
    stride_g_h,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PIECE: tl.constexpr,  # columns of dK at a time: a tile beside all of it fits into no registers
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    HO: tl.constexpr = HQ if HQ > HV else HV
    READERS: tl.constexpr = HO // HV
    SHARING: tl.constexpr = HV // HK
    PIECES: tl.constexpr = BLOCK_K // PIECE
    begin()
    pid = tl.program_id(0)
    head_k = pid % HK
    unit = (pid // HK).to(tl.int64)
    seq, batch, start, chunk, end = unit_span(unit, cu_seqlens_ptr, N, T, C)
    t = start + chunk * C
    offs_c = tl.arange(0, C)
    if (seq == N) | (t >= end):
        if by_gate_ptr is not None:
            for j in range(SHARING):
                at = by_gate_ptr + unit * (2 * HV) + head_k * SHARING + j
                tl.store(at, 0.0)
                tl.store(at + HV, 0.0)
        return
    rows = t + offs_c < end
    in_row = batch * T
    token = in_row + t + offs_c  # in the workspace
    chunk_slot = (in_row + t) // C + seq
    chunk_slots = tokens // C + N
    q_ptr += batch * stride_q_b
    d_ptr += batch * stride_d_b
    k_at = k_ptr + batch * stride_k_b + head_k * stride_k_h
    dk = ()
    for _ in tl.static_range(PIECES):
        dk = dk + (tl.zeros([C, PIECE], tl.float32),)
    for j in range(SHARING):
        head_v = head_k * SHARING + j
        of_value = head_v.to(tl.int64) * tokens + token
        S_at = S_ptr + (chunk_slot * HV + head_v) * (K * V)
        dS_at = dS_ptr + (chunk_slot * HV + head_v) * (K * V)
        d_at = d_ptr + head_v * stride_d_h  # D without beta, which is a factor
        beta = load_vector(beta32_ptr, of_value, rows)
        out = beta * load_vector(decay_out_ptr, of_value, rows)
        dg = tl.zeros([C], tl.float32)
        wrote = tl.zeros([C], tl.float32)  # what each token's write, and each read, asks of decays
        asked = tl.zeros([C], tl.float32)
        if g2_ptr is not None:
            left = tl.exp2(tl.load(g2_ptr + head_v.to(tl.int64) * tokens
                                   + in_row + tl.minimum(t + C, end) - 1))  # fmt: skip
            dg += overlap(S_at, dS_at, K, V, BLOCK_K, BLOCK_V, STAGES, PRECISION) * left
        sums = ()
        for i in tl.static_range(PIECES):
            write = state_products(
                tl.zeros([C, PIECE], tl.float32), d_at, dS_at, t, end, i * PIECE, stride_d_t,
                K, V, PIECE, BLOCK_V, STAGES, PRECISION,
            )  # fmt: skip
            if hard_ptr is not None:
                if is_hard(hard_ptr, head_v, chunk_slot, chunk_slots):
                    low_at = d_low_ptr + (in_row * HV + head_v) * V
                    write = state_products(
                        write, low_at, dS_at, t, end, i * PIECE, HV * V,
                        K, V, PIECE, BLOCK_V, 1, PRECISION,
                    )  # fmt: skip
            write = write * out[:, None]
            if g2_ptr is not None:
                wrote += row_sums(write, k_at, t, end, i * PIECE, stride_k_t, K, PIECE)
            dk_i = dk[i] + write
            if beta32_ptr is not None:
                y_at = y_ptr + (in_row * HV + head_v) * V
                read = state_products(
                    tl.zeros([C, PIECE], tl.float32), y_at, S_at, t, end, i * PIECE, HV * V,
                    K, V, PIECE, BLOCK_V, STAGES, PRECISION,
                )  # fmt: skip
                read = read * (-beta * load_vector(decay_in_ptr, of_value, rows))[:, None]
                if g2_ptr is not None:
                    asked += row_sums(read, k_at, t, end, i * PIECE, stride_k_t, K, PIECE)
                dk_i += read
                h = load_tile(h_ptr + (in_row * HV + head_v) * C, t, end, 0, HV * C, C, C)
                k = load_tile(k_at, t, end, i * PIECE, stride_k_t, K, PIECE)
                dk_i = plus_product(
                    dk_i, h, k, h_down_ptr, head_v, chunk_slot, chunk_slots, PRECISION
                )
                h = tl.trans(h)
                dk_i = plus_product(
                    dk_i, h, k, h_down_ptr, head_v, chunk_slot, chunk_slots, PRECISION
                )
            if n_ptr is not None:
                for reader in tl.static_range(READERS):
                    head_o = head_v * READERS + reader
                    q_at = q_ptr + (head_o * HQ // HO) * stride_q_h
                    n = load_tile(n_ptr + (in_row * HO + head_o) * C, t, end, 0, HO * C, C, C)
                    q = load_tile(q_at, t, end, i * PIECE, stride_q_t, K, PIECE)
                    n = tl.trans(n)
                    dk_i = plus_product(
                        dk_i, n, q, n_down_ptr, head_o, chunk_slot, chunk_slots, PRECISION
                    )
            sums = sums + (dk_i,)
        dk = sums
        if g2_ptr is not None:
            of_output = (head_v * READERS).to(tl.int64) * tokens + token
            asked += sum_of_parts(by_query_ptr, of_output, rows, tokens, READERS)
            dg += load_vector(by_pair_ptr, of_value, rows)
            # a token's decay acts on what was written before it and on what is read from it on
            before = offs_c[None, :] < offs_c[:, None]
            dg += tl.sum(tl.where(before, wrote[None, :], asked[None, :]), axis=1)
            if hard_ptr is not None:
                if is_hard(hard_ptr, head_v, chunk_slot, chunk_slots):
                    dg += load_vector(by_low_ptr, of_value, rows)
            if A_log_ptr is not None:
                at = g_ptr + batch * stride_g_b + head_v * stride_g_h
                a = tl.load(at + (t + offs_c) * stride_g_t, mask=rows, other=0.0).to(tl.float32)
                if dt_bias_ptr is not None:
                    a += tl.load(dt_bias_ptr + head_v).to(tl.float32)
                rate = tl.exp(tl.load(A_log_ptr + head_v).to(tl.float32))
                dg = tl.where(rows, dg, 0.0)
                gate_at = by_gate_ptr + unit * (2 * HV) + head_v
                tl.store(gate_at, tl.sum(-rate * softplus(a) * dg))
                dg = -rate * sigmoid(a) * dg
                tl.store(gate_at + HV, tl.sum(dg))
            at = dg_ptr + token * HV + head_v
            tl.store(at, dg.to(dg_ptr.dtype.element_ty), mask=rows)
    at = dk_ptr + (in_row * HK + head_k) * K
    r_k = load_vector(r_k_ptr, head_k.to(tl.int64) * tokens + token, rows)
    store_gradient(at, dk, k_at, r_k, t, end, HK * K, stride_k_t, K, PIECE, r_k_ptr is not None)


@triton.jit(do_not_specialize=["units"], do_not_specialize_on_alignment=GATES)
def backward_sums_kernel(
    by_gate_ptr,  # [units, 2, HV] float32
    dA_log_ptr,  # [HV]
    ddt_bias_ptr,  # [HV]; None: not given
    units,
    HV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin()
    head_v = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    by_rate = tl.zeros([BLOCK], tl.float32)
    by_bias = tl.zeros([BLOCK], tl.float32)
    for first in range(0, units, BLOCK):
        at = by_gate_ptr + (first + offs).to(tl.int64) * (2 * HV) + head_v
        by_rate += tl.load(at, mask=first + offs < units, other=0.0)
        by_bias += tl.load(at + HV, mask=first + offs < units, other=0.0)
    tl.store(dA_log_ptr + head_v, tl.sum(by_rate).to(dA_log_ptr.dtype.element_ty))
    if ddt_bias_ptr is not None:
        tl.store(ddt_bias_ptr + head_v, tl.sum(by_bias).to(ddt_bias_ptr.dtype.element_ty))
