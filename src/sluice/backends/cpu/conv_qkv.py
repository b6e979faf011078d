"""Convolution, split, l2 norm and gates in one pass over the tokens.

One task is a unit (conv.py) of whole heads of q, k or v, or the gates of its tokens. Results that
must be normalised or rounded become lines in the first-level cache and are then stored by heads.
"""

from __future__ import annotations

import math

from sluice.backends import Launch
from sluice.backends.cpu.addressing import locate, span, state_rows
from sluice.backends.cpu.conv import CHANNELS, after_pass, in_order, share_units
from sluice.backends.cpu.conv_lines import (
    TOKENS,
    convolve,
    front_lines,
    keep_windows,
    load_pass,
    load_weights,
    make_lines,
    start_window,
)
from sluice.backends.cpu.conv_rows import GROUP, convolve_rows, deal_taps, serves_rows
from sluice.backends.cpu.jit import jit, jit_inline
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import bind as bind_kernel
from sluice.backends.cpu.launch import with_zeros
from sluice.backends.cpu.llvm import BF16, ELEMENT_BYTES, F16, F32, LANES, LINE
from sluice.backends.cpu.memory import address_of, fence, release
from sluice.backends.cpu.operands import L2_EPS
from sluice.backends.cpu.params import PARAMS
from sluice.backends.cpu.scratch_rows import (
    fill,
    fill_tail,
    load_row,
    read,
    round_up,
    scale_row,
    store_row,
    sum_squares,
    write,
)
from sluice.backends.cpu.simd import get, load, pointer, put, splat, store
from sluice.backends.cpu.threads import tasks_of
from sluice.backends.cpu.tiles import load_rows, stream_runs
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
def _target(p, section, batch, token, head):
    """Address, element and stride from token to token of a head of q, k or v."""
    if section == 0:
        return p.q, batch * p.q_b + token * p.q_t + head * p.q_h, p.q_t
    if section == 1:
        return p.k, batch * p.k_b + token * p.k_t + head * p.k_h, p.k_t
    return p.v, batch * p.v_b + token * p.v_t + head * p.v_h, p.v_t


@jit_inline
def _scale_past(to, row, n, factor):
    """`scale_row` to memory past the caches."""
    for i in range(0, n, LANES):
        stream_runs(to, i, 0, load_rows(row, i, LANES, 1) * factor, 1)


@jit
def _store_heads(p, c, section, batch, token, head, heads, tokens):
    """Lines of results to q, k or v, normalised."""
    width = p.V if section == 2 else p.K
    n = round_up(width, LANES)
    for t in range(tokens):
        for h in range(heads):
            row = c.y + t * c.width + h * width
            address, at, _ = _target(p, section, batch, token + t, head + h)
            if section < 2 and p.normalize:
                fill_tail(row, width)
                factor = 1.0 / math.sqrt(sum_squares(row, n) + L2_EPS)
                if p.io == F32 and n == width:
                    to = pointer(address, F32) + at
                    if p.far and address_of(to) % LINE == 0:
                        _scale_past(to, row, n, factor)
                    else:
                        scale_row(to, row, n, factor)
                    continue
                if p.io == BF16 and n == width:
                    scale_row(pointer(address, BF16) + at, row, n, factor)
                    continue
                scale_row(row, row, n, factor)
            store_row(address, p.io, at, row, width)


@jit
def _zero_heads(p, c, section, batch, start, head, heads, tokens):
    for t in range(TOKENS):
        fill(c.y + t * c.width, c.width, 0.0)
    for t0 in range(0, tokens, TOKENS):
        count = min(TOKENS, tokens - t0)
        _store_heads(p, c, section, batch, start + t0, head, heads, count)


@jit
def _pass(p, c, read_slot, at, t, m, first, count, section, batch, start, head, heads):
    """Tokens t to t + m through lines."""
    size = ELEMENT_BYTES[p.io]
    load_pass(p, c, read_slot, at, t, m, first, count)
    soon = p.x + (at + t * p.x_t + count * p.x_d) * size
    address, to, stride = _target(p, section, batch, start + t, head)
    convolve(p, c, m, count, soon, p.x_t, address + to * size, stride)
    _store_heads(p, c, section, batch, start + t, head, heads, m)


@jit
def task(p, c, unit, block):
    """A block of heads of one unit."""
    section, head, heads, first = _section(p, block)
    count = heads * (p.V if section == 2 else p.K)
    seq, t0 = locate(p, unit, p.unit_t)
    batch, start, T = span(p, seq)
    end = min(t0 + p.unit_t, T)
    if p.cu != 0 and seq == p.N - 1 and t0 == 0:
        _zero_heads(p, c, section, 0, start + T, head, heads, p.T - start - T)
    if end <= t0 and t0 > 0:
        return
    padding, read_slot, write_slot = state_rows(p, seq)
    start_window(p, c, seq)
    if padding:
        _zero_heads(p, c, section, batch, start + t0, head, heads, end - t0)
        return
    at = batch * p.x_b + start * p.x_t + first * p.x_d
    load_weights(p, c, 0, first, count)
    t = t0
    if t0 == 0:
        t = min(TOKENS, end)
        _pass(p, c, read_slot, at, 0, t, first, count, section, batch, start, head, heads)
        keep_windows(p, c, seq, read_slot, write_slot, at, T, first, count)
    direct = serves_rows(p, count)
    straight = p.io != F16 and section == 2 and p.v_h == p.V
    if direct:
        deal_taps(p, c, count)
    while t < end:
        m = min(TOKENS, end - t)
        after = after_pass(p, at, t0, t + m, end, count)
        if direct and m >= GROUP:
            address, to, stride = _target(p, section, batch, start + t, head)
            address += to * ELEMENT_BYTES[p.io]
            convolve_rows(p, c, at, t, m, count, after, address, stride, not straight)
            if not straight:
                _store_heads(p, c, section, batch, start + t, head, heads, m)
        else:
            if direct:  # the last tokens of a sequence
                load_weights(p, c, 0, first, count)
            _pass(p, c, read_slot, at, t, m, first, count, section, batch, start, head, heads)
        t += m


@jit
def _gate_in(row, address, code, at, step, count):
    """The raw gates of some heads."""
    if step == 1:
        load_row(row, address, code, at, count)
        return
    for i in range(count):
        put(row, i, read(address, code, at + i * step))


@jit
def _gate_out(address, code, at, step, row, count):
    if step == 1:
        store_row(address, code, at, row, count)
        return
    for i in range(count):
        write(address, code, at + i * step, get(row, i))


@jit
def _gate_row(p, c, batch, token, h, count):
    """g and beta of LANES heads of one token."""
    row = c.y
    if p.a != 0:
        _gate_in(row, p.a, p.a_code, batch * p.a_b + token * p.a_t + h * p.a_h, p.a_h, count)
        store(row, 0, vsoftplus(load(row, 0) + load(c.bias, 0)) * load(c.weight, 0))
        _gate_out(p.g, p.g_code, batch * p.g_b + token * p.g_t + h * p.g_h, p.g_h, row, count)
    if p.b != 0:
        _gate_in(row, p.b, p.b_code, batch * p.b_b + token * p.b_t + h * p.b_h, p.b_h, count)
        strength = vsigmoid(load(row, 0))
        store(row, 0, strength + strength if p.double else strength)
        at = batch * p.beta_b + token * p.beta_t + h * p.beta_h
        _gate_out(p.beta, p.beta_code, at, p.beta_h, row, count)


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
    seq, t0 = locate(p, unit, p.unit_t)
    batch, start, T = span(p, seq)
    padding, _read, _write = state_rows(p, seq)
    if p.cu != 0 and seq == p.N - 1 and t0 == 0:
        _zero_gates(p, 0, start + T, p.T - start - T)
    if padding:
        _zero_gates(p, batch, start + t0, min(p.unit_t, T - t0))
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
        for t in range(t0, min(t0 + p.unit_t, T)):
            _gate_row(p, c, batch, start + t, h, count)


def conv_qkv_kernel(block):
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
    fence()
    release(memory)


KERNEL = Kernel("conv_qkv", conv_qkv_kernel)


def bind(spec: ConvQkvSpec) -> Launch:
    """A launch of ``conv_qkv``."""
    each_k, each_v = (max(CHANNELS // d, 1) if d % LANES == 0 else 1 for d in (spec.K, spec.V))
    blocks = 2 * -(-spec.HK // each_k) + -(-spec.HV // each_v)
    share, elements = share_units(spec, blocks + 1), math.prod(spec.x.shape)
    launch = bind_kernel(KERNEL, spec, share, values.conv, elements)
    return with_zeros(launch, spec, "q", "k", "v", "g", "beta")
