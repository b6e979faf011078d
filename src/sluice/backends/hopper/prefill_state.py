"""The serial half of chunked prefill on Hopper, in Gluon: the state stays in registers.

Per chunk of C = 64 tokens, with Sᵀ [64, K] the left operand of every product of the chain, so that
nothing of it goes through shared memory (docs/kernels/chunked.md):

    Uᵀ  = Sᵀ Kᵀ
    Wᵀ  = beta Vᵀ - beta e^gc Uᵀ
    Vdᵀ = Wᵀ Agᵀ
    Oᵀ  = scale (e^gc Sᵀ Qᵀ + Vdᵀ Pᵀ)
    Sᵀ <- e^gl Sᵀ + (e^(gl - gc) Vdᵀ) K

Ag and the cumulative decays come from the kernel that runs over chunks in parallel. One warp asks
for tiles by TMA, as many chunks ahead as there are buffers, and makes the factors of a chunk from
its gates (prefill_loader.py); four make P (prefill_maker.py). One warpgroup holds 64 value columns
of one head (prefill_warps.py); with BLOCK_V = 128 two of them share a program's tiles, in turns.

Without OUTPUT the same kernel makes what a segment does to any state: S_zero, from zero, and the
transition M, from the identity and without values.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sluice.backends.hopper.prefill_loader import C_TOKENS, ROWS, bring
from sluice.backends.hopper.prefill_maker import make
from sluice.backends.hopper.prefill_tiles import unit_span
from sluice.backends.hopper.prefill_warps import consume
from sluice.backends.triton.arguments import INDICES


@gluon.jit(
    do_not_specialize=["N", "T", "pad_slot", "segment_size", "stride_gates_h"],
    do_not_specialize_on_alignment=INDICES,
)
def hopper_state_kernel(
    q_desc,  # [B * T, HQ * K], block [C, 64]
    k_desc,  # [B * T, HK * K], block [C, 64]
    v_desc,  # [B * T, HV * V], block [C, 64]
    a_desc,  # [B * T, HV * C], block [C, C]: Ag
    o_desc,  # [B * T, HV * V], block [C, 64]
    o_ptr,  # the same
    b_ptr,  # [HV, B * T] float32: beta
    g2_ptr,  # [HV, B * T] float32: cumulative log2 decay; None without g
    r_k_ptr,  # [HK, B * T] float32: inverse lengths; None without norm
    hard_ptr,  # [HK, B * T] int8, at a chunk's first token: whether its Ag is float16
    joined_ptr,  # [units, HV, K, V + K] float32: S_zero | M without OUTPUT, else states; None
    state_ptr,  # [P, HV, V, K] or [P, HV, K, V], read and written
    slots_ptr,  # [N]; None: row i is sequence i
    write_slots_ptr,  # [N]; None: slots
    has_state_ptr,  # [N]; None: all have
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    scale,
    N,
    T,
    pad_slot,
    segment_size,
    stride_o_t,
    stride_gates_h,  # of b, g2, r_k and hard
    stride_state_p,
    HQ: gl.constexpr,
    HK: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BLOCK_V: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
    STATE_KV: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    C: gl.constexpr = C_TOKENS
    HALVES: gl.constexpr = BLOCK_V // ROWS
    BLOCKS_V: gl.constexpr = V // BLOCK_V
    BLOCKS: gl.constexpr = BLOCKS_V if OUTPUT else BLOCKS_V + K // BLOCK_V
    gdc_wait()  # for the kernels before this one: see tiles.begin
    gdc_launch_dependents()
    pid = gl.program_id(0)
    block = pid % BLOCKS
    head_v = (pid // BLOCKS) % HV
    unit = pid // (BLOCKS * HV)
    head_k = head_v // (HV // HK)
    head_q = head_v // (HV // HQ)
    seq, start, segment, end = unit_span(unit, cu_seqlens_ptr, N, T, segment_size)
    row = start + segment * segment_size
    if seq >= N:
        end = row
    tokens = gl.maximum(gl.minimum(end - row, segment_size), 0)
    exists = (seq < N) & ((tokens > 0) | (segment == 0))
    live = exists
    slot = gl.minimum(seq, N - 1).to(gl.int64)
    if slots_ptr is not None:
        slot = gl.load(slots_ptr + gl.minimum(seq, N - 1)).to(gl.int64)
        live = live & (slot > pad_slot)
    values = 1
    if not OUTPUT:
        values = (block < BLOCKS_V).to(gl.int32)
        live = live & (end - row > segment_size)  # all segments but the last
        tokens = gl.where(live, tokens, 0)
        block = block % BLOCKS_V
    first_row = block * BLOCK_V
    column_v = head_v * V + first_row

    # int64: P·HV·V·K passes 2**31 at 4,096 slots
    state_ptr += head_v * (V * K)
    b_ptr += head_v.to(gl.int64) * stride_gates_h
    if g2_ptr is not None:
        g2_ptr += head_v.to(gl.int64) * stride_gates_h
    if r_k_ptr is not None:
        r_k_ptr += head_k.to(gl.int64) * stride_gates_h
    hard_ptr += head_k.to(gl.int64) * stride_gates_h

    dtype: gl.constexpr = k_desc.dtype
    # K above Q: one product of the state with both
    KEYS: gl.constexpr = 2 * C if OUTPUT else C
    kq_bufs = gl.allocate_shared_memory(dtype, [NUM_BUFFERS, KEYS, K], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [NUM_BUFFERS * HALVES, C, ROWS], v_desc.layout)
    a_bufs = gl.allocate_shared_memory(dtype, [NUM_BUFFERS, C, C], a_desc.layout)
    if OUTPUT:
        products: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.float16)
        p_bufs = gl.allocate_shared_memory(gl.float16, [NUM_BUFFERS, C, C], products)
        o_bufs = gl.allocate_shared_memory(dtype, [HALVES, C, ROWS], v_desc.layout)
    else:  # nothing is read
        p_bufs = a_bufs
        o_bufs = v_bufs
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    past = gl.allocate_shared_memory(gl.float32, [NUM_BUFFERS, C], plain)
    to_end = gl.allocate_shared_memory(gl.float32, [NUM_BUFFERS, C], plain)
    read = gl.allocate_shared_memory(gl.float32, [NUM_BUFFERS, C], plain)
    lift = gl.allocate_shared_memory(gl.float32, [NUM_BUFFERS, C], plain)
    whole = gl.allocate_shared_memory(gl.float32, [NUM_BUFFERS, C], plain)
    b = gl.allocate_shared_memory(gl.float32, [NUM_BUFFERS, C], plain)
    factors = (b, past, to_end, read, lift, whole)
    r_q = gl.allocate_shared_memory(gl.float32, [C], plain)
    g2 = gl.allocate_shared_memory(gl.float32, [NUM_BUFFERS, C], plain)
    r_k = gl.allocate_shared_memory(gl.float32, [NUM_BUFFERS, C], plain)
    ready = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], mbarrier.MBarrierLayout())
    gated = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_BUFFERS):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(gated.index(stage), count=1)
        mbarrier.init(made.index(stage), count=1)
        mbarrier.init(free.index(stage), count=HALVES)
    for half in gl.static_range(2):
        mbarrier.init(turn.index(half), count=1)
    fence_async_shared()

    known = live
    keep = live
    split = end - start > segment_size
    if OUTPUT:
        source_ptr = state_ptr + slot * stride_state_p
        if has_state_ptr is not None:
            known = known & (gl.load(has_state_ptr + gl.minimum(seq, N - 1)) != 0)
        if write_slots_ptr is not None:
            slot = gl.load(write_slots_ptr + gl.minimum(seq, N - 1)).to(gl.int64)
        keep = keep & (slot > pad_slot) & (row + tokens >= end)
        target_ptr = state_ptr + slot * stride_state_p
        if joined_ptr is not None:
            # the program that ends the sequence writes the pool while others still begin
            known = known & (end - start <= segment_size)
            before = gl.where(segment > 0, unit - 1, unit + (end - start - 1) // segment_size)
            joined_ptr += (before.to(gl.int64) * HV + head_v) * (K * (V + K))
    else:
        source_ptr = joined_ptr
        target_ptr = joined_ptr + (unit.to(gl.int64) * HV + head_v) * (K * (V + K))
        target_ptr += gl.where(values != 0, 0, V)
    tiles = (
        q_desc, k_desc, v_desc, a_desc, kq_bufs, v_bufs, a_bufs, ready, free, row,
        gl.where(live, tokens, 0), head_q * K, head_k * K, head_v * C, column_v, values != 0,
    )  # fmt: skip
    gates = (b_ptr, g2_ptr, r_k_ptr, b, g2, r_k, past, to_end, whole, gated)
    ahead = (tiles, g2, r_k, r_q, read, lift, p_bufs, gated, made, scale, r_k_ptr)
    work = (
        kq_bufs, v_bufs, a_bufs, p_bufs, o_bufs, factors, ready, made, free, turn, o_desc,
        o_ptr, source_ptr, known, joined_ptr, split, target_ptr, keep,
        live, row, tokens, column_v, first_row, values, stride_o_t, hard_ptr,
    )  # fmt: skip
    # constants stay constants only where they stand in the call
    if HALVES == 1:
        gl.warp_specialize(
            [
                (consume, (work, K, V, STATE_KV, 0, HALVES, NUM_BUFFERS, OUTPUT)),
                (make, (ahead, K, BLOCK_V, NUM_BUFFERS, OUTPUT)),
                (bring, (tiles, gates, K, BLOCK_V, NUM_BUFFERS, OUTPUT)),
            ],
            [4, 1],
            [152, 32],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (work, K, V, STATE_KV, 0, HALVES, NUM_BUFFERS, OUTPUT)),
                (consume, (work, K, V, STATE_KV, 1, HALVES, NUM_BUFFERS, OUTPUT)),
                (make, (ahead, K, BLOCK_V, NUM_BUFFERS, OUTPUT)),
                (bring, (tiles, gates, K, BLOCK_V, NUM_BUFFERS, OUTPUT)),
            ],
            [4, 4, 1],
            [200, 80, 32],
        )
