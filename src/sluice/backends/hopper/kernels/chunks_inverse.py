"""The inverse of hopper_chunks_kernel: A = (I + L)⁻¹ of four value heads, one per warp.

L = strictLower(diag(beta) K Kᵀ) [64, 64] is cut into blocks of 16 x 16: L = L_d + L_b, the blocks
on the diagonal and those below it. Forward substitution gives the diagonal blocks of A in float32,
A_d = (I + L_d)⁻¹. A thread has two columns of a block, so a step is one multiply-add, and no thread
waits for another. Then, with E = A_d L_b,

    A = (I - E)(I + E²) A_d                        E⁴ = 0

in float16 products with float32 sums. Only blocks that are not zero are made: E_ij for i > j and
(E²)_ij for i > j + 1.

E need not be small, but the series over blocks is short. An entry of E² is a sum of bounded terms
over 16 tokens, or two such sums, so nothing cancels (docs/numerics.md); in a series over single
tokens much would. The right factor A_d is a sum of two float16 terms. With one term, its rounding
errors would add up over tokens where keys repeat.

A warp keeps its head in registers: the accumulator of a 16 x 16 product has the layout of a left
operand, and its transpose that of a right one. Only K Kᵀ and A_d pass through shared memory.
"""

# ruff: noqa: RET505, RUF005 (Triton has no tuple unpacking; constexpr branches stay if/else)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from sluice.backends.hopper.kernels.gluon_api import reinterpret
from sluice.backends.hopper.kernels.layouts import along


@gluon.constexpr_function
def warp_bases(KH):
    """How the two bits of a warp's number select a head in [KH, 4 / KH, 16, 16]."""
    return [[0, 1, 0, 0], [0, 2, 0, 0] if KH == 1 else [1, 0, 0, 0]]


@gluon.constexpr_function
def quads(KH):
    """A block of each of four heads, [KH, 4 / KH, 16, 16]: four neighbours of a row per thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 8, 0]],
        lane_bases=[[0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        warp_bases=warp_bases(KH),
        block_bases=[],
        shape=[KH, 4 // KH, 16, 16],
    )


@gluon.constexpr_function
def upright(KH):
    """A transposed block of each of four heads as a product needs it, its rows mixed."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 2, 0], [0, 0, 0, 8]],
        lane_bases=[[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 4, 0], [0, 0, 8, 0]],
        warp_bases=warp_bases(KH),
        block_bases=[],
        shape=[KH, 4 // KH, 16, 16],
    )


@gluon.constexpr_function
def block_layout(shape, second, third, turned=False):
    """Shared memory of [..., 16, 16], block by block, swizzled.

    ``second``, ``third``: the (row, column) that bits 1 and 2 of the row lead to.
    ``turned``: block (i, j) of [4, 4, ...] lies at (i, i xor j), so the diagonal is at (i, 0).
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
    return gl.SharedLinearLayout(offsets)


@gluon.constexpr_function
def lower(row, column):
    """The number of a block among the six below the diagonal, row by row."""
    return row * (row - 1) // 2 + column


@gluon.constexpr_function
def inverse_layout(KH):
    """Shared memory of A_d: [4 blocks, KH, 4 / KH, 16, 16]."""
    return block_layout([4, KH, 4 // KH, 16, 16], (2, 8), (5, 0))


@gluon.jit
def inverse_blocks(inv_diag_smem, KH: gl.constexpr):
    """A_d in shared memory, to be indexed by block."""
    H: gl.constexpr = 4 // KH
    layout: gl.constexpr = block_layout([KH, H, 16, 16], (2, 8), (5, 0))
    return reinterpret(inv_diag_smem, gl.float32, [4, KH, H, 16, 16], layout)


@gluon.jit
def gate_blocks(smem, KH: gl.constexpr):
    """Gates in shared memory (chunks_gates.py), to be indexed by block of 16 tokens."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    return reinterpret(smem, gl.float32, [4, KH, 4 // KH, 16], layout)


@gluon.jit
def store_kk(k_smem, kks, KH: gl.constexpr):
    """Put K Kᵀ of each key head, block by block, in the place of K, which is no longer needed."""
    x = gl.reshape(side_by_side(kks), [4, 16, 4, 16, KH])
    layout: gl.constexpr = block_layout([4, 4, KH, 16, 16], (2, 8), (4, 0), turned=True)
    kk_smem = reinterpret(k_smem, gl.float32, [4, 4, KH, 16, 16], layout)
    kk_smem.store(gl.permute(x, (0, 2, 4, 1, 3)))


@gluon.jit
def side_by_side(kks):
    """One or two [64, 64] as [64, 64, 1 or 2]."""
    if len(kks) == 1:
        return gl.reshape(kks[0], [64, 64, 1])
    else:
        return gl.join(kks[0], kks[1])


@gluon.jit
def paired(xs):
    """Half as many tensors: i and i + half side by side."""
    half: gl.constexpr = len(xs) // 2
    pairs = ()
    for i in gl.static_range(half):
        pairs = pairs + (gl.join(xs[i], xs[i + half]),)
    return pairs


@gluon.jit
def stack(xs, KH: gl.constexpr):
    """Sixteen [KH, H, 4, 1, 16] as [4, KH, H, 16, 16]: number i becomes row i, blocks first."""
    xs = paired(paired(paired(paired(xs))))
    return gl.permute(gl.reshape(xs[0], [KH, 4 // KH, 4, 16, 16]), (2, 0, 1, 4, 3))


@gluon.jit
def invert_diagonal(k_smem, beta_smem, KH: gl.constexpr):
    """A_d [4, KH, H, 16, 16]: the diagonal blocks of four value heads.

    A thread has two columns x of a block: x_i = e_i - beta_i sum_j (k_i · k_j) x_j.
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
    # without store_kk's swizzle of columns, which is undone below
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    kk_diag_smem = reinterpret(k_smem, gl.float32, [4, 4, KH, 16, 16], plain).slice(0, 1, 1)
    beta_smem = beta_smem.permute((1, 2, 0, 3))
    xs = ()
    for i in gl.static_range(16):
        x = gl.where(column == i, zero + 1.0, zero)
        if i > 0:
            row = kk_diag_smem.slice(i, 1, 3)
            total = zero
            for j in gl.static_range(i):
                kk = row.slice(j ^ ((i & 2) << 2), 1, 4).load(by_element)
                total = total + gl.permute(kk, (2, 1, 0, 3, 4)) * xs[j]
            x = x - gl.expand_dims(beta_smem.slice(i, 1, 3).load(of_row), 4) * total
        xs = xs + (x,)
    return stack(xs, KH)


@gluon.jit
def mixed(x):
    """[KH, H, 16, 16] as [4, 16, 16], with column 4 t + 2 n + e at 8 n + 2 t + e.

    Thread t has columns 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t of a product's accumulator. Before mixing
    they are four neighbours, which one access stores or loads.
    """
    return gl.reshape(gl.permute(gl.reshape(x, [4, 16, 4, 2, 2]), (0, 1, 3, 2, 4)), [4, 16, 16])


@gluon.jit
def unmixed(x, KH: gl.constexpr):
    """The inverse of ``mixed``, in the layout ``quads``."""
    x = gl.permute(gl.reshape(x, [4, 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.reshape(x, [KH, 4 // KH, 16, 16]), quads(KH))


@gluon.jit
def product(x, y_t, total):
    """total + x @ y of [4, 16, 16], one product per warp, from x and the transpose of y."""
    acc: gl.constexpr = total.type.layout
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=acc, k_width=2)
    y = gl.permute(y_t, (0, 2, 1))
    return mma_v2(gl.convert_layout(x, left), gl.convert_layout(y, right), total)


@gluon.jit
def invert(k_smem, beta_smem, inv_diag_smem, KH: gl.constexpr):
    """The blocks A_ij [4, 16, 16], i > j, in the order of ``lower``.

    Their columns are mixed. The diagonal blocks go to ``inv_diag_smem``. ``k_smem`` has what
    ``store_kk`` put there. Right factors are needed transposed; where the transpose is not at hand,
    it is a product of its own.
    """
    acc: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8]
    )
    kk_layout: gl.constexpr = block_layout([KH, 16, 16], (2, 8), (4, 0))
    kk_smem = reinterpret(k_smem, gl.float32, [16, KH, 16, 16], kk_layout)
    inv_diag = inverse_blocks(inv_diag_smem, KH)
    beta_rows = gate_blocks(beta_smem, KH)
    zero = gl.zeros([4, 16, 16], gl.float32, acc)
    inv_diag_smem.store(invert_diagonal(k_smem, beta_smem, KH))
    x_t = ()  # A_d, transposed
    rest_t = ()  # what float16 leaves of it
    for b in gl.static_range(3):
        x = inv_diag.index(b).permute((0, 1, 3, 2)).load(upright(KH))
        x = gl.permute(gl.reshape(x, [4, 4, 2, 2, 16]), (0, 2, 1, 3, 4))
        x = gl.reshape(x, [4, 16, 16])
        x_t = x_t + (x.to(gl.float16),)
        rest_t = rest_t + ((x - x_t[b].to(gl.float32)).to(gl.float16),)
    e = ()  # -E_ij
    e_t = ()
    for i in gl.static_range(1, 4):
        beta = gl.expand_dims(beta_rows.index(i).load(gl.SliceLayout(2, quads(KH))), 2)
        x = mixed(inv_diag.index(i).load(quads(KH)).to(gl.float16))
        for j in gl.static_range(i):
            kk = kk_smem.index(j * 4 + (i ^ j))
            l_b_t = gl.expand_dims(kk.load(gl.SliceLayout(1, quads(KH))), 1) * -beta
            l_b_t = mixed(l_b_t.to(gl.float16))
            e = e + (product(x, l_b_t, zero).to(gl.float16),)
            if i < 3:
                e_t = e_t + (product(l_b_t, x, zero).to(gl.float16),)
    f20 = product(e[2], e_t[0], zero).to(gl.float16)  # (E²)_20
    f31 = product(e[5], e_t[2], zero).to(gl.float16)
    f30 = product(e[5], e_t[1], product(e[4], e_t[0], zero)).to(gl.float16)
    y20 = product(f20, x_t[0], product(f20, rest_t[0], zero))  # (E² A_d)_20
    y31 = product(f31, x_t[1], product(f31, rest_t[1], zero))
    y30 = product(f30, x_t[0], product(f30, rest_t[0], zero))
    y20_t = product(x_t[0], f20, zero).to(gl.float16)
    a10 = product(e[0], x_t[0], product(e[0], rest_t[0], zero))
    a20 = product(e[1], x_t[0], product(e[1], rest_t[0], y20))
    a21 = product(e[2], x_t[1], product(e[2], rest_t[1], zero))
    a30 = product(e[3], x_t[0], product(e[3], rest_t[0], product(e[5], y20_t, y30)))
    a31 = product(e[4], x_t[1], product(e[4], rest_t[1], y31))
    a32 = product(e[5], x_t[2], product(e[5], rest_t[2], zero))
    return a10, a20, a21, a30, a31, a32
