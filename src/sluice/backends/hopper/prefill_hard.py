"""Chunks whose keys nearly repeat, on Hopper: which they are, and their Ag in float16.

There O and the state are sums that nearly cancel, and errors of Ag that are alike from token to
token add up (docs/numerics.md, benchmarks/prefill_rounding.py).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sluice.backends.hopper.prefill_inverse import side_by_side


@gluon.jit
def repeating(kks, NORM: gl.constexpr):
    """Whether the keys of a chunk nearly repeat, for each key head.

    That is, 64 pairs or more have a cosine of about 0.9: each counts twice, and the diagonal once.
    Keys that are not normalised are measured against the longest: what is short adds little.
    """
    size = gl.abs(side_by_side(kks))
    least = 0.9
    if not NORM:
        largest = gl.max(gl.max(size, axis=1), axis=0)
        least = gl.expand_dims(gl.expand_dims(largest, 0), 1) * 0.9
    return gl.sum(gl.sum((size > least).to(gl.int32), axis=1), axis=0) >= 192


@gluon.jit
def in_float16(a, g_i, row, DECAY: gl.constexpr):
    """A block of Ag times 2⁸ in float16, its last row such that the errors of a column cancel.

    They weigh what is left of them at the block's end.
    """
    a = gl.minimum(gl.maximum(a * 256.0, -65504.0), 65504.0)
    error = a - a.to(gl.float16).to(gl.float32)
    if DECAY:
        g_end = gl.sum(gl.where(row == 15, g_i, 0.0), axis=2)
        error = error * gl.exp2(gl.expand_dims(g_end, 2) - g_i)
    error = gl.sum(gl.where(row == 15, 0.0, error), axis=2)
    return gl.where(row == 15, a + gl.expand_dims(error, 2), a).to(gl.float16)
