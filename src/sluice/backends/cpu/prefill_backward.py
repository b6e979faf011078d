"""The backward of prefill: one task is the heads of a sequence that share keys and queries.

Chunks of C tokens, by the equations (G1) to (G5) of docs/kernels/backward.md, for one value head
after the other. A first sweep computes the state before each chunk again, and keeps it transposed,
with the errors E and what the state predicted. The second sweep goes back over the chunks. Keys
and queries are normalised once per task; their gradients are summed over value heads in float32.

Decays between tokens of a chunk are sums of log decays from one to the other: no difference of
long sums is ever taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from sluice.backends import Launch
from sluice.backends.cpu.block import Fields
from sluice.backends.cpu.gemm import WIDTH, gemm, gemm_lower, transpose
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import bind_fields
from sluice.backends.cpu.llvm import F32, LANES
from sluice.backends.cpu.memory import allocate, release
from sluice.backends.cpu.params import CODES
from sluice.backends.cpu.scratch_rows import (
    fill,
    load_row,
    read_index,
    round_up,
    scale_row,
    store_row,
    sum_squares,
)
from sluice.backends.cpu.simd import fma, get, load, pointer, put, splat, store
from sluice.backends.cpu.struct_view import struct_view
from sluice.backends.cpu.threads import tasks_of
from sluice.backends.cpu.tiles import total
from sluice.backends.cpu.vmath import vexp
from sluice.backends.reference import backward
from sluice.backends.reference.recurrence import L2_EPS, log_decay, write_strength
from sluice.contract.backward import DeltaBackwardSpec

C = 32
"""Tokens per chunk."""
STEP = 8
"""Tokens that are substituted one by one; what lies before them is a product."""
NEVER = -1e30
"""The log decay between tokens of the wrong order."""

FIELDS = Fields(
    "prefill_backward",
    "q k v g beta do state dfinal dq dk dv dg dbeta dstate cu",
    "q_b q_t q_h k_b k_t k_h v_b v_t v_h cu_wide io T N HQ HK HV K V groups delta gated normalize"
    " from_state to_state",
    "scale eps",
)
view = FIELDS.view

WORK = (
    "q k dq dk rho_q rho_k"  # [heads of the task, T, ..], over the whole sequence
    " predicted error kkg states"  # of one value head, over the whole sequence
    " fade down up rate strength"  # of one chunk: decays, g and beta
    " do_dv qk_in k_out v d d_turned k_turned kk qk by_qk by_kk dk_read dk_write dq_in"
    " S dS dS_turned pairs inter kept panel"
)
work = struct_view("backward_work", "Kp Vp Tp G", "", WORK)


@jit
def _room(p, w, base):
    """Lay out scratch memory from float ``base`` on; returns its size."""
    Kp, Vp = round_up(p.K, WIDTH), round_up(p.V, WIDTH)
    Tp, G = round_up(p.T, C), max(p.HQ // p.HV, 1)
    hq, hk = p.HQ // p.groups, p.HK // p.groups
    w.Kp, w.Vp, w.Tp, w.G = Kp, Vp, Tp, G
    at = 0
    memory = pointer(base, F32)
    w.q = memory + at
    at += hq * Tp * Kp
    w.k = memory + at
    at += hk * Tp * Kp
    w.dq = memory + at
    at += hq * Tp * Kp
    w.dk = memory + at
    at += hk * Tp * Kp
    w.rho_q = memory + at
    at += hq * Tp
    w.rho_k = memory + at
    at += hk * Tp
    w.predicted = memory + at
    at += Tp * Vp
    w.error = memory + at
    at += Tp * Vp
    w.kkg = memory + at
    at += Tp * C
    w.states = memory + at
    at += Tp // C * Kp * Vp
    w.fade = memory + at
    at += C * C
    w.down = memory + at
    at += C
    w.up = memory + at
    at += C
    w.rate = memory + at
    at += C
    w.strength = memory + at
    at += C
    w.do_dv = memory + at
    at += (G + 1) * C * Vp
    w.qk_in = memory + at
    at += (G + 1) * C * Kp
    w.k_out = memory + at
    at += C * Kp
    w.v = memory + at
    at += C * Vp
    w.d = memory + at
    at += C * Vp
    w.d_turned = memory + at
    at += C * Vp
    w.k_turned = memory + at
    at += C * Kp
    w.kk = memory + at
    at += C * C
    w.qk = memory + at
    at += G * C * C
    w.by_qk = memory + at
    at += (G + 1) * C * C
    w.by_kk = memory + at
    at += C * C
    w.dk_read = memory + at
    at += C * Kp
    w.dk_write = memory + at
    at += C * Kp
    w.dq_in = memory + at
    at += (G + 1) * C * Kp
    w.S = memory + at
    at += Kp * Vp
    w.dS = memory + at
    at += Kp * Vp
    w.dS_turned = memory + at
    at += Kp * Vp
    w.pairs = memory + at
    at += C
    w.inter = memory + at
    at += C
    w.kept = memory + at
    at += C
    w.panel = memory + at
    at += WIDTH * max(max(Kp, Vp), (G + 1) * C)
    return at


@jit
def _load_heads(p, dst, rho, address, at_head, stride_t, stride_h, first, heads, T, Tp, Kp, factor):
    """Rows of some heads in float32, normalised and times ``factor``; zeros behind them."""
    for h in range(heads):
        for t in range(Tp):
            row = dst + (h * Tp + t) * Kp
            if t >= T:
                fill(row, Kp, 0.0)
                continue
            fill(row + (Kp - WIDTH), WIDTH, 0.0)
            load_row(row, address, p.io, at_head + t * stride_t + (first + h) * stride_h, p.K)
            length = 1.0
            if p.normalize:
                length = 1.0 / math.sqrt(sum_squares(row, Kp) + p.eps)
            put(rho, h * Tp + t, length)
            scale_row(row, row, Kp, length * factor)


@jit
def _load_values(dst, address, code, index, stride, m, n, ld):
    """m rows of n elements in float32; zeros behind them."""
    for t in range(C):
        row = dst + t * ld
        if t >= m:
            fill(row, ld, 0.0)
        else:
            fill(row + (ld - WIDTH), WIDTH, 0.0)
            load_row(row, address, code, index + t * stride, n)


@jit
def _gates(p, w, at, m):
    """Decays of a chunk: ``fade`` from j to i, ``down`` from its start, ``up`` to its end."""
    g, beta = pointer(p.g, F32), pointer(p.beta, F32)
    for t in range(C):
        put(w.rate, t, get(g, at + t * p.HV) if p.gated != 0 and t < m else 0.0)
        put(w.strength, t, get(beta, at + t * p.HV) if p.delta != 0 and t < m else 0.0)
    whole = 0.0
    for t in range(C):
        whole += get(w.rate, t)
        put(w.down, t, whole)
    rest = 0.0
    for t in range(C - 1, -1, -1):
        put(w.up, t, rest)
        rest += get(w.rate, t)
    for i in range(C):
        row = w.fade + i * C
        for j in range(0, C, LANES):
            if i == 0:
                store(row, j, splat(NEVER))
            else:
                store(row, j, load(row + (-C), j) + get(w.rate, i))
        for j in range(i, C):
            put(row, j, NEVER)
        put(row, i, 0.0)
    for j in range(0, C * C, LANES):
        store(w.fade, j, vexp(load(w.fade, j)))
    for i in range(C):
        for j in range(i + 1, C):
            put(w.fade, i * C + j, 0.0)
    for j in range(0, C, LANES):
        store(w.down, j, vexp(load(w.down, j)))
        store(w.up, j, vexp(load(w.up, j)))
    return 1.0 * get(w.down, C - 1)


@jit
def _scale_rows(dst, src, factors, ld):
    for t in range(C):
        scale_row(dst + t * ld, src + t * ld, ld, get(factors, t))


@jit
def _dot(a, b, n):
    acc = splat(0.0)
    for i in range(0, n, LANES):
        acc = fma(load(a, i), load(b, i), acc)
    return total(acc)


@jit
def _add_scaled(dst, src, factor, n):
    """dst += factor src."""
    for i in range(0, n, LANES):
        store(dst, i, fma(load(src, i), factor, load(dst, i)))


@jit
def _chunk_forward(p, w, k, chunk, v_at, v_stride, g_at, m):
    """(G2), (G3) for one chunk: keeps the state before it, E, and what the state predicted."""
    Kp, Vp = w.Kp, w.Vp
    rows = chunk * C
    whole = _gates(p, w, g_at, m)
    error, kkg = w.error + rows * Vp, w.kkg + rows * C
    transpose(w.states + chunk * Kp * Vp, Kp, w.S, Vp, Kp, Vp)
    _load_values(error, p.v, p.io, v_at, v_stride, m, p.V, Vp)
    if p.delta != 0:
        transpose(w.k_turned, C, k, Kp, C, Kp)
        gemm(kkg, C, k, Kp, 1, w.k_turned, C, C, C, Kp, 0.0, w.panel)
        for j in range(0, C * C, LANES):
            store(kkg, j, load(kkg, j) * load(w.fade, j))
        _scale_rows(w.qk_in, k, w.down, Kp)
        predicted = w.predicted + rows * Vp
        gemm(predicted, Vp, w.qk_in, Kp, 1, w.S, Vp, C, Vp, Kp, 0.0, w.panel)
        for j in range(0, C * Vp, LANES):
            store(error, j, load(error, j) - load(predicted, j))
        for i in range(C):
            for j in range(0, C, LANES):
                store(w.kk, i * C + j, load(kkg, i * C + j) * load(w.strength, j) * -1.0)
        for first in range(0, C, STEP):
            block = error + first * Vp
            if first > 0:
                gemm(block, Vp, w.kk + first * C, C, 1, error, Vp, STEP, Vp, first, 1.0, w.panel)
            for i in range(1, STEP):
                for j in range(i):
                    factor = get(w.kk, (first + i) * C + first + j)
                    _add_scaled(block + i * Vp, block + j * Vp, factor, Vp)
        _scale_rows(w.d, error, w.strength, Vp)
        d = w.d
    else:
        d = error
    _scale_rows(w.k_out, k, w.up, Kp)
    gemm(w.S, Vp, w.k_out, 1, Kp, d, Vp, Kp, Vp, C, whole, w.panel)


@jit
def _chunk_backward(p, w, q, dq, stride_q, k, dk, chunk, batch, start, head, m):
    """(G4), (G5) and the rest for one chunk; dS becomes the gradient of the state before it."""
    Kp, Vp, G, rows = w.Kp, w.Vp, w.G, chunk * C
    t0, HO = start + rows, max(p.HQ, p.HV)
    g_at = (batch * p.T + t0) * p.HV + head
    whole = _gates(p, w, g_at, m)
    kkg, error, S = w.kkg + rows * C, w.error + rows * Vp, w.states + chunk * Kp * Vp
    dV, k_in = w.do_dv + G * C * Vp, w.qk_in + G * C * Kp
    for r in range(G):
        o_at = ((batch * p.T + t0) * HO + head * G + r) * p.V
        _load_values(w.do_dv + r * C * Vp, p.do, p.io, o_at, HO * p.V, m, p.V, Vp)
        _scale_rows(w.qk_in + r * C * Kp, q + r * stride_q, w.down, Kp)
    d = error
    if p.delta != 0:
        _scale_rows(w.d, error, w.strength, Vp)
        d = w.d
    _scale_rows(w.k_out, k, w.up, Kp)
    transpose(w.k_turned, C, k, Kp, C, Kp)
    transpose(w.dS_turned, Kp, w.dS, Vp, Kp, Vp)
    # dD, then dV
    gemm(dV, Vp, w.k_out, Kp, 1, w.dS, Vp, C, Vp, Kp, 0.0, w.panel)
    for r in range(G):
        qk = w.qk + r * C * C
        gemm(qk, C, q + r * stride_q, Kp, 1, w.k_turned, C, C, C, Kp, 0.0, w.panel)
        for j in range(0, C * C, LANES):
            store(qk, j, load(qk, j) * load(w.fade, j))
        gemm_lower(dV, Vp, qk, True, w.do_dv + r * C * Vp, Vp, Vp, 1.0, w.panel, C)
    if p.delta != 0:
        dbeta = pointer(p.dbeta, F32)
        scale_row(w.kk, kkg, C * C, -1.0)
        for first in range(C - STEP, -1, -STEP):
            behind, block = first + STEP, dV + first * Vp
            if behind < C:
                at = w.kk + behind * C + first
                later = dV + behind * Vp
                gemm(block, Vp, at, 1, C, later, Vp, STEP, Vp, C - behind, 1.0, w.panel)
            for i in range(first + STEP - 1, first - 1, -1):
                for j in range(i + 1, first + STEP):
                    _add_scaled(dV + i * Vp, dV + j * Vp, get(w.kk, j * C + i), Vp)
                if i < m:
                    put(dbeta, g_at + i * p.HV, _dot(dV + i * Vp, error + i * Vp, Vp))
                scale_row(dV + i * Vp, dV + i * Vp, Vp, get(w.strength, i))
    for i in range(m):
        store_row(p.dv, p.io, ((batch * p.T + t0 + i) * p.HV + head) * p.V, dV + i * Vp, p.V)
    # gradients of pairs of tokens
    last = G + 1 if p.delta != 0 else G
    transpose(w.d_turned, C, d, Vp, C, Vp)
    gemm(w.by_qk, C, w.do_dv, Vp, 1, w.d_turned, C, last * C, C, Vp, 0.0, w.panel)
    if p.gated != 0:
        _pairs(p, w, kkg, m)
    for r in range(last):
        for j in range(0, C * C, LANES):
            by = load(w.by_qk + r * C * C, j) * load(w.fade, j)
            store(w.by_qk + r * C * C, j, by if r < G else by * -1.0)
    # through the states: readers before the chunk, writers after it
    gemm(w.dq_in, Kp, w.do_dv, Vp, 1, S, Kp, last * C, Kp, Vp, 0.0, w.panel)
    gemm(w.dk_write, Kp, d, Vp, 1, w.dS_turned, Kp, C, Kp, Vp, 0.0, w.panel)
    for t in range(C):
        inter = 0.0
        for r in range(G):
            row = w.dq_in + (r * C + t) * Kp
            scale_row(row, row, Kp, get(w.down, t))
            inter += _dot(row, q + r * stride_q + t * Kp, Kp)
        scale_row(w.dk_write + t * Kp, w.dk_write + t * Kp, Kp, get(w.up, t))
        put(w.kept, t, _dot(w.dk_write + t * Kp, k + t * Kp, Kp))
        if p.delta != 0:
            row = w.dq_in + (G * C + t) * Kp
            scale_row(row, row, Kp, -get(w.down, t))
            inter += _dot(row, k + t * Kp, Kp)
            _add_scaled(w.dk_write + t * Kp, row, 1.0, Kp)
        put(w.inter, t, inter)
    for j in range(0, C * Kp, LANES):
        store(dk, j, load(dk, j) + load(w.dk_write, j))
    for r in range(G):
        by, one = w.by_qk + r * C * C, dq + r * stride_q
        for j in range(0, C * Kp, LANES):
            store(one, j, load(one, j) + load(w.dq_in + r * C * Kp, j))
        gemm_lower(one, Kp, by, False, k, Kp, Kp, 1.0, w.panel, C)
        gemm_lower(dk, Kp, by, True, q + r * stride_q, Kp, Kp, 1.0, w.panel, C)
    if p.delta != 0:
        by = w.by_qk + G * C * C
        for i in range(C):  # each pair of keys, from both sides; a key has no pair in itself
            put(by, i * C + i, 0.0)
            for j in range(i):
                put(by, j * C + i, get(by, i * C + j))
        gemm(dk, Kp, by, C, 1, k, Kp, C, Kp, C, 1.0, w.panel)
        _scale_rows(k_in, k, w.down, Kp)
        scale_row(k_in, k_in, C * Kp, -1.0)
    if p.gated != 0:
        product = 0.0
        for j in range(Vp):
            product += _dot(S + j * Kp, w.dS_turned + j * Kp, Kp)
        _store_decays(p, w, g_at, m, whole * product)
    gemm(w.dS, Vp, w.qk_in, 1, Kp, w.do_dv, Vp, Kp, Vp, last * C, whole, w.panel)


@jit
def _pairs(p, w, kkg, m):
    """What pairs of tokens say about the decay at t: those with t between them, and no others."""
    fill(w.pairs, C, 0.0)
    for i in range(1, m):
        before = 0.0
        for t in range(1, i + 1):
            j = t - 1
            one = 0.0
            for r in range(w.G):
                one += get(w.by_qk, (r * C + i) * C + j) * get(w.qk, (r * C + i) * C + j)
            if p.delta != 0:
                one -= get(w.by_qk, (w.G * C + i) * C + j) * get(kkg, i * C + j)
            before += one
            put(w.pairs, t, get(w.pairs, t) + before)


@jit
def _store_decays(p, w, at, m, whole):
    """dg of a chunk: pairs, readers from t on, writers before t, and the state that passes."""
    dg = pointer(p.dg, F32)
    written = 0.0
    for t in range(m):
        put(w.kk, t, written + whole)
        written += get(w.kept, t)
    read = 0.0
    for t in range(m - 1, -1, -1):
        read += get(w.inter, t)
        put(dg, at + t * p.HV, get(w.kk, t) + read + get(w.pairs, t))


@jit
def _finish(p, w, address, ready, d, rho, at, stride_t, first, heads, T, factor):
    """Through scale and norm, to the caller's tensor [.., H, K]."""
    Kp = w.Kp
    for h in range(heads):
        for t in range(T):
            row, unit = d + (h * w.Tp + t) * Kp, ready + (h * w.Tp + t) * Kp
            length = get(rho, h * w.Tp + t)
            scale_row(row, row, Kp, factor)
            if p.normalize != 0 and factor != 0.0:
                along = _dot(row, unit, Kp) / (factor * factor)
                _add_scaled(row, unit, -along, Kp)
                scale_row(row, row, Kp, length)
            store_row(address, p.io, at + t * stride_t + (first + h) * p.K, row, p.K)


@jit
def task(p, w, seq, group):
    """The heads of one group in one sequence."""
    Kp, Vp = w.Kp, w.Vp
    batch, start, T = seq, 0, p.T
    if p.cu != 0:
        start = read_index(p.cu, p.cu_wide, seq)
        batch, T = 0, read_index(p.cu, p.cu_wide, seq + 1) - start
    hq, hk, hv = p.HQ // p.groups, p.HK // p.groups, p.HV // p.groups
    q_at, k_at = batch * p.q_b + start * p.q_t, batch * p.k_b + start * p.k_t
    Tp = round_up(T, C)
    w.Tp = Tp
    _load_heads(p, w.q, w.rho_q, p.q, q_at, p.q_t, p.q_h, group * hq, hq, T, Tp, Kp, p.scale)
    _load_heads(p, w.k, w.rho_k, p.k, k_at, p.k_t, p.k_h, group * hk, hk, T, Tp, Kp, 1.0)
    fill(w.dq, hq * Tp * Kp, 0.0)
    fill(w.dk, hk * Tp * Kp, 0.0)
    for head in range(group * hv, group * hv + hv):
        k_head = head // (p.HV // p.HK) - group * hk
        q_head = (head * w.G if p.HQ > p.HV else head // (p.HV // p.HQ)) - group * hq
        k, dk = w.k + k_head * Tp * Kp, w.dk + k_head * Tp * Kp
        q, dq = w.q + q_head * Tp * Kp, w.dq + q_head * Tp * Kp
        S_at = (seq * p.HV + head) * p.K * p.V
        _load_state(p, w, w.S, p.state, S_at, p.from_state)
        for chunk in range(Tp // C):
            t0 = chunk * C
            v_at = batch * p.v_b + (start + t0) * p.v_t + head * p.v_h
            g_at = (batch * p.T + start + t0) * p.HV + head
            _chunk_forward(p, w, k + t0 * Kp, chunk, v_at, p.v_t, g_at, min(C, T - t0))
        _load_state(p, w, w.dS, p.dfinal, S_at, p.to_state)
        for chunk in range(Tp // C - 1, -1, -1):
            t0 = chunk * C
            at = t0 * Kp
            m = min(C, T - t0)
            _chunk_backward(
                p, w, q + at, dq + at, Tp * Kp, k + at, dk + at, chunk, batch, start, head, m
            )
        if p.dstate != 0:
            for i in range(p.K):
                store_row(p.dstate, F32, S_at + i * p.V, w.dS + i * Vp, p.V)
    row = batch * p.T + start
    _finish(
        p, w, p.dq, w.q, w.dq, w.rho_q, row * p.HQ * p.K, p.HQ * p.K, group * hq, hq, T, p.scale
    )
    _finish(p, w, p.dk, w.k, w.dk, w.rho_k, row * p.HK * p.K, p.HK * p.K, group * hk, hk, T, 1.0)


@jit
def _load_state(p, w, dst, address, at, given):
    """A state [K, V] in padded float32 scratch, or zeros."""
    fill(dst, w.Kp * w.Vp, 0.0)
    if given != 0:
        for i in range(p.K):
            load_row(dst + i * w.Vp, address, F32, at + i * p.V, p.V)


def prefill_backward_kernel(block):
    p = view(block)
    record = allocate(64 * 8)
    w = work(record)
    size = _room(p, w, 0)
    memory = allocate(size * 4 + 128)
    _room(p, w, round_up(memory, 64))
    for i in tasks_of(p):
        task(p, w, i // p.groups, i % p.groups)
    release(memory)
    release(record)


KERNEL = Kernel("prefill_backward", prefill_backward_kernel)
_ORDER = FIELDS.addresses


def bind(spec: DeltaBackwardSpec) -> Launch:
    """A launch of the backward of ``prefill``; gates and states are prepared in torch."""
    groups = math.gcd(spec.HQ, spec.HK)
    values = {
        **{name: getattr(spec, name) for name in ("T", "N", "HQ", "HK", "HV", "K", "V", "delta")},
        "io": CODES[spec.dtype],
        "groups": groups,
        "gated": spec.g is not None,
        "normalize": spec.normalize_qk,
        "cu_wide": spec.cu_seqlens is not None and spec.cu_seqlens.dtype == torch.int64,
        "from_state": spec.state is not None,
        "to_state": spec.dfinal is not None,
        "scale": spec.q_scale,
        "eps": L2_EPS,
    }
    for name in ("q", "k", "v"):
        strides = getattr(spec, name).strides
        values |= dict(zip((f"{name}_b", f"{name}_t", f"{name}_h"), strides, strict=False))
    given = ["q", "k", "v", "do", "dq", "dk", "dv"]
    given += ["g", "dg"] if spec.g is not None else []
    given += ["beta", "dbeta"] if spec.delta else []
    given += ["state", "dstate"] if spec.state is not None else []
    given += ["dfinal"] if spec.dfinal is not None else []
    given += ["cu"] if spec.varlen else []
    sources = {name: _ORDER.index(name) for name in given}
    tasks = spec.N * groups
    run = bind_fields(KERNEL, FIELDS, values, sources, lambda threads: {"tasks": tasks})

    def launch(tensors: Sequence[Any]) -> None:
        with torch.no_grad():
            _launch(spec, spec.views(tensors), run if tasks > 0 else None)

    return launch


def _launch(spec: DeltaBackwardSpec, t: Any, run: Launch | None) -> None:
    whole, f32 = t, torch.float32
    made = ("dq", "dk", "dv", "dg", "dbeta")
    _, t = backward.without_tail(t, spec.T, ("q", "k", "v", "g", "beta", "do"), made)
    if run is None:
        for name in (*made, "dA_log", "ddt_bias", "dstate"):
            if getattr(t, name) is not None:
                getattr(t, name).zero_()
        return
    g, beta = (None if x is None else x.to(f32) for x in (whole.g, whole.beta))
    if t.A_log is not None:
        g = log_decay(g, t.A_log, t.dt_bias)
        beta = None if beta is None else write_strength(beta, spec.neg_eigval)
    g, beta = (None if x is None else x.contiguous() for x in (g, beta))
    S, dS = (None if x is None else _kv(spec, x.to(f32)).contiguous() for x in (t.state, t.dfinal))
    dstate = None if S is None else torch.empty_like(S)
    do = whole.do
    if do is None:
        do = whole.v.new_zeros(*whole.v.shape[:2], spec.HO, spec.V)
    dg, dbeta = (None if x is None else torch.empty_like(x) for x in (g, beta))
    known = {
        "q": whole.q, "k": whole.k, "v": whole.v, "g": g, "beta": beta, "do": do, "state": S,
        "dfinal": dS, "dq": whole.dq, "dk": whole.dk, "dv": whole.dv, "dg": dg, "dbeta": dbeta,
        "dstate": dstate, "cu": whole.cu_seqlens,
    }  # fmt: skip
    run([known[name] for name in _ORDER])
    T = t.q.shape[1]
    g, beta, dg, dbeta = (None if x is None else x[:, :T] for x in (g, beta, dg, dbeta))
    backward.gates(t, g, beta, dg, dbeta, spec.beta_scale)
    if t.dstate is not None:
        t.dstate.copy_(_kv(spec, dstate))


def _kv(spec: DeltaBackwardSpec, S: torch.Tensor) -> torch.Tensor:
    return S.mT if spec.state_layout == "vk" else S
