"""Prefill: sequences of any length, eight tokens at a time, the state held in float32 scratch.

One task is some value heads of one sequence that share their key head. Its states are brought into
the shape [blocks of V, K, BLOCK_V], whatever their layout and type, stay there for the whole
sequence, and go back once. A block is at most 16 KB, which pass through the first-level cache once
per eight tokens. Products of rows of k and q are made once for all heads of the task.
"""

from __future__ import annotations

from sluice.backends import Launch
from sluice.backends.cpu.addressing import NOWHERE, span, state_rows
from sluice.backends.cpu.checkpoints import checkpoint, columns
from sluice.backends.cpu.delta import BLOCK_V, MOST, block
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import bind as bind_kernel
from sluice.backends.cpu.launch import with_zeros
from sluice.backends.cpu.llvm import F32, LANES
from sluice.backends.cpu.memory import address_of, release
from sluice.backends.cpu.operands import (
    GATES,
    KEY_DECAY,
    load_gates,
    load_key_gates,
    make_operands,
    make_work,
)
from sluice.backends.cpu.params import PARAMS
from sluice.backends.cpu.scratch_rows import load_row, round_up
from sluice.backends.cpu.state import head_at, load_tile, store_tile
from sluice.backends.cpu.threads import tasks_of
from sluice.backends.cpu.tokens import (
    load_keys,
    load_values,
    prefetch_token,
    readers_of_state,
    share_heads,
    share_keys,
    store_outputs,
    zero_outputs,
)
from sluice.contract import values
from sluice.contract.spec import DeltaSpec

KV1, KV2, KV4, KV8 = (block("kv", M) for M in (1, 2, 4, 8))

view = PARAMS.view


@jit
def _blocks(p, w, beta, tile, m, batch, token, head):
    """(B1) to (B3) for all blocks of a head's state."""
    K, n, ld_v = p.K, round_up(p.K, LANES), w.ld_v
    ahead, each = token + MOST, MOST * BLOCK_V // ld_v
    for v0 in range(0, ld_v, BLOCK_V):
        s, soon = tile + v0 * K, address_of(tile + (v0 + BLOCK_V) * K)
        for _t in range(each):
            if p.cu != 0 or ahead < p.T:
                prefetch_token(p, batch, ahead, head, True)
            ahead += 1
        if m > 4:
            KV8(w, beta, s, BLOCK_V, s, BLOCK_V, soon, K, n, v0, True)
        elif m > 2:
            KV4(w, beta, s, BLOCK_V, s, BLOCK_V, soon, K, n, v0, True)
        elif m == 2:
            KV2(w, beta, s, BLOCK_V, s, BLOCK_V, soon, K, n, v0, True)
        else:
            KV1(w, beta, s, BLOCK_V, s, BLOCK_V, soon, K, n, v0, True)


@jit
def _advance(p, w, tile, gate, batch, token, head, m):
    """m tokens of one head whose rows of k and q are loaded: outputs to w.o, the state to tile."""
    if p.decay == KEY_DECAY:
        load_key_gates(p, w, batch * p.g_b + token * p.g_t + head * p.g_h, head, m)
    load_values(p, w, batch, token, head, m)
    make_operands(p, w, w.alpha + gate, m, True)
    _blocks(p, w, w.beta + gate, tile, m, batch, token, head)


@jit
def _keep_after(p, w, tile, seq, tokens, head):
    """Store a head's state at every checkpoint after exactly `tokens` tokens."""
    begin, end = columns(p, tokens - 1, tokens)
    for column in range(begin, end):
        count, slot = checkpoint(p, seq, column)
        if count == tokens and slot > p.pad:
            store_tile(p, w, tile, head_at(p, slot, head))


@jit
def _keep_inside(p, w, tile, gate, seq, batch, start, t0, head, m):
    """The states at checkpoints inside the next m tokens, from a copy of the state."""
    size = round_up(p.V, BLOCK_V) * p.K
    begin, end = columns(p, t0, t0 + m - 1)
    copied = False
    for column in range(begin, end):
        count, slot = checkpoint(p, seq, column)
        if t0 < count < t0 + m and slot > p.pad:
            spare = w.tile + p.heads_per_task * size
            load_row(spare, address_of(tile), F32, 0, size)
            load_keys(p, w, batch, start + t0, head, count - t0)
            _advance(p, w, spare, gate, batch, start + t0, head, count - t0)
            store_tile(p, w, spare, head_at(p, slot, head))
            copied = True
    if copied:
        load_keys(p, w, batch, start + t0, head, m)


@jit
def task(p, w, seq, first):
    """The value heads `first` to `first + heads_per_task` of one sequence."""
    padding, read, write = state_rows(p, seq)
    batch, start, T = span(p, seq)
    shared = share_keys(p)
    size = round_up(p.V, BLOCK_V) * p.K
    for head in range(first, first + p.heads_per_task):
        if p.cu != 0 and seq == p.N - 1:
            zero_outputs(p, w, 0, start + T, p.T - start - T, head)
        if padding:
            zero_outputs(p, w, batch, start, T, head)
        else:
            load_tile(p, w, w.tile + (head - first) * size, head_at(p, read, head), read == NOWHERE)
            if p.checkpoints != 0 and p.positions != 0:
                _keep_after(p, w, w.tile + (head - first) * size, seq, 0, head)
    if padding:
        return
    for t0 in range(0, T, MOST):
        m = min(MOST, T - t0)
        token = start + t0
        for head in range(first, first + p.heads_per_task):
            i = head - first
            gate = i * GATES + t0 % GATES
            tile = w.tile + i * size
            if t0 % GATES == 0:
                g_at = batch * p.g_b + token * p.g_t + head * p.g_h
                beta_at = batch * p.beta_b + token * p.beta_t + head * p.beta_h
                load_gates(p, w, gate, g_at, beta_at, head, min(GATES, T - t0))
            if i == 0 or not shared:
                load_keys(p, w, batch, token, head, m)
            if p.checkpoints != 0:
                _keep_inside(p, w, tile, gate, seq, batch, start, t0, head, m)
            _advance(p, w, tile, gate, batch, token, head, m)
            store_outputs(p, w, batch, token, head, m)
            if p.checkpoints != 0:
                _keep_after(p, w, tile, seq, t0 + m, head)
    if write != NOWHERE:
        for head in range(first, first + p.heads_per_task):
            store_tile(p, w, w.tile + (head - first) * size, head_at(p, write, head))


def prefill_kernel(block):
    p = view(block)
    tiles = p.heads_per_task + (1 if p.checkpoints != 0 else 0)
    size = round_up(p.V, BLOCK_V) * p.K
    w, memory = make_work(p, readers_of_state(p), p.heads_per_task, tiles * size)
    runs = p.HV // p.heads_per_task
    for i in tasks_of(p):
        task(p, w, i // runs, i % runs * p.heads_per_task)
    release(memory)


KERNEL = Kernel("prefill", prefill_kernel)


def bind(spec: DeltaSpec) -> Launch:
    """A launch of ``prefill``."""
    return with_zeros(bind_kernel(KERNEL, spec, share_heads(spec), values.delta), spec, "out")
