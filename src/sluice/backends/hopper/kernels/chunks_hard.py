"""Hard chunks of hopper_chunks_kernel: which chunks are hard, and their Ag in float16.

Where keys nearly repeat, O and the state are sums that nearly cancel, and errors of Ag that are
alike from token to token add up (docs/numerics.md, benchmarks/prefill_rounding.py).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sluice.backends.hopper.kernels.chunks_inverse import side_by_side


@gluon.jit
def keys_repeat(kks, NORMALIZE_QK: gl.constexpr):
    """Whether the 64 keys of a chunk nearly repeat, for each key head.

    They do if n + 2 p >= 192. Here p is the number of pairs i > j with |k_i · k_j| > 0.9 m, n the
    number of keys with |k_i|² > 0.9 m, and m the largest |k|² of the chunk (1 for normalised keys).
    With keys of equal length n = 64, so 64 pairs make a chunk hard. Short keys add little, and with
    them more pairs are needed.

    Triton's kernels use a simpler rule, p >= 63 in a whole chunk. It marks slightly more chunks.
    """
    size = gl.abs(side_by_side(kks))
    least = 0.9
    if not NORMALIZE_QK:
        largest = gl.max(gl.max(size, axis=1), axis=0)
        least = gl.expand_dims(gl.expand_dims(largest, 0), 1) * 0.9
    return gl.sum(gl.sum((size > least).to(gl.int32), axis=1), axis=0) >= 192


@gluon.jit
def float16_block(ag, g2, row, DECAY: gl.constexpr):
    """A block [16, 16] of Ag times 2⁸ in float16.

    Its last row takes back the rounding errors of the rows above it, decayed to that row. So the
    errors of a column cancel.
    """
    ag = gl.minimum(gl.maximum(ag * 256.0, -65504.0), 65504.0)
    error = ag - ag.to(gl.float16).to(gl.float32)
    if DECAY:
        g2_last = gl.sum(gl.where(row == 15, g2, 0.0), axis=2)
        error = error * gl.exp2(gl.expand_dims(g2_last, 2) - g2)
    error = gl.sum(gl.where(row == 15, 0.0, error), axis=2)
    return gl.where(row == 15, ag + gl.expand_dims(error, 2), ag).to(gl.float16)
