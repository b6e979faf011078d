"""The backward of prefill with decay per key; tasks are those of ``prefill_backward.py``.

For one value head after the other, a first sweep over its chunks computes the state before each
chunk again, and keeps it with the errors E, the decays and the products P. The second sweep goes
back over the chunks (``chunk_key_backward.py``).
"""

from __future__ import annotations

from sluice.backends.cpu.backward_heads import (
    heads_of,
    load_heads,
    load_state,
    store_heads,
    store_state,
    take,
    take_shared,
    view,
)
from sluice.backends.cpu.chunk_backward import STEP, WORK_BYTES, C, make_constants, work
from sluice.backends.cpu.chunk_key_backward import (
    COLUMN,
    begin_gates,
    chunk_key_backward,
    chunk_key_forward,
    end_gates,
)
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.llvm import LANES
from sluice.backends.cpu.memory import allocate, release
from sluice.backends.cpu.scratch_rows import round_up
from sluice.backends.cpu.threads import tasks_of


@jit
def _room(p, w, base):
    """Lay out scratch memory from address ``base`` on; returns its size in bytes."""
    take_shared(p, w, base)
    Kp, Tp = w.Kp, w.Tp
    w.alpha, w.k_out = take(w, Tp * Kp), take(w, Tp * Kp)
    w.down, w.k_turned, w.wrote = take(w, C * Kp), take(w, C * Kp), take(w, C * Kp)
    w.whole, w.bias, w.ddt, w.by_g = take(w, Kp), take(w, Kp), take(w, Kp), take(w, C * Kp)
    w.pace, w.dA = take(w, LANES), take(w, LANES)
    w.columns = take(w, (3 + 2 * w.G) * COLUMN)
    w.faded, w.now = take(w, STEP * COLUMN), take(w, STEP * LANES)
    return w.next - base


@jit
def task(p, w, seq, group):
    """The heads of one group in one sequence."""
    batch, start, T = load_heads(p, w, seq, group)
    Kp, Tp, hv = w.Kp, w.Tp, p.HV // p.groups
    n = Tp // C
    for head in range(group * hv, group * hv + hv):
        k_head, q_head = heads_of(p, head, group)
        k, dk = w.k + k_head * Tp * Kp, w.dk + k_head * Tp * Kp
        q, dq = w.q + q_head * Tp * Kp, w.dq + q_head * Tp * Kp
        S_at = (seq * p.HV + head) * p.K * p.V
        v_at = batch * p.v_b + start * p.v_t + head * p.v_h
        g_at = batch * p.g_b + start * p.g_t + head * p.g_h
        begin_gates(p, w, head)
        load_state(p, w, w.states, p.state, S_at, p.from_state)
        for chunk in range(n):
            t0 = chunk * C
            empty, m = chunk == 0 and p.from_state == 0, min(C, T - t0)
            beta_at = (batch * p.T + start + t0) * p.HV + head
            rows = (q + t0 * Kp, Tp * Kp, k + t0 * Kp)
            places = (v_at + t0 * p.v_t, g_at + t0 * p.g_t, beta_at)
            chunk_key_forward(p, w, *rows, chunk, *places, m, empty, chunk == n - 1)
        load_state(p, w, w.dS, p.dfinal, S_at, p.to_state)
        for chunk in range(n - 1, -1, -1):
            t0 = chunk * C
            at, token, m = t0 * Kp, batch * p.T + start + t0, min(C, T - t0)
            empty, free = chunk == 0 and p.from_state == 0, chunk == n - 1 and p.to_state == 0
            rows = (q + at, dq + at, Tp * Kp, k + at, dk + at)
            here = g_at + t0 * p.g_t
            chunk_key_backward(p, w, *rows, chunk, token, here, head, m, empty, free)
        store_state(p, w, S_at)
        end_gates(p, w, seq, head)
    store_heads(p, w, batch * p.T + start, T, group)


def prefill_key_backward_kernel(block):
    p = view(block)
    record = allocate(WORK_BYTES)
    w = work(record)
    memory = allocate(_room(p, w, 0) + 64)
    _room(p, w, round_up(memory, 64))
    make_constants(w)
    for i in tasks_of(p):
        task(p, w, i // p.groups, i % p.groups)
    release(memory)
    release(record)


KERNEL = Kernel("prefill_key_backward", prefill_key_backward_kernel)
