"""The four warps of hopper_state_kernel that work ahead: they make gates and P.

    P = lower(G ∘ Q Kᵀ)                            G_ij = exp(gc_i - gc_j), i >= j

of one head and one chunk is needed by both warpgroups that hold its state, and waits for neither.
It goes to float16 in shared memory, each row times a power of two that brings its largest product
to [2¹⁰, 2¹¹), before its gates. Tiles that reach beyond a sequence get zeros there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sluice.backends.hopper.prefill_loader import C_TOKENS, ROWS
from sluice.backends.hopper.prefill_tiles import barrier

NORM_EPS = gl.constexpr(1e-6)


@gluon.jit
def make(
    work,
    HK: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, BLOCK_V: gl.constexpr,
    NUM_BUFFERS: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """All chunks of a program, each a chunk before the warps that wait for it."""
    tiles, factors, notes, p_bufs, made, g2_ptr, r_k_ptr, scale = work
    kq_bufs, v_bufs, a_bufs, ready, _, row, tokens = tiles[4:11]
    C: gl.constexpr = C_TOKENS
    HALVES: gl.constexpr = BLOCK_V // ROWS
    NORM: gl.constexpr = r_k_ptr is not None
    acc: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16]
    )
    offs = gl.arange(0, C, gl.BlockedLayout([1], [32], [4], [0]))
    # those of the next chunk: a load's latency is not to sit between two chunks
    g2, g2_last, r_k = load_gates(g2_ptr, r_k_ptr, row, tokens, offs, HK, HV)
    stage = 0
    phase = 0
    for chunk in range(gl.cdiv(tokens, C)):
        mbarrier.wait(ready.index(stage), phase)
        kq_smem = kq_bufs.index(stage)
        count = tokens - chunk * C
        if count < C:
            for piece in gl.static_range(K // ROWS):
                end_rows(kq_smem.slice(0, C, 0).slice(piece * ROWS, ROWS, 1), count)
                if OUTPUT:
                    end_rows(kq_smem.slice(C, C, 0).slice(piece * ROWS, ROWS, 1), count)
            end_rows(a_bufs.index(stage), count)
            for half in gl.static_range(HALVES):
                end_rows(v_bufs.index(stage * HALVES + half), count)
            fence_async_shared()
            barrier()
        if OUTPUT:
            q_smem = kq_smem.slice(C, C, 0)
            k_t = kq_smem.slice(0, C, 0).permute((1, 0))
            none = gl.zeros([C, C], gl.float32, acc)
            p = warpgroup_mma(q_smem, k_t, none, use_acc=False, is_async=True)
        # while the tensor cores are at it
        make_factors(factors, notes, g2, g2_last, r_k, stage, NORM, OUTPUT)
        t = chunk * C + C
        g2, g2_last, r_k = load_gates(g2_ptr, r_k_ptr, row + t, tokens - t, offs, HK, HV)
        if OUTPUT:
            if NORM:
                keep_lengths(q_smem, notes, K)
            g_i = notes[0].load(gl.SliceLayout(1, acc))
            if HALVES == 1:  # there are registers for it
                G = decay_between(g_i, notes, row >> 31, acc)
            p = warpgroup_mma_wait(0, deps=[p])
            p = scale_rows(p, g_i, factors, notes, scale, stage, acc, NORM)
            if HALVES == 2:
                G = decay_between(g_i, notes, row >> 31, acc)
            p_bufs.index(stage).store((p * G).to(gl.float16))
            fence_async_shared()
            barrier()
        mbarrier.arrive(made.index(stage), count=1)
        stage += 1
        if stage == NUM_BUFFERS:
            stage = 0
            phase = phase ^ 1


@gluon.jit
def end_rows(smem, count):
    """Zeros behind the first ``count`` rows of a tile [C, 64]: those tokens belong to others."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, layout)), 1)
    for first in gl.static_range(0, C_TOKENS, 16):
        part = smem.slice(first, 16, 0)
        x = part.load(layout)
        part.store(gl.where(rows + first < count, x, gl.zeros([16, ROWS], x.dtype, layout)))


@gluon.jit
def load_gates(g2_ptr, r_k_ptr, t, count, offs, HK: gl.constexpr, HV: gl.constexpr):
    """Log2 decays of a chunk, the last of them, inverse lengths of its keys.

    ``count`` tokens, of which the first 64 are the chunk, exist; none where it is not positive.
    """
    count = gl.minimum(count, C_TOKENS)
    # 32 bits are enough: Ag alone, 64 times as large, would fill more memory than there is;
    # behind the last token the decay stays
    token = t + gl.maximum(gl.minimum(offs, count - 1), 0)
    g2 = offs.to(gl.float32) * 0.0
    g2_last = 0.0
    r_k = g2 + 1.0
    if g2_ptr is not None:
        g2 = gl.load(g2_ptr + token * HV, mask=count > 0 * offs, other=0.0)
        g2_last = gl.load(g2_ptr + (t + count - 1) * HV, mask=count > 0, other=0.0)
    if r_k_ptr is not None:
        r_k = gl.load(r_k_ptr + token * HK, mask=count > 0 * offs, other=1.0)
    return g2, g2_last, r_k


@gluon.jit
def make_notes(layout: gl.constexpr):
    """What a maker hands from one of its layouts to another: decays, inverse lengths of k and q."""
    decays = gl.allocate_shared_memory(gl.float32, [C_TOKENS], layout)
    keys = gl.allocate_shared_memory(gl.float32, [C_TOKENS], layout)
    queries = gl.allocate_shared_memory(gl.float32, [C_TOKENS], layout)
    return decays, keys, queries


@gluon.jit
def make_factors(factors, notes, g2, g2_last, r_k, stage, NORM: gl.constexpr, OUTPUT: gl.constexpr):
    """What needs no tile. Factors: of U; of Vd for the state; of S; and two that come with P."""
    past, to_end = factors[:2]
    past.index(stage).store(gl.exp2(g2) * r_k)
    to_end.index(stage).store(gl.exp2(g2_last - g2) * r_k)
    factors[4].index(stage).store(gl.exp2(g2_last) + g2 * 0.0)
    if OUTPUT:
        notes[0].store(g2)
        if NORM:
            notes[1].store(r_k)
    barrier()


@gluon.jit
def keep_lengths(q_smem, notes, K: gl.constexpr):
    """Inverse lengths of the queries."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    total = gl.zeros([C_TOKENS], gl.float32, gl.SliceLayout(1, layout))
    for piece in gl.static_range(K // ROWS):
        x = q_smem.slice(piece * ROWS, ROWS, 1).load(layout).to(gl.float32)
        total = total + gl.sum(x * x, axis=1)
    notes[2].store(gl.rsqrt(total + NORM_EPS))
    barrier()


@gluon.jit
def scale_rows(p, g_i, factors, notes, scale, stage, acc: gl.constexpr, NORM: gl.constexpr):
    """Q Kᵀ with rows times powers of two, for float16.

    Factors: of S Q before P Vd is added to it, and of the sum.
    """
    if NORM:
        p = p * gl.expand_dims(notes[1].load(gl.SliceLayout(0, acc)), 0)
    up, down = row_scale(p)
    factors[2].index(stage).store(gl.exp2(g_i) * up)
    down = down * scale
    if NORM:
        down = down * notes[2].load(gl.SliceLayout(1, acc))
    factors[3].index(stage).store(down)
    return p * gl.expand_dims(up, 1)


@gluon.jit
def decay_between(g_i, notes, zero, acc: gl.constexpr):
    """G, zero above the diagonal.

    ``zero`` is one the compiler cannot see: else it keeps what lies below the diagonal in registers
    from chunk to chunk.
    """
    by_column: gl.constexpr = gl.SliceLayout(0, acc)
    i = gl.expand_dims(gl.arange(0, C_TOKENS, gl.SliceLayout(1, acc)), 1) + zero
    j = gl.expand_dims(gl.arange(0, C_TOKENS, by_column), 0)
    g = gl.expand_dims(g_i, 1) - gl.expand_dims(notes[0].load(by_column), 0)
    return gl.exp2(gl.where(i >= j, g, float("-inf")))


@gluon.jit
def row_scale(p):
    """The power of two that brings a row's largest to [2¹⁰, 2¹¹), and its inverse; 1 for zeros."""
    largest = gl.max(gl.abs(p), axis=1)
    bits = (largest.to(gl.int32, bitcast=True) & 0x7F800000) - (10 << 23)
    bits = gl.minimum(gl.maximum(bits, 1 << 23), 253 << 23)
    bits = gl.where(largest == 0.0, 127 << 23, bits)
    return (0x7F000000 - bits).to(gl.float32, bitcast=True), bits.to(gl.float32, bitcast=True)
