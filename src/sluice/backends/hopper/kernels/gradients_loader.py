"""The loader role of hopper_gradients_kernel: one warp finds chunks and brings their tiles.

The rows of a head are asked for early, in time for the group of pairs, which is a head ahead.
"""
# ruff: noqa: SIM102 (constexpr branches stay apart)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sluice.backends.hopper.kernels.constants import GROUP_V, C
from sluice.backends.hopper.kernels.gluon_api import async_load, barrier
from sluice.backends.hopper.kernels.gradients_args import (
    CHUNKS,
    Chunk,
    first_place,
    next_place,
    phase_of,
    place_of,
    put_chunk,
)
from sluice.backends.hopper.kernels.gradients_parts import low_e, low_y
from sluice.backends.hopper.kernels.work_units import unit_span


@gluon.jit
def run_loader(args):
    """Load queries and keys once per chunk, then rows and states of each value head."""
    shared = args.shared
    barriers = shared.barriers
    K: gl.constexpr = shared.tiles.qk.shape[2]
    pid = gl.program_id(0)
    number = pid * 0
    item = pid * 0
    place = first_place(pid * 0)
    pid, chunk, chunk_slot = find_chunk(args, pid, number)
    if chunk.count > 0:
        place = copy_rows(args, chunk, 0, place)
    while chunk.count > 0:
        for head in range(shared.heads):
            mbarrier.wait(barriers.states_free, (item & 1) ^ 1)
            copy_states(args, chunk, chunk_slot, head)
            if head == 0:
                mbarrier.wait(barriers.keys_free, (number & 1) ^ 1)
                mbarrier.expect(barriers.keys_loaded, 2 * 2 * C * K)
                at = [chunk.row, chunk.head_k * K]
                async_load(args.q_desc, at, barriers.keys_loaded, shared.tiles.qk.index(0))
                async_load(args.k_desc, at, barriers.keys_loaded, shared.tiles.qk.index(1))
            if head + 1 < shared.heads:
                place = copy_rows(args, chunk, head + 1, place)
            item += 1
        number += 1
        pid, chunk, chunk_slot = find_chunk(args, pid + gl.num_programs(0), number)
        if chunk.count > 0:
            place = copy_rows(args, chunk, 0, place)


@gluon.jit
def find_chunk(args, pid, number):
    """Find the next chunk with tokens, from ``pid`` on, and describe it to the other warps.

    Returns its number, the chunk, and its index among the stored states.
    """
    HK = args.shared.HK
    row, count, seq, t = chunk_at(args, pid)
    while (pid < args.chunks) & (count <= 0):
        if args.by_gate_ptr is not None:  # what an empty chunk adds to the sums over chunks
            HV = HK * args.shared.heads
            at = (pid // HK).to(gl.int64) * (2 * HV) + (pid % HK) * args.shared.heads
            for head in range(args.shared.heads):
                gl.store(args.by_gate_ptr + at + head, 0.0)
                gl.store(args.by_gate_ptr + at + HV + head, 0.0)
        pid += gl.num_programs(0)
        row, count, seq, t = chunk_at(args, pid)
    count = gl.where(pid < args.chunks, count, 0)
    chunk_slot = row // C + seq
    is_hard = count < 0
    if args.hard_ptr is not None:
        head = (pid % HK) * args.shared.heads
        hard_at = head.to(gl.int64) * (args.shared.tokens // C + args.N) + chunk_slot
        is_hard = gl.load(args.hard_ptr + hard_at, mask=count > 0, other=0) != 0
    batch = seq * 0
    if args.cu_seqlens_ptr is None:
        batch = seq
    chunk = Chunk(row, count, pid % HK, is_hard, number)
    put_chunk(args.shared, chunk, pid // HK, batch, t)
    barrier()
    mbarrier.arrive(args.shared.barriers.chunk_ready.index(number % CHUNKS), count=1)
    return pid, chunk, chunk_slot


@gluon.jit
def chunk_at(args, pid):
    """A chunk's first token, its number of tokens, its sequence, and its first token in the batch
    row."""
    unit = gl.minimum(pid, args.chunks - 1) // args.shared.HK
    seq, start, number, end = unit_span(unit, args.cu_seqlens_ptr, args.N, args.T, C)
    row = start + number * C
    count = gl.where(seq < args.N, gl.minimum(end - row, C), 0)
    t = row
    if args.cu_seqlens_ptr is None:
        t = row - seq * args.T
    return row, count, seq, t


@gluon.jit
def copy_rows(args, chunk, head, place):
    """Start the copies of dO, E and Y of a head; of a hard chunk also the low terms."""
    shared = args.shared
    barriers = shared.barriers
    at = place_of(place, chunk.is_hard)
    mbarrier.wait(barriers.rows_free.index(at), phase_of(place, at) ^ 1)
    ready = barriers.rows_ready.index(at)
    mbarrier.expect(ready, 2 * 6 * C * GROUP_V)
    column = (chunk.head_k * shared.heads + head) * (2 * GROUP_V)
    for half in gl.static_range(2):
        part = [chunk.row, column + half * GROUP_V]
        async_load(args.do_desc, part, ready, shared.tiles.rows.index(6 * at + 3 * half))
        async_load(args.e_desc, part, ready, shared.tiles.rows.index(6 * at + 3 * half + 1))
        async_load(args.y_desc, part, ready, shared.tiles.rows.index(6 * at + 3 * half + 2))
    if shared.LOWS:
        if chunk.is_hard:
            low_ready = barriers.rows_ready.index(1)
            mbarrier.wait(barriers.rows_free.index(1), phase_of(place, 1) ^ 1)
            mbarrier.expect(low_ready, 2 * 4 * C * GROUP_V)
            for half in gl.static_range(2):
                part = [chunk.row, column + half * GROUP_V]
                async_load(args.e_low_desc, part, low_ready, low_e(shared.tiles, half, 0))
                async_load(args.y_low_desc, part, low_ready, low_y(shared.tiles, half, 0))
    return next_place(place, chunk.is_hard)


@gluon.jit
def copy_states(args, chunk, chunk_slot, head):
    """Start the copies of S and dS of a head."""
    shared = args.shared
    K: gl.constexpr = shared.tiles.qk.shape[2]
    ready = shared.barriers.states_ready
    mbarrier.expect(ready, 2 * 4 * GROUP_V * K)
    head_v = chunk.head_k * shared.heads + head
    row = (chunk_slot * (shared.HK * shared.heads) + head_v) * (2 * GROUP_V)
    for half in gl.static_range(2):
        part = [row + half * GROUP_V, 0]
        async_load(args.before_desc, part, ready, shared.tiles.states.index(2 * half))
        async_load(args.after_desc, part, ready, shared.tiles.states.index(2 * half + 1))
