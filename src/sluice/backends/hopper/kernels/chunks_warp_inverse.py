"""The inverse of hopper_chunks_warp_kernel: A = (I + L)⁻¹ of one value head, by one warp.

The equations are those of chunks_inverse.py. K Kᵀ stays in registers, as the accumulators of its
blocks of 16 x 16. Such an accumulator has the layout of a left operand, and its transpose that of a
right one. Shared memory holds the diagonal blocks, because every column needs their rows, and A_d
as two float16 terms. These are transposed: a thread has two columns of A_d, which are rows of A_dᵀ.
"""

# ruff: noqa: RUF005 (Triton has no tuple unpacking)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from sluice.backends.hopper.kernels.chunks_inverse import block_layout, paired
from sluice.backends.hopper.kernels.gluon_api import reinterpret
from sluice.backends.hopper.kernels.layouts import along


@gluon.constexpr_function
def block():
    """A block [16, 16], as a product makes it."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def left_block():
    return gl.DotOperandLayout(operand_index=0, parent=block(), k_width=2)


@gluon.constexpr_function
def right_block():
    return gl.DotOperandLayout(operand_index=1, parent=block(), k_width=2)


@gluon.constexpr_function
def columns():
    """Four blocks [4, 16, 16]: a thread has two columns of a block."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 0, 8], [1, 0, 0], [2, 0, 0]],
        warp_bases=[],
        block_bases=[],
        shape=[4, 16, 16],
    )


@gluon.constexpr_function
def upper(row, column):
    """The number of a block of K Kᵀ among the ten on and above the diagonal, row by row."""
    return 4 * row - row * (row - 1) // 2 + column - row


@gluon.constexpr_function
def kk_layout():
    """Shared memory of four float32 blocks, as products make them."""
    return block_layout([4, 16, 16], (2, 8), (4, 0))


@gluon.constexpr_function
def half_layout(shape):
    """Shared memory of float16 blocks [.., 16, 16], for ldmatrix."""
    return block_layout(shape, (2, 0), (4, 8))


@gluon.jit
def left(x):
    """A block as the left operand of a product."""
    return gl.convert_layout(x, left_block())


@gluon.jit
def right(x_t):
    """A block as the right operand, from its transpose."""
    return gl.convert_layout(gl.permute(x_t, (1, 0)), right_block())


@gluon.jit
def products_of_keys(k_smem, K: gl.constexpr):
    """K Kᵀ: its ten blocks [16, 16] on and above the diagonal, row by row.

    Keys are loaded twice, as left and as right operands: these differ in the order of their
    registers, and a load is cheaper than four copies.
    """
    kks = ()
    for _ in gl.static_range(10):
        kks = kks + (gl.zeros([16, 16], gl.float32, block()),)
    for s in gl.static_range(K // 16):
        k = ()
        k_t = ()
        for i in gl.static_range(4):
            piece = k_smem.slice(16 * i, 16, 0).slice(16 * s, 16, 1)
            k = k + (piece.load(left_block()),)
            k_t = k_t + (piece.permute((1, 0)).load(right_block()),)
        sums = ()
        for j in gl.static_range(4):
            for i in gl.static_range(j, 4):
                sums = sums + (mma_v2(k[j], k_t[i], kks[upper(j, i)]),)
        kks = sums
    return kks


@gluon.jit
def invert_diagonal(kk_smem, beta_smem):
    """A_d [4, 16, 16]: the diagonal blocks.

    A thread has two columns x of a block: x_i = e_i - beta_i sum_j (k_i · k_j) x_j.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 2], [4, 1, 8], [1, 1, 1], [2, 1, 0])
    column = along(2, 16, layout, 3)
    zero = gl.zeros([4, 1, 16], gl.float32, layout)
    xs = ()
    for i in gl.static_range(16):
        x = gl.where(column == i, zero + 1.0, zero)
        if i > 0:
            row = kk_smem.slice(i, 1, 1)
            total = zero
            for j in gl.static_range(i):
                total = total + row.slice(j ^ ((i & 2) << 2), 1, 2).load(layout) * xs[j]
            beta = beta_smem.slice(i, 1, 1).load(gl.SliceLayout(2, layout))
            x = x - gl.expand_dims(beta, 2) * total
        xs = xs + (x,)
    xs = paired(paired(paired(paired(xs))))
    x = gl.permute(gl.reshape(xs[0], [4, 16, 16]), (0, 2, 1))
    return gl.convert_layout(x, columns())


@gluon.jit
def invert(kks, a_d, k_smem, beta_smem):
    """The blocks A_ij [16, 16], i > j, in the order of ``lower`` (chunks_inverse.py).

    ``a_d``: the diagonal blocks; their float16 terms go to the last quarter of ``k_smem``. Where
    a product is needed as a right factor, its transpose is a product of its own.
    """
    zero = gl.zeros([16, 16], gl.float32, block())
    terms_smem = reinterpret(k_smem, gl.float16, [8, 4, 16, 16], half_layout([4, 16, 16]))
    block_smem = reinterpret(k_smem, gl.float16, [32, 16, 16], half_layout([16, 16]))
    term = a_d.to(gl.float16)
    terms_smem.index(6).store(gl.permute(term, (0, 2, 1)))
    rest = (a_d - term.to(gl.float32)).to(gl.float16)
    terms_smem.index(7).store(gl.permute(rest, (0, 2, 1)))
    x = ()  # A_d
    rest = ()  # what float16 leaves of it
    for b in gl.static_range(3):
        x = x + (block_smem.index(24 + b).permute((1, 0)).load(right_block()),)
        rest = rest + (block_smem.index(28 + b).permute((1, 0)).load(right_block()),)
    x0_t = block_smem.index(24).load(left_block())
    e = ()  # -E_ij, in the same order
    e_right = ()
    for i in gl.static_range(1, 4):
        beta = beta_smem.slice(16 * i, 16, 0).load(gl.SliceLayout(0, block()))
        x_i = block_smem.index(24 + i).permute((1, 0)).load(left_block())
        for j in gl.static_range(i):
            l_t = (kks[upper(j, i)] * -gl.expand_dims(beta, 0)).to(gl.float16)
            e = e + (left(mma_v2(x_i, right(l_t), zero).to(gl.float16)),)
            if i < 3:
                x_i_t = block_smem.index(24 + i).load(right_block())
                e_right = e_right + (right(mma_v2(left(l_t), x_i_t, zero).to(gl.float16)),)
    f20 = mma_v2(e[2], e_right[0], zero).to(gl.float16)  # (E²)_20
    f31 = left(mma_v2(e[5], e_right[2], zero).to(gl.float16))
    f30 = mma_v2(e[5], e_right[1], mma_v2(e[4], e_right[0], zero))
    f30 = left(f30.to(gl.float16))
    y20_right = right(mma_v2(x0_t, right(f20), zero).to(gl.float16))  # (E² A_d)_20
    f20 = left(f20)
    y20 = mma_v2(f20, x[0], mma_v2(f20, rest[0], zero))
    y31 = mma_v2(f31, x[1], mma_v2(f31, rest[1], zero))
    y30 = mma_v2(f30, x[0], mma_v2(f30, rest[0], zero))
    a10 = mma_v2(e[0], x[0], mma_v2(e[0], rest[0], zero))
    a20 = mma_v2(e[1], x[0], mma_v2(e[1], rest[0], y20))
    a21 = mma_v2(e[2], x[1], mma_v2(e[2], rest[1], zero))
    a30 = mma_v2(e[3], x[0], mma_v2(e[3], rest[0], mma_v2(e[5], y20_right, y30)))
    a31 = mma_v2(e[4], x[1], mma_v2(e[4], rest[1], y31))
    a32 = mma_v2(e[5], x[2], mma_v2(e[5], rest[2], zero))
    return a10, a20, a21, a30, a31, a32
