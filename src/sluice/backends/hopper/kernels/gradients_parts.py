"""What the groups of hopper_gradients_kernel share: tiles, numbers per token, masks, and gradients.

Numbers per token are loaded where they are used. The first such load brings them into the L1 cache.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from sluice.backends.hopper.kernels.constants import COPY_WIDTH, C
from sluice.backends.hopper.kernels.layouts import accumulator

# Tiles of a head
DO = gl.constexpr(0)
E = gl.constexpr(1)
Y = gl.constexpr(2)
STATE = gl.constexpr(0)
DSTATE = gl.constexpr(1)


@gluon.jit
def rows_of(tiles, place, row: gl.constexpr, half: gl.constexpr):
    """Half of the columns of dO, E or Y: [C, V / 2]."""
    return tiles.rows.index(6 * place + 3 * half + row)


@gluon.jit
def state_of(tiles, nothing, state: gl.constexpr, half: gl.constexpr):
    """Half of the rows of S or dS: [V / 2, K]."""
    return tiles.states.index(2 * half + state + nothing)


@gluon.jit
def low_e(tiles, half: gl.constexpr, nothing):
    """Where the low terms of E lie: half of their columns."""
    return tiles.rows.index(6 + half + nothing)


@gluon.jit
def low_y(tiles, half: gl.constexpr, nothing):
    """Where the low terms of Y lie."""
    return tiles.rows.index(8 + half + nothing)


@gluon.jit
def low_n(tiles, nothing):
    """Where the low term of N lies."""
    return tiles.rows.index(10 + nothing)


@gluon.jit
def key_columns(smem, half: gl.constexpr):
    """Half of the key columns of a tile: products of 64 columns leave registers for the sums."""
    return smem.slice(half * COPY_WIDTH, COPY_WIDTH, 1)


@gluon.jit
def multiply_state(
    tiles, place, nothing, row: gl.constexpr, state: gl.constexpr, half: gl.constexpr
):  # fmt: skip
    """Start dO, E or Y [C, V] times half of the key columns of S or dS."""
    x = gl.zeros([C, COPY_WIDTH], gl.float32, accumulator(COPY_WIDTH))
    right = key_columns(state_of(tiles, nothing, state, 0), half)
    x = warpgroup_mma(rows_of(tiles, place, row, 0), right, x, use_acc=False, is_async=True)
    right = key_columns(state_of(tiles, nothing, state, 1), half)
    return warpgroup_mma(rows_of(tiles, place, row, 1), right, x, is_async=True)


@gluon.jit
def wait_for_keys(barriers, count, number):
    """Wait for queries and keys; in a short chunk also for the zeros that the queries put there."""
    mbarrier.wait(barriers.keys_loaded, number & 1)
    if count < C:
        mbarrier.wait(barriers.keys_ready, number & 1)


@gluon.jit
def per_token(ptr, at, count, layout: gl.constexpr):
    """One number per token of a chunk, from ``at`` on; 0 after its ``count`` tokens."""
    offs = gl.arange(0, C, layout)
    return gl.load(ptr + at + offs, mask=offs < count, other=0.0)


@gluon.jit
def nothing_of(x):
    """0 for x >= 0, but the compiler cannot know that.

    Added to the index of a tile, it makes the compiler compute a product's descriptor where the
    product is. Otherwise the descriptors of all products would stay in registers: from head to
    head if the index is the same for all heads, or from one half of the columns to the other.
    """
    return x >> 31


@gluon.jit
def square(columns_smem):
    """Rows i and columns j of a product [C, C].

    The columns are loaded. If they were computed, the compiler would keep them, or masks made from
    them, in registers from head to head.
    """
    layout: gl.constexpr = accumulator(C)
    i = gl.arange(0, C, gl.SliceLayout(1, layout))
    j = columns_smem.load(gl.SliceLayout(0, layout))
    return gl.expand_dims(i, 1), gl.expand_dims(j, 0)


@gluon.jit
def load_keys(smem, half: gl.constexpr):
    """Half of the key columns of Q or K, in float32."""
    return key_columns(smem, half).load(accumulator(COPY_WIDTH)).to(gl.float32)


@gluon.jit
def without_norm(dx_0, dx_1, x_smem, r_ptr, stride_r, count):
    """The gradient by x of r times the one by x̂ = r x."""
    rows = gl.arange(0, C, gl.SliceLayout(1, accumulator(COPY_WIDTH)))
    r = gl.load(r_ptr + rows * stride_r, mask=rows < count, other=0.0)
    along = gl.sum(dx_0 * load_keys(x_smem, 0), axis=1)
    along = (along + gl.sum(dx_1 * load_keys(x_smem, 1), axis=1)) * r * r
    dx_0 = dx_0 - load_keys(x_smem, 0) * gl.expand_dims(along, 1)
    dx_1 = dx_1 - load_keys(x_smem, 1) * gl.expand_dims(along, 1)
    return dx_0, dx_1


@gluon.jit
def store_gradient(ptr, dx_0, dx_1, count, stride_t):
    """Store a gradient [C, K] in two halves."""
    layout: gl.constexpr = accumulator(COPY_WIDTH)
    rows = gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.expand_dims(gl.arange(0, COPY_WIDTH, gl.SliceLayout(0, layout)), 0)
    at = gl.expand_dims(rows * stride_t, 1) + columns
    mask = gl.expand_dims(rows < count, 1) & (columns < COPY_WIDTH)
    gl.store(ptr + at, dx_0.to(ptr.dtype.element_ty), mask=mask)
    gl.store(ptr + COPY_WIDTH + at, dx_1.to(ptr.dtype.element_ty), mask=mask)
