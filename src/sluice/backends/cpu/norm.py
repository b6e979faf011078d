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
    pick,
    store_runs,
    total,
)
from sluice.backends.cpu.vmath import ROWS, sigmoid_rows, silu_rows, vsigmoid, vsilu
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
    even = b == p.HV * c and (a == p.HK * b or p.N <= p.HV * p.HK)
    if even:  # a division takes as long as a vector of results
        return row * c
    return row // (p.HV * p.HK) * a + row // p.HV % p.HK * b + row % p.HV * c


@jit_inline
def _squares(acc, both):
    return fma(pick(both, 1), pick(both, 1), fma(pick(both, 0), pick(both, 0), acc))


@jit
def _gates(p, z, at, after, gates):
    """act(z) of ROWS rows, from elements `at` and `after` on, to scratch memory: a loop of its own,
    whose constants are in registers."""
    step, apart, apart_to = PAIR, after - at, p.V
    if ROWS == 2 and apart == p.V:  # one after the other: read in the order of addresses
        step, apart, apart_to = 2 * PAIR, PAIR, PAIR
    for i in range(0, p.V // PAIR * step, step):
        both = load_runs(z, at + i, apart, ROWS, 2)
        made = sigmoid_rows(both) if p.sigmoid else silu_rows(both)
        store_runs(gates, i, apart_to, made, ROWS, 1)


@jit_inline
def _scaled(x, at, factor, weight, gates, i):
    """A pair of results."""
    both, by = load_runs(x, at + i, 0, 1, 2), load_rows(weight, i, LANES, 2)
    return by * (both * factor) * load_rows(gates, i, LANES, 2)


@jit
def _in_place(p, x, z, o, weight, gates, first, count):
    """Rows from memory to memory, of whole pairs of vectors; bfloat16 and weight are dealt, so
    that a NaN stays one when it is rounded (`deal_factors`).

    The squares of the next row are added up meanwhile: a sum alone waits for its own additions.
    """
    last = first + count - 1
    acc, at = splat(0.0), _at(first, p.q_b, p.q_t, p.q_h, p)
    for i in range(0, p.V, PAIR):
        acc = _squares(acc, load_runs(x, at + i, 0, 1, 2))
    for row in range(first, first + count):
        factor = 1.0 / math.sqrt(total(acc) / p.V + p.eps)
        acc, made = splat(0.0), (row - first) % ROWS
        if made == 0:
            other = _at(min(row + ROWS - 1, last), p.z_b, p.z_t, p.z_h, p)
            _gates(p, z, _at(row, p.z_b, p.z_t, p.z_h, p), other, gates)
        to, gate = _at(row, p.o_b, p.o_t, p.o_h, p), gates + made * p.V
        after = _at(min(row + 1, last), p.q_b, p.q_t, p.q_h, p)
        for i in range(0, p.V, PAIR):
            acc = _squares(acc, load_runs(x, after + i, 0, 1, 2))
            store_runs(o, to + i, 0, _scaled(x, at, factor, weight, gate, i), 1, 1)
        at = after


@jit
def _is_direct(p):
    return p.V % PAIR == 0 and p.z_code == p.io and p.io != F16


@jit
def task(p, w, first, count):
    """Rows `first` to `first + count`."""
    n = round_up(p.V, LANES)
    x, z, weight = w, w + n, w + (1 + ROWS) * n
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
    memory = allocate((2 + ROWS) * n * 4 + 64)
    w = pointer(round_up(memory, 64), F32)
    weight = w + (1 + ROWS) * n
    load_norm_weight(p, weight)
    if p.io == BF16 and _is_direct(p):
        deal_factors(weight, n)
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
    vectors = values["N"]
    launch = bind_fields(
        KERNEL, PARAMS, values, sources, share_vectors(vectors), elements=vectors * spec.V
    )
    return with_copies(launch, copied, spec.TENSORS.index("out")) if copied else launch


def _joined(meta: Meta) -> Meta | None:
    """[..., V] as [a, b, c, V]; None if leading dimensions lie so that they cannot be joined."""
    while meta.dim() < 4:
        meta = meta.unsqueeze(0)
    shape, strides = meta.shape, meta.strides
    step = span = 0
    for size, stride in zip(reversed(shape[:-3]), reversed(strides[:-3]), strict=True):
        if size == 1:
            continue
        if step == 0:
            step = span = stride
        elif stride != span:
            return None
        span *= size
    joined = math.prod(shape[:-3])
    return Meta((joined, *shape[-3:]), (step, *strides[-3:]), meta.dtype, meta.device)
