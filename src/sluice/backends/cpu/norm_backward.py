"""The backward of the gated norm: dx and dz of some vectors, and their part of dweight.

With x̂ = ρ x and y = weight x̂ act(z):  dx̂ = weight act(z) dy,  dx = ρ (dx̂ − x̂ mean(x̂ dx̂)),
dz = weight x̂ act'(z) dy.  Each part of the vectors has a row of sums for dweight; torch adds the
rows. There are as many parts for any number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from sluice.backends import Launch
from sluice.backends.cpu.block import Fields
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import bind_fields
from sluice.backends.cpu.llvm import F32, LANES
from sluice.backends.cpu.memory import allocate, release
from sluice.backends.cpu.params import CODES
from sluice.backends.cpu.scratch_rows import fill, load_row, round_up, store_row, sum_squares
from sluice.backends.cpu.simd import fma, load, pointer, splat, store
from sluice.backends.cpu.threads import tasks_of
from sluice.backends.cpu.tiles import total
from sluice.backends.cpu.vmath import vsigmoid
from sluice.contract.backward import NormBackwardSpec

PARTS = 64
"""Parts of the vectors at most."""

FIELDS = Fields("norm_backward", "x z weight dy dx dz sums", "io z_code N V parts sigmoid", "eps")
view = FIELDS.view


@jit
def _vector(p, w, n, row):
    """One vector; adds to the sums of its part."""
    x, z, dy, weight, sums = w, w + n, w + 2 * n, w + 3 * n, w + 4 * n
    load_row(x, p.x, p.io, row * p.V, p.V)
    load_row(z, p.z, p.z_code, row * p.V, p.V)
    load_row(dy, p.dy, p.io, row * p.V, p.V)
    rho = 1.0 / math.sqrt(sum_squares(x, n) / p.V + p.eps)
    along = splat(0.0)
    for i in range(0, n, LANES):
        gate, unit, by = vsigmoid(load(z, i)), load(x, i) * rho, load(dy, i)
        act = gate if p.sigmoid != 0 else gate * load(z, i)
        slope = gate * (1.0 - gate)
        if p.sigmoid == 0:
            slope = gate * fma(load(z, i), 1.0 - gate, splat(1.0))
        store(sums, i, fma(unit, act * by, load(sums, i)))
        store(z, i, load(weight, i) * unit * slope * by)
        by = load(weight, i) * act * by
        along = fma(unit, by, along)
        store(x, i, unit)
        store(dy, i, by)
    mean = total(along) / p.V
    for i in range(0, n, LANES):
        store(dy, i, (load(dy, i) - load(x, i) * mean) * rho)
    store_row(p.dx, p.io, row * p.V, dy, p.V)
    store_row(p.dz, p.z_code, row * p.V, z, p.V)


def norm_backward_kernel(block):
    p = view(block)
    n = round_up(p.V, LANES)
    memory = allocate(5 * n * 4 + 64)
    w = pointer(round_up(memory, 64), F32)
    load_row(w + 3 * n, p.weight, F32, 0, p.V)
    for part in tasks_of(p):
        fill(w + 4 * n, n, 0.0)
        for row in range(part * p.N // p.parts, (part + 1) * p.N // p.parts):
            _vector(p, w, n, row)
        store_row(p.sums, F32, part * p.V, w + 4 * n, p.V)
    release(memory)


KERNEL = Kernel("norm_backward", norm_backward_kernel)


def bind(spec: NormBackwardSpec) -> Launch:
    """A launch of the backward of ``rms_norm_gated``."""
    parts = min(PARTS, spec.vectors)
    values = {
        "io": CODES[spec.dtype],
        "z_code": CODES[spec.z.dtype],
        "N": spec.vectors,
        "V": spec.V,
        "parts": parts,
        "sigmoid": spec.activation == "sigmoid",
        "eps": spec.eps,
    }
    sources = {name: i for i, name in enumerate(FIELDS.addresses)}
    run = bind_fields(KERNEL, FIELDS, values, sources, lambda threads: {"tasks": parts})

    def launch(tensors: Sequence[Any]) -> None:
        x, z, weight, dy, dx, dz, dweight = tensors
        with torch.no_grad():
            if parts == 0:
                dweight.zero_()
                return
            sums = torch.empty(parts, spec.V, dtype=torch.float32)
            weight = weight.to(torch.float32).contiguous()
            run([x.contiguous(), z.contiguous(), weight, dy.contiguous(), dx, dz, sums])
            dweight.copy_(sums.sum(0))

    return launch
