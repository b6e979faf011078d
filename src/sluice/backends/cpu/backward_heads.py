"""What both kernels of the backward of prefill share: their blocks, a task's heads and its states.

One task is the heads of a sequence that share keys and queries. Keys and queries are normalised
once per task; their gradients are summed over value heads in float32.
"""

from __future__ import annotations

import math

from sluice.backends.cpu.addressing import span
from sluice.backends.cpu.block import Fields
from sluice.backends.cpu.chunk_backward import C
from sluice.backends.cpu.gemm import WIDTH, spaced
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.llvm import F32, LANES
from sluice.backends.cpu.scratch_rows import (
    fill,
    load_row,
    prefetch_row,
    round_up,
    scale_row,
    store_row,
    sum_squares,
)
from sluice.backends.cpu.simd import fma, get, load, pointer, put, splat, store
from sluice.backends.cpu.tiles import total

AHEAD = 16
"""How many tokens ahead memory is asked for rows of q, k and their gradients."""

FIELDS = Fields(
    "prefill_backward",
    "q k v g beta do state dfinal dq dk dv dg dbeta dstate cu"
    # raw gates of decay per key: [HV], [HV, K], and sums of gradients of each sequence
    " A dt dA ddt",
    "q_b q_t q_h k_b k_t k_h v_b v_t v_h cu_wide io T N HQ HK HV K V groups delta gated normalize"
    " from_state to_state"
    # g per key, where the caller has it
    " g_b g_t g_h g_code",
    "scale eps",
)
view = FIELDS.view


@jit
def take(w, count):
    """The next ``count`` floats of scratch memory."""
    here = w.next
    w.next = here + 4 * count
    return pointer(here, F32)


@jit
def take_shared(p, w, base):
    """Lay out, from address ``base`` on, the scratch memory that both kernels have."""
    Kp, Vp = round_up(p.K, WIDTH), round_up(p.V, WIDTH)
    Tp, G = round_up(p.T, C), max(p.HQ // p.HV, 1)
    hq, hk = p.HQ // p.groups, p.HK // p.groups
    w.Kp, w.Vp, w.Tp, w.G, w.ld, w.next = Kp, Vp, Tp, G, spaced(Kp), base
    w.q, w.dq, w.rho_q = take(w, hq * Tp * Kp), take(w, hq * Tp * Kp), take(w, hq * Tp)
    w.k, w.dk, w.rho_k = take(w, hk * Tp * Kp), take(w, hk * Tp * Kp), take(w, hk * Tp)
    w.states, w.error = take(w, max(Tp // C, 1) * Vp * w.ld), take(w, Tp * Vp)
    w.qk, w.bend, w.strength = take(w, G * Tp * C), take(w, Tp * C), take(w, Tp)
    w.lower, w.rhs, w.by = take(w, C * C), take(w, C * C), take(w, (G + 1) * C * C)
    w.ones, w.kept = take(w, C), take(w, C)
    w.d, w.dV, w.rest = take(w, C * Vp), take(w, C * Vp), take(w, C * Vp)
    w.do_dv, w.qk_in = take(w, (G + 1) * C * Vp), take(w, (G + 1) * C * Kp)
    w.made, w.dS = take(w, (G + 1) * C * Kp), take(w, Vp * w.ld)


@jit
def _load_rows(p, dst, rho, address, at_head, stride_t, stride_h, first, heads, T, Tp, Kp, factor):
    """Rows of some heads in float32, normalised and times ``factor``; zeros after them."""
    for h in range(heads):
        for t in range(Tp):
            row = dst + (h * Tp + t) * Kp
            if t >= T:
                fill(row, Kp, 0.0)
                continue
            fill(row + (Kp - WIDTH), WIDTH, 0.0)
            here = at_head + t * stride_t + (first + h) * stride_h
            prefetch_row(address, p.io, here + AHEAD * stride_t, p.K)
            load_row(row, address, p.io, here, p.K)
            length = 1.0
            if p.normalize:
                length = 1.0 / math.sqrt(sum_squares(row, Kp) + p.eps)
            put(rho, h * Tp + t, length)
            scale_row(row, row, Kp, length * factor)


@jit
def _dot(a, b, n):
    acc = splat(0.0)
    for i in range(0, n, LANES):
        acc = fma(load(a, i), load(b, i), acc)
    return total(acc)


@jit
def _finish(p, w, address, ready, d, rho, at, stride_t, first, heads, T, factor):
    """Through scale and norm, to the caller's tensor [.., H, K]."""
    Kp = w.Kp
    for h in range(heads):
        for t in range(T):
            row, unit = d + (h * w.Tp + t) * Kp, ready + (h * w.Tp + t) * Kp
            length, along = 1.0, 0.0
            if p.normalize != 0 and factor != 0.0:
                length = 1.0 * get(rho, h * w.Tp + t)
                along = -length * _dot(row, unit, Kp) / factor
            for i in range(0, Kp, LANES):
                store(row, i, fma(load(row, i), length * factor, load(unit, i) * along))
            here = at + t * stride_t + (first + h) * p.K
            prefetch_row(address, p.io, here + AHEAD * stride_t, p.K)
            store_row(address, p.io, here, row, p.K)


@jit
def heads_of(p, head, group):
    """The key head of a value head and its (first) query head, counted in the group."""
    q_head = head * (p.HQ // p.HV) if p.HQ > p.HV else head // (p.HV // p.HQ)
    k_head = head // (p.HV // p.HK)
    return k_head - group * (p.HK // p.groups), q_head - group * (p.HQ // p.groups)


@jit
def load_heads(p, w, seq, group):
    """Queries and keys of a group, and zeros for their gradients; the sequence's span."""
    batch, start, T = span(p, seq)
    hq, hk, Kp, Tp = p.HQ // p.groups, p.HK // p.groups, w.Kp, round_up(T, C)
    w.Tp = Tp
    q_at, k_at = batch * p.q_b + start * p.q_t, batch * p.k_b + start * p.k_t
    _load_rows(p, w.q, w.rho_q, p.q, q_at, p.q_t, p.q_h, group * hq, hq, T, Tp, Kp, p.scale)
    _load_rows(p, w.k, w.rho_k, p.k, k_at, p.k_t, p.k_h, group * hk, hk, T, Tp, Kp, 1.0)
    fill(w.dq, hq * Tp * Kp, 0.0)
    fill(w.dk, hk * Tp * Kp, 0.0)
    return batch, start, T


@jit
def store_heads(p, w, token, T, group):
    """The gradients of a group's queries and keys, from ``token`` on."""
    hq, hk, q_t, k_t = p.HQ // p.groups, p.HK // p.groups, p.HQ * p.K, p.HK * p.K
    _finish(p, w, p.dq, w.q, w.dq, w.rho_q, token * q_t, q_t, group * hq, hq, T, p.scale)
    _finish(p, w, p.dk, w.k, w.dk, w.rho_k, token * k_t, k_t, group * hk, hk, T, 1.0)


@jit
def load_state(p, w, dst, address, at, given):
    """A state [V, K] in padded float32 scratch, or zeros."""
    fill(dst, w.Vp * w.ld, 0.0)
    if given != 0:
        for i in range(p.V):
            load_row(dst + i * w.ld, address, F32, at + i * p.K, p.K)


@jit
def store_state(p, w, at):
    """The gradient of an initial state."""
    if p.dstate != 0:
        for i in range(p.V):
            store_row(p.dstate, F32, at + i * p.K, w.dS + i * w.ld, p.K)
