"""The backward of prefill, after the walks: gradients of queries, keys and gates.

One program owns a chunk of C tokens and the value heads that share its key head or query head, one
after the other, so sums over heads are made in registers and in one order. For each value head,
docs/kernels/backward.md (G6) to (G9), with S the state before the chunk and dS the gradient of the
state after it:

    N  = s dO Dᵀ ∘ Γ,   H = −strictLower(dV Dᵀ ∘ Γ)
    dQ = s e^γ dO Sᵀ + N K
    dK = Nᵀ Q + (H + Hᵀ) K + e^(γ_C−γ) D dSᵀ − e^γ dV Sᵀ

Nᵀ and Hᵀ are products of their own. They would be transposes of what a product made as left
operands, which Triton 3.4 to 3.7.0 compiles wrongly for Hopper.

The log decay of token t gets what spans it and nothing else (G9): no difference of sums is taken.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import GATES, INDICES
from sluice.backends.triton.kernels.backward_chunks import load_tile
from sluice.backends.triton.kernels.math import begin, sigmoid, softplus
from sluice.backends.triton.kernels.prefill_chunks import C
from sluice.backends.triton.kernels.work_units import unit_span


@triton.jit
def load_state(ptr, v, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Rows v to v + BLOCK_V of a stored state [V, K]."""
    offs_v = v + tl.arange(0, BLOCK_V)
    offs_k = tl.arange(0, BLOCK_K)
    mask = (offs_v < V)[:, None] & (offs_k < K)[None, :]
    return tl.load(ptr + offs_v[:, None] * K + offs_k[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(
    ptr, x, x_hat, r, t, end, wanted, stride_t,
    K: tl.constexpr, BLOCK_K: tl.constexpr, NORMALIZE_QK: tl.constexpr,
):  # fmt: skip
    """Store the gradient by x̂ [C, K], or the one by the x that was divided by its length."""
    if NORMALIZE_QK:
        x = (x - x_hat * tl.sum(x * x_hat, axis=1)[:, None]) * r[:, None]
    offs_t = t + tl.arange(0, C)
    offs_k = tl.arange(0, BLOCK_K)
    mask = (offs_t < end)[:, None] & (offs_k < K)[None, :] & wanted
    at = ptr + offs_t[:, None] * stride_t + offs_k[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_vector(ptr, token, rows, stride: tl.constexpr):
    """One number per token; ones without a pointer."""
    if ptr is None:
        x = tl.full(token.shape, 1.0, tl.float32)
    else:
        x = tl.load(ptr + token * stride, mask=rows, other=0.0).to(tl.float32)
    return x


@triton.jit
def sum_of_parts(ptr, at, rows, step, PARTS: tl.constexpr):
    """The sum of what PARTS programs left for each token."""
    total = tl.load(ptr + at, mask=rows, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(ptr + at + part * step, mask=rows, other=0.0)
    return total


@triton.jit(
    do_not_specialize=["N", "T", "tokens", "stride_g_b"],
    do_not_specialize_on_alignment=[*INDICES, *GATES],
)
def backward_gradients_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    v_ptr,  # [B, T, HV, V]; read without beta only
    g_ptr,  # [B, T, HV]; read if it is a raw gate
    A_log_ptr,
    dt_bias_ptr,
    do_ptr,  # [B, T, HO, V]; None: zeros
    e_ptr,  # [B * T, HV, V]: E; None without beta
    S_ptr,  # [B * T // C + N, HV, V, K]
    dS_ptr,
    by_beta_ptr,  # [PARTS, HV, B * T] float32; None without beta
    by_write_ptr,  # [PARTS, HV, B * T] float32; None without g
    beta32_ptr,  # [HV, B * T] float32; None without beta
    g2_ptr,  # None without g
    r_k_ptr,  # [B * T, HK] float32; None without norm
    r_q_ptr,  # [B * T, HQ] float32
    dq_ptr,  # [B, T, HQ, K]
    dk_ptr,  # [B, T, HK, K]
    dv_ptr,  # [B, T, HV, V], read
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
    stride_v_b,
    stride_v_t,
    stride_v_h,
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
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    HO: tl.constexpr = HQ if HQ > HV else HV
    READERS: tl.constexpr = HO // HV
    GROUPS: tl.constexpr = HQ if HQ < HK else HK
    ONE_PAIR: tl.constexpr = HQ == HK  # all heads of the program share one q and one k
    NORMALIZE_QK: tl.constexpr = r_k_ptr is not None
    begin()
    pid = tl.program_id(0)
    group = pid % GROUPS
    unit = (pid // GROUPS).to(tl.int64)
    seq, batch, start, chunk, end = unit_span(unit, cu_seqlens_ptr, N, T, C)
    t = start + chunk * C
    offs_c = tl.arange(0, C)
    if (seq == N) | (t >= end):
        if by_gate_ptr is not None:
            for j in range(HV // GROUPS):
                at = by_gate_ptr + unit * (2 * HV) + group * (HV // GROUPS) + j
                tl.store(at, 0.0)
                tl.store(at + HV, 0.0)
        return
    rows = t + offs_c < end
    token = batch * T + t + offs_c  # in the workspace
    slot = (batch * T + t) // C + seq
    lower = offs_c[:, None] >= offs_c[None, :]
    below = offs_c[:, None] > offs_c[None, :]
    above = offs_c[:, None] < offs_c[None, :]
    q_ptr += batch * stride_q_b
    k_ptr += batch * stride_k_b
    v_ptr += batch * stride_v_b
    in_row = batch * T  # gradients are dense
    dq = tl.zeros([C, BLOCK_K], tl.float32)
    dk = tl.zeros([C, BLOCK_K], tl.float32)
    if ONE_PAIR:
        k = load_tile(k_ptr + group * stride_k_h, t, end, 0, stride_k_t, K, BLOCK_K)
        q = load_tile(q_ptr + group * stride_q_h, t, end, 0, stride_q_t, K, BLOCK_K)
        r_k = load_vector(None if r_k_ptr is None else r_k_ptr + group, token, rows, HK)
        r_q = load_vector(None if r_q_ptr is None else r_q_ptr + group, token, rows, HQ)
        if g2_ptr is not None:
            kk = tl.dot(k, tl.trans(k), input_precision=PRECISION)
            qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    for j in range(HV // GROUPS):
        head_v = group * (HV // GROUPS) + j
        head_k = head_v // (HV // HK)
        if not ONE_PAIR:
            k = load_tile(k_ptr + head_k * stride_k_h, t, end, 0, stride_k_t, K, BLOCK_K)
            r_k = load_vector(None if r_k_ptr is None else r_k_ptr + head_k, token, rows, HK)
            if g2_ptr is not None:
                kk = tl.dot(k, tl.trans(k), input_precision=PRECISION)
            dk = tl.where(head_v % (HV // HK) == 0, 0.0, dk)
        of_value = head_v.to(tl.int64) * tokens + token
        beta = load_vector(beta32_ptr, of_value, rows, 1)
        decay_in = tl.full([C], 1.0, tl.float32)
        decay_out = decay_in
        fade = tl.where(lower, 1.0, 0.0)  # Γ, and Γᵀ
        turned = tl.where(offs_c[:, None] <= offs_c[None, :], 1.0, 0.0)
        if g2_ptr is not None:
            g2 = tl.load(g2_ptr + of_value, mask=rows, other=0.0)
            count = tl.minimum(end - t, C)
            g2_last = tl.sum(tl.where(offs_c == count - 1, g2, 0.0))
            g2 = tl.where(rows, g2, g2_last)
            decay_in = tl.exp2(g2)
            decay_out = tl.exp2(g2_last - g2)
            fade *= tl.exp2(tl.where(lower, g2[:, None] - g2[None, :], 0.0))
            turned *= tl.exp2(tl.where(lower, 0.0, g2[None, :] - g2[:, None]))
        S_at = S_ptr + (slot * HV + head_v) * (K * V)
        dS_at = dS_ptr + (slot * HV + head_v) * (K * V)
        dv_at = dv_ptr + (in_row * HV + head_v) * V
        # D without beta, which is a factor
        d_at = v_ptr + head_v * stride_v_h
        stride_d_t = stride_v_t
        if e_ptr is not None:
            d_at = e_ptr + (in_row * HV + head_v) * V
            stride_d_t = tl.full([], HV * V, tl.int32)

        # what is read of the state before the chunk and written to the one after it
        write = tl.zeros([C, BLOCK_K], tl.float32)
        if e_ptr is not None:
            read = tl.zeros([C, BLOCK_K], tl.float32)
            h = tl.zeros([C, C], tl.float32)
            ht = tl.zeros([C, C], tl.float32)
        whole = tl.zeros([BLOCK_V], tl.float32)
        for v in tl.static_range(0, V, BLOCK_V):
            d = load_tile(d_at, t, end, v, stride_d_t, V, BLOCK_V)
            dS = load_state(dS_at, v, K, V, BLOCK_K, BLOCK_V)
            write = tl.dot(d, dS, acc=write, input_precision=PRECISION)
            if g2_ptr is not None:
                S = load_state(S_at, v, K, V, BLOCK_K, BLOCK_V)
                whole += tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1)
            if e_ptr is not None:
                S = load_state(S_at, v, K, V, BLOCK_K, BLOCK_V)
                dv = load_tile(dv_at, t, end, v, HV * V, V, BLOCK_V)
                read = tl.dot(dv, S, acc=read, input_precision=PRECISION)
                h = tl.dot(dv, tl.trans(d), acc=h, input_precision=PRECISION)
                ht = tl.dot(d, tl.trans(dv), acc=ht, input_precision=PRECISION)
        dk += write * (beta * decay_out)[:, None]
        if e_ptr is not None:
            read = read * -decay_in[:, None]
            dk += read
            h = tl.where(below, -h * fade * beta[None, :], 0.0)
            ht = tl.where(above, -ht * turned * beta[:, None], 0.0)
            by_pair = ((h + ht) * r_k[None, :]).to(k.dtype)
            dk = tl.dot(by_pair, k, acc=dk, input_precision=PRECISION)
        if g2_ptr is not None:
            inter = tl.zeros([C], tl.float32)
            pairs = tl.zeros([C, C], tl.float32)
            if e_ptr is not None:
                inter = tl.sum(read * k.to(tl.float32), axis=1) * r_k
                pairs = h * kk * r_k[:, None] * r_k[None, :]

        for reader in tl.static_range(READERS):
            head_o = head_v * READERS + reader
            head_q = head_o * HQ // HO
            if not ONE_PAIR:
                q = load_tile(q_ptr + head_q * stride_q_h, t, end, 0, stride_q_t, K, BLOCK_K)
                r_q = load_vector(None if r_q_ptr is None else r_q_ptr + head_q, token, rows, HQ)
                if g2_ptr is not None:
                    qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                dq = tl.where(head_o % (HO // HQ) == 0, 0.0, dq)
            if do_ptr is not None:
                n = tl.zeros([C, C], tl.float32)
                nt = tl.zeros([C, C], tl.float32)
                dq_in = tl.zeros([C, BLOCK_K], tl.float32)
                do_at = do_ptr + (in_row * HO + head_o) * V
                for v in tl.static_range(0, V, BLOCK_V):
                    d = load_tile(d_at, t, end, v, stride_d_t, V, BLOCK_V)
                    do = load_tile(do_at, t, end, v, HO * V, V, BLOCK_V)
                    S = load_state(S_at, v, K, V, BLOCK_K, BLOCK_V)
                    dq_in = tl.dot(do, S, acc=dq_in, input_precision=PRECISION)
                    n = tl.dot(do, tl.trans(d), acc=n, input_precision=PRECISION)
                    nt = tl.dot(d, tl.trans(do), acc=nt, input_precision=PRECISION)
                dq_in = dq_in * (decay_in * scale)[:, None]
                dq += dq_in
                n = n * fade * (beta * scale)[None, :]
                nt = nt * turned * (beta * scale)[:, None]
                n_low = (n * r_k[None, :]).to(k.dtype)
                nt_low = (nt * r_q[None, :]).to(q.dtype)
                dq = tl.dot(n_low, k, acc=dq, input_precision=PRECISION)
                dk = tl.dot(nt_low, q, acc=dk, input_precision=PRECISION)
                if g2_ptr is not None:
                    inter += tl.sum(dq_in * q.to(tl.float32), axis=1) * r_q
                    qk_hat = qk * r_q[:, None] * r_k[None, :]
                    pairs += tl.where(below, n * qk_hat, 0.0)
            if not ONE_PAIR:
                q_hat = q.to(tl.float32) * r_q[:, None]
                at = dq_ptr + (in_row * HQ + head_q) * K
                last = head_o % (HO // HQ) == HO // HQ - 1
                store_rows(at, dq, q_hat, r_q, t, end, last, HQ * K, K, BLOCK_K, NORMALIZE_QK)

        if g2_ptr is not None:
            spans = tl.sum(tl.where(below, tl.cumsum(pairs, axis=0, reverse=True), 0.0), axis=1)
            kept = sum_of_parts(by_write_ptr, of_value, rows, HV * tokens, PARTS)
            kept = tl.sum(tl.where(below, kept[None, :], 0.0), axis=1)
            dg = spans + kept + tl.cumsum(inter, axis=0, reverse=True)
            dg += tl.sum(whole) * tl.exp2(g2_last)
            if A_log_ptr is not None:
                at = g_ptr + batch * stride_g_b + head_v * stride_g_h
                a = tl.load(at + (t + offs_c) * stride_g_t, mask=rows, other=0.0).to(tl.float32)
                if dt_bias_ptr is not None:
                    a += tl.load(dt_bias_ptr + head_v).to(tl.float32)
                rate = tl.exp(tl.load(A_log_ptr + head_v).to(tl.float32))
                dg = tl.where(rows, dg, 0.0)
                by_rate = tl.sum(-rate * softplus(a) * dg)
                dg = -rate * sigmoid(a) * dg
                gate_at = by_gate_ptr + unit * (2 * HV) + head_v
                tl.store(gate_at, by_rate)
                tl.store(gate_at + HV, tl.sum(dg))
            at = dg_ptr + token * HV + head_v
            tl.store(at, dg.to(dg_ptr.dtype.element_ty), mask=rows)
        if e_ptr is not None:
            dbeta = sum_of_parts(by_beta_ptr, of_value, rows, HV * tokens, PARTS)
            if A_log_ptr is not None:
                dbeta *= beta * (1.0 - beta / beta_scale)
            at = dbeta_ptr + token * HV + head_v
            tl.store(at, dbeta.to(dbeta_ptr.dtype.element_ty), mask=rows)
        if not ONE_PAIR:
            k_hat = k.to(tl.float32) * r_k[:, None]
            at = dk_ptr + (in_row * HK + head_k) * K
            last = head_v % (HV // HK) == HV // HK - 1
            store_rows(at, dk, k_hat, r_k, t, end, last, HK * K, K, BLOCK_K, NORMALIZE_QK)
    if ONE_PAIR:
        q_hat = q.to(tl.float32) * r_q[:, None]
        at = dq_ptr + (in_row * HQ + group) * K
        store_rows(at, dq, q_hat, r_q, t, end, True, HQ * K, K, BLOCK_K, NORMALIZE_QK)
        k_hat = k.to(tl.float32) * r_k[:, None]
        at = dk_ptr + (in_row * HK + group) * K
        store_rows(at, dk, k_hat, r_k, t, end, True, HK * K, K, BLOCK_K, NORMALIZE_QK)


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
