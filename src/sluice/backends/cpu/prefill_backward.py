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
from sluice.backends.cpu import prefill_key_backward
from sluice.backends.cpu.backward_heads import (
    FIELDS,
    heads_of,
    load_heads,
    load_state,
    store_heads,
    store_state,
    take,
    take_shared,
    view,
)
from sluice.backends.cpu.chunk_backward import (
    WORK_BYTES,
    C,
    chunk_backward,
    chunk_forward,
    make_constants,
    multiply_pairs,
    share_keys,
    share_queries,
    work,
)
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import bind_fields
from sluice.backends.cpu.memory import allocate, release
from sluice.backends.cpu.params import CODES, describe, is_readable
from sluice.backends.cpu.scratch_rows import fill, round_up
from sluice.backends.cpu.threads import tasks_of
from sluice.backends.reference import backward
from sluice.backends.reference.recurrence import L2_EPS, log_decay, write_strength
from sluice.contract.backward import DeltaBackwardSpec


@jit
def _room(p, w, base):
    """Lay out scratch memory from address ``base`` on; returns its size in bytes."""
    take_shared(p, w, base)
    Kp, Tp, G = w.Kp, w.Tp, w.G
    w.k_turned, w.kk, w.sum_by = take(w, Tp * Kp), take(w, Tp * C), take(w, (G + 1) * Tp * C)
    w.fade, w.down, w.up, w.rate = take(w, Tp * C), take(w, Tp), take(w, Tp), take(w, C)
    w.pairs, w.inter, w.minus, w.k_out = take(w, C), take(w, C), take(w, C), take(w, C * Kp)
    return w.next - base


@jit
def task(p, w, seq, group):
    """The heads of one group in one sequence."""
    batch, start, T = load_heads(p, w, seq, group)
    Kp, Tp, hv = w.Kp, w.Tp, p.HV // p.groups
    n, fresh = Tp // C, True
    for head in range(group * hv, group * hv + hv):
        k_head, q_head = heads_of(p, head, group)
        k, dk = w.k + k_head * Tp * Kp, w.dk + k_head * Tp * Kp
        q, dq = w.q + q_head * Tp * Kp, w.dq + q_head * Tp * Kp
        if fresh:
            share_keys(w, k, Tp)
            share_queries(w, q, Tp * Kp, Tp)
        S_at = (seq * p.HV + head) * p.K * p.V
        load_state(p, w, w.states, p.state, S_at, p.from_state)
        for chunk in range(n):
            t0 = chunk * C
            v_at = batch * p.v_b + (start + t0) * p.v_t + head * p.v_h
            g_at = (batch * p.T + start + t0) * p.HV + head
            empty = chunk == 0 and p.from_state == 0
            m = min(C, T - t0)
            chunk_forward(p, w, k + t0 * Kp, chunk, v_at, g_at, m, empty, chunk == n - 1)
        load_state(p, w, w.dS, p.dfinal, S_at, p.to_state)
        for chunk in range(n - 1, -1, -1):
            t0 = chunk * C
            at, token, m = t0 * Kp, batch * p.T + start + t0, min(C, T - t0)
            empty, free = chunk == 0 and p.from_state == 0, chunk == n - 1 and p.to_state == 0
            rows = (q + at, dq + at, Tp * Kp, k + at, dk + at)
            chunk_backward(p, w, *rows, chunk, token, head, m, empty, free, fresh)
        fresh = head + 1 == group * hv + hv or heads_of(p, head + 1, group) != (k_head, q_head)
        if fresh:
            multiply_pairs(p, w, q, dq, Tp * Kp, k, dk, Tp)
        store_state(p, w, S_at)
    store_heads(p, w, batch * p.T + start, T, group)


def prefill_backward_kernel(block):
    p = view(block)
    record = allocate(WORK_BYTES)
    w = work(record)
    memory = allocate(_room(p, w, 0) + 64)
    _room(p, w, round_up(memory, 64))
    make_constants(w)
    fill(w.kk, w.Tp * C, 0.0)  # not all above a diagonal is ever written
    fill(w.qk, w.G * w.Tp * C, 0.0)
    for i in tasks_of(p):
        task(p, w, i // p.groups, i % p.groups)
    release(memory)
    release(record)


KERNEL = Kernel("prefill_backward", prefill_backward_kernel)
_ORDER = FIELDS.addresses


def bind(spec: DeltaBackwardSpec) -> Launch:
    """A launch of the backward of ``prefill``; torch prepares states, and gates per head."""
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
    kernel = KERNEL
    if spec.g is not None and spec.decay == "key":
        kernel = prefill_key_backward.KERNEL
        g = spec.g if is_readable("g", spec.g) else spec.g.new_empty(*spec.g.shape)
        values |= describe("g", g)
        given += ["A", "dA", "ddt"] if spec.raw_gates else []
        given += ["dt"] if spec.dt_bias is not None else []
    sources = {name: _ORDER.index(name) for name in given}
    tasks = spec.N * groups
    run = bind_fields(kernel, FIELDS, values, sources, lambda threads: {"tasks": tasks})

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
    S, dS = (None if x is None else _vk(spec, x.to(f32)).contiguous() for x in (t.state, t.dfinal))
    dstate = None if S is None else torch.empty_like(S)
    do = whole.do
    if do is None:
        do = whole.v.new_zeros(*whole.v.shape[:2], spec.HO, spec.V)
    beta = None if whole.beta is None else whole.beta.to(f32)
    if beta is not None and t.A_log is not None:
        beta = write_strength(beta, spec.neg_eigval)
    beta = None if beta is None else beta.contiguous()
    dbeta = None if beta is None else torch.empty_like(beta)
    known = {
        "q": whole.q, "k": whole.k, "v": whole.v, "beta": beta, "do": do, "state": S, "dfinal": dS,
        "dq": whole.dq, "dk": whole.dk, "dv": whole.dv, "dbeta": dbeta, "dstate": dstate,
        "cu": whole.cu_seqlens, **(_key_gates if spec.decay == "key" else _head_gates)(spec, whole),
    }  # fmt: skip
    run([known.get(name) for name in _ORDER])
    T = t.q.shape[1]
    g, beta, dg, dbeta = (
        None if x is None else x[:, :T] for x in (known["g"], beta, known["dg"], dbeta)
    )
    if spec.decay == "key":  # the kernel has made the others
        if spec.raw_gates:
            t.dA_log.copy_(known["dA"].sum(0))
            if t.ddt_bias is not None:
                t.ddt_bias.copy_(known["ddt"].sum(0))
        t = t._replace(dg=None)
    backward.gates(t, g, beta, dg, dbeta, spec.beta_scale)
    if t.dstate is not None:
        t.dstate.copy_(_vk(spec, dstate))


def _head_gates(spec: DeltaBackwardSpec, t: Any) -> dict[str, Any]:
    """Log decays per head, and room for their gradients."""
    if t.g is None:
        return {"g": None, "dg": None}
    g = t.g.to(torch.float32)
    g = g if t.A_log is None else log_decay(g, t.A_log, t.dt_bias)
    g = g.contiguous()
    return {"g": g, "dg": torch.empty_like(g)}


def _key_gates(spec: DeltaBackwardSpec, t: Any) -> dict[str, Any]:
    """Gates per key as they are, and for raw ones room for sums of each sequence."""
    assert spec.g is not None
    found = {"g": t.g if is_readable("g", spec.g) else t.g.contiguous(), "dg": t.dg}
    if t.A_log is not None:
        found["A"] = t.A_log.to(torch.float32).contiguous()
        found["dA"] = found["A"].new_empty(spec.N, spec.HV)
        found["ddt"] = found["A"].new_empty(spec.N, spec.HV, spec.K)
        if t.dt_bias is not None:
            found["dt"] = t.dt_bias.to(torch.float32).contiguous()
    return found


def _vk(spec: DeltaBackwardSpec, S: torch.Tensor) -> torch.Tensor:
    """From the caller's layout to [.., V, K], or back."""
    return S.mT if spec.state_layout == "kv" else S
