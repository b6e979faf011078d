"""Register layouts, and what follows from one."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def accumulator(N):
    """The layout of a product [64, N] of a warpgroup: 16 rows per warp."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])


@gluon.constexpr_function
def left_operand(N):
    """The layout of the left operand of a product [64, N], when it comes from registers."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator(N), k_width=2)


@gluon.constexpr_function
def axis_layout(layout, axis, rank):
    """The layout of numbers along one axis of ``layout``."""
    for other in reversed(range(rank)):
        layout = layout if other == axis else gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def along(axis: gl.constexpr, size: gl.constexpr, layout: gl.constexpr, rank: gl.constexpr):
    """0 to size - 1 along one axis of ``layout``; the other axes have length 1."""
    x = gl.arange(0, size, axis_layout(layout, axis, rank))
    for other in gl.static_range(rank):
        if other != axis:
            x = gl.expand_dims(x, other)
    return x
