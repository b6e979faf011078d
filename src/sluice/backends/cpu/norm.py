"""Gated RMSNorm over vectors: norm first, gate after, rounded once.

y = weight x / sqrt(mean x^2 + eps) act(z)

Vectors of V elements are counted over three dimensions. Where leading dimensions cannot be seen as
three, inputs are copied before, and the output after.
"""

from __future__ import annotations

import math

from sluice.backends import Launch
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import Share, bind_fields, with_copies
from sluice.backends.cpu.llvm import BF16, F32, LANES
from sluice.backends.cpu.memory import allocate, release
from sluice.backends.cpu.params import PARAMS, constants, describe, sources_of
from sluice.backends.cpu.scratch_rows import load_row, read, round_up, store_row, sum_squares
from sluice.backends.cpu.simd import load, pointer, put, store
from sluice.backends.cpu.threads import tasks_of
from sluice.backends.cpu.vmath import vsigmoid, vsilu
from sluice.contract.meta import Meta
from sluice.contract.spec import NormSpec

VECTORS = 16
"""Vectors per task at most."""

view = PARAMS.view


@jit
def load_norm_weight(p, weight):
    """The weight as float32, padded with zeros."""
    for i in range(round_up(p.V, LANES)):
        put(weight, i, read(p.norm, p.norm_code, i * p.norm_d) if i < p.V else 0.0)


@jit
def gated_norm(p, x, z, o, weight):
    """The gated norm of the row x at o; rows are of any type, of whole vectors."""
    n = round_up(p.V, LANES)
    factor = 1.0 / math.sqrt(sum_squares(x, n) / p.V + p.eps)
    if p.sigmoid:
        for i in range(0, n, LANES):
            store(o, i, load(weight, i) * (load(x, i) * factor) * vsigmoid(load(z, i)))
    else:
        for i in range(0, n, LANES):
            store(o, i, load(weight, i) * (load(x, i) * factor) * vsilu(load(z, i)))


@jit
def task(p, w, first, count):
    """Rows `first` to `first + count`; rows are counted over three dimensions."""
    n = round_up(p.V, LANES)
    x, z, weight = w, w + n, w + 2 * n
    direct = n == p.V and p.z_code == p.io
    for row in range(first, first + count):
        a, b, c = row // (p.HV * p.HK), row // p.HV % p.HK, row % p.HV
        x_at = a * p.q_b + b * p.q_t + c * p.q_h
        z_at = a * p.z_b + b * p.z_t + c * p.z_h
        o_at = a * p.o_b + b * p.o_t + c * p.o_h
        if direct and p.io == F32:
            x_row, z_row = pointer(p.q, F32) + x_at, pointer(p.z, F32) + z_at
            gated_norm(p, x_row, z_row, pointer(p.o, F32) + o_at, weight)
        elif direct and p.io == BF16:
            x_half, z_half = pointer(p.q, BF16) + x_at, pointer(p.z, BF16) + z_at
            gated_norm(p, x_half, z_half, pointer(p.o, BF16) + o_at, weight)
        else:
            load_row(x, p.q, p.io, x_at, p.V)
            load_row(z, p.z, p.z_code, z_at, p.V)
            gated_norm(p, x, z, x, weight)
            store_row(p.o, p.io, o_at, x, p.V)


def norm_kernel(block):
    p = view(block)
    n = round_up(p.V, LANES)
    memory = allocate(3 * n * 4 + 64)
    w = pointer(round_up(memory, 64), F32)
    load_norm_weight(p, w + 2 * n)
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
