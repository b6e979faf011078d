"""Gated RMSNorm over rows: norm first, gate after, rounded once.

y = weight x / sqrt(mean x^2 + eps) act(z)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.launch import Kernel, claim, first_range
from sluice.backends.cpu.llvm import F32, LANES
from sluice.backends.cpu.memory import allocate, release
from sluice.backends.cpu.params import PARAMS, norm_block
from sluice.backends.cpu.rows import load_row, read, round_up, store_row, sum_squares
from sluice.backends.cpu.simd import load, pointer, put, store
from sluice.backends.cpu.vmath import vsigmoid, vsilu
from sluice.contract.problem import NormProblem
from sluice.contract.tensors import NormTensors

ROWS = 16  # rows a task takes

view = PARAMS.view


@jit
def load_norm_weight(p, weight):
    """The weight as float32, padded with zeros."""
    for i in range(round_up(p.V, LANES)):
        put(weight, i, read(p.norm, p.norm_code, i * p.norm_d) if i < p.V else 0.0)


@jit
def gated_norm(p, x, z, weight):
    """Replace the row x by its gated norm; x and z are float32, padded with zeros."""
    n = round_up(p.V, LANES)
    factor = 1.0 / math.sqrt(sum_squares(x, n) / p.V + p.eps)
    for i in range(0, n, LANES):
        gate = load(z, i)
        gate = vsigmoid(gate) if p.sigmoid else vsilu(gate)
        store(x, i, load(weight, i) * (load(x, i) * factor) * gate)


@jit
def task(p, w, first, count):
    """Rows `first` to `first + count`; rows are counted over three dimensions."""
    n = round_up(p.V, LANES)
    x, z, weight = w, w + n, w + 2 * n
    for row in range(first, first + count):
        a, b, c = row // (p.HV * p.HK), row // p.HV % p.HK, row % p.HV
        load_row(x, p.q, p.io, a * p.q_b + b * p.q_t + c * p.q_h, p.V)
        load_row(z, p.z, p.z_code, a * p.z_b + b * p.z_t + c * p.z_h, p.V)
        gated_norm(p, x, z, weight)
        store_row(p.o, p.io, a * p.o_b + b * p.o_t + c * p.o_h, x, p.V)


def _make(version: str) -> Callable[[Any], None]:
    def norm_kernel(block):
        _ = version
        p = view(block)
        n = round_up(p.V, LANES)
        memory = allocate(3 * n * 4 + 64)
        w = pointer(round_up(memory, 64), F32)
        load_norm_weight(p, w + 2 * n)
        own = first_range(p)
        for other in range(p.threads):
            part = (own + other) % p.threads
            i = claim(p, part)
            while i >= 0:
                task(p, w, i * ROWS, min(ROWS, p.N - i * ROWS))
                i = claim(p, part)
        release(memory)

    return norm_kernel


KERNEL = Kernel("rms_norm_gated", PARAMS, _make)


def rms_norm_gated(p: NormProblem, t: NormTensors) -> None:
    """Serve ``rms_norm_gated``."""
    x, z, out = (_four_dimensional(y) for y in (t.x, t.z, t.out))
    if out.data_ptr() != t.out.data_ptr():  # leading dimensions that no view can join
        t.out.copy_(_normed(p, t).view(t.out.shape))
        return
    KERNEL(norm_block(p, x, z, t.weight, out), -(-p.rows // ROWS))


def _normed(p: NormProblem, t: NormTensors) -> Tensor:
    out = t.out.new_empty(t.out.shape)
    rms_norm_gated(p, t._replace(out=out))
    return out


def _four_dimensional(x: Tensor) -> Tensor:
    """[a, b, c, V], a view where there is one."""
    if x.dim() <= 4:
        return x.view(*(1,) * (4 - x.dim()), *x.shape) if x.is_contiguous() else _widened(x)
    return x.reshape(-1, *x.shape[-3:])


def _widened(x: Tensor) -> Tensor:
    while x.dim() < 4:
        x = x.unsqueeze(0)
    return x
