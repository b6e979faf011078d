"""Depthwise causal convolution over tokens.

One task is a unit: some tokens of a block of channels of one sequence, `p.unit_t` at most. The
first tokens of a sequence, odd shapes and transposed inputs go through lines (conv_lines.py), all
others straight from memory to memory (conv_rows.py).
"""

from __future__ import annotations

import math

from sluice.backends import Launch
from sluice.backends.cpu.addressing import NOWHERE, locate, span, state_rows
from sluice.backends.cpu.conv_lines import (
    TOKENS,
    convolve,
    front_lines,
    keep_windows,
    load_lines,
    load_pass,
    load_weights,
    load_window,
    make_lines,
    start_window,
    store_lines,
    store_window,
)
from sluice.backends.cpu.conv_rows import GROUP, convolve_rows, deal_taps, serves_rows
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import Share, with_zeros
from sluice.backends.cpu.launch import bind as bind_kernel
from sluice.backends.cpu.llvm import ELEMENT_BYTES, F16, LANES
from sluice.backends.cpu.memory import fence, release
from sluice.backends.cpu.params import PARAMS
from sluice.backends.cpu.scratch_rows import fill, read_index, round_up
from sluice.backends.cpu.threads import tasks_of
from sluice.contract import values
from sluice.contract.spec import ConvQkvSpec, ConvSpec

CHANNELS = 512  # of a block: half a page of float32 tokens
UNIT_T = 64  # tokens of a unit, where that leaves every thread some of them

view = PARAMS.view


@jit
def _zero_lines(p, c, batch, start, tokens, first, count):
    for t in range(TOKENS):
        fill(c.y + t * c.width, round_up(count, LANES), 0.0)
    for t0 in range(0, tokens, TOKENS):
        at = batch * p.y_b + (start + t0) * p.y_t + first * p.y_d
        store_lines(p, c, at, min(TOKENS, tokens - t0), count)


@jit
def in_order(p, i, blocks):
    """The unit and the block of task i: tasks go along the dimension of x that is contiguous."""
    if p.x_d == 1:
        return i // blocks, i % blocks
    units = p.tasks // blocks
    return i % units, i // units


@jit
def after_pass(p, at, t0, t, end, count):
    """The element of x that is needed after the tokens before t: the next token's, or channel's."""
    return at + t * p.x_t if t < end else at + t0 * p.x_t + count


@jit
def _pass(p, c, read, at, out, t, m, first, count):
    """Tokens t to t + m through lines."""
    size, to = ELEMENT_BYTES[p.io], out + t * p.y_t
    load_pass(p, c, read, at, t, m, first, count)
    soon = p.x + (at + t * p.x_t + count * p.x_d) * size
    convolve(p, c, m, count, soon, p.x_t, p.y + to * size, p.y_t)
    store_lines(p, c, to, m, count)


@jit
def task(p, c, unit, first):
    """The channels from `first` on of one unit."""
    seq, t0 = locate(p, unit, p.unit_t)
    batch, start, T = span(p, seq)
    count, end = min(CHANNELS, p.D - first), min(t0 + p.unit_t, T)
    if p.cu != 0 and seq == p.N - 1 and t0 == 0:
        _zero_lines(p, c, 0, start + T, p.T - start - T, first, count)
    if end <= t0 and t0 > 0:
        return
    padding, read, write = state_rows(p, seq)
    start_window(p, c, seq)
    if padding:
        _zero_lines(p, c, batch, start + t0, end - t0, first, count)
        return
    at = batch * p.x_b + start * p.x_t + first * p.x_d
    out = batch * p.y_b + start * p.y_t + first * p.y_d
    load_weights(p, c, 0, first, count)
    t = t0
    if t0 == 0:
        t = min(TOKENS, end)
        _pass(p, c, read, at, out, 0, t, first, count)
        keep_windows(p, c, seq, read, write, at, T, first, count)
    direct, straight = serves_rows(p, count), p.io != F16 and p.y_d == 1
    if direct:
        deal_taps(p, c, count)
    while t < end:
        m = min(TOKENS, end - t)
        after, to = after_pass(p, at, t0, t + m, end, count), out + t * p.y_t
        if direct and m >= GROUP:
            address = p.y + to * ELEMENT_BYTES[p.io]
            convolve_rows(p, c, at, t, m, count, after, address, p.y_t, not straight)
            if not straight:
                store_lines(p, c, to, m, count)
        else:
            if direct:  # the last tokens of a sequence
                load_weights(p, c, 0, first, count)
            _pass(p, c, read, at, out, t, m, first, count)
        t += m


@jit
def roll_task(p, c, layer, token, seq, first):
    """The window of some channels moved on by the accepted tokens of a draft.

    `token` is the draft's at which the sequence's begin; only buffers have it.
    """
    count = min(CHANNELS, p.D - first)
    padding, read, write = state_rows(p, seq)
    if padding or write == NOWHERE:
        return
    batch, start, _ = span(p, seq)
    at = batch * p.x_b + start * p.x_t
    if p.buffered:
        at = token * p.x_t
    c.base = layer * p.conv_layer
    m = read_index(p.accepted, p.accepted_wide, seq)
    load_window(p, c, 0, read, first, count, read == NOWHERE)
    load_lines(p, c, c.front, 0, at + first * p.x_d, m, count)
    store_window(p, c, 0, m, write, first, count)


def blocks_of(D: int) -> int:
    """Tasks for D channels of a sequence."""
    return -(-D // CHANNELS)


def share_units(p: ConvSpec | ConvQkvSpec, blocks: int) -> Share:
    """Units of `blocks` tasks that cover all sequences, one each at least: see `locate`."""

    def units(size: int) -> int:
        return p.T // size + p.N if p.varlen else p.N * max(-(-p.T // size), 1)

    def share(threads: int) -> dict[str, int]:
        size = UNIT_T if units(UNIT_T) * blocks >= 8 * threads else TOKENS
        return {"tasks": units(size) * blocks, "unit_t": size}

    return share


def conv_kernel(block):
    p = view(block)
    c, memory = make_lines(CHANNELS, front_lines(p), p.W)
    blocks = (p.D + CHANNELS - 1) // CHANNELS
    for i in tasks_of(p):
        unit, index = in_order(p, i, blocks)
        task(p, c, unit, index * CHANNELS)
    fence()
    release(memory)


KERNEL = Kernel("causal_conv1d", conv_kernel)


def bind(spec: ConvSpec) -> Launch:
    """A launch of ``causal_conv1d``."""
    share, elements = share_units(spec, blocks_of(spec.D)), math.prod(spec.x.shape)
    launch = bind_kernel(KERNEL, spec, share, values.conv, elements)
    return with_zeros(launch, spec, "out")
