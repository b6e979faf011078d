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
    deal_factors,
    load_row,
    read,
    round_up,
    store_row,
    sum_squares,
)
from sluice.backends.cpu.simd import fma, load, pointer, put, splat, store
from sluice.backends.cpu.threads import tasks_of
from sluice.backends.cpu.tiles import (
    load_rows,
    load_runs,
    pair,
    pick,
    store_rows,
    store_runs,
    total,
)
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


@jit_inline
def _at(row, a, b, c, p):
    """The first element of a row; rows are counted over three dimensions of these strides."""
    return row // (p.HV * p.HK) * a + row // p.HV % p.HK * b + row % p.HV * c


@jit_inline
def _squares(acc, both):
    return fma(pick(both, 1), pick(both, 1), fma(pick(both, 0), pick(both, 0), acc))


@jit
def _gates(p, z, gates):
    """act(z) of one row, to scratch memory: a loop of its own, whose constants are in registers."""
    if p.sigmoid:
        for i in range(0, p.V, PAIR):
            both = load_runs(z, i, 0, 1, 2)
            store_rows(gates, i, LANES, pair(vsigmoid(pick(both, 0)), vsigmoid(pick(both, 1))))
    else:
        for i in range(0, p.V, PAIR):
            both = load_runs(z, i, 0, 1, 2)
            store_rows(gates, i, LANES, pair(vsilu(pick(both, 0)), vsilu(pick(both, 1))))


@jit
def _in_place(p, x, z, o, weight, gates, first, count):
    """Rows from memory to memory, of whole pairs of vectors; bfloat16 and weight are dealt, so
    that a NaN stays one when it is rounded (`deal_factors`).

    The squares of the next row are added up meanwhile: a sum alone waits for its own additions.
    """
    acc, at = splat(0.0), _at(first, p.q_b, p.q_t, p.q_h, p)
    for i in range(0, p.V, PAIR):
        acc = _squares(acc, load_runs(x, at + i, 0, 1, 2))
    for row in range(first, first + count):
        factor = 1.0 / math.sqrt(total(acc) / p.V + p.eps)
        acc = splat(0.0)
        _gates(p, z + _at(row, p.z_b, p.z_t, p.z_h, p), gates)
        to = o + _at(row, p.o_b, p.o_t, p.o_h, p)
        after = _at(min(row + 1, first + count - 1), p.q_b, p.q_t, p.q_h, p)
        for i in range(0, p.V, PAIR):
            both, gate = load_runs(x, at + i, 0, 1, 2), load_rows(gates, i, LANES, 2)
            by = load_rows(weight, i, LANES, 2)
            acc = _squares(acc, load_runs(x, after + i, 0, 1, 2))
            one = pick(by, 0) * (pick(both, 0) * factor) * pick(gate, 0)
            two = pick(by, 1) * (pick(both, 1) * factor) * pick(gate, 1)
            store_runs(to, i, 0, pair(one, two), 1, 1)
        at = after


@jit
def _is_direct(p):
    return p.V % PAIR == 0 and p.z_code == p.io and p.io != F16


@jit
def task(p, w, first, count):
    """Rows `first` to `first + count`."""
    n = round_up(p.V, LANES)
    x, z, weight = w, w + n, w + 2 * n
    if _is_direct(p) and p.io == F32:
        values, gates = pointer(p.q, F32), pointer(p.z, F32)
        _in_place(p, values, gates, pointer(p.o, F32), weight, z, first, count)
    elif _is_direct(p):
        halves, half_gates = pointer(p.q, BF16), pointer(p.z, BF16)
        _in_place(p, halves, half_gates, pointer(p.o, BF16), weight, z, first, count)
    else:
        for row in range(first, first + count):
            load_row(x, p.q, p.io, _at(row, p.q_b, p.q_t, p.q_h, p), p.V)
            load_row(z, p.z, p.z_code, _at(row, p.z_b, p.z_t, p.z_h, p), p.V)
            gated_norm(p, x, z, weight)
            store_row(p.o, p.io, _at(row, p.o_b, p.o_t, p.o_h, p), x, p.V)


def norm_kernel(block):
    p = view(block)
    n = round_up(p.V, LANES)
    memory = allocate(3 * n * 4 + 64)
    w = pointer(round_up(memory, 64), F32)
    load_norm_weight(p, w + 2 * n)
    if p.io == BF16 and _is_direct(p):
        deal_factors(w + 2 * n, n)
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
