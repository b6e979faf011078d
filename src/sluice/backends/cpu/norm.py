"""Gated RMSNorm over vectors: norm first, gate after, rounded once.

y = weight x / sqrt(mean x^2 + eps) act(z)

Vectors of V elements are counted over three dimensions. Where leading dimensions cannot be seen as
three, inputs are copied before, and the output after.
"""

from __future__ import annotations

import math

from sluice.backends import Launch
from sluice.backends.cpu.jit import jit, jit_inline
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import Share, bind_fields, with_copies
from sluice.backends.cpu.llvm import BF16, F16, F32, LANES
from sluice.backends.cpu.memory import allocate, release
from sluice.backends.cpu.params import PARAMS, constants, describe, sources_of
from sluice.backends.cpu.scratch_rows import (
    deal_row,
    load_row,
    read,
    round_up,
    store_row,
    sum_squares,
)
from sluice.backends.cpu.simd import fma, load, pointer, put, splat, store
from sluice.backends.cpu.threads import tasks_of
from sluice.backends.cpu.tiles import load_rows, load_runs, pair, pick, store_runs, total
from sluice.backends.cpu.vmath import vsigmoid, vsilu
from sluice.contract.meta import Meta
from sluice.contract.spec import NormSpec

PAIR = 2 * LANES
VECTORS = 16
"""Vectors per task at most."""

view = PARAMS.view


@jit
def load_norm_weight(p, weight):
    """The weight as float32, padded with zeros."""
    for i in range(round_up(p.V, LANES)):
        put(weight, i, read(p.norm, p.norm_code, i * p.norm_d) if i < p.V else 0.0)


@jit_inline
def _gate(z, sigmoid):
    return vsigmoid(z) if sigmoid else vsilu(z)


@jit
def gated_norm(p, x, z, weight):
    """Replace the row x by its gated norm; x and z are float32, padded with zeros."""
    n = round_up(p.V, LANES)
    factor = 1.0 / math.sqrt(sum_squares(x, n) / p.V + p.eps)
    for i in range(0, n, LANES):
        gate = _gate(load(z, i), p.sigmoid)
        store(x, i, load(weight, i) * (load(x, i) * factor) * gate)


@jit
def _norm_in_place(p, x, z, o, weight):
    """The same from memory to memory, for whole pairs of vectors; bfloat16 and weight are dealt."""
    acc = splat(0.0)
    for i in range(0, p.V, PAIR):
        both = load_runs(x, i, 0, 1, 2)
        acc = fma(pick(both, 0), pick(both, 0), acc)
        acc = fma(pick(both, 1), pick(both, 1), acc)
    factor = 1.0 / math.sqrt(total(acc) / p.V + p.eps)
    for i in range(0, p.V, PAIR):
        both, gates = load_runs(x, i, 0, 1, 2), load_runs(z, i, 0, 1, 2)
        by = load_rows(weight, i, LANES, 2)
        first = pick(by, 0) * (pick(both, 0) * factor) * _gate(pick(gates, 0), p.sigmoid)
        second = pick(by, 1) * (pick(both, 1) * factor) * _gate(pick(gates, 1), p.sigmoid)
        store_runs(o, i, 0, pair(first, second), 1, 0)


@jit
def _is_direct(p):
    return p.V % PAIR == 0 and p.z_code == p.io and p.io != F16


@jit
def task(p, w, first, count):
    """Rows `first` to `first + count`; rows are counted over three dimensions."""
    n = round_up(p.V, LANES)
    x, z, weight = w, w + n, w + 2 * n
    direct = _is_direct(p)
    for row in range(first, first + count):
        a, b, c = row // (p.HV * p.HK), row // p.HV % p.HK, row % p.HV
        x_at = a * p.q_b + b * p.q_t + c * p.q_h
        z_at = a * p.z_b + b * p.z_t + c * p.z_h
        o_at = a * p.o_b + b * p.o_t + c * p.o_h
        if direct and p.io == F32:
            x_row, z_row = pointer(p.q, F32) + x_at, pointer(p.z, F32) + z_at
            _norm_in_place(p, x_row, z_row, pointer(p.o, F32) + o_at, weight)
        elif direct:
            x_half, z_half = pointer(p.q, BF16) + x_at, pointer(p.z, BF16) + z_at
            _norm_in_place(p, x_half, z_half, pointer(p.o, BF16) + o_at, weight)
        else:
            load_row(x, p.q, p.io, x_at, p.V)
            load_row(z, p.z, p.z_code, z_at, p.V)
            gated_norm(p, x, z, weight)
            store_row(p.o, p.io, o_at, x, p.V)


def norm_kernel(block):
    p = view(block)
    n = round_up(p.V, LANES)
    memory = allocate(3 * n * 4 + 64)
    w = pointer(round_up(memory, 64), F32)
    load_norm_weight(p, w + 2 * n)
    if p.io == BF16 and _is_direct(p):
        deal_row(w + 2 * n, w + 2 * n, n)
    for i in tasks_of(p):
        task(p, w, i * p.unit_t, min(p.unit_t, p.N - i * p.unit_t))
    release(memory)


KERNEL = Kernel("rms_norm_gated", norm_kernel)


def share_vectors(count: int) -> Share:
    """Vectors per task: fewer where threads would have none."""

    def share(threads: int) -> dict[str, int]:
        each = min(VECTORS, -(-count // threads))
        return {"tasks": -(-count // each), "unit_t": each}

    return share


def bind(spec: NormSpec) -> Launch:
    """A launch of ``rms_norm_gated``."""
    if spec.vectors == 0:
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
    launch = bind_fields(KERNEL, PARAMS, values, sources, share_vectors(spec.vectors))
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
