"""What both groups of hopper_gradients_kernel need: numbers per token, and the store of a gradient.

They are loaded where they are used. The first load of a number brings its line into the L1 cache.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sluice.backends.hopper.kernels.constants import C
from sluice.backends.hopper.kernels.layouts import accumulator


@gluon.jit
def per_token(ptr, at, count, layout: gl.constexpr):
    """One number per token of a chunk, from ``at`` on; 0 after its ``count`` tokens."""
    offs = gl.arange(0, C, layout)
    return gl.load(ptr + at + offs, mask=offs < count, other=0.0)


@gluon.jit
def row_sums(x, y_smem):
    """Σ_c x_ic y_ic of each row of x [C, K], with y in shared memory."""
    return gl.sum(x * y_smem.load(x.type.layout).to(gl.float32), axis=1)


@gluon.jit
def store_gradient(ptr, dx, x_smem, r_ptr, stride_r, count, stride_t, K: gl.constexpr):
    """Store the gradient by x, of which ``dx`` [C, K] is r times the one by x̂ = r x."""
    acc: gl.constexpr = accumulator(K)
    rows = gl.arange(0, C, gl.SliceLayout(1, acc))
    columns = gl.arange(0, K, gl.SliceLayout(0, acc))
    if r_ptr is not None:
        r = gl.load(r_ptr + rows * stride_r, mask=rows < count, other=0.0)
        x = x_smem.load(acc).to(gl.float32)
        dx = dx - x * gl.expand_dims(gl.sum(dx * x, axis=1) * r * r, 1)
    at = gl.expand_dims(rows * stride_t, 1) + gl.expand_dims(columns, 0)
    mask = gl.expand_dims(rows < count, 1) & gl.expand_dims(columns < K, 0)
    gl.store(ptr + at, dx.to(ptr.dtype.element_ty), mask=mask)
