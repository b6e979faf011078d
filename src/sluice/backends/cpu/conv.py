"""Depthwise causal convolution over tokens, in lines of channels (conv_lines.py).

One task is a unit: a few tokens of a block of channels of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sluice.backends import Launch
from sluice.backends.cpu.addressing import NOWHERE, locate, span, state_rows
from sluice.backends.cpu.conv_lines import (
    TOKENS,
    convolve,
    front_lines,
    keep_windows,
    load_lines,
    load_unit,
    load_window,
    make_lines,
    store_lines,
    store_window,
)
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import bind as bind_kernel
from sluice.backends.cpu.launch import with_zeros
from sluice.backends.cpu.llvm import ELEMENT_BYTES, LANES
from sluice.backends.cpu.memory import release
from sluice.backends.cpu.params import PARAMS
from sluice.backends.cpu.scratch_rows import fill, read_index, round_up
from sluice.backends.cpu.threads import tasks_of
from sluice.contract import values
from sluice.contract.spec import ConvQkvSpec, ConvSpec

CHANNELS = 512  # of a block: half a page of float32 tokens

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
def task(p, c, unit, first):
    """The channels from `first` on of one unit."""
    seq, t0 = locate(p, unit, TOKENS)
    batch, start, T = span(p, seq)
    count, tokens = min(CHANNELS, p.D - first), min(TOKENS, T - t0)
    if p.cu != 0 and seq == p.N - 1 and t0 == 0:
        _zero_lines(p, c, 0, start + T, p.T - start - T, first, count)
    if tokens <= 0 and t0 > 0:
        return
    padding, read, write = state_rows(p, seq)
    if padding:
        _zero_lines(p, c, batch, start + t0, tokens, first, count)
        return
    at = batch * p.x_b + start * p.x_t + first * p.x_d
    load_unit(p, c, read, at, t0, tokens, first, count)
    size = ELEMENT_BYTES[p.io]
    out = batch * p.y_b + (start + t0) * p.y_t + first * p.y_d
    soon = p.x + (at + t0 * p.x_t + count * p.x_d) * size
    convolve(p, c, tokens, count, soon, p.x_t, p.y + out * size, p.y_t)
    store_lines(p, c, out, tokens, count)
    if t0 == 0:
        keep_windows(p, c, seq, read, write, at, T, first, count)


@jit
def roll_task(p, c, seq, first):
    """The window of some channels moved on by the accepted tokens of a draft."""
    count = min(CHANNELS, p.D - first)
    padding, read, write = state_rows(p, seq)
    if padding or write == NOWHERE:
        return
    batch, start, _ = span(p, seq)
    m = read_index(p.accepted, p.accepted_wide, seq)
    load_window(p, c, 0, read, first, count, read == NOWHERE)
    load_lines(p, c, c.front, 0, batch * p.x_b + start * p.x_t + first * p.x_d, m, count)
    store_window(p, c, 0, m, write, first, count)


def blocks_of(D: int) -> int:
    """Tasks for D channels of a sequence."""
    return -(-D // CHANNELS)


def units_of(p: ConvSpec | ConvQkvSpec) -> int:
    """Units that cover all sequences, each of which has one at least: see `locate`."""
    return p.T // TOKENS + p.N if p.varlen else p.N * max(-(-p.T // TOKENS), 1)


def _make(version: str) -> Callable[[Any], None]:
    def conv_kernel(block):
        _ = version
        p = view(block)
        c, memory = make_lines(CHANNELS, front_lines(p), p.W)
        blocks = (p.D + CHANNELS - 1) // CHANNELS
        for i in tasks_of(p):
            unit, index = in_order(p, i, blocks)
            task(p, c, unit, index * CHANNELS)
        release(memory)

    return conv_kernel


KERNEL = Kernel("causal_conv1d", _make)


def bind(spec: ConvSpec) -> Launch:
    """A launch of ``causal_conv1d``."""
    tasks = units_of(spec) * blocks_of(spec.D)
    launch = bind_kernel(KERNEL, spec, lambda threads: {"tasks": tasks}, values.conv)
    return with_zeros(launch, spec, "out")
