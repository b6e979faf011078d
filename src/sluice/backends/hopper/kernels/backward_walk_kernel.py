"""Both walks of the backward of prefill on Hopper, in Gluon: the state stays in registers.

With X the state before a chunk, or the gradient of the state after it (BACK), transposed as in
state_kernel.py, a chunk of C = 64 tokens is (docs/kernels/backward.md, (G10) and (G4)):

    R = V − e^γ K X                         BACK: dD = Pᵀ dO + e^(γ_C−γ) K X
    E = R − Bg (beta R)                           Y  = dD − Bgᵀ (beta dD)
    X <- e^γ_C X + Kᵀ (e^(γ_C−γ) beta E)          X <- e^γ_C X + Qᵀ (s e^γ dO) − Kᵀ (e^γ beta Y)

so both are one kernel: a product with keys, one with Bg, and an update of X, each of which needs
the one before it. X is stored before the update, and so are E, or Y and dV = beta Y.

A program owns 64 value columns of one value head over one segment of a sequence. One warp brings
tiles by TMA and factors, STAGES chunks ahead (backward_walk_loader.py); four warps hold X
(backward_walk_chunks.py).

Each walk has a launch of its own for programs with a hard chunk (backward_walk_chunks.py), so that
their low terms take no registers from the others.

With EFFECT nothing is stored but X after a segment that began with zeros; forward also from the
identity and without values, which is the segment's transition (G11).

Neither walk reads what the other writes. So the walk back runs beside the walk forward, on SMs that
the latter leaves free (ALONGSIDE). A program of the walk back starts once all programs of the walk
forward have started and have waited for all kernels before them. So its own inputs are complete.
The walk back waits for the walk forward only at its end, so that a kernel that waits for the walk
back waits for both.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sluice.backends.hopper.kernels.backward_walk_args import (
    WalkArgs,
    WalkBarriers,
    WalkFactors,
    WalkLoaderArgs,
    WalkSizes,
    WalkTiles,
)
from sluice.backends.hopper.kernels.backward_walk_chunks import run_walk
from sluice.backends.hopper.kernels.backward_walk_loader import run_walk_loader
from sluice.backends.hopper.kernels.constants import GROUP_V, C
from sluice.backends.hopper.kernels.work_units import unit_span
from sluice.backends.triton.kernels.alignment import INDICES


@gluon.jit(
    do_not_specialize=["N", "T", "tokens", "segment_size", "HV", "R_Q", "R_K"],
    do_not_specialize_on_alignment=INDICES,
)
def hopper_walk_kernel(
    q_desc,  # [B * T, HQ * K], block [C, K]; None without BACK, as p_desc and dv_desc
    k_desc,  # [B * T, HK * K], block [C, K]
    v_desc,  # [B * T, HV * V], block [C, 64]: v; BACK: dO
    b_desc,  # [B * T, HV * C] float16, block [C, C]: Bg / b_down
    p_desc,  # [B * T, HV * C], block [C, C]
    x_desc,  # [(B * T // C + N) * HV * V, K], block [64, K]: X before it changes, chunk by chunk
    y_desc,  # [B * T, HV * V], block [C, 64]: E; BACK: Y
    dv_desc,  # the same: dV
    y_ptr,  # the same tensors
    dv_ptr,
    y_low_ptr,  # [B * T, HV, V]: low terms of y in hard chunks; None: there are none
    x_low_ptr,  # [chunk_slots, HV, V, K]: low terms of X in hard chunks; None: none, or no g
    p_low_ptr,  # [B * T, HV, C]; None without BACK too
    b_low_ptr,  # [B * T, HV, C]: low terms of Bg in hard chunks; None without HARD
    hard_ptr,  # [HV, B * T // C + N] int32; None: no chunk is hard
    beta32_ptr,  # [HV, B * T] float32
    decay_in_ptr,  # [HV, B * T] float32: e^γ r_k
    decay_out_ptr,  # [HV, B * T] float32: e^(γ_C - γ) r_k
    decay_q_ptr,  # [HV, B * T] float32: scale e^γ r_q; None without BACK
    g2_ptr,  # [HV, B * T] float32; None without g
    b_down_ptr,  # [HV, B * T] float32, at a chunk's first token
    state_ptr,  # [N, HV, V, K] or [N, HV, K, V]: the first X; None: zeros
    dstate_ptr,  # the same: the last X; None: not wanted
    segments_ptr,  # [segments, HV, 2 * V + K, K] float32: S, transition, dS; None: no split
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    N,
    T,
    tokens,  # B * T
    segment_size,
    HV,
    R_Q,  # value heads per query head
    R_K,  # value heads per key head
    K: gl.constexpr,
    V: gl.constexpr,
    STAGES: gl.constexpr,
    STATE_KV: gl.constexpr,
    BACK: gl.constexpr,
    EFFECT: gl.constexpr,
    HARD: gl.constexpr,  # with hard_ptr: the programs that have a hard chunk, or the rest
    ALONGSIDE: gl.constexpr,  # with BACK: wait for the kernel before at the end only
):
    BLOCKS_V: gl.constexpr = V // GROUP_V
    BLOCKS: gl.constexpr = BLOCKS_V + K // GROUP_V if EFFECT and not BACK else BLOCKS_V
    if not ALONGSIDE:
        gdc_wait()  # for the kernels before this one: see begin in triton/kernels/math.py
    gdc_launch_dependents()

    # The tokens of this program
    pid = gl.program_id(0)
    block = pid % BLOCKS
    head_v = (pid // BLOCKS) % HV
    unit = pid // (BLOCKS * HV)
    seq, start, segment, end = unit_span(unit, cu_seqlens_ptr, N, T, segment_size)
    row = start + segment * segment_size
    stop = gl.minimum(row + segment_size, end)
    is_split = end - start > segment_size
    live = (seq < N) & ((row < end) | (segment == 0))
    values = 1
    if EFFECT and BACK:
        live = live & (segment > 0)  # nothing comes before the first segment
    if EFFECT and not BACK:
        values = (block < BLOCKS_V).to(gl.int32)  # the later blocks make the transition
        live = live & is_split & ((stop < end) | (values == 0))
        block = block % BLOCKS_V
    if hard_ptr is not None:
        hard_ptr += head_v.to(gl.int64) * (tokens // C + N) + row // C + seq
        live = live & (any_hard(hard_ptr, gl.where(live, stop - row, 0)) == HARD)
    count = gl.where(live, stop - row, 0)
    first_v = block * GROUP_V

    # Offsets in int64: N * HV * V * K passes 2**31 at 4,096 sequences
    head = head_v.to(gl.int64)
    of_sequence = (gl.minimum(seq, N - 1).to(gl.int64) * HV + head) * (V * K)
    if segments_ptr is not None:
        segments_ptr += (unit.to(gl.int64) * HV + head) * ((2 * V + K) * K)
        if BACK:
            segments_ptr += (V + K) * K
    if state_ptr is not None:
        state_ptr += of_sequence
    if dstate_ptr is not None:
        dstate_ptr += of_sequence
    write = live
    if EFFECT:
        dstate_ptr = segments_ptr + gl.where(values != 0, 0, V * K)
    else:
        write = live & (segment == 0)
    if hard_ptr is not None:
        y_low_ptr += head_v * V + first_v
        if BACK:
            p_low_ptr += head_v * C
        if HARD:
            b_low_ptr += head_v * C
    if BACK:
        dv_ptr += head_v * V + first_v
        decay_q_ptr += head * tokens
    if g2_ptr is not None:
        g2_ptr += head * tokens

    sizes = WalkSizes(K, V, STAGES, STATE_KV, BACK, EFFECT, HARD)
    tiles = allocate_tiles(k_desc, v_desc, b_desc, x_desc, sizes)
    factors = allocate_factors(STAGES)
    barriers = allocate_barriers(STAGES)
    loader = WalkLoaderArgs(
        k_desc=k_desc, q_desc=q_desc, v_desc=v_desc, b_desc=b_desc, p_desc=p_desc,
        row=row, tokens=count,
        column_k=(head_v // R_K) * K, column_q=(head_v // R_Q) * K,
        column_v=head_v * V + first_v, column_c=head_v * C,
        beta32_ptr=beta32_ptr + head * tokens,
        decay_in_ptr=decay_in_ptr + head * tokens, decay_out_ptr=decay_out_ptr + head * tokens,
        decay_q_ptr=decay_q_ptr, g2_ptr=g2_ptr, b_down_ptr=b_down_ptr + head * tokens,
        tiles=tiles, factors=factors, barriers=barriers,
    )  # fmt: skip
    walk = WalkArgs(
        tiles=tiles, factors=factors, barriers=barriers,
        x_desc=x_desc, y_desc=y_desc, dv_desc=dv_desc,
        y_ptr=y_ptr + head_v * V + first_v, y_low_ptr=y_low_ptr, dv_ptr=dv_ptr,
        x_low_ptr=x_low_ptr,
        p_low_ptr=p_low_ptr, b_low_ptr=b_low_ptr, hard_ptr=hard_ptr,
        source_ptr=state_ptr, has_source=live & ((segments_ptr is None) | (is_split == 0)),
        segments_ptr=segments_ptr, is_split=live & is_split,
        target_ptr=dstate_ptr, write=write, values=values,
        row=row, tokens=count, column_v=head_v * V + first_v, first_v=first_v,
        row_x=((row // C + seq) * HV + head_v) * V + first_v, step_x=HV * V,
        stride_v_t=HV * V, stride_p_t=HV * C,
    )  # fmt: skip
    gl.warp_specialize([(run_walk, (walk, sizes)), (run_walk_loader, (loader, sizes))], [1], [32])
    if ALONGSIDE:  # noqa: SIM102 (a constexpr branch stays apart)
        if live | (pid == 0):  # one program is enough: programs without tokens leave their SM
            gdc_wait()


@gluon.jit
def any_hard(hard_ptr, tokens):
    """Whether one of the chunks of these tokens is hard."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    chunks = gl.cdiv(tokens, C)
    found = tokens * 0
    for first in range(0, chunks, 128):
        number = first + gl.arange(0, 128, layout)
        hard = gl.load(hard_ptr + number, mask=number < chunks, other=0)
        found = gl.maximum(found, gl.max(hard, axis=0))
    return found != 0


@gluon.jit
def allocate_tiles(k_desc, v_desc, b_desc, x_desc, sizes):
    """The tiles. TMA and the tensor cores share the descriptors' layouts."""
    dtype: gl.constexpr = k_desc.dtype
    k = gl.allocate_shared_memory(dtype, [sizes.STAGES, C, sizes.K], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [sizes.STAGES, C, GROUP_V], v_desc.layout)
    b = gl.allocate_shared_memory(gl.float16, [sizes.STAGES, C, C], b_desc.layout)
    q = k  # never read without BACK, as the others that are the same memory
    p = v
    p_low = v
    b_low = b
    dv = v
    x = k
    y = v
    if sizes.HARD:
        b_low = gl.allocate_shared_memory(gl.float16, [C, C], b_desc.layout)
    if sizes.BACK:
        square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
        q = gl.allocate_shared_memory(dtype, [sizes.STAGES, C, sizes.K], k_desc.layout)
        p = gl.allocate_shared_memory(dtype, [sizes.STAGES, C, C], square)
        if sizes.HARD:
            p_low = gl.allocate_shared_memory(dtype, [C, C], square)
    if not sizes.EFFECT:
        x = gl.allocate_shared_memory(dtype, [GROUP_V, sizes.K], x_desc.layout)
        y = gl.allocate_shared_memory(dtype, [C, GROUP_V], v_desc.layout)
        if sizes.BACK:
            dv = gl.allocate_shared_memory(dtype, [C, GROUP_V], v_desc.layout)
    return WalkTiles(k, q, v, b, p, p_low, b_low, x, y, dv)


@gluon.jit
def allocate_factors(STAGES: gl.constexpr):
    """The factors."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    beta = gl.allocate_shared_memory(gl.float32, [STAGES, C], layout)
    read = gl.allocate_shared_memory(gl.float32, [STAGES, C], layout)
    write = gl.allocate_shared_memory(gl.float32, [STAGES, C], layout)
    decay_q = gl.allocate_shared_memory(gl.float32, [STAGES, C], layout)
    decay_all = gl.allocate_shared_memory(gl.float32, [STAGES, C], layout)
    b_down = gl.allocate_shared_memory(gl.float32, [STAGES, C], layout)
    return WalkFactors(beta, read, write, decay_q, decay_all, b_down)


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr):
    """The mbarriers, initialised."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    tiles_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    factors_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    stage_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(tiles_ready.index(stage), count=1)
        mbarrier.init(factors_ready.index(stage), count=1)
        mbarrier.init(stage_free.index(stage), count=1)
    fence_async_shared()
    return WalkBarriers(tiles_ready, factors_ready, stage_free)
