"""The backward of both convolutions: one task is a block of channels, or a head of conv_qkv.

A task goes over all sequences, each from its last tokens to its first, TOKENS at a time:

    z_t = bias + Σ_w weight_w x_(t − W + 1 + w),   dz = act'(z) dy
    dx_s = Σ_w weight_w dz_(s + W − 1 − w),   dweight_w = Σ_t dz_t x_(t − W + 1 + w)

So every sum has one task and one order. Heads of q and k pass through the l2 norm first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from sluice.backends import Launch
from sluice.backends.cpu.block import Fields
from sluice.backends.cpu.jit import jit, jit_inline
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import bind_fields
from sluice.backends.cpu.llvm import F32, LANES
from sluice.backends.cpu.memory import allocate, release
from sluice.backends.cpu.params import CODES
from sluice.backends.cpu.scratch_rows import (
    copy_row,
    fill,
    load_row,
    prefetch_row,
    read_index,
    round_up,
    store_row,
    sum_squares,
)
from sluice.backends.cpu.simd import fma, load, pointer, splat, store
from sluice.backends.cpu.threads import tasks_of
from sluice.backends.cpu.tiles import total
from sluice.backends.cpu.vmath import vsigmoid
from sluice.backends.reference import backward
from sluice.backends.reference.recurrence import L2_EPS, log_decay, write_strength
from sluice.contract.backward import ConvBackwardSpec, ConvQkvBackwardSpec

CHANNELS = 128
"""Channels of a task of causal_conv1d."""
TOKENS = 32
"""Tokens at a time."""

FIELDS = Fields(
    "conv_backward",
    "x weight bias state dy dk dv dwindow dx dweight dbias dstate cu",
    "x_b x_t cu_wide io T N D W L silu normalize heads HK K HV V",
    "eps",
)
view = FIELDS.view


@jit
def _dot(a, b, n):
    acc = splat(0.0)
    for i in range(0, n, LANES):
        acc = fma(load(a, i), load(b, i), acc)
    return total(acc)


@jit_inline
def _taps(dst, start, taps, rows, step, W, ld):
    """dst = start + Σ_w taps[w] rows[w step], for rows of ld elements; step is 1 or −1 row."""
    for i in range(0, ld, LANES):
        acc = load(start, i)
        for k in range(W):
            acc = fma(load(taps, k * ld + i), load(rows, k * step + i), acc)
        store(dst, i, acc)


@jit
def _add_products(dtaps, dbias, dz, xs, m, W, ld):
    """dtaps[w] += Σ_t dz[t] xs[t + w] and dbias += Σ_t dz[t], for m tokens."""
    for i in range(0, ld, LANES):
        acc = load(dbias, i)
        for t in range(i, m * ld, ld):
            acc = acc + load(dz, t)
        store(dbias, i, acc)
        for k in range(W):
            acc = load(dtaps, k * ld + i)
            for t in range(i, m * ld, ld):
                acc = fma(load(dz, t), load(xs, k * ld + t), acc)
            store(dtaps, k * ld + i, acc)


@jit
def _add(dst, a, n):
    for i in range(0, n, LANES):
        store(dst, i, load(dst, i) + load(a, i))


@jit
def _load_input(p, row, batch, start, seq, t, first, count, ld):
    """The input of token t, or of the window before the first."""
    fill(row, ld, 0.0)
    if t >= 0:
        load_row(row, p.x, p.io, batch * p.x_b + (start + t) * p.x_t + first, count)
    elif p.state != 0 and p.L + t >= 0:
        load_row(row, p.state, F32, (seq * p.L + p.L + t) * p.D + first, count)


@jit
def _through_norm(p, dy, y, n):
    """dy <- the gradient by y of y / sqrt(Σ y² + eps)."""
    rho = 1.0 / math.sqrt(sum_squares(y, n) + p.eps)
    along = rho * rho * _dot(dy, y, n)
    for i in range(0, n, LANES):
        store(dy, i, (load(dy, i) - load(y, i) * along) * rho)


@jit
def _activate(p, z, dy, y, ld, normalize):
    """dy <- dz, through the norm and the activation."""
    if normalize:
        if p.silu != 0:
            for i in range(0, ld, LANES):
                store(y, i, load(z, i) * vsigmoid(load(z, i)))
        else:
            copy_row(y, z, ld)
        _through_norm(p, dy, y, ld)
    if p.silu != 0:
        for i in range(0, ld, LANES):
            gate = vsigmoid(load(z, i))
            slope = gate * fma(load(z, i), 1.0 - gate, splat(1.0))
            store(dy, i, load(dy, i) * slope)


@jit
def _sequence(p, w, ld, seq, first, count, source, at, stride, normalize):
    """One sequence; `source` + `at` is where the gradient of its batch's first token lies."""
    batch, start, T = seq, 0, p.T
    if p.cu != 0:
        start = read_index(p.cu, p.cu_wide, seq)
        batch, T = 0, read_index(p.cu, p.cu_wide, seq + 1) - start
    before = p.W - 1
    taps, bias, dtaps = w, w + p.W * ld, w + (p.W + 1) * ld
    dbias, z, y = w + (2 * p.W + 1) * ld, w + (2 * p.W + 2) * ld, w + (2 * p.W + 3) * ld
    xs = w + (2 * p.W + 4) * ld
    dz = xs + (TOKENS + before) * ld
    zero = dz + (TOKENS + before) * ld
    fill(zero, ld, 0.0)
    for t in range(before):  # no token comes after the last
        fill(dz + t * ld, ld, 0.0)
    blocks = (T + TOKENS - 1) // TOKENS
    for block in range(blocks - 1, -1, -1):
        t0 = block * TOKENS
        m = min(TOKENS, T - t0)
        for t in range(before - 1, -1, -1):  # what the block after it has found
            copy_row(dz + (m + t) * ld, dz + t * ld, ld)
        for t in range(m + before):
            _load_input(p, xs + t * ld, batch, start, seq, t0 + t - before, first, count, ld)
        token = batch * p.T + start + t0
        for t in range(m):
            row = dz + t * ld
            if source == 0:
                fill(row, ld, 0.0)
                continue
            soon = token + t - TOKENS
            if block > 0:
                there = batch * p.x_b + (start + t0 + t - TOKENS - before) * p.x_t
                prefetch_row(p.x, p.io, there + first, count)
                prefetch_row(source, p.io, at + soon * stride, count)
                prefetch_row(p.dx, p.io, soon * p.D + first, count)
            _taps(z, bias, taps, xs + t * ld, ld, p.W, ld)
            fill(row + (ld - LANES), LANES, 0.0)
            load_row(row, source, p.io, at + (token + t) * stride, count)
            _activate(p, z, row, y, ld, normalize)
        _add_products(dtaps, dbias, dz, xs, m, p.W, ld)
        for t in range(m):
            _taps(z, zero, taps, dz + (t + before) * ld, -ld, p.W, ld)
            column = p.L - (T - (t0 + t))
            if p.dwindow != 0 and column >= 0:
                load_row(y, p.dwindow, F32, (seq * p.L + column) * p.D + first, count)
                _add(z, y, ld)
            store_row(p.dx, p.io, (token + t) * p.D + first, z, count)
    if p.dstate != 0:
        for column in range(p.L):
            fill(z, ld, 0.0)
            t = column - p.L
            for k in range(p.W):
                s = t + before - k
                if 0 <= s < min(T, TOKENS):
                    _taps(z, z, taps + k * ld, dz + s * ld, ld, 1, ld)
            if p.dwindow != 0 and column >= T:
                load_row(y, p.dwindow, F32, (seq * p.L + column - T) * p.D + first, count)
                _add(z, y, ld)
            store_row(p.dstate, F32, (seq * p.L + column) * p.D + first, z, count)


@jit
def task(p, w, i):
    """All sequences of one block of channels or one head."""
    first, count, source, at, stride = i * CHANNELS, CHANNELS, p.dy, i * CHANNELS, p.D
    normalize = False
    if p.heads == 0:
        count = min(CHANNELS, p.D - first)
    elif i < 2 * p.HK:
        first, count, stride = i * p.K, p.K, p.HK * p.K
        source, at = (p.dy, first) if i < p.HK else (p.dk, first - p.HK * p.K)
        normalize = p.normalize != 0
    else:
        at = (i - 2 * p.HK) * p.V
        first, count, source, stride = 2 * p.HK * p.K + at, p.V, p.dv, p.HV * p.V
    ld = round_up(count, LANES)
    fill(w, (2 * p.W + 2) * ld, 0.0)
    for k in range(p.W):
        load_row(w + k * ld, p.weight, F32, k * p.D + first, count)
    if p.bias != 0:
        load_row(w + p.W * ld, p.bias, F32, first, count)
    for seq in range(p.N):
        _sequence(p, w, ld, seq, first, count, source, at, stride, normalize)
    for k in range(p.W):
        store_row(p.dweight, F32, k * p.D + first, w + (p.W + 1 + k) * ld, count)
    store_row(p.dbias, F32, first, w + (2 * p.W + 1) * ld, count)


def conv_backward_kernel(block):
    p = view(block)
    widest = round_up(max(CHANNELS, max(p.K, p.V)), LANES)
    memory = allocate((2 * p.W + 5 + 2 * (TOKENS + p.W)) * widest * 4 + 64)
    w = pointer(round_up(memory, 64), F32)
    for i in tasks_of(p):
        task(p, w, i)
    release(memory)


KERNEL = Kernel("conv_backward", conv_backward_kernel)
_ORDER = FIELDS.addresses


def bind(spec: ConvBackwardSpec | ConvQkvBackwardSpec) -> Launch:
    """A launch of the backward of either convolution; weights and windows are turned in torch."""
    split = isinstance(spec, ConvQkvBackwardSpec)
    tasks = 2 * spec.HK + spec.HV if split else -(-spec.D // CHANNELS)
    dense = spec.x.strides[2] == 1 or spec.D == 1
    strides = spec.x.strides if dense else (spec.T * spec.D, spec.D, 1)
    values = {
        **{name: getattr(spec, name) for name in ("T", "N", "D", "W", "L", "silu")},
        **({name: getattr(spec, name) for name in ("HK", "K", "HV", "V")} if split else {}),
        "heads": split,
        "normalize": split and spec.normalize_qk,
        "x_b": strides[0],
        "x_t": strides[1],
        "cu_wide": spec.cu_seqlens is not None and spec.cu_seqlens.dtype == torch.int64,
        "io": CODES[spec.dtype],
        "eps": L2_EPS,
    }
    given = ["x", "weight", "dx", "dweight", "dbias"]
    given += ["bias"] if spec.bias is not None else []
    given += ["state", "dstate"] if spec.state is not None else []
    given += ["dy", "dk", "dv"] if split else ["dy"] if spec.dy is not None else []
    given += ["dwindow"] if not split and spec.dwindow is not None else []
    given += ["cu"] if spec.varlen else []
    sources = {name: _ORDER.index(name) for name in given}
    run = bind_fields(KERNEL, FIELDS, values, sources, lambda threads: {"tasks": tasks})

    def launch(tensors: Sequence[Any]) -> None:
        with torch.no_grad():
            _launch(spec, spec.views(tensors), run, split)

    return launch


def _launch(spec: Any, t: Any, run: Launch, split: bool) -> None:
    names = ("dx", "da", "db") if split else ("dx",)
    gates = ("a", "b", "dg", "dbeta") if split else ()
    _, cut = backward.without_tail(t, spec.T, gates, names)
    f32 = torch.float32
    state, dwindow = (
        None if y is None else y.to(f32).mT.contiguous()
        for y in (t.state, None if split else t.dwindow)
    )
    dweight, dbias = t.x.new_empty(spec.W, spec.D, dtype=f32), t.x.new_empty(spec.D, dtype=f32)
    dstate = None if state is None else torch.empty_like(state)
    known = {
        "x": t.x if spec.x.strides[2] == 1 else t.x.contiguous(),
        "weight": t.weight.to(f32).mT.contiguous(),
        "bias": None if t.bias is None else t.bias.to(f32).contiguous(),
        "state": state,
        "dy": t.dq if split else t.dy,
        "dk": t.dk if split else None,
        "dv": t.dv if split else None,
        "dwindow": dwindow,
        "dx": t.dx,
        "dweight": dweight,
        "dbias": dbias,
        "dstate": dstate,
        "cu": t.cu_seqlens,
    }
    run([known[name] for name in _ORDER])
    t.dweight.copy_(dweight.mT)
    if t.dbias is not None:
        t.dbias.copy_(dbias)
    if t.dstate is not None:
        t.dstate.copy_(dstate.mT)
    if split:
        g = beta = dg = dbeta = None
        if cut.a is not None:
            g, dg = log_decay(cut.a.to(f32), t.A_log, t.dt_bias), cut.dg.to(f32)
        if cut.b is not None:
            beta, dbeta = write_strength(cut.b.to(f32), spec.neg_eigval), cut.dbeta.to(f32)
        backward.gates(cut, g, beta, dg, dbeta, 2.0 if spec.neg_eigval else 1.0, ("a", "b"))
