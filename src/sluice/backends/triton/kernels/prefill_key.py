"""Prefill with decay per key: one program computes a sequence in chunks of 16 tokens.

With one decay per key dimension, the gates cannot be moved out of K Kᵀ (docs/kernels/chunked.md,
section 7). In a chunk of 16 tokens, with γ the cumulative log decay [16, K]:

    KKg_ij = Σ_c k_ic k_jc e^(γ_ic - γ_jc)  i > j                            (K20)
    QKg_ij = Σ_c q_ic k_jc e^(γ_ic - γ_jc)  i >= j
    D  = (I + diag(beta) KKg)⁻¹ diag(beta) (V - (e^γ ∘ K) S)                 (K21)
    O  = scale ((e^γ ∘ Q) S + QKg D)
    S <- diag(e^γ_C) S + (e^(γ_C - γ) ∘ K)ᵀ D

KKg and QKg are summed directly, and each difference of γ is masked before its exponential, so
nothing overflows, however strong the gates. Arithmetic is float32, with products in three passes of
tf32. A program owns BLOCK_V value columns of one value head of one sequence, and computes KKg and
QKg for itself.

This kernel needs more registers than a thread has. Hopper takes it, since it ran on an H200; other
GPUs take the kernels of prefill_key_pieces.py (configs.KEY_WHOLE).
"""

# ruff: noqa: RET505 (constexpr branches stay if/else)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from sluice.backends.triton.kernels.alignment import INDICES
from sluice.backends.triton.kernels.math import LOG2_E, begin, divide, softplus
from sluice.backends.triton.kernels.prefill_chunks import inverse_lengths, zero_tail
from sluice.backends.triton.kernels.prefill_state import state_offsets
from sluice.backends.triton.kernels.work_units import unit_span


@triton.jit
def exact_dot(x, y, acc):
    """x y + acc, as good as float32 products."""
    if is_cuda():
        return tl.dot(x, y, acc=acc, input_precision="tf32x3")
    else:
        return tl.dot(x, y, acc=acc, input_precision="ieee")


@triton.jit
def load_rows(ptr, offs_t, end, stride_t, offs, END: tl.constexpr):
    """Token rows in float32, zeros from ``end`` on."""
    mask = (offs_t < end)[:, None] & (offs < END)[None, :]
    at = ptr + offs_t[:, None] * stride_t + offs[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def decayed_products(x, y, k, g2):
    """Σ_c x_ic k_jc 2^(g2_ic - g2_jc) [16, 16] for i >= j, and the same of y unless it is None.

    Elements above the diagonal are meaningless.
    """
    index = tl.arange(0, 16)
    out_x = tl.zeros([16, 16], tl.float32)
    out_y = tl.zeros([16, 16], tl.float32)
    for j in range(16):
        own = (index == j)[:, None]
        k_j = tl.sum(tl.where(own, k, 0.0), axis=0)
        g2_j = tl.sum(tl.where(own, g2, 0.0), axis=0)
        k_j = tl.exp2(tl.minimum(g2 - g2_j[None, :], 0.0)) * k_j[None, :]
        here = (index == j)[None, :]
        out_x = tl.where(here, tl.sum(x * k_j, axis=1)[:, None], out_x)
        if y is not None:
            out_y = tl.where(here, tl.sum(y * k_j, axis=1)[:, None], out_y)
    return out_x, out_y


@triton.jit
def load_queries(
    q_ptr, head_q, offs_t, end, stride_q_t, stride_q_h, offs_k,
    K: tl.constexpr, NORMALIZE_QK: tl.constexpr,
):  # fmt: skip
    """A chunk of queries in float32, normalised if NORMALIZE_QK."""
    q = load_rows(q_ptr + head_q * stride_q_h, offs_t, end, stride_q_t, offs_k, K)
    if NORMALIZE_QK:
        q = q * inverse_lengths(q)[:, None]
    return q


@triton.jit
def invert(l):
    """(I + l)⁻¹ of a strictly lower l [16, 16], by forward substitution (K25)."""
    index = tl.arange(0, 16)
    inverse = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
    for i in range(1, 16):
        l_i = tl.sum(tl.where((index == i)[:, None], l, 0.0), axis=0)
        row = tl.sum(l_i[:, None] * inverse, axis=0)
        inverse = tl.where((index == i)[:, None], inverse - row[None, :], inverse)
    return inverse


@triton.jit
def zero_rows(
    o_ptr, start, end, head_v, offs_v, stride_o_t, stride_o_h,
    READERS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Zeros for a sequence without a slot: these columns of all readers of a value head."""
    offs_c = tl.arange(0, 16)
    zeros = tl.zeros([16, offs_v.shape[0]], o_ptr.dtype.element_ty)
    for t in range(start, end, 16):
        mask = (t + offs_c < end)[:, None] & (offs_v < V)[None, :]
        for reader in tl.static_range(READERS):
            at = o_ptr + (t + offs_c)[:, None] * stride_o_t
            at += (head_v * READERS + reader) * stride_o_h
            tl.store(at + offs_v[None, :], zeros, mask=mask)


_FREE = ["N", "T", "M", "every", "pad_slot", "stride_g_b", "stride_beta_b", "stride_beta_t"]
_FREE += ["HV", "R_Q", "R_K", "inverse_HV", "inverse_R_Q", "inverse_R_K"]


@triton.jit(
    do_not_specialize=_FREE,
    do_not_specialize_on_alignment=[*INDICES, "beta_ptr", "A_log_ptr"],
)
def prefill_key_kernel(
    q_ptr,  # [B, T, HQ, K]
    k_ptr,  # [B, T, HK, K]
    v_ptr,  # [B, T, HV, V]
    g_ptr,  # [B, T, HV, K]
    beta_ptr,  # [B, T, HV]; None without beta
    A_log_ptr,  # [HV]; given: g and beta are raw gates
    dt_bias_ptr,  # [HV, K]; None: 0
    state_ptr,  # [P, HV, V, K] or [P, HV, K, V], read and written
    o_ptr,  # [B, T, HO, V]
    slots_ptr,  # [N]
    write_slots_ptr,  # [N]
    has_state_ptr,  # [N]
    cu_seqlens_ptr,  # [N + 1]
    checkpoint_slots_ptr,  # [N, M]; None: no checkpoints
    checkpoint_positions_ptr,  # [N, M]; None: after every ``every`` tokens
    scale,
    beta_scale,
    N,
    T,
    M,
    every,
    pad_slot,
    segment_size,  # no sequence is longer
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
    stride_beta_b,
    stride_beta_t,
    stride_beta_h,
    stride_o_b,
    stride_o_t,
    stride_o_h,
    stride_state_p,
    HV,
    R_Q,  # value heads per query head; 1 if there are fewer
    R_K,  # value heads per key head
    inverse_HV,  # for divide, as are the next two
    inverse_R_Q,
    inverse_R_K,
    READERS: tl.constexpr,  # query heads per value head; 1 if there are fewer
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NORMALIZE_QK: tl.constexpr,
    STATE_KV: tl.constexpr,
):
    C: tl.constexpr = 16
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    pid_v = pid % BLOCKS
    unit, head_v = divide(pid // BLOCKS, HV, inverse_HV)
    first_q, _ = divide(head_v * READERS, R_Q, inverse_R_Q)
    head_k, _ = divide(head_v, R_K, inverse_R_K)
    unit = unit.to(tl.int64)
    begin()
    seq, batch, start, _segment, end = unit_span(unit, cu_seqlens_ptr, N, T, segment_size)
    o_ptr += batch * stride_o_b
    if seq >= N:  # tokens after the last sequence
        if pid_v == 0:
            for t in range(start, end, 64):
                zero_tail(o_ptr, t, end, head_v, stride_o_t, stride_o_h, READERS, V)
        return

    none = tl.zeros([C, BLOCK_V], tl.float32)
    offs_c = tl.arange(0, C)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = pid_v * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (offs_k < K)[:, None] & (offs_v < V)[None, :]
    slot = seq
    live = seq >= 0
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + seq).to(tl.int64)
        live = slot > pad_slot
    if not live:
        zero_rows(o_ptr, start, end, head_v, offs_v, stride_o_t, stride_o_h, READERS, V)
        return

    # int64: P·HV·V·K passes 2**31 at 4,096 slots
    state_ptr += head_v * (V * K)
    in_pool = state_offsets(offs_k, offs_v, K, V, STATE_KV)
    known = live
    if has_state_ptr is not None:
        known = tl.load(has_state_ptr + seq) != 0
    S = tl.load(state_ptr + slot * stride_state_p + in_pool, mask=tile & known, other=0.0)
    S = S.to(tl.float32)
    if checkpoint_positions_ptr is not None:
        for j in range(M):
            if tl.load(checkpoint_positions_ptr + seq * M + j) == 0:
                kept = tl.load(checkpoint_slots_ptr + seq * M + j).to(tl.int64)
                saved = state_ptr + kept * stride_state_p + in_pool
                tl.store(saved, S.to(state_ptr.dtype.element_ty), mask=tile & (kept > pad_slot))

    q_ptr += batch * stride_q_b
    k_ptr += batch * stride_k_b + head_k * stride_k_h
    v_ptr += batch * stride_v_b + head_v * stride_v_h
    g_ptr += batch * stride_g_b + head_v * stride_g_h
    if beta_ptr is not None:
        beta_ptr += batch * stride_beta_b + head_v * stride_beta_h
    for t in range(start, end, C):
        offs_t = t + offs_c
        rows = offs_t < end
        k = load_rows(k_ptr, offs_t, end, stride_k_t, offs_k, K)
        if NORMALIZE_QK:
            k = k * inverse_lengths(k)[:, None]
        g = load_rows(g_ptr, offs_t, end, stride_g_t, offs_k, K)
        if A_log_ptr is not None:
            if dt_bias_ptr is not None:
                bias = tl.load(dt_bias_ptr + head_v * K + offs_k, mask=offs_k < K, other=0.0)
                g += bias.to(tl.float32)[None, :]
            g = -tl.exp(tl.load(A_log_ptr + head_v).to(tl.float32)) * softplus(g)
        g = tl.where(rows[:, None] & (offs_k < K)[None, :], g * LOG2_E, 0.0)
        g2 = tl.cumsum(g, axis=0)
        d = load_rows(v_ptr, offs_t, end, stride_v_t, offs_v, V)
        q = load_queries(
            q_ptr, first_q, offs_t, end, stride_q_t, stride_q_h, offs_k, K, NORMALIZE_QK
        )
        if beta_ptr is not None:
            beta = tl.load(beta_ptr + offs_t * stride_beta_t, mask=rows, other=0.0).to(tl.float32)
            if A_log_ptr is not None:
                beta = tl.where(rows, tl.sigmoid(beta) * beta_scale, 0.0)
            kkg, qkg = decayed_products(k, q, k, g2)
            inverse = invert(tl.where(offs_c[:, None] > offs_c[None, :], kkg * beta[:, None], 0.0))
            d = exact_dot(-k * tl.exp2(g2), S, d)
            d = exact_dot(inverse, d * beta[:, None], none)
        else:
            qkg = decayed_products(q, None, k, g2)[0]
        for reader in tl.static_range(READERS):
            head_o = head_v * READERS + reader
            if reader > 0:
                head_q = first_q + reader
                q = load_queries(
                    q_ptr, head_q, offs_t, end, stride_q_t, stride_q_h, offs_k, K, NORMALIZE_QK
                )
                qkg = decayed_products(q, None, k, g2)[0]
            qkg = tl.where(offs_c[:, None] >= offs_c[None, :], qkg, 0.0)
            o = exact_dot(q * tl.exp2(g2), S, none)
            o = exact_dot(qkg, d, o) * scale
            at = o_ptr + offs_t[:, None] * stride_o_t + head_o * stride_o_h + offs_v[None, :]
            mask = rows[:, None] & (offs_v < V)[None, :]
            tl.store(at, o.to(o_ptr.dtype.element_ty), mask=mask)
        if checkpoint_slots_ptr is not None:
            for j in range(M):
                position = tl.cast((j + 1) * every, tl.int64)
                if checkpoint_positions_ptr is not None:
                    position = tl.load(checkpoint_positions_ptr + seq * M + j).to(tl.int64)
                n = position - (t - start)  # tokens of this chunk before the checkpoint
                if (n > 0) & (n <= C) & (t + n <= end):
                    kept = tl.load(checkpoint_slots_ptr + seq * M + j).to(tl.int64)
                    # no bound by 0: below there is none, and a last checkpoint has the same bits
                    before = (offs_c < n)[:, None]
                    g2_n = tl.sum(tl.where(before, g, 0.0), axis=0)
                    decay_n = tl.exp2(tl.where(before, g2_n[None, :] - g2, 0.0))
                    keys = tl.trans(tl.where(before, k * decay_n, 0.0))
                    S_n = exact_dot(keys, d, S * tl.exp2(g2_n)[:, None])
                    saved = state_ptr + kept * stride_state_p + in_pool
                    rounded = S_n.to(state_ptr.dtype.element_ty)
                    tl.store(saved, rounded, mask=tile & (kept > pad_slot))
        g2_last = tl.sum(g, axis=0)
        decay_out = tl.exp2(g2_last[None, :] - g2)
        S = exact_dot(tl.trans(k * decay_out), d, S * tl.exp2(g2_last)[:, None])

    write = live
    if write_slots_ptr is not None:
        slot = tl.load(write_slots_ptr + seq).to(tl.int64)
        write = slot > pad_slot
    at = state_ptr + slot * stride_state_p + in_pool
    tl.store(at, S.to(state_ptr.dtype.element_ty), mask=tile & write)
