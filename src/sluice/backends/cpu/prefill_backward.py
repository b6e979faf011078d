"""The backward of prefill: one task is the heads of a sequence that share keys and queries.

For one value head after the other, a first sweep over its chunks computes the state before each
chunk again, and keeps it with the errors E. The second sweep goes back over the chunks
(``chunk_backward.py``). Keys and queries are normalised once per task; their gradients are summed
over value heads in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from sluice.backends import Launch
from sluice.backends.cpu.block import Fields
from sluice.backends.cpu.chunk_backward import (
    C,
    chunk_backward,
    chunk_forward,
    make_constants,
    multiply_pairs,
    share_keys,
    share_queries,
    work,
)
from sluice.backends.cpu.gemm import WIDTH, spaced
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import bind_fields
from sluice.backends.cpu.llvm import F32, LANES
from sluice.backends.cpu.memory import allocate, release
from sluice.backends.cpu.params import CODES
from sluice.backends.cpu.scratch_rows import (
    fill,
    load_row,
    prefetch_row,
    read_index,
    round_up,
    scale_row,
    store_row,
    sum_squares,
)
from sluice.backends.cpu.simd import fma, get, load, pointer, put, splat, store
from sluice.backends.cpu.threads import tasks_of
from sluice.backends.cpu.tiles import total
from sluice.backends.reference import backward
from sluice.backends.reference.recurrence import L2_EPS, log_decay, write_strength
from sluice.contract.backward import DeltaBackwardSpec

AHEAD = 16
"""How many tokens ahead memory is asked for rows of q, k and their gradients."""

FIELDS = Fields(
    "prefill_backward",
    "q k v g beta do state dfinal dq dk dv dg dbeta dstate cu",
    "q_b q_t q_h k_b k_t k_h v_b v_t v_h cu_wide io T N HQ HK HV K V groups delta gated normalize"
    " from_state to_state",
    "scale eps",
)
view = FIELDS.view


@jit
def _take(w, count):
    """The next ``count`` floats of scratch memory."""
    here = w.next
    w.next = here + 4 * count
    return pointer(here, F32)


@jit
def _room(p, w, base):
    """Lay out scratch memory from address ``base`` on; returns its size in bytes."""
    Kp, Vp = round_up(p.K, WIDTH), round_up(p.V, WIDTH)
    Tp, G = round_up(p.T, C), max(p.HQ // p.HV, 1)
    hq, hk = p.HQ // p.groups, p.HK // p.groups
    w.Kp, w.Vp, w.Tp, w.G, w.ld, w.next = Kp, Vp, Tp, G, spaced(Kp), base
    w.q, w.dq, w.rho_q = _take(w, hq * Tp * Kp), _take(w, hq * Tp * Kp), _take(w, hq * Tp)
    w.k, w.dk, w.rho_k = _take(w, hk * Tp * Kp), _take(w, hk * Tp * Kp), _take(w, hk * Tp)
    w.k_turned, w.kk, w.qk = _take(w, Tp * Kp), _take(w, Tp * C), _take(w, G * Tp * C)
    w.sum_by = _take(w, (G + 1) * Tp * C)
    w.states, w.error = _take(w, max(Tp // C, 1) * Vp * w.ld), _take(w, Tp * Vp)
    w.fade, w.bend = _take(w, Tp * C), _take(w, Tp * C)
    w.down, w.up, w.strength = _take(w, Tp), _take(w, Tp), _take(w, Tp)
    w.lower, w.rhs, w.by = _take(w, C * C), _take(w, C * C), _take(w, (G + 1) * C * C)
    w.ones, w.rate = _take(w, C), _take(w, C)
    w.pairs, w.inter, w.kept, w.minus = _take(w, C), _take(w, C), _take(w, C), _take(w, C)
    w.d, w.dV, w.rest = _take(w, C * Vp), _take(w, C * Vp), _take(w, C * Vp)
    w.do_dv, w.qk_in = _take(w, (G + 1) * C * Vp), _take(w, (G + 1) * C * Kp)
    w.k_out, w.made, w.dS = _take(w, C * Kp), _take(w, (G + 1) * C * Kp), _take(w, Vp * w.ld)
    return w.next - base


@jit
def _load_heads(p, dst, rho, address, at_head, stride_t, stride_h, first, heads, T, Tp, Kp, factor):
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
def _heads(p, head, group):
    """The key head of a value head and its (first) query head, counted in the group."""
    q_head = head * (p.HQ // p.HV) if p.HQ > p.HV else head // (p.HV // p.HQ)
    k_head = head // (p.HV // p.HK)
    return k_head - group * (p.HK // p.groups), q_head - group * (p.HQ // p.groups)


@jit
def task(p, w, seq, group):
    """The heads of one group in one sequence."""
    Kp = w.Kp
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
    n, fresh = Tp // C, True
    for head in range(group * hv, group * hv + hv):
        k_head, q_head = _heads(p, head, group)
        k, dk = w.k + k_head * Tp * Kp, w.dk + k_head * Tp * Kp
        q, dq = w.q + q_head * Tp * Kp, w.dq + q_head * Tp * Kp
        if fresh:
            share_keys(w, k, Tp)
            share_queries(w, q, Tp * Kp, Tp)
        S_at = (seq * p.HV + head) * p.K * p.V
        _load_state(p, w, w.states, p.state, S_at, p.from_state)
        for chunk in range(n):
            t0 = chunk * C
            v_at = batch * p.v_b + (start + t0) * p.v_t + head * p.v_h
            g_at = (batch * p.T + start + t0) * p.HV + head
            empty = chunk == 0 and p.from_state == 0
            m = min(C, T - t0)
            chunk_forward(p, w, k + t0 * Kp, chunk, v_at, g_at, m, empty, chunk == n - 1)
        _load_state(p, w, w.dS, p.dfinal, S_at, p.to_state)
        for chunk in range(n - 1, -1, -1):
            t0 = chunk * C
            at, token, m = t0 * Kp, batch * p.T + start + t0, min(C, T - t0)
            empty, free = chunk == 0 and p.from_state == 0, chunk == n - 1 and p.to_state == 0
            rows = (q + at, dq + at, Tp * Kp, k + at, dk + at)
            chunk_backward(p, w, *rows, chunk, token, head, m, empty, free, fresh)
        fresh = head + 1 == group * hv + hv or _heads(p, head + 1, group) != (k_head, q_head)
        if fresh:
            multiply_pairs(p, w, q, dq, Tp * Kp, k, dk, Tp)
        if p.dstate != 0:
            for i in range(p.V):
                store_row(p.dstate, F32, S_at + i * p.K, w.dS + i * w.ld, p.K)
    row = batch * p.T + start
    _finish(
        p, w, p.dq, w.q, w.dq, w.rho_q, row * p.HQ * p.K, p.HQ * p.K, group * hq, hq, T, p.scale
    )
    _finish(p, w, p.dk, w.k, w.dk, w.rho_k, row * p.HK * p.K, p.HK * p.K, group * hk, hk, T, 1.0)


@jit
def _load_state(p, w, dst, address, at, given):
    """A state [V, K] in padded float32 scratch, or zeros."""
    fill(dst, w.Vp * w.ld, 0.0)
    if given != 0:
        for i in range(p.V):
            load_row(dst + i * w.ld, address, F32, at + i * p.K, p.K)


def prefill_backward_kernel(block):
    p = view(block)
    record = allocate(64 * 8)
    w = work(record)
    memory = allocate(_room(p, w, 0) + 64)
    _room(p, w, round_up(memory, 64))
    make_constants(w)
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
    S, dS = (None if x is None else _vk(spec, x.to(f32)).contiguous() for x in (t.state, t.dfinal))
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
        t.dstate.copy_(_vk(spec, dstate))


def _vk(spec: DeltaBackwardSpec, S: torch.Tensor) -> torch.Tensor:
    """From the caller's layout to [.., V, K], or back."""
    return S.mT if spec.state_layout == "kv" else S
