"""Decode that keeps the state after each token, in a slot of its own.

(B1) and (B2) of delta.py run once for all tokens of a block of the state, which is kept in scratch
memory: the slot that is read may be written. Then (B3) folds the first n tokens into that block for
every n, as commit does, so the bits are those of verify and commit. A sequence of one token is
plain decode.
"""

from __future__ import annotations

from sluice.backends import Launch
from sluice.backends.cpu.addressing import NOWHERE, span, state_rows, state_slot
from sluice.backends.cpu.decode import deal_keys, head_runner, is_dealt, kv_block, vk_block
from sluice.backends.cpu.delta import BLOCK_V
from sluice.backends.cpu.jit import jit, named
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import bind as bind_kernel
from sluice.backends.cpu.launch import with_zeros
from sluice.backends.cpu.llvm import F32, LANES
from sluice.backends.cpu.memory import address_of, release
from sluice.backends.cpu.operands import (
    KEY_DECAY,
    head_decays,
    key_decays,
    load_gates,
    load_key_gates,
    make_operands,
    make_work,
    pad_keys,
)
from sluice.backends.cpu.params import PARAMS
from sluice.backends.cpu.scratch_rows import fill, round_up
from sluice.backends.cpu.simd import pointer
from sluice.backends.cpu.state import (
    block_floats,
    head_at,
    is_direct,
    load_block,
    load_dealt,
    store_block,
    store_dealt,
)
from sluice.backends.cpu.threads import tasks_of
from sluice.backends.cpu.tokens import (
    load_keys,
    load_values,
    readers_of_state,
    share_heads,
    share_keys,
    store_outputs,
    zero_outputs,
)
from sluice.backends.cpu.verify import fold
from sluice.contract import values
from sluice.contract.spec import DeltaSpec

RUN_ONE = head_runner(False)

view = PARAMS.view


@jit
def _factors(p, w, m):
    """k_out and decay_all of the first m tokens, as commit makes them."""
    n = round_up(p.K, LANES)
    if p.decay == KEY_DECAY:
        for t in range(m):
            key_decays(w, w.kq_raw, t, n)
    else:
        head_decays(w, w.kq, w.alpha, m, n)
    pad_keys(w, m, n)


@jit
def _many(p, w, seq, read, head, m):
    """Outputs of m tokens to w.o, and the state after each to its slot."""
    K, V, n = p.K, p.V, round_up(p.K, LANES)
    source, direct, memory = head_at(p, read, head), is_direct(p), pointer(p.state, F32)
    ld, far = BLOCK_V if p.kv else n, V if p.kv else K
    keys, dealt = w.kq, is_dealt(p, w)
    if dealt:
        w.kq = w.kq_raw
    for v0 in range(0, V, BLOCK_V):
        if dealt:
            load_dealt(p, w.tile, source, v0, read == NOWHERE)
        else:
            load_block(p, w.tile, source, v0, read == NOWHERE)
        soon = address_of(memory + source + (K * (V + v0) if p.kv else (v0 + BLOCK_V) * K))
        if p.kv:
            kv_block(p, w, w.tile, ld, w.tile, ld, soon, n, v0, m, False)
        else:
            vk_block(p, w, w.tile, ld, w.tile, ld, soon, n, v0, m, False)
        for t in range(m - 1, -1, -1):
            slot = state_slot(p, seq, t)
            if slot != NOWHERE:
                _factors(p, w, t + 1)
                target = head_at(p, slot, head)
                if direct:
                    to = memory + target + (v0 if p.kv else v0 * K)
                    fold(p, w, w.tile, ld, to, far, soon, t + 1)
                else:
                    fold(p, w, w.tile, ld, w.block, ld, soon, t + 1)
                    if dealt:
                        store_dealt(p, w.block, target, v0)
                    else:
                        store_block(p, w.block, target, v0)
            fill(w.d + t * BLOCK_V, BLOCK_V, 0.0)  # the states before know nothing of token t
    w.kq = keys


@jit
def _one_head(p, w, seq, batch, start, m, read, head):
    g_at = batch * p.g_b + start * p.g_t + head * p.g_h
    beta_at = batch * p.beta_b + start * p.beta_t + head * p.beta_h
    load_gates(p, w, 0, g_at, beta_at, head, m)
    if p.decay == KEY_DECAY:
        load_key_gates(p, w, g_at, head, m)
    load_values(p, w, batch, start, head, m)
    if m == 1:
        write = state_slot(p, seq, 0)
        make_operands(p, w, w.alpha, 1, True)
        RUN_ONE(p, w, read, write, head, batch * p.T + start, 1)
    else:
        make_operands(p, w, w.alpha, m, False)
        _many(p, w, seq, read, head, m)
    store_outputs(p, w, batch, start, head, m)


@jit
def task(p, w, seq, first):
    """The value heads `first` to `first + heads_per_task` of one sequence."""
    padding, read, _write = state_rows(p, seq)
    batch, start, m = span(p, seq)
    shared = share_keys(p)
    for head in range(first, first + p.heads_per_task):
        if p.cu != 0 and seq == p.N - 1:
            zero_outputs(p, w, 0, start + m, p.T - start - m, head)
        if padding:
            zero_outputs(p, w, batch, start, m, head)
        elif m > 0:
            if head == first or not shared:
                load_keys(p, w, batch, start, head, m)
                deal_keys(p, w, m)
            _one_head(p, w, seq, batch, start, m, read, head)


@named("decode_states")
def states_kernel(block):
    p = view(block)
    w, memory = make_work(p, readers_of_state(p), 1, block_floats(p))
    runs = p.HV // p.heads_per_task
    for i in tasks_of(p):
        task(p, w, i // runs, i % runs * p.heads_per_task)
    release(memory)


KERNEL = Kernel("decode_states", states_kernel)


def bind(spec: DeltaSpec) -> Launch:
    """A launch of ``decode`` with one write slot for each token."""
    return with_zeros(bind_kernel(KERNEL, spec, share_heads(spec), values.delta), spec, "out")
