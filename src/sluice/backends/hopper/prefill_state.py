"""The serial half of chunked prefill on Hopper, in Gluon: one warpgroup, the state in registers.

Per chunk of C = 64 tokens, with Sᵀ [BLOCK_V, K] the left operand of every product of the chain, so
that nothing of it goes through shared memory (docs/kernels/chunked.md):

    Uᵀ  = Sᵀ Kᵀ
    Wᵀ  = Vᵀ - e^gc Uᵀ
    Vdᵀ = Wᵀ Agᵀ
    Oᵀ  = scale (e^gc Sᵀ Qᵀ + Vdᵀ Pᵀ)
    Sᵀ <- e^gl Sᵀ + (e^(gl - gc) Vdᵀ) K

Ag, P and the gates come from the Triton kernels that run over chunks in parallel. One program owns
BLOCK_V value columns of one value head of one sequence. Whole chunks come by TMA, one ahead; what
is left at the end of a sequence by masked loads, since the tokens behind it belong to others.
"""

# ruff: noqa: RET505 (what a kernel may not say, and constants decide)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def request_chunk(
    q_desc, k_desc, v_desc, a_desc, p_desc, q_bufs, k_bufs, v_bufs, a_bufs, p_bufs, ready,
    chunk, chunks, row, head_q, head_k, head_v, column_v,
    K: gl.constexpr, BLOCK_V: gl.constexpr, C: gl.constexpr, NUM_BUFFERS: gl.constexpr,
):  # fmt: skip
    """Ask for a chunk's tiles, if the sequence has that many whole chunks."""
    stage = chunk % NUM_BUFFERS
    bar = ready.index(stage)
    inside = chunk < chunks
    t = row + chunk * C
    mbarrier.expect(bar, 2 * C * (2 * K + BLOCK_V + 2 * C), pred=inside)
    tma.async_copy_global_to_shared(q_desc, [t, head_q * K], bar, q_bufs.index(stage), pred=inside)
    tma.async_copy_global_to_shared(k_desc, [t, head_k * K], bar, k_bufs.index(stage), pred=inside)
    tma.async_copy_global_to_shared(v_desc, [t, column_v], bar, v_bufs.index(stage), pred=inside)
    tma.async_copy_global_to_shared(a_desc, [t, head_v * C], bar, a_bufs.index(stage), pred=inside)
    tma.async_copy_global_to_shared(p_desc, [t, head_v * C], bar, p_bufs.index(stage), pred=inside)


@gluon.jit
def load_decays(g2_ptr, row, count, offs_c, HV: gl.constexpr):
    """Cumulative log2 decays of ``count`` tokens from ``row`` on, and the last of them."""
    g2 = offs_c.to(gl.float32) * 0.0
    g2_last = 0.0
    if g2_ptr is not None:
        g2 = gl.load(g2_ptr + (row + offs_c) * HV, mask=offs_c < count, other=0.0)
        g2_last = gl.load(g2_ptr + (row + gl.maximum(count, 1) - 1) * HV)
    return g2, g2_last


@gluon.jit
def load_lengths(r_ptr, row, count, offs_c, H: gl.constexpr):
    """Inverse lengths of ``count`` keys or queries from ``row`` on; 1 without norm."""
    if r_ptr is None:
        return offs_c.to(gl.float32) * 0.0 + 1.0
    else:
        return gl.load(r_ptr + (row + offs_c) * H, mask=offs_c < count, other=0.0)


@gluon.jit
def state_offsets(
    first_row,
    layout: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BLOCK_V: gl.constexpr,
    STATE_KV: gl.constexpr,
):
    """Where the elements of Sᵀ [BLOCK_V, K] lie in a head's state."""
    rows = first_row + gl.arange(0, BLOCK_V, gl.SliceLayout(1, layout))
    columns = gl.arange(0, K, gl.SliceLayout(0, layout))
    if STATE_KV:
        return gl.expand_dims(rows, 1) + gl.expand_dims(columns, 0) * V
    else:
        return gl.expand_dims(rows, 1) * K + gl.expand_dims(columns, 0)


@gluon.jit
def advance(
    s, q_smem, k_smem, v_smem, a_smem, p_smem, g2, g2_last, r_q, r_k,
    acc_c: gl.constexpr, left_c: gl.constexpr, left_k: gl.constexpr,
    BLOCK_V: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One chunk: the state behind it and Oᵀ [BLOCK_V, C], not yet scaled."""
    dtype: gl.constexpr = k_smem.dtype
    none = gl.zeros([BLOCK_V, C], gl.float32, acc_c)
    s_left = gl.convert_layout(s.to(dtype), left_c)
    u = warpgroup_mma(s_left, k_smem.permute((1, 0)), none, use_acc=False, is_async=True)
    o = warpgroup_mma(s_left, q_smem.permute((1, 0)), none, use_acc=False, is_async=True)
    v = v_smem.permute((1, 0)).load(acc_c).to(gl.float32)
    decay = gl.exp2(g2)
    u = warpgroup_mma_wait(1, deps=[u])
    w = v - u * gl.expand_dims(decay * r_k, 0)
    w_left = gl.convert_layout(w.to(dtype), left_c)
    vd = warpgroup_mma(w_left, a_smem.permute((1, 0)), none, use_acc=False, is_async=True)
    o = warpgroup_mma_wait(1, deps=[o])
    o = o * gl.expand_dims(decay * r_q, 0)
    s = s * gl.exp2(g2_last)
    vd = warpgroup_mma_wait(0, deps=[vd])
    to_end = gl.expand_dims(gl.exp2(g2_last - g2) * r_k, 0)
    s = warpgroup_mma(gl.convert_layout((vd * to_end).to(dtype), left_k), k_smem, s, is_async=True)
    vd_left = gl.convert_layout(vd.to(dtype), left_c)
    o = warpgroup_mma(vd_left, p_smem.permute((1, 0)), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    o = warpgroup_mma_wait(0, deps=[o])
    return s, o


@gluon.jit
def fill(smem, ptr, stride, count, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Copy ``count`` rows of a tile into shared memory, zeros behind them."""
    threads: gl.constexpr = COLUMNS // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // threads, threads], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    at = gl.expand_dims(rows * stride, 1) + gl.expand_dims(columns, 0)
    mask = gl.expand_dims(rows < count, 1) & (gl.expand_dims(columns, 0) < COLUMNS)
    smem.store(gl.load(ptr + at, mask=mask, other=0.0))


@gluon.jit(do_not_specialize=["N", "T", "pad_slot"])
def hopper_state_kernel(
    q_desc,  # [B * T, HQ * K], block [C, K]
    k_desc,  # [B * T, HK * K], block [C, K]
    v_desc,  # [B * T, HV * V], block [C, BLOCK_V]
    a_desc,  # [B * T, HV * C], block [C, C]: Ag
    p_desc,  # [B * T, HV * C], block [C, C]: P
    o_desc,  # [B * T, HV * V], block [C, BLOCK_V]
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    p_ptr,
    o_ptr,  # the same six
    g2_ptr,  # [B * T, HV] float32: cumulative log2 decay; None without g
    r_q_ptr,  # [B * T, HQ] float32: inverse lengths; None without norm
    r_k_ptr,  # [B * T, HK] float32
    state_ptr,  # [P, HV, V, K] or [P, HV, K, V], read and written
    slots_ptr,  # [N]; None: row i is sequence i
    write_slots_ptr,  # [N]; None: slots
    has_state_ptr,  # [N]; None: all have
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    scale,
    N,
    T,
    pad_slot,
    stride_q_t,
    stride_k_t,
    stride_v_t,
    stride_o_t,
    stride_state_p,
    HQ: gl.constexpr,
    HK: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BLOCK_V: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
    STATE_KV: gl.constexpr,
):
    C: gl.constexpr = 64
    BLOCKS: gl.constexpr = V // BLOCK_V
    pid = gl.program_id(0)
    pid_v = pid % BLOCKS
    head_v = (pid // BLOCKS) % HV
    seq = pid // (BLOCKS * HV)
    head_k = head_v // (HV // HK)
    head_q = head_v // (HV // HQ)
    column_v = head_v * V + pid_v * BLOCK_V

    acc_c: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16]
    )
    acc_k: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, K, 16]
    )
    left_c: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_c, k_width=2)
    left_k: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_k, k_width=2)
    offs_c = gl.arange(0, C, gl.SliceLayout(0, acc_c))
    rows_o = gl.arange(0, BLOCK_V, gl.SliceLayout(1, acc_c))

    row = seq * T
    tokens = T
    if cu_seqlens_ptr is not None:
        row = gl.load(cu_seqlens_ptr + seq).to(gl.int32)
        tokens = gl.load(cu_seqlens_ptr + seq + 1).to(gl.int32) - row
    slot = seq.to(gl.int64)
    if slots_ptr is not None:
        slot = gl.load(slots_ptr + seq).to(gl.int64)
        if slot <= pad_slot:
            for t in range(0, tokens, C):
                at = (row + t + offs_c).to(gl.int64) * stride_o_t
                at = gl.expand_dims(at, 0) + gl.expand_dims(column_v + rows_o, 1)
                mask = gl.expand_dims(t + offs_c < tokens, 0) & gl.expand_dims(rows_o < V, 1)
                zeros = gl.zeros([BLOCK_V, C], o_ptr.dtype.element_ty, acc_c)
                gl.store(o_ptr + at, zeros, mask=mask)
            return

    dtype: gl.constexpr = q_desc.dtype
    q_bufs = gl.allocate_shared_memory(dtype, [NUM_BUFFERS, C, K], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [NUM_BUFFERS, C, K], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [NUM_BUFFERS, C, BLOCK_V], v_desc.layout)
    a_bufs = gl.allocate_shared_memory(dtype, [NUM_BUFFERS, C, C], a_desc.layout)
    p_bufs = gl.allocate_shared_memory(dtype, [NUM_BUFFERS, C, C], p_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_BUFFERS):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    chunks = tokens // C
    for ahead in gl.static_range(NUM_BUFFERS - 1):
        request_chunk(
            q_desc, k_desc, v_desc, a_desc, p_desc, q_bufs, k_bufs, v_bufs, a_bufs, p_bufs, ready,
            ahead, chunks, row, head_q, head_k, head_v, column_v, K, BLOCK_V, C, NUM_BUFFERS,
        )  # fmt: skip

    # int64: P·HV·V·K passes 2**31 at 4,096 slots
    state_ptr += head_v * (V * K)
    in_pool = state_offsets(pid_v * BLOCK_V, acc_k, K, V, BLOCK_V, STATE_KV)
    if has_state_ptr is None:
        s = gl.load(state_ptr + slot * stride_state_p + in_pool).to(gl.float32)
    else:
        known = (gl.load(has_state_ptr + seq) != 0) & (in_pool >= 0)
        s = gl.load(state_ptr + slot * stride_state_p + in_pool, mask=known, other=0.0)
        s = s.to(gl.float32)

    if g2_ptr is not None:
        g2_ptr += head_v
    if r_k_ptr is not None:
        r_q_ptr += head_q
        r_k_ptr += head_k
    g2, g2_last = load_decays(g2_ptr, row, gl.minimum(tokens, C), offs_c, HV)
    for chunk in range(chunks):
        cur = chunk % NUM_BUFFERS
        tma.store_wait(0)  # the stage about to be refilled still holds an output tile
        request_chunk(
            q_desc, k_desc, v_desc, a_desc, p_desc, q_bufs, k_bufs, v_bufs, a_bufs, p_bufs, ready,
            chunk + NUM_BUFFERS - 1, chunks, row, head_q, head_k, head_v, column_v,
            K, BLOCK_V, C, NUM_BUFFERS,
        )  # fmt: skip
        # one chunk ahead: a load's latency is not to sit in the chain
        left = gl.minimum(tokens - (chunk + 1) * C, C)
        g2_next, g2_last_next = load_decays(g2_ptr, row + (chunk + 1) * C, left, offs_c, HV)
        r_q = load_lengths(r_q_ptr, row + chunk * C, C, offs_c, HQ)
        r_k = load_lengths(r_k_ptr, row + chunk * C, C, offs_c, HK)
        mbarrier.wait(ready.index(cur), (chunk // NUM_BUFFERS) & 1)
        v_smem = v_bufs.index(cur)
        s, o = advance(
            s, q_bufs.index(cur), k_bufs.index(cur), v_smem, a_bufs.index(cur), p_bufs.index(cur),
            g2, g2_last, r_q, r_k, acc_c, left_c, left_k, BLOCK_V, C,
        )  # fmt: skip
        v_smem.permute((1, 0)).store((o * scale).to(dtype))  # the V tile is done with
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [row + chunk * C, column_v], v_smem)
        g2 = g2_next
        g2_last = g2_last_next
    tma.store_wait(0)

    rest = tokens - chunks * C
    if rest > 0:
        first = (row + chunks * C).to(gl.int64)
        fill(q_bufs.index(0), q_ptr + first * stride_q_t + head_q * K, stride_q_t, rest, C, K)
        fill(k_bufs.index(0), k_ptr + first * stride_k_t + head_k * K, stride_k_t, rest, C, K)
        fill(v_bufs.index(0), v_ptr + first * stride_v_t + column_v, stride_v_t, rest, C, BLOCK_V)
        fill(a_bufs.index(0), a_ptr + first * (HV * C) + head_v * C, HV * C, rest, C, C)
        fill(p_bufs.index(0), p_ptr + first * (HV * C) + head_v * C, HV * C, rest, C, C)
        fence_async_shared()
        gl.thread_barrier()
        r_q = load_lengths(r_q_ptr, row + chunks * C, rest, offs_c, HQ)
        r_k = load_lengths(r_k_ptr, row + chunks * C, rest, offs_c, HK)
        s, o = advance(
            s, q_bufs.index(0), k_bufs.index(0), v_bufs.index(0), a_bufs.index(0), p_bufs.index(0),
            g2, g2_last, r_q, r_k, acc_c, left_c, left_k, BLOCK_V, C,
        )  # fmt: skip
        at = (first + offs_c) * stride_o_t
        at = gl.expand_dims(at, 0) + gl.expand_dims(column_v + rows_o, 1)
        mask = gl.expand_dims(offs_c < rest, 0) & gl.expand_dims(rows_o < V, 1)
        gl.store(o_ptr + at, (o * scale).to(dtype), mask=mask)

    if write_slots_ptr is not None:
        slot = gl.load(write_slots_ptr + seq).to(gl.int64)
    if slot > pad_slot:
        # made anew, with a zero the compiler cannot see: kept through the loop they would fill
        # half the registers
        zero = gl.minimum(rest, 0)
        in_pool = state_offsets(pid_v * BLOCK_V + zero, acc_k, K, V, BLOCK_V, STATE_KV)
        gl.store(state_ptr + slot * stride_state_p + in_pool, s.to(state_ptr.dtype.element_ty))
