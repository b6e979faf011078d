"""The backward of prefill, after the walks: gradients of queries, keys and gates.

Two kernels over chunks of C tokens, docs/kernels/backward.md (G6) to (G9). With S the state before
the chunk and dS the gradient of the state after it:

    N  = s dO Dᵀ ∘ Γ,   H = −strictLower(dV Dᵀ ∘ Γ)
    dQ = s e^γ dO Sᵀ + N K
    dK = Nᵀ Q + (H + Hᵀ) K + e^(γ_C−γ) D dSᵀ − e^γ dV Sᵀ

A program of the first kernel owns a query head, one of the second a key head. Each goes over the
value heads that share it, one after the other, so sums over heads are made in registers and in one
order. In one kernel, both gradients would not fit into registers.

Nᵀ and Hᵀ are products of their own. They would be transposes of what a product made as left
operands, which Triton 3.4 to 3.7.0 compiles wrongly for Hopper.

The log decay of token t gets what spans it and nothing else (G9): no difference of sums is taken.
"""

# ruff: noqa: SIM102 (what a pointer decides is an if of its own)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import GATES, INDICES
from sluice.backends.triton.kernels.backward_chunks import load_tile
from sluice.backends.triton.kernels.math import begin, sigmoid, softplus
from sluice.backends.triton.kernels.prefill_chunks import C
from sluice.backends.triton.kernels.work_units import unit_span


@triton.jit
def load_state(
    ptr, v, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Rows v to v + BLOCK_V of a stored state [V, K]."""
    offs_v = v + tl.arange(0, BLOCK_V)
    offs_k = tl.arange(0, BLOCK_K)
    mask = (offs_v < V)[:, None] & (offs_k < K)[None, :]
    return tl.load(ptr + offs_v[:, None] * K + offs_k[None, :], mask=mask, other=0.0)


@triton.jit
def store_gradient(
    ptr, d, x, r, t, end, stride_t,
    K: tl.constexpr, BLOCK_K: tl.constexpr, NORMALIZE_QK: tl.constexpr,
):  # fmt: skip
    """Store the gradient by x; ``d`` is the one by x̂ = r x."""
    if NORMALIZE_QK:
        x_hat = x.to(tl.float32) * r[:, None]
        d = (d - x_hat * tl.sum(d * x_hat, axis=1)[:, None]) * r[:, None]
    offs_t = t + tl.arange(0, C)
    offs_k = tl.arange(0, BLOCK_K)
    mask = (offs_t < end)[:, None] & (offs_k < K)[None, :]
    at = ptr + offs_t[:, None] * stride_t + offs_k[None, :]
    tl.store(at, d.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def fade(g2, low, TURNED: tl.constexpr, EXACT: tl.constexpr):
    """Γ_ij = e^(γ_i - γ_j) for i >= j, else 0; or Γᵀ. EXACT: γ has a second term."""
    offs = tl.arange(0, C)
    x = g2[None, :] - g2[:, None] if TURNED else g2[:, None] - g2[None, :]
    if EXACT:
        x += low[None, :] - low[:, None] if TURNED else low[:, None] - low[None, :]
    some = offs[:, None] <= offs[None, :] if TURNED else offs[:, None] >= offs[None, :]
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
    """The cumulative log2 decay of a chunk of ``count`` tokens, constant after them; its last."""
    g2 = tl.zeros([C], tl.float32)
    last = 0.0
    if g2_ptr is not None:
        g2 = tl.load(g2_ptr + at, mask=rows, other=0.0)
        last = tl.sum(tl.where(tl.arange(0, C) == count - 1, g2, 0.0))
        g2 = tl.where(rows, g2, last)
    return g2, last


@triton.jit
def spanned(pairs, inter):
    """What spans each token t: Σ_{i >= t > j} pairs_ij + Σ_{i >= t} inter_i."""
    offs = tl.arange(0, C)
    below = offs[:, None] > offs[None, :]
    sums = tl.cumsum(tl.where(below, pairs, 0.0), axis=0, reverse=True)
    return tl.sum(tl.where(below, sums, 0.0), axis=1) + tl.cumsum(inter, axis=0, reverse=True)


@triton.jit
def row_products(
    x, y, x_ptr, y_ptr, t, end, stride_x_t, stride_y_t,
    K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X Yᵀ. Float32 rows are loaded again, in pieces: as operands they are two terms each."""
    if x.dtype == tl.float32:
        PIECE: tl.constexpr = 16
        xy = tl.zeros([C, C], tl.float32)
        for d in tl.range(0, K, PIECE, num_stages=1):
            x_piece = load_tile(x_ptr, t, end, d, stride_x_t, K, PIECE)
            y_piece = load_tile(y_ptr, t, end, d, stride_y_t, K, PIECE)
            xy = tl.dot(x_piece, tl.trans(y_piece), acc=xy, input_precision=PRECISION)
    else:
        xy = tl.dot(x, tl.trans(y), input_precision=PRECISION)
    return xy


@triton.jit
def is_hard(hard_ptr, head_v, slot, slots):
    """Whether a chunk is hard. Asked only where there is a ``hard_ptr``: low terms come with it."""
    return tl.load(hard_ptr + head_v.to(tl.int64) * slots + slot) != 0


@triton.jit
def plus_product(
    acc, x_ptr, y_ptr, t, end, stride_x_t, stride_y_t, V: tl.constexpr, BLOCK_V: tl.constexpr
):
    """acc + X Yᵀ for two chunks of 16-bit rows."""
    for v in tl.range(0, V, BLOCK_V, num_stages=1):
        x = load_tile(x_ptr, t, end, v, stride_x_t, V, BLOCK_V)
        y = load_tile(y_ptr, t, end, v, stride_y_t, V, BLOCK_V)
        acc = tl.dot(x, tl.trans(y), acc=acc)
    return acc


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
    d_ptr,  # [B, T, HV, V]: E; v without beta
    d_low_ptr,  # [B * T, HV, V]: low terms of E in hard chunks; None: there are none
    hard_ptr,  # [HV, B * T // C + N] int32; None: no chunk is hard
    S_ptr,  # [B * T // C + N, HV, V, K]
    beta32_ptr,  # [HV, B * T] float32; None without beta
    g2_ptr,  # [HV, B * T] float32; None without g
    g2_low_ptr,  # the same; None: zeros
    r_k_ptr,  # [B * T, HK] float32; None without norm
    r_q_ptr,  # [B * T, HQ] float32
    dq_ptr,  # [B, T, HQ, K]
    by_query_ptr,  # [HO, B * T] float32: what outputs ask of decays; None without g
    cu_seqlens_ptr,
    scale,
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
    slot = (in_row + t) // C + seq
    k_ptr += batch * stride_k_b
    d_ptr += batch * stride_d_b
    q_at = q_ptr + batch * stride_q_b + head_q * stride_q_h
    q = load_tile(q_at, t, end, 0, stride_q_t, K, BLOCK_K)
    r_q = load_vector(r_q_ptr, token * HQ + head_q, rows)
    dq = tl.zeros([C, BLOCK_K], tl.float32)
    for j in range(HO // HQ):
        head_o = head_q * (HO // HQ) + j
        head_v = head_o * HV // HO
        head_k = head_v // (HV // HK)
        of_value = head_v.to(tl.int64) * tokens + token
        of_output = head_o.to(tl.int64) * tokens + token
        if do_ptr is None:
            if g2_ptr is not None:
                tl.store(by_query_ptr + of_output, tl.zeros([C], tl.float32), mask=rows)
        else:
            beta = load_vector(beta32_ptr, of_value, rows)
            g2, _ = load_decay(g2_ptr, of_value, rows, tl.minimum(end - t, C))
            low, _ = load_decay(g2_low_ptr, of_value, rows, tl.minimum(end - t, C))
            S_at = S_ptr + (slot * HV + head_v) * (K * V)
            do_at = do_ptr + (in_row * HO + head_o) * V
            d_at = d_ptr + head_v * stride_d_h
            n = tl.zeros([C, C], tl.float32)
            read = tl.zeros([C, BLOCK_K], tl.float32)
            for v in tl.range(0, V, BLOCK_V, num_stages=STAGES):
                do = load_tile(do_at, t, end, v, HO * V, V, BLOCK_V)
                S = load_state(S_at, v, K, V, BLOCK_K, BLOCK_V)
                read = tl.dot(do, S, acc=read, input_precision=PRECISION)
                d = load_tile(d_at, t, end, v, stride_d_t, V, BLOCK_V)
                n = tl.dot(do, tl.trans(d), acc=n, input_precision=PRECISION)
            if hard_ptr is not None:
                if is_hard(hard_ptr, head_v, slot, tokens // C + N):
                    d_at = d_low_ptr + (in_row * HV + head_v) * V
                    n = plus_product(n, do_at, d_at, t, end, HO * V, HV * V, V, BLOCK_V)
            read = read * (tl.exp2(g2) * scale)[:, None]
            dq += read
            n = n * fade(g2, low, False, g2_low_ptr is not None) * (beta * scale)[None, :]
            k = load_tile(k_ptr + head_k * stride_k_h, t, end, 0, stride_k_t, K, BLOCK_K)
            r_k = load_vector(r_k_ptr, token * HK + head_k, rows)
            if g2_ptr is not None:
                inter = tl.sum(read * q.to(tl.float32), axis=1) * r_q
                k_at = k_ptr + head_k * stride_k_h
                qk = row_products(
                    q, k, q_at, k_at, t, end, stride_q_t, stride_k_t, K, BLOCK_K, PRECISION
                )
                asked = spanned(n * qk * r_q[:, None] * r_k[None, :], inter)
                tl.store(by_query_ptr + of_output, asked, mask=rows)
            n = n * r_k[None, :]
            high = n.to(k.dtype)
            dq = tl.dot(high, k, acc=dq, input_precision=PRECISION)
            if k.dtype == tl.bfloat16:  # where keys repeat, the sum nearly cancels
                dq = tl.dot((n - high.to(tl.float32)).to(k.dtype), k, acc=dq)
    at = dq_ptr + (in_row * HQ + head_q) * K
    store_gradient(at, dq, q, r_q, t, end, HQ * K, K, BLOCK_K, r_q_ptr is not None)


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
    do_ptr,  # [B, T, HO, V]; None: zeros
    d_ptr,  # [B, T, HV, V]: E; v without beta
    d_low_ptr,  # [B * T, HV, V]: low terms of E in hard chunks; None: there are none
    hard_ptr,  # [HV, B * T // C + N] int32; None: no chunk is hard
    S_ptr,  # [B * T // C + N, HV, V, K]
    dS_ptr,
    by_query_ptr,  # [HO, B * T] float32; None without g
    by_beta_ptr,  # [PARTS, HV, B * T] float32; None without beta
    beta32_ptr,  # [HV, B * T] float32; None without beta
    g2_ptr,  # None without g
    g2_low_ptr,
    r_k_ptr,  # [B * T, HK] float32; None without norm
    r_q_ptr,  # [B * T, HQ] float32
    dk_ptr,  # [B, T, HK, K]
    dv_ptr,  # [B, T, HV, V], read
    dv_low_ptr,  # [B * T, HV, V]
    dg_ptr,  # [B, T, HV]; None without g
    dbeta_ptr,  # [B, T, HV]; None without beta
    by_gate_ptr,  # [units, 2, HV] float32: Σ g dg and Σ da of each chunk; None: no raw gates
    cu_seqlens_ptr,
    scale,
    beta_scale,
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
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    HO: tl.constexpr = HQ if HQ > HV else HV
    READERS: tl.constexpr = HO // HV
    SHARING: tl.constexpr = HV // HK
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
    slot = (in_row + t) // C + seq
    below = offs_c[:, None] > offs_c[None, :]
    above = offs_c[:, None] < offs_c[None, :]
    q_ptr += batch * stride_q_b
    d_ptr += batch * stride_d_b
    k_at = k_ptr + batch * stride_k_b + head_k * stride_k_h
    k = load_tile(k_at, t, end, 0, stride_k_t, K, BLOCK_K)
    r_k = load_vector(r_k_ptr, token * HK + head_k, rows)
    dk = tl.zeros([C, BLOCK_K], tl.float32)
    for j in range(SHARING):
        head_v = head_k * SHARING + j
        of_value = head_v.to(tl.int64) * tokens + token
        beta = load_vector(beta32_ptr, of_value, rows)
        g2, g2_last = load_decay(g2_ptr, of_value, rows, tl.minimum(end - t, C))
        low, low_last = load_decay(g2_low_ptr, of_value, rows, tl.minimum(end - t, C))
        S_at = S_ptr + (slot * HV + head_v) * (K * V)
        dS_at = dS_ptr + (slot * HV + head_v) * (K * V)
        dv_at = dv_ptr + (in_row * HV + head_v) * V
        d_at = d_ptr + head_v * stride_d_h  # D without beta, which is a factor

        write = tl.zeros([C, BLOCK_K], tl.float32)
        whole = tl.zeros([BLOCK_V], tl.float32)
        for v in tl.range(0, V, BLOCK_V, num_stages=STAGES):
            dS = load_state(dS_at, v, K, V, BLOCK_K, BLOCK_V)
            if g2_ptr is not None:
                S = load_state(S_at, v, K, V, BLOCK_K, BLOCK_V)
                whole += tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1)
            d = load_tile(d_at, t, end, v, stride_d_t, V, BLOCK_V)
            write = tl.dot(d, dS, acc=write, input_precision=PRECISION)
        if hard_ptr is not None:
            if is_hard(hard_ptr, head_v, slot, tokens // C + N):
                low_at = d_low_ptr + (in_row * HV + head_v) * V
                for v in tl.range(0, V, BLOCK_V, num_stages=1):
                    dS = load_state(dS_at, v, K, V, BLOCK_K, BLOCK_V)
                    d = load_tile(low_at, t, end, v, HV * V, V, BLOCK_V)
                    write = tl.dot(d, dS, acc=write)
        left = (g2_last - g2) + (low_last - low)
        write = write * (beta * tl.exp2(left))[:, None]
        dk += write
        kept = tl.sum(write * k.to(tl.float32), axis=1) * r_k  # what the state asks of decays

        if do_ptr is not None:
            for reader in tl.static_range(READERS):
                head_o = head_v * READERS + reader
                head_q = head_o * HQ // HO
                nt = tl.zeros([C, C], tl.float32)
                do_at = do_ptr + (in_row * HO + head_o) * V
                for v in tl.range(0, V, BLOCK_V, num_stages=STAGES):
                    d = load_tile(d_at, t, end, v, stride_d_t, V, BLOCK_V)
                    do = load_tile(do_at, t, end, v, HO * V, V, BLOCK_V)
                    nt = tl.dot(d, tl.trans(do), acc=nt, input_precision=PRECISION)
                r_q = load_vector(r_q_ptr, token * HQ + head_q, rows)
                if hard_ptr is not None:
                    if is_hard(hard_ptr, head_v, slot, tokens // C + N):
                        low_at = d_low_ptr + (in_row * HV + head_v) * V
                        nt = plus_product(nt, low_at, do_at, t, end, HV * V, HO * V, V, BLOCK_V)
                nt = (
                    nt
                    * fade(g2, low, True, g2_low_ptr is not None)
                    * (beta * scale)[:, None]
                    * r_q[None, :]
                )
                q = load_tile(q_ptr + head_q * stride_q_h, t, end, 0, stride_q_t, K, BLOCK_K)
                dk = tl.dot(nt.to(q.dtype), q, acc=dk, input_precision=PRECISION)

        if beta32_ptr is not None:
            read = tl.zeros([C, BLOCK_K], tl.float32)
            for v in tl.range(0, V, BLOCK_V, num_stages=STAGES):
                S = load_state(S_at, v, K, V, BLOCK_K, BLOCK_V)
                dv = load_tile(dv_at, t, end, v, HV * V, V, BLOCK_V)
                read = tl.dot(dv, S, acc=read, input_precision=PRECISION)
            read = read * -tl.exp2(g2)[:, None]
            dk += read
            inter = tl.sum(read * k.to(tl.float32), axis=1) * r_k
            h = tl.zeros([C, C], tl.float32)
            ht = tl.zeros([C, C], tl.float32)
            for v in tl.range(0, V, BLOCK_V, num_stages=STAGES):
                d = load_tile(d_at, t, end, v, stride_d_t, V, BLOCK_V)
                dv = load_tile(dv_at, t, end, v, HV * V, V, BLOCK_V)
                h = tl.dot(dv, tl.trans(d), acc=h, input_precision=PRECISION)
                ht = tl.dot(d, tl.trans(dv), acc=ht, input_precision=PRECISION)
            if hard_ptr is not None:
                if is_hard(hard_ptr, head_v, slot, tokens // C + N):
                    d_low_at = d_low_ptr + (in_row * HV + head_v) * V
                    v_low_at = dv_low_ptr + (in_row * HV + head_v) * V
                    h = plus_product(h, dv_at, d_low_at, t, end, HV * V, HV * V, V, BLOCK_V)
                    h = plus_product(h, v_low_at, d_at, t, end, HV * V, stride_d_t, V, BLOCK_V)
                    ht = plus_product(ht, d_low_at, dv_at, t, end, HV * V, HV * V, V, BLOCK_V)
                    ht = plus_product(ht, d_at, v_low_at, t, end, stride_d_t, HV * V, V, BLOCK_V)
            h = (
                tl.where(below, h * -fade(g2, low, False, g2_low_ptr is not None), 0.0)
                * beta[None, :]
            )
            ht = (
                tl.where(above, ht * -fade(g2, low, True, g2_low_ptr is not None), 0.0)
                * beta[:, None]
            )
            by_pair = ((h + ht) * r_k[None, :]).to(k.dtype)
            dk = tl.dot(by_pair, k, acc=dk, input_precision=PRECISION)
            dbeta = sum_of_parts(by_beta_ptr, of_value, rows, HV * tokens, PARTS)
            if A_log_ptr is not None:
                dbeta *= beta * (1.0 - beta / beta_scale)
            at = dbeta_ptr + token * HV + head_v
            tl.store(at, dbeta.to(dbeta_ptr.dtype.element_ty), mask=rows)

        if g2_ptr is not None:
            of_output = (head_v * READERS).to(tl.int64) * tokens + token
            dg = sum_of_parts(by_query_ptr, of_output, rows, tokens, READERS)
            if beta32_ptr is not None:
                kk = row_products(
                    k, k, k_at, k_at, t, end, stride_k_t, stride_k_t, K, BLOCK_K, PRECISION
                )
                dg += spanned(h * kk * r_k[:, None] * r_k[None, :], inter)
            dg += tl.sum(tl.where(below, kept[None, :], 0.0), axis=1)
            dg += tl.sum(whole) * tl.exp2(g2_last)
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
    store_gradient(at, dk, k, r_k, t, end, HK * K, K, BLOCK_K, r_k_ptr is not None)


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
