"""Convolution, split, l2 norm and gates in one pass over the tokens.

One task is a unit (conv_lines.py) of whole heads of q, k or v, or the gates of its tokens. A line
of results is normalised head by head while it is in the first-level cache, and then stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sluice.backends import Launch
from sluice.backends.cpu.addressing import locate, span, state_rows
from sluice.backends.cpu.conv import CHANNELS, in_order, units_of
from sluice.backends.cpu.conv_lines import (
    TOKENS,
    convolve,
    front_lines,
    keep_windows,
    load_unit,
    make_lines,
)
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import bind as bind_kernel
from sluice.backends.cpu.launch import with_zeros
from sluice.backends.cpu.llvm import ELEMENT_BYTES, LANES
from sluice.backends.cpu.memory import release
from sluice.backends.cpu.operands import L2_EPS
from sluice.backends.cpu.params import PARAMS
from sluice.backends.cpu.scratch_rows import (
    fill,
    fill_tail,
    read,
    round_up,
    scale_row,
    store_row,
    sum_squares,
    write,
)
from sluice.backends.cpu.simd import get, load, put, splat, store
from sluice.backends.cpu.threads import tasks_of
from sluice.backends.cpu.vmath import vexp, vsigmoid, vsoftplus
from sluice.contract import values
from sluice.contract.spec import ConvQkvSpec

view = PARAMS.view


@jit
def heads_in_block(width):
    """Whole heads of `width` channels that a block takes; one if they are not whole vectors."""
    return max(CHANNELS // width, 1) if width % LANES == 0 else 1


@jit
def _section(p, block):
    """Which of q, k, v a block belongs to (0, 1, 2), its first head, heads, and channel."""
    each = heads_in_block(p.K)
    blocks = (p.HK + each - 1) // each
    if block < 2 * blocks:
        section, head = block // blocks, block % blocks * each
        return section, head, min(each, p.HK - head), (section * p.HK + head) * p.K
    each = heads_in_block(p.V)
    head = (block - 2 * blocks) * each
    return 2, head, min(each, p.HV - head), 2 * p.HK * p.K + head * p.V


@jit
def _store_heads(p, c, section, batch, token, head, heads, tokens):
    """Lines of results to q, k or v, normalised."""
    width = p.V if section == 2 else p.K
    n = round_up(width, LANES)
    for t in range(tokens):
        for h in range(heads):
            row = c.y + t * c.width + h * width
            if section < 2 and p.normalize:
                fill_tail(row, width)
                scale_row(row, row, n, 1.0 / math.sqrt(sum_squares(row, n) + L2_EPS))
            if section == 0:
                at = batch * p.q_b + (token + t) * p.q_t + (head + h) * p.q_h
                store_row(p.q, p.io, at, row, width)
            elif section == 1:
                at = batch * p.k_b + (token + t) * p.k_t + (head + h) * p.k_h
                store_row(p.k, p.io, at, row, width)
            else:
                at = batch * p.v_b + (token + t) * p.v_t + (head + h) * p.v_h
                store_row(p.v, p.io, at, row, width)


@jit
def _zero_heads(p, c, section, batch, start, head, heads, tokens):
    for t in range(TOKENS):
        fill(c.y + t * c.width, c.width, 0.0)
    for t0 in range(0, tokens, TOKENS):
        count = min(TOKENS, tokens - t0)
        _store_heads(p, c, section, batch, start + t0, head, heads, count)


@jit
def task(p, c, unit, block):
    """A block of heads of one unit."""
    section, head, heads, first = _section(p, block)
    count = heads * (p.V if section == 2 else p.K)
    seq, t0 = locate(p, unit, TOKENS)
    batch, start, T = span(p, seq)
    tokens = min(TOKENS, T - t0)
    if p.cu != 0 and seq == p.N - 1 and t0 == 0:
        _zero_heads(p, c, section, 0, start + T, head, heads, p.T - start - T)
    if tokens <= 0 and t0 > 0:
        return
    padding, read_slot, write_slot = state_rows(p, seq)
    if padding:
        _zero_heads(p, c, section, batch, start + t0, head, heads, tokens)
        return
    at = batch * p.x_b + start * p.x_t + first * p.x_d
    load_unit(p, c, read_slot, at, t0, tokens, first, count)
    size = ELEMENT_BYTES[p.io]
    soon = p.x + (at + t0 * p.x_t + count * p.x_d) * size
    if section == 0:
        late, late_t = p.q + (batch * p.q_b + (start + t0) * p.q_t + head * p.q_h) * size, p.q_t
    elif section == 1:
        late, late_t = p.k + (batch * p.k_b + (start + t0) * p.k_t + head * p.k_h) * size, p.k_t
    else:
        late, late_t = p.v + (batch * p.v_b + (start + t0) * p.v_t + head * p.v_h) * size, p.v_t
    convolve(p, c, tokens, count, soon, p.x_t, late, late_t)
    _store_heads(p, c, section, batch, start + t0, head, heads, tokens)
    if t0 == 0:
        keep_windows(p, c, seq, read_slot, write_slot, at, T, first, count)


@jit
def _gate_row(p, c, batch, token, h, count):
    """g and beta of LANES heads of one token."""
    row = c.y
    if p.a != 0:
        at = batch * p.a_b + token * p.a_t + h * p.a_h
        for i in range(count):
            put(row, i, read(p.a, p.a_code, at + i * p.a_h))
        store(row, 0, vsoftplus(load(row, 0) + load(c.bias, 0)) * load(c.weight, 0))
        for i in range(count):
            at = batch * p.g_b + token * p.g_t + (h + i) * p.g_h
            write(p.g, p.g_code, at, get(row, i))
    if p.b != 0:
        at = batch * p.b_b + token * p.b_t + h * p.b_h
        for i in range(count):
            put(row, i, read(p.b, p.b_code, at + i * p.b_h))
        strength = vsigmoid(load(row, 0))
        store(row, 0, strength + strength if p.double else strength)
        for i in range(count):
            at = batch * p.beta_b + token * p.beta_t + (h + i) * p.beta_h
            write(p.beta, p.beta_code, at, get(row, i))


@jit
def _zero_gates(p, batch, start, tokens):
    for t in range(start, start + tokens):
        for h in range(p.HV):
            if p.a != 0:
                write(p.g, p.g_code, batch * p.g_b + t * p.g_t + h * p.g_h, 0.0)
            if p.b != 0:
                write(p.beta, p.beta_code, batch * p.beta_b + t * p.beta_t + h * p.beta_h, 0.0)


@jit
def gates_task(p, c, unit):
    """All gates of one unit."""
    seq, t0 = locate(p, unit, TOKENS)
    batch, start, T = span(p, seq)
    padding, _read, _write = state_rows(p, seq)
    if p.cu != 0 and seq == p.N - 1 and t0 == 0:
        _zero_gates(p, 0, start + T, p.T - start - T)
    if padding:
        _zero_gates(p, batch, start + t0, min(TOKENS, T - t0))
        return
    for h in range(0, p.HV, LANES):
        count = min(LANES, p.HV - h)
        store(c.y, 0, splat(0.0))
        store(c.bias, 0, splat(0.0))
        if p.a != 0:
            for i in range(count):
                put(c.y, i, read(p.A, p.A_code, (h + i) * p.A_h))
                if p.dt != 0:
                    put(c.bias, i, read(p.dt, p.dt_code, (h + i) * p.dt_h))
            store(c.weight, 0, vexp(load(c.y, 0)) * -1.0)
        for t in range(t0, min(t0 + TOKENS, T)):
            _gate_row(p, c, batch, start + t, h, count)


def _make(version: str) -> Callable[[Any], None]:
    def conv_qkv_kernel(block):
        _ = version
        p = view(block)
        width = max(heads_in_block(p.K) * p.K, heads_in_block(p.V) * p.V)
        c, memory = make_lines(round_up(width, LANES), front_lines(p), p.W)
        each_k, each_v = heads_in_block(p.K), heads_in_block(p.V)
        blocks = 2 * ((p.HK + each_k - 1) // each_k) + (p.HV + each_v - 1) // each_v
        for i in tasks_of(p):
            unit, index = in_order(p, i, blocks + 1)
            if index < blocks:
                task(p, c, unit, index)
            else:
                gates_task(p, c, unit)
        release(memory)

    return conv_qkv_kernel


KERNEL = Kernel("conv_qkv", _make)


def bind(spec: ConvQkvSpec) -> Launch:
    """A launch of ``conv_qkv``."""
    each_k, each_v = (max(CHANNELS // d, 1) if d % LANES == 0 else 1 for d in (spec.K, spec.V))
    blocks = 2 * -(-spec.HK // each_k) + -(-spec.HV // each_v)
    tasks = units_of(spec) * (blocks + 1)
    launch = bind_kernel(KERNEL, spec, lambda threads: {"tasks": tasks}, values.conv)
    return with_zeros(launch, spec, "q", "k", "v", "g", "beta")
