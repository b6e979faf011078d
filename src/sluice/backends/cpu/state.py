"""A head's state, of any storage type and layout, moved to and from float32 scratch memory.

There are two shapes of scratch memory. A *block* is BLOCK_V rows of a state [V, K] or BLOCK_V
columns of a state [K, V], as they are stored. A *tile* is a whole state as
[blocks of V, K, BLOCK_V], which is what prefill works on.
"""

from __future__ import annotations

from sluice.backends.cpu.addressing import NOWHERE
from sluice.backends.cpu.delta import BLOCK_V
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.llvm import BF16, F32, LANES
from sluice.backends.cpu.scratch_rows import fill, load_row, read, round_up, store_row, write
from sluice.backends.cpu.simd import get, pointer, put
from sluice.backends.cpu.tiles import load_rows, load_runs, store_rows, store_runs, transposed


@jit
def head_at(p, slot, head):
    """The first element of a head's state."""
    return slot * p.state_p + head * p.K * p.V


@jit
def is_direct(p):
    """Whether blocks can be written to memory as they are computed."""
    whole = p.V % BLOCK_V == 0 and (p.kv != 0 or p.K % LANES == 0)
    return p.state_code == F32 and whole


@jit
def block_floats(p):
    """Scratch for a block."""
    return BLOCK_V * max(p.K, round_up(p.K, LANES))


@jit
def load_block(p, tile, at, v0, fresh):
    """BLOCK_V rows (vk) or columns (kv) from v0 on, padded with zeros; zeros if fresh."""
    K, V = p.K, p.V
    if p.kv:
        width = min(BLOCK_V, V - v0)
        for i in range(K):
            row = tile + i * BLOCK_V
            if fresh or width <= BLOCK_V - LANES:
                fill(row, BLOCK_V, 0.0)
            if not fresh:
                load_row(row, p.state, p.state_code, at + i * V + v0, width)
    else:
        n = round_up(K, LANES)
        if n == K and v0 + BLOCK_V <= V and not fresh:
            load_row(tile, p.state, p.state_code, at + v0 * K, BLOCK_V * K)
            return
        for r in range(BLOCK_V):
            if fresh or v0 + r >= V:
                fill(tile + r * n, n, 0.0)
            else:
                load_row(tile + r * n, p.state, p.state_code, at + (v0 + r) * K, K)


@jit
def store_block(p, tile, at, v0):
    """Store a block, rounded once."""
    K, V = p.K, p.V
    width = min(BLOCK_V, V - v0)
    if p.kv:
        for i in range(K):
            store_row(p.state, p.state_code, at + i * V + v0, tile + i * BLOCK_V, width)
    else:
        n = round_up(K, LANES)
        if n == K:
            store_row(p.state, p.state_code, at + v0 * K, tile, width * K)
            return
        for r in range(width):
            store_row(p.state, p.state_code, at + (v0 + r) * K, tile + r * n, K)


@jit
def load_dealt(p, tile, at, v0, fresh):
    """`load_block` of rows of bfloat16, of whole pairs of vectors, which come dealt (tiles.py)."""
    count = 0 if fresh else min(BLOCK_V, p.V - v0) * p.K
    rows = pointer(p.state, BF16) + at + v0 * p.K
    for i in range(0, count, 2 * LANES):
        store_rows(tile, i, LANES, load_runs(rows, i, 0, 1, 2))
    fill(tile + count, BLOCK_V * p.K - count, 0.0)


@jit
def store_dealt(p, tile, at, v0):
    """`store_block` of what `load_dealt` loads."""
    rows = pointer(p.state, BF16) + at + v0 * p.K
    for i in range(0, min(BLOCK_V, p.V - v0) * p.K, 2 * LANES):
        store_runs(rows, i, 0, load_rows(tile, i, LANES, 2), 1, 0)


@jit
def pass_through(p, w, read, write, head):
    """A sequence without tokens: its state goes to its write slot as it is."""
    if write == NOWHERE or write == read:  # noqa: SIM109
        return
    copy_head(p, w, head_at(p, read, head), head_at(p, write, head), read == NOWHERE)


@jit
def copy_head(p, w, source, target, fresh):
    """A head's state from one element of the pool to another; zeros if fresh."""
    for v0 in range(0, p.V, BLOCK_V):
        load_block(p, w.tile, source, v0, fresh)
        store_block(p, w.tile, target, v0)


@jit
def _turned_in(tile, block, K):
    """A block [BLOCK_V, K] to a tile's [K, BLOCK_V], in squares of LANES."""
    for i in range(0, K, LANES):
        for r in range(0, BLOCK_V, LANES):
            square = transposed(load_rows(block, r * K + i, K, LANES))
            store_rows(tile, i * BLOCK_V + r, BLOCK_V, square)


@jit
def _turned_out(block, tile, K):
    """A tile's [K, BLOCK_V] to a block [BLOCK_V, K]."""
    for r in range(0, BLOCK_V, LANES):
        for i in range(0, K, LANES):
            square = transposed(load_rows(tile, i * BLOCK_V + r, BLOCK_V, LANES))
            store_rows(block, r * K + i, K, square)


@jit
def load_tile(p, w, tile, at, fresh):
    """A whole head's state as a tile; zeros if fresh."""
    K, V = p.K, p.V
    if fresh:
        fill(tile, round_up(V, BLOCK_V) * K, 0.0)
        return
    for v0 in range(0, V, BLOCK_V):
        part = tile + v0 * K
        if p.kv:
            load_block(p, part, at, v0, False)
        elif K % LANES == 0:
            load_block(p, w.block, at, v0, False)
            _turned_in(part, w.block, K)
        else:
            fill(part, K * BLOCK_V, 0.0)
            for r in range(min(BLOCK_V, V - v0)):
                for i in range(K):
                    value = read(p.state, p.state_code, at + (v0 + r) * K + i)
                    put(part, i * BLOCK_V + r, value)


@jit
def store_tile(p, w, tile, at):
    """Store a tile as a whole head's state, rounded once."""
    K, V = p.K, p.V
    for v0 in range(0, V, BLOCK_V):
        part = tile + v0 * K
        if p.kv:
            store_block(p, part, at, v0)
        elif K % LANES == 0:
            _turned_out(w.block, part, K)
            store_block(p, w.block, at, v0)
        else:
            for r in range(min(BLOCK_V, V - v0)):
                for i in range(K):
                    value = get(part, i * BLOCK_V + r)
                    write(p.state, p.state_code, at + (v0 + r) * K + i, value)
