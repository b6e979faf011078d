"""The warp of hopper_state_kernel that brings tiles and gates, as many chunks ahead as fit."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from sluice.backends.hopper.prefill_tiles import barrier

ROWS = gl.constexpr(64)  # value columns of a warpgroup
C_TOKENS = gl.constexpr(64)


@gluon.jit
def bring(
    tiles, gates, K: gl.constexpr, BLOCK_V: gl.constexpr, NUM_BUFFERS: gl.constexpr,
    OUTPUT: gl.constexpr,
):  # fmt: skip
    """All chunks of a program.

    A warp of its own: what it loads is waited for here, and the compiler puts a barrier behind each
    copy.
    """
    free, tokens = tiles[8], tiles[10]
    chunks = gl.cdiv(tokens, C_TOKENS)
    for chunk in range(gl.minimum(chunks, NUM_BUFFERS)):
        ask(tiles, chunk, chunk, K, BLOCK_V, OUTPUT)
    stage = 0
    phase = 1
    for chunk in range(chunks):
        if chunk >= NUM_BUFFERS:
            mbarrier.wait(free.index(stage), phase)
            ask(tiles, chunk, stage, K, BLOCK_V, OUTPUT)
        make_factors(gates, tiles[9] + chunk * C_TOKENS, tokens - chunk * C_TOKENS, stage)
        stage += 1
        if stage == NUM_BUFFERS:
            stage = 0
            phase = phase ^ 1


@gluon.jit
def ask(tiles, chunk, stage, K: gl.constexpr, BLOCK_V: gl.constexpr, OUTPUT: gl.constexpr):
    """Ask for the tiles of a chunk."""
    q_desc, k_desc, v_desc, a_desc, kq_bufs, v_bufs, a_bufs, ready = tiles[:8]
    row = tiles[9]
    column_q, column_k, column_a, column_v, values = tiles[11:]
    C: gl.constexpr = C_TOKENS
    HALVES: gl.constexpr = BLOCK_V // ROWS
    COMMON: gl.constexpr = 2 * C * (2 * K + C if OUTPUT else K + C)
    bar = ready.index(stage)
    t = row + chunk * C
    if values:
        mbarrier.expect(bar, COMMON + 2 * C * BLOCK_V)
    else:
        mbarrier.expect(bar, COMMON)
    copy_rows(k_desc, kq_bufs.index(stage).slice(0, C, 0), t, column_k, bar, K)
    if OUTPUT:
        copy_rows(q_desc, kq_bufs.index(stage).slice(C, C, 0), t, column_q, bar, K)
    for half in gl.static_range(HALVES):
        v_smem = v_bufs.index(stage * HALVES + half)
        at = column_v + half * ROWS
        tma.async_copy_global_to_shared(v_desc, [t, at], bar, v_smem, pred=values)
    tma.async_copy_global_to_shared(a_desc, [t, column_a], bar, a_bufs.index(stage))


@gluon.jit
def copy_rows(desc, smem, row, column, bar, K: gl.constexpr):
    """Ask for a tile [C, K] that is part of a taller one: in pieces of 64 columns."""
    for piece in gl.static_range(K // ROWS):
        part = smem.slice(piece * ROWS, ROWS, 1)
        tma.async_copy_global_to_shared(desc, [row, column + piece * ROWS], bar, part)


@gluon.jit
def make_factors(gates, t, count, stage):
    """The gates of a chunk, and what follows from them: factors of V, U, Vd for the state, and S.

    The chunk's tokens begin at ``t``; ``count`` and no more belong to it. Behind them the decay
    stays.
    """
    b_ptr, g2_ptr, r_k_ptr, b, g2, r_k, past, to_end, whole, gated = gates
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    count = gl.minimum(count, C_TOKENS)
    at = gl.minimum(gl.arange(0, C_TOKENS, layout), count - 1)
    one = gl.full([C_TOKENS], 1.0, gl.float32, layout)
    from_start = one
    behind = one
    through = one
    g = one * 0.0
    if g2_ptr is not None:
        g = gl.load(g2_ptr + t + at)
        last = gl.load(g2_ptr + t + count - 1)
        from_start = gl.exp2(g)
        behind = gl.exp2(last - g)
        through = one * gl.exp2(last)
    g2.index(stage).store(g)
    if r_k_ptr is not None:
        lengths = gl.load(r_k_ptr + t + at)
        from_start = from_start * lengths
        behind = behind * lengths
        r_k.index(stage).store(lengths)
    beta = gl.load(b_ptr + t + at)
    b.index(stage).store(beta)
    past.index(stage).store(from_start * beta)
    to_end.index(stage).store(behind)
    whole.index(stage).store(through)
    barrier()
    mbarrier.arrive(gated.index(stage), count=1)
