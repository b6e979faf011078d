"""The backward of prefill with decay per key, after the walks: queries, keys and gates.

Chunks of C = 16 tokens, docs/kernels/backward.md (G12) to (G14). First, on tensor cores, what a
chunk has to do with states, and what pairs of tokens ask:

    read_q = s e^γ ∘ (dO Sᵀ),    read_k = −e^γ ∘ (dV Sᵀ),    write = e^(γ_C−γ) ∘ (D dSᵀ)
    N = s dO Dᵀ,    H = −strictLower(dV Dᵀ),    whole = e^γ_C ∘ Σ_v S ∘ dS

The rest is a sum over pairs of tokens for each key channel by itself. There a thread owns a
channel: 16 tokens are 16 registers of it, nothing passes between threads, and the decay between two
tokens is a running sum. The log decay of token t gets what spans it and nothing else: reads from t
on of what was written before it.

Both gradients are left per value head, in float32, and one more kernel sums the heads that share a
query or a key, in order, and goes back through the l2 norm.
"""
# ruff: noqa: RUF005 (Triton has no tuple unpacking)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.alignment import INDICES
from sluice.backends.triton.kernels.backward_key_chunks import (
    FREE,
    KEY_C,
    UNALIGNED,
    load_beta,
    load_by,
    log2_gates,
)
from sluice.backends.triton.kernels.math import LOG2_E, begin, sigmoid
from sluice.backends.triton.kernels.prefill_key import exact_dot
from sluice.backends.triton.kernels.work_units import unit_span

READ = tl.constexpr(4)
"""Tokens of a chunk whose reads share their code: fewer are faster, and take longer to compile."""


@triton.jit
def load_columns(ptr, offs_v, offs_k, K: tl.constexpr, V: tl.constexpr):
    """Rows ``offs_v`` of a stored state [V, K], in float32."""
    mask = (offs_v < V)[:, None] & (offs_k < K)[None, :]
    return tl.load(ptr + offs_v[:, None] * K + offs_k[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=FREE, do_not_specialize_on_alignment=UNALIGNED)
def backward_key_pairs_kernel(
    g_ptr,  # [B, T, HV, K]
    beta_ptr,  # [B, T, HV]; None: no delta rule
    A_log_ptr,  # [HV]; given: g and beta are raw gates
    dt_bias_ptr,  # [HV, K]; None: 0
    do_ptr,  # [B, T, HO, V]; None: zeros
    d_ptr,  # [B, T, HV, V]: E; v without beta
    y_ptr,  # [B * T, HV, V] float32: Y; None without beta
    S_ptr,  # [B * T // C + N, HV, V, K]
    dS_ptr,
    n_ptr,  # [B * T, HO, C] float32: N; None without dO
    h_ptr,  # [B * T, HV, C] float32: H; None without beta
    read_q_ptr,  # [B * T, HO, K] float32; None without dO
    read_k_ptr,  # [B * T, HV, K] float32; not written without beta
    write_ptr,  # [B * T, HV, K] float32
    whole_ptr,  # [B * T // C + N, HV, K] float32
    dbeta_ptr,  # [B, T, HV]; None without beta
    cu_seqlens_ptr,
    scale,
    beta_scale,
    N,
    T,
    stride_d_b,
    stride_d_t,
    stride_d_h,
    stride_g_b,
    stride_g_t,
    stride_g_h,
    stride_beta_b,
    stride_beta_t,
    stride_beta_h,
    HQ: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    HO: tl.constexpr = HQ if HQ > HV else HV
    READERS: tl.constexpr = HO // HV
    begin()
    pid = tl.program_id(0)
    head_v = pid % HV
    seq, batch, start, chunk, end = unit_span((pid // HV).to(tl.int64), cu_seqlens_ptr, N, T, KEY_C)
    t = start + chunk * KEY_C
    if (seq == N) | (t >= end):
        return
    left = tl.minimum(end - t, KEY_C).to(tl.int32)
    offs_c = tl.arange(0, KEY_C)
    offs_k = tl.arange(0, BLOCK_K)
    rows = offs_c < left
    token = batch * T + t  # in the workspace
    chunk_slot = (token // KEY_C + seq) * HV + head_v
    S_ptr += chunk_slot * (K * V)
    dS_ptr += chunk_slot * (K * V)
    d_ptr += batch * stride_d_b + t * stride_d_t + head_v * stride_d_h
    g_ptr += batch * stride_g_b + t * stride_g_t + head_v * stride_g_h
    if beta_ptr is not None:
        beta_ptr += batch * stride_beta_b + t * stride_beta_t + head_v * stride_beta_h
    beta = load_beta(beta_ptr, A_log_ptr, beta_scale, offs_c, stride_beta_t, left)
    in_k = offs_c[:, None] * (HV * K) + offs_k[None, :]
    mask_k = rows[:, None] & (offs_k < K)[None, :]
    in_c = offs_c[:, None] * (HV * KEY_C) + offs_c[None, :]
    g = log2_gates(
        g_ptr, A_log_ptr, dt_bias_ptr, head_v, offs_c[:, None], stride_g_t, offs_k[None, :], left, K
    )

    write = tl.zeros([KEY_C, BLOCK_K], tl.float32)
    whole = tl.zeros([BLOCK_K], tl.float32)
    for v in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        offs_v = v + tl.arange(0, BLOCK_V)
        dS = load_columns(dS_ptr, offs_v, offs_k, K, V)
        d = load_by(d_ptr, offs_c[:, None], stride_d_t, offs_v[None, :], left, V)
        write = exact_dot(d, dS, write)
        whole += tl.sum(dS * load_columns(S_ptr, offs_v, offs_k, K, V), axis=0)
    tl.store(
        whole_ptr + chunk_slot * K + offs_k, whole * tl.exp2(tl.sum(g, axis=0)), mask=offs_k < K
    )
    after = log2_gates(
        g_ptr, A_log_ptr, dt_bias_ptr, head_v, offs_c[:, None] + 1, stride_g_t, offs_k[None, :],
        left, K,
    )  # fmt: skip
    write *= tl.exp2(tl.cumsum(after, axis=0, reverse=True)) * beta[:, None]
    tl.store(write_ptr + (token * HV + head_v) * K + in_k, write, mask=mask_k)

    if beta_ptr is not None:
        y_ptr += (token * HV + head_v) * V
        h = tl.zeros([KEY_C, KEY_C], tl.float32)
        read = tl.zeros([KEY_C, BLOCK_K], tl.float32)
        for v in tl.range(0, V, BLOCK_V, num_stages=STAGES):
            offs_v = v + tl.arange(0, BLOCK_V)
            y = load_by(y_ptr, offs_c[:, None], HV * V, offs_v[None, :], left, V)
            d = load_by(d_ptr, offs_c[None, :], stride_d_t, offs_v[:, None], left, V)
            h = exact_dot(y, d, h)
            read = exact_dot(y, load_columns(S_ptr, offs_v, offs_k, K, V), read)
        dbeta = tl.sum(tl.where(offs_c[:, None] == offs_c[None, :], h, 0.0), axis=1)
        if A_log_ptr is not None:
            dbeta *= beta * (1.0 - beta / beta_scale)
        at = dbeta_ptr + (token + offs_c) * HV + head_v
        tl.store(at, dbeta.to(dbeta_ptr.dtype.element_ty), mask=rows)
        h = tl.where(offs_c[:, None] > offs_c[None, :], -h * beta[:, None] * beta[None, :], 0.0)
        tl.store(h_ptr + (token * HV + head_v) * KEY_C + in_c, h, mask=rows[:, None])
        read *= -tl.exp2(tl.cumsum(g, axis=0)) * beta[:, None]
        tl.store(read_k_ptr + (token * HV + head_v) * K + in_k, read, mask=mask_k)

    if do_ptr is not None:
        for reader in tl.static_range(READERS):
            of_output = token * HO + head_v * READERS + reader
            n = tl.zeros([KEY_C, KEY_C], tl.float32)
            read = tl.zeros([KEY_C, BLOCK_K], tl.float32)
            for v in tl.range(0, V, BLOCK_V, num_stages=STAGES):
                offs_v = v + tl.arange(0, BLOCK_V)
                do_at = do_ptr + of_output * V
                do = load_by(do_at, offs_c[:, None], HO * V, offs_v[None, :], left, V)
                d = load_by(d_ptr, offs_c[None, :], stride_d_t, offs_v[:, None], left, V)
                n = exact_dot(do, d, n)
                read = exact_dot(do, load_columns(S_ptr, offs_v, offs_k, K, V), read)
            n = tl.where(offs_c[:, None] >= offs_c[None, :], n * scale * beta[None, :], 0.0)
            at = n_ptr + of_output * KEY_C + offs_c[:, None] * (HO * KEY_C) + offs_c[None, :]
            tl.store(at, n, mask=rows[:, None])
            read *= tl.exp2(tl.cumsum(g, axis=0)) * scale
            at = read_q_ptr + of_output * K + offs_c[:, None] * (HO * K) + offs_k[None, :]
            tl.store(at, read, mask=mask_k)


@triton.jit(do_not_specialize=FREE, do_not_specialize_on_alignment=UNALIGNED)
def backward_key_channels_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    g_ptr,  # [B, T, HV, K]
    A_log_ptr,  # [HV]; given: g is a raw gate
    dt_bias_ptr,  # [HV, K]; None: 0
    r_q_ptr,  # [B * T, HQ] float32; None without norm
    r_k_ptr,  # [B * T, HK] float32
    n_ptr,  # [B * T, HO, C] float32: N; None without dO
    h_ptr,  # [B * T, HV, C] float32: H; None without beta
    read_q_ptr,  # [B * T, HO, K] float32: read_q in, dQ̂ out; None without dO
    read_k_ptr,  # [B * T, HV, K] float32: read_k in, if there is beta; dK̂ out
    write_ptr,  # [B * T, HV, K] float32
    whole_ptr,  # [B * T // C + N, HV, K] float32
    dg_ptr,  # [B, T, HV, K]
    by_gate_ptr,  # [units, 2, HV, K] float32: Σ g dg and Σ da of each chunk; None: no raw gates
    cu_seqlens_ptr,
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
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    HO: tl.constexpr = HQ if HQ > HV else HV
    READERS: tl.constexpr = HO // HV
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    begin()
    pid = tl.program_id(0)
    head_v = (pid // BLOCKS) % HV
    head_k = head_v // (HV // HK)
    unit = (pid // (BLOCKS * HV)).to(tl.int64)
    offs_k = (pid % BLOCKS) * BLOCK_K + tl.arange(0, BLOCK_K)
    some = offs_k < K
    zero = tl.zeros([BLOCK_K], tl.float32)
    seq, batch, start, chunk, end = unit_span(unit, cu_seqlens_ptr, N, T, KEY_C)
    t = start + chunk * KEY_C
    if by_gate_ptr is not None:
        by_gate_ptr += (unit * (2 * HV) + head_v) * K + offs_k
    if (seq == N) | (t >= end):
        if by_gate_ptr is not None:
            tl.store(by_gate_ptr, zero, mask=some)
            tl.store(by_gate_ptr + HV * K, zero, mask=some)
        return
    left = tl.minimum(end - t, KEY_C).to(tl.int32)
    token = batch * T + t  # in the workspace
    q_ptr += batch * stride_q_b + t * stride_q_t
    k_ptr += batch * stride_k_b + t * stride_k_t + head_k * stride_k_h
    g_ptr += batch * stride_g_b + t * stride_g_t + head_v * stride_g_h
    in_k = (token * HV + head_v) * K
    chunk_slot = token // KEY_C + seq
    whole = tl.load(whole_ptr + (chunk_slot * HV + head_v) * K + offs_k, mask=some, other=0.0)
    keys = ()
    spans = ()  # of each token before i: the log2 decays after it, up to i
    dk = ()
    dg = ()
    before = zero  # what the writes of earlier tokens ask of decays
    for block in tl.static_range(KEY_C // READ):
        for _ in tl.static_range(READ):
            keys = keys + (zero,)
            spans = spans + (zero,)
            dk = dk + (zero,)
            dg = dg + (zero,)
        for i in range(block * READ, tl.minimum(left, (block + 1) * READ)):
            # token i reads
            g = log2_gates(g_ptr, A_log_ptr, dt_bias_ptr, head_v, i, stride_g_t, offs_k, left, K)
            k = load_by(k_ptr, i, stride_k_t, offs_k, left, K)
            if r_k_ptr is not None:
                k *= tl.load(r_k_ptr + (token + i) * HK + head_k)
            write = load_by(write_ptr + in_k, i, HV * K, offs_k, left, K)
            read = zero
            if h_ptr is not None:
                read = load_by(read_k_ptr + in_k, i, HV * K, offs_k, left, K)
            own = read + write
            run = read * k  # what its reads ask of decays
            queries = ()
            dq = ()
            for reader in tl.static_range(READERS):
                if n_ptr is not None:
                    head_q = (head_v * READERS + reader) * HQ // HO
                    of_output = token * HO + head_v * READERS + reader
                    q = load_by(q_ptr + head_q * stride_q_h, i, stride_q_t, offs_k, left, K)
                    if r_q_ptr is not None:
                        q *= tl.load(r_q_ptr + (token + i) * HQ + head_q)
                    read_q = load_by(read_q_ptr + of_output * K, i, HO * K, offs_k, left, K)
                    run += read_q * q
                    queries = queries + (q,)
                    dq = dq + (read_q,)
            # what token j wrote; N and H are zero where j is after i
            keys_more = ()
            spans_more = ()
            dk_more = ()
            dg_more = ()
            for j in tl.static_range((block + 1) * READ):
                span = tl.where(j < i, spans[j] + g, 0.0)
                fade = tl.exp2(span)
                key = tl.where(j == i, k, keys[j])
                faded = key * fade
                by = zero
                if h_ptr is not None:
                    h = tl.load(h_ptr + ((token + i) * HV + head_v) * KEY_C + j)
                    by = h * k
                    own += h * faded
                dq_more = ()
                for reader in tl.static_range(READERS):
                    if n_ptr is not None:
                        of_output = (token + i) * HO + head_v * READERS + reader
                        n = tl.load(n_ptr + of_output * KEY_C + j)
                        by += n * queries[reader]
                        dq_more = dq_more + (dq[reader] + n * faded,)
                dq = dq_more
                first = tl.where(j == i, whole + before, dg[j])
                dg_more = dg_more + (tl.where(j <= i, first + run, 0.0),)
                run += by * faded
                keys_more = keys_more + (key,)
                spans_more = spans_more + (span,)
                dk_more = dk_more + (dk[j] + by * fade,)
            if n_ptr is not None:
                for reader in tl.static_range(READERS):
                    at = read_q_ptr + ((token + i) * HO + head_v * READERS + reader) * K + offs_k
                    tl.store(at, dq[reader], mask=some)
            dk = ()
            for j in tl.static_range((block + 1) * READ):
                dk = dk + (dk_more[j] + tl.where(j == i, own, 0.0),)
            keys = keys_more
            spans = spans_more
            dg = dg_more
            before += write * k
    by_rate = zero
    by_bias = zero
    for i in tl.static_range(KEY_C):
        mask = some & (i < left)
        tl.store(read_k_ptr + in_k + i * (HV * K) + offs_k, dk[i], mask=mask)
        made = dg[i]
        if A_log_ptr is not None:
            g = log2_gates(g_ptr, A_log_ptr, dt_bias_ptr, head_v, i, stride_g_t, offs_k, left, K)
            by_rate += tl.where(mask, g * made, 0.0) / LOG2_E
            a = load_by(g_ptr, i, stride_g_t, offs_k, left, K)
            if dt_bias_ptr is not None:
                a += tl.load(dt_bias_ptr + head_v * K + offs_k, mask=some, other=0.0)
            made *= -tl.exp(tl.load(A_log_ptr + head_v).to(tl.float32)) * sigmoid(a)
            by_bias += tl.where(mask, made, 0.0)
        tl.store(dg_ptr + in_k + i * (HV * K) + offs_k, made.to(dg_ptr.dtype.element_ty), mask=mask)
    if by_gate_ptr is not None:
        tl.store(by_gate_ptr, by_rate, mask=some)
        tl.store(by_gate_ptr + HV * K, by_bias, mask=some)


@triton.jit(do_not_specialize=["N", "T", "tokens"], do_not_specialize_on_alignment=INDICES)
def backward_key_fold_kernel(
    parts_ptr,  # [B * T, H * SHARED, K] float32: gradients by x̂ = r x; None: zeros
    x_ptr,  # [B, T, H, K]
    r_ptr,  # [B * T, H] float32; None without norm
    dx_ptr,  # [B, T, H, K]
    cu_seqlens_ptr,
    N,
    T,
    tokens,  # B * T
    stride_x_b,
    stride_x_t,
    stride_x_h,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """The sum over heads that share x, back through the norm; zeros after the last sequence."""
    begin()
    pid = tl.program_id(0)
    head = pid % H
    token = (pid // H).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_k = tl.arange(0, BLOCK_K)
    owned = token < tokens
    if cu_seqlens_ptr is not None:
        owned = owned & (token < tl.load(cu_seqlens_ptr + N))
    mask = owned[:, None] & (offs_k < K)[None, :]
    d = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    if parts_ptr is not None:
        for part in tl.static_range(SHARED):
            at = parts_ptr + (token * (H * SHARED) + head * SHARED + part)[:, None] * K
            d += tl.load(at + offs_k[None, :], mask=mask, other=0.0)
        if r_ptr is not None:
            r = tl.load(r_ptr + token * H + head, mask=owned, other=0.0)[:, None]
            at = x_ptr + ((token // T) * stride_x_b + (token % T) * stride_x_t)[:, None]
            at += head * stride_x_h + offs_k[None, :]
            x = tl.load(at, mask=mask, other=0.0).to(tl.float32) * r
            d = r * (d - x * tl.sum(x * d, axis=1)[:, None])
    at = dx_ptr + (token * H + head)[:, None] * K + offs_k[None, :]
    mask = (token < tokens)[:, None] & (offs_k < K)[None, :]
    tl.store(at, d.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["units"], do_not_specialize_on_alignment=UNALIGNED)
def backward_key_sums_kernel(
    by_gate_ptr,  # [units, 2, HV, K] float32
    dA_log_ptr,  # [HV]
    ddt_bias_ptr,  # [HV, K]; None: not given
    units,
    HV: tl.constexpr,
    K: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The sums over chunks; a program owns a value head."""
    begin()
    head_v = tl.program_id(0)
    offs_k = tl.arange(0, BLOCK_K)
    by_rate = tl.zeros([BLOCK_U, BLOCK_K], tl.float32)
    by_bias = tl.zeros([BLOCK_U, BLOCK_K], tl.float32)
    for first in range(0, units, BLOCK_U):
        unit = first + tl.arange(0, BLOCK_U)
        at = (unit.to(tl.int64) * (2 * HV) + head_v)[:, None] * K + offs_k[None, :]
        mask = (unit < units)[:, None] & (offs_k < K)[None, :]
        by_rate += tl.load(by_gate_ptr + at, mask=mask, other=0.0)
        by_bias += tl.load(by_gate_ptr + at + HV * K, mask=mask, other=0.0)
    tl.store(dA_log_ptr + head_v, tl.sum(by_rate).to(dA_log_ptr.dtype.element_ty))
    if ddt_bias_ptr is not None:
        made = tl.sum(by_bias, axis=0).to(ddt_bias_ptr.dtype.element_ty)
        tl.store(ddt_bias_ptr + head_v * K + offs_k, made, mask=offs_k < K)
