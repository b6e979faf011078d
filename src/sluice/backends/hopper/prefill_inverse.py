"""The inverse of the parallel half of chunked prefill on Hopper: four value heads, a warp each.

Of (I + M)⁻¹, M = strictLower(diag(beta) K Kᵀ) [64, 64], by blocks of 16 x 16. M = D + N, D its four
blocks on the diagonal. X = (I + D)⁻¹ by forward substitution in float32, two columns of a block a
thread, so that a step is one multiply-add and no thread waits for another; then, with E = X N,

    A = (I - E)(I + E²) X                          E⁴ = 0

in float16 products with float32 sums, of the blocks that are not zero: E_ij for i > j, (E²)_ij for
i > j + 1. E is no small number, but E² already is a sum over 16 tokens of bounded terms, at most
two such sums long, so nothing cancels (docs/numerics.md); a series over single tokens would. The X
on the right is two terms: where keys repeat, its rounding would add up over tokens.

A warp has a head from beginning to end, in registers: an accumulator of a 16 x 16 product is laid
out as a left factor, and its transpose as a right one. Only K Kᵀ and X pass through shared memory.
"""

# ruff: noqa: RET505, RUF005 (what a kernel may not say, and constants decide)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


@gluon.constexpr_function
def by_warp(KH):
    """Where in [KH, 4 / KH, 16, 16] the bits of a warp's number lead."""
    return [[0, 1, 0, 0], [0, 2, 0, 0] if KH == 1 else [1, 0, 0, 0]]


@gluon.constexpr_function
def block_offsets(shape, second, third, turned=False):
    """The bits of an offset in [..., 16, 16] as steps along the axes, block by block.

    ``second``, ``third``: what the row's bits 1 and 2 lead to, as (row, column): a swizzle.
    ``turned``: block (i, j) of [4, 4, ...] lies at (i, i xor j), so (i, 0) is the diagonal.
    """
    lead = [0] * (len(shape) - 2)
    inner = [(0, 1), (0, 2), (0, 4), (0, 8), (1, 0), second, third, (8, 0)]
    offsets = [[*lead, row, column] for row, column in inner]
    for axis in reversed(range(len(shape) - 2)):
        step = 1
        while step < shape[axis]:
            basis = [0] * len(shape)
            basis[axis] = step
            if turned and axis == 0:
                basis[1] = step
            offsets.append(basis)
            step *= 2
    return offsets


@gluon.constexpr_function
def axis_of(layout, axis, rank):
    """The layout of numbers along one axis."""
    for other in reversed(range(rank)):
        layout = layout if other == axis else gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def along(axis: gl.constexpr, size: gl.constexpr, layout: gl.constexpr, rank: gl.constexpr):
    """0 to size - 1 along one axis of ``layout``, 1 long along the others."""
    x = gl.arange(0, size, axis_of(layout, axis, rank))
    for other in gl.static_range(rank):
        if other != axis:
            x = gl.expand_dims(x, other)
    return x


@gluon.jit
def side_by_side(X):
    """One or two [64, 64] as [64, 64, 1 or 2]."""
    if len(X) == 1:
        return gl.reshape(X[0], [64, 64, 1])
    else:
        return gl.join(X[0], X[1])


@gluon.jit
def by_block(X):
    """One or two [C, C] as [4, 4, 1 or 2, 16, 16]."""
    x = gl.reshape(side_by_side(X), [4, 16, 4, 16, len(X)])
    return gl.permute(x, (0, 2, 4, 1, 3))


@gluon.jit
def paired(X):
    """Half as many tensors: i and i + half side by side."""
    half: gl.constexpr = len(X) // 2
    pairs = ()
    for i in gl.static_range(half):
        pairs = pairs + (gl.join(X[i], X[i + half]),)
    return pairs


@gluon.jit
def stack(X, KH: gl.constexpr):
    """Sixteen [KH, H, 4, 1, 16] as [4, KH, H, 16, 16]: number i becomes row i, blocks first."""
    X = paired(paired(paired(paired(X))))
    return gl.permute(gl.reshape(X[0], [KH, 4 // KH, 4, 16, 16]), (2, 0, 1, 4, 3))


@gluon.jit
def invert_diagonal(d_smem, b_smem, KH: gl.constexpr):
    """X = (I + D)⁻¹ [4, KH, H, 16, 16]: of the four diagonal blocks of four value heads' D.

    A thread has two columns of a block: x_i = e_i - beta_i sum_j D_ij x_j.
    """
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1, 2], [1, 1, 4, 1, 8], [KH, 4 // KH, 1, 1, 1], [4, 3, 2, 1, 0]
    )
    column = along(4, 16, layout, 5)
    zero = gl.zeros([KH, 4 // KH, 4, 1, 16], gl.float32, layout)
    of_row: gl.constexpr = gl.SliceLayout(4, layout)
    by_element: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1, 2], [4, 1, 1, 1, 8], [1, 4 // KH, KH, 1, 1], [4, 3, 0, 1, 2]
    )
    beta_smem = b_smem.permute((1, 2, 0, 3))
    X = ()
    for i in gl.static_range(16):
        x = gl.where(column == i, zero + 1.0, zero)
        if i > 0:
            row = d_smem.slice(i, 1, 3)
            total = zero
            for j in gl.static_range(i):
                d = row.slice(j ^ ((i & 2) << 2), 1, 4).load(by_element)  # as block_offsets has it
                total = total + gl.permute(d, (2, 1, 0, 3, 4)) * X[j]
            x = x - gl.expand_dims(beta_smem.slice(i, 1, 3).load(of_row), 4) * total
        X = X + (x,)
    return stack(X, KH)


@gluon.jit
def mixed(x):
    """[KH, H, 16, 16] as [4, 16, 16], columns 4 t + 2 n + e at 8 n + 2 t + e.

    A product's accumulator has columns 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t in a thread: so they are
    four neighbours, which one access stores or loads.
    """
    return gl.reshape(gl.permute(gl.reshape(x, [4, 16, 4, 2, 2]), (0, 1, 3, 2, 4)), [4, 16, 16])


@gluon.jit
def unmixed(x, layout: gl.constexpr, KH: gl.constexpr):
    """The inverse of ``mixed``."""
    x = gl.permute(gl.reshape(x, [4, 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.reshape(x, [KH, 4 // KH, 16, 16]), layout)


@gluon.jit
def product(x, y_t, total):
    """total + x @ y of [4, 16, 16], a warp a product, from x and the transpose of y."""
    acc: gl.constexpr = total.type.layout
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=acc, k_width=2)
    y = gl.permute(y_t, (0, 2, 1))
    return mma_v2(gl.convert_layout(x, left), gl.convert_layout(y, right), total)


@gluon.jit
def invert(
    kk_smem, d_smem, b_smem, x_smem, X, b_rows, quads: gl.constexpr, upright: gl.constexpr,
    KH: gl.constexpr,
):  # fmt: skip
    """The blocks A_ij [4, 16, 16], i > j: (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2).

    Of (I + M)⁻¹, M strictly lower, with mixed columns; those of the diagonal stay in x_smem. Right
    factors are needed transposed, and where the transpose is not at hand it is a product too.
    """
    acc: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8]
    )
    none = gl.zeros([4, 16, 16], gl.float32, acc)
    x_smem.store(invert_diagonal(d_smem, b_smem, KH))
    X_t = ()
    rest_t = ()  # of X_t: what float16 leaves
    for b in gl.static_range(3):
        x = X.index(b).permute((0, 1, 3, 2)).load(upright)
        x = gl.permute(gl.reshape(x, [4, 4, 2, 2, 16]), (0, 2, 1, 3, 4))
        x = gl.reshape(x, [4, 16, 16])
        X_t = X_t + (x.to(gl.float16),)
        rest_t = rest_t + ((x - X_t[b].to(gl.float32)).to(gl.float16),)
    E = ()  # -E_ij
    E_t = ()
    for i in gl.static_range(1, 4):
        beta = gl.expand_dims(b_rows.index(i).load(gl.SliceLayout(2, quads)), 2)
        x = mixed(X.index(i).load(quads).to(gl.float16))
        for j in gl.static_range(i):
            kk = kk_smem.index(j * 4 + (i ^ j))
            n_t = gl.expand_dims(kk.load(gl.SliceLayout(1, quads)), 1) * -beta
            n_t = mixed(n_t.to(gl.float16))
            E = E + (product(x, n_t, none).to(gl.float16),)
            if i < 3:
                E_t = E_t + (product(n_t, x, none).to(gl.float16),)
    F20 = product(E[2], E_t[0], none).to(gl.float16)
    F31 = product(E[5], E_t[2], none).to(gl.float16)
    F30 = product(E[5], E_t[1], product(E[4], E_t[0], none)).to(gl.float16)
    Y20 = product(F20, X_t[0], product(F20, rest_t[0], none))
    Y31 = product(F31, X_t[1], product(F31, rest_t[1], none))
    Y30 = product(F30, X_t[0], product(F30, rest_t[0], none))
    Y20_t = product(X_t[0], F20, none).to(gl.float16)
    A10 = product(E[0], X_t[0], product(E[0], rest_t[0], none))
    A20 = product(E[1], X_t[0], product(E[1], rest_t[0], Y20))
    A21 = product(E[2], X_t[1], product(E[2], rest_t[1], none))
    A30 = product(E[3], X_t[0], product(E[3], rest_t[0], product(E[5], Y20_t, Y30)))
    A31 = product(E[4], X_t[1], product(E[4], rest_t[1], Y31))
    A32 = product(E[5], X_t[2], product(E[5], rest_t[2], none))
    return A10, A20, A21, A30, A31, A32
