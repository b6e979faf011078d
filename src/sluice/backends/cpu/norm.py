"""Gated RMSNorm over vectors: norm first, gate after, rounded once.

y = weight x / sqrt(mean x^2 + eps) act(z)

Vectors of V elements are counted over three dimensions. Where leading dimensions cannot be seen as
three, inputs are copied before, and the output after.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sluice.backends import Launch
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import bind_fields, with_copies
from sluice.backends.cpu.llvm import F32, LANES
from sluice.backends.cpu.memory import allocate, release
from sluice.backends.cpu.params import PARAMS, constants, describe, sources_of
from sluice.backends.cpu.scratch_rows import load_row, read, round_up, store_row, sum_squares
from sluice.backends.cpu.simd import load, pointer, put, store
from sluice.backends.cpu.threads import tasks_of
from sluice.backends.cpu.vmath import vsigmoid, vsilu
from sluice.contract.meta import Meta
from sluice.contract.spec import NormSpec

VECTORS = 16
"""Vectors per task."""

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
        for i in tasks_of(p):
            task(p, w, i * VECTORS, min(VECTORS, p.N - i * VECTORS))
        release(memory)

    return norm_kernel


KERNEL = Kernel("rms_norm_gated", _make)


def bind(spec: NormSpec) -> Launch:
    """A launch of ``rms_norm_gated``."""
    tasks = -(-spec.vectors // VECTORS)
    if tasks == 0:
        return lambda tensors: None
    values, sources, copied = constants(spec), {}, {}
    for field, name in sources_of(spec).items():
        meta, index = getattr(spec, name), spec.TENSORS.index(name)
        if field != "norm":
            joined = _joined(meta)
            if joined is None:
                copied[index] = meta
                joined = _joined(meta.new_empty(*meta.shape))
            meta = joined
            values |= {"HK": meta.shape[1], "HV": meta.shape[2]}
        values |= describe(field, meta)
        sources[field] = index
    launch = bind_fields(KERNEL, PARAMS, values, sources, lambda threads: {"tasks": tasks})
    return with_copies(launch, copied, spec.TENSORS.index("out")) if copied else launch


def _joined(meta: Meta) -> Meta | None:
    """[..., V] as [a, b, c, V]; None if leading dimensions lie so that they cannot be joined."""
    while meta.dim() < 4:
        meta = meta.unsqueeze(0)
    *leading, b, c, V = meta.shape
    step = 0
    for i in range(len(leading) - 1, -1, -1):
        if meta.shape[i] == 1:
            continue
        if step == 0:
            step = span = meta.strides[i]
        elif meta.strides[i] != span:
            return None
        span *= meta.shape[i]
    return meta._replace(shape=(math.prod(leading), b, c, V), strides=(step, *meta.strides[-3:]))
