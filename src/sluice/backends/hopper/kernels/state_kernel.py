"""The serial half of chunked prefill on Hopper, in Gluon: the state stays in registers.

Per chunk of C = 64 tokens (docs/kernels/symbols.md), with γ the cumulative log decay in the chunk:

    Uᵀ     = Sᵀ Kᵀ
    (βW)ᵀ  = β Vᵀ - β e^γ Uᵀ
    Dᵀ     = (βW)ᵀ Agᵀ
    Oᵀ     = scale (e^γ Sᵀ Qᵀ + Dᵀ QKgᵀ)
    Sᵀ    <- e^γ_C Sᵀ + (e^(γ_C - γ) Dᵀ) K

Sᵀ [64, K] and what follows from it are left operands, from registers: the chain from one state to
the next never passes through shared memory. Ag and γ come from hopper_chunks_kernel.

A program has warps of four roles. The planner, one warp, takes one item after another for the
program: a block of value columns of a head, in one sequence (state_items.py). The loader, one
warp, brings tiles by TMA, STAGES chunks ahead, and makes factors from the gates (state_loader.py).
Four warps make the products QKg (state_products.py). A state group, four warps, holds 64 value
columns of one head (state_groups.py); with BLOCK_V = 128 two groups share the tiles and take turns.
Stages, phases and turns carry over from item to item, so the roles that work ahead are already at
the next item while the state groups finish the one before.

Without OUTPUT the same kernel makes the effect of a segment on any state, S -> M S + S_zero: S_zero
is the state after the segment from zero, and M, the transition, is the state after it from the
identity and without values.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sluice.backends.hopper.kernels.constants import GROUP_V, C
from sluice.backends.hopper.kernels.state_args import (
    Barriers,
    Factors,
    LoaderArgs,
    PlannerArgs,
    ProductsArgs,
    Sizes,
    StateArgs,
    Tiles,
)
from sluice.backends.hopper.kernels.state_checkpoints import PoolCheckpoints
from sluice.backends.hopper.kernels.state_groups import run_state
from sluice.backends.hopper.kernels.state_items import allocate_items, run_planner
from sluice.backends.hopper.kernels.state_loader import run_loader
from sluice.backends.hopper.kernels.state_products import run_products
from sluice.backends.triton.kernels.alignment import INDICES


@gluon.jit(
    do_not_specialize=[
        "number",
        "N",
        "T",
        "M",
        "every",
        "pad_slot",
        "segment_size",
        "stride_gates_h",
        "HV",
        "R_Q",
        "R_K",
    ],
    do_not_specialize_on_alignment=INDICES,
)
def hopper_state_kernel(
    q_desc,  # [B * T, HQ * K], block [C, 64]
    k_desc,  # [B * T, HK * K], block [C, 64]
    v_desc,  # [B * T, HV * V], block [C, 64]
    ag_desc,  # [B * T, HV * C], block [C, C]
    o_desc,  # [B * T, HV * V], block [C, 64]
    o_ptr,  # the same tensor
    beta32_ptr,  # [HV, B * T] float32
    g2_ptr,  # [HV, B * T] float32: γ in powers of two; None without g
    r_k_ptr,  # [HK, B * T] float32: inverse lengths of the keys; None without norm
    hard_ptr,  # [HK, B * T] int8, at a chunk's first token: whether its Ag is float16
    taken_ptr,  # [1] int32: items that programs took after their first; 0 before and after a launch
    segments_ptr,  # [units, HV, K, V + K] float32: S_zero | M without OUTPUT, else states; or None
    state_ptr,  # [P, HV, V, K] or [P, HV, K, V], read and written
    slots_ptr,  # [N]; None: sequence i has slot i
    write_slots_ptr,  # [N]; None: slots
    has_state_ptr,  # [N]; None: all have
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    checkpoint_slots_ptr,  # [N, M]; None: no checkpoints
    checkpoint_positions_ptr,  # [N, M]; None: after every ``every`` tokens
    waiting_ptr,  # [N, M, HV, V, K] float32: states before tails; None: they wait in their slots
    scale,
    number,  # of items, over all programs (state_items.py)
    N,
    T,
    M,
    every,
    pad_slot,
    segment_size,
    stride_o_t,
    stride_gates_h,  # of beta32, g2, r_k and hard
    stride_state_p,
    HV,
    R_Q,  # value heads per query head
    R_K,  # value heads per key head
    K: gl.constexpr,
    V: gl.constexpr,
    BLOCK_V: gl.constexpr,
    STAGES: gl.constexpr,
    STATE_KV: gl.constexpr,
    OUTPUT: gl.constexpr,
    EVERY: gl.constexpr,  # without OUTPUT: for every segment, else for all but a sequence's last
    TAILS: gl.constexpr,  # whether a checkpoint may lie inside a chunk
):
    GROUPS: gl.constexpr = BLOCK_V // GROUP_V
    sizes = Sizes(K, V, GROUPS, STAGES, STATE_KV, OUTPUT)
    tiles = allocate_tiles(k_desc, v_desc, ag_desc, sizes)
    factors = allocate_factors(STAGES)
    barriers = allocate_barriers(STAGES, GROUPS)
    items = allocate_items(GROUPS)
    fence_async_shared()
    # Nothing above reads or writes memory: each role waits for the kernels before this one.
    if checkpoint_slots_ptr is None:
        saves = PoolCheckpoints(
            None, None, None, None, None, None, None, None, None, None, None, False
        )  # fmt: skip
    else:
        saves = PoolCheckpoints(
            slots_ptr=checkpoint_slots_ptr, positions_ptr=checkpoint_positions_ptr, every=every,
            number=M, state_ptr=state_ptr, stride_state_p=stride_state_p, pad_slot=pad_slot,
            waiting_ptr=waiting_ptr, HV=HV, N=N, rows=stride_gates_h, TAILS=TAILS,
        )  # fmt: skip
    planner = PlannerArgs(
        cu_seqlens_ptr=cu_seqlens_ptr, slots_ptr=slots_ptr, write_slots_ptr=write_slots_ptr,
        has_state_ptr=has_state_ptr, hard_ptr=hard_ptr, state_ptr=state_ptr,
        stride_state_p=stride_state_p, taken_ptr=taken_ptr, number=number,
        N=N, T=T, HV=HV, R_Q=R_Q, R_K=R_K, pad_slot=pad_slot,
        segment_size=segment_size, stride_gates_h=stride_gates_h, items=items,
        SPLIT=segments_ptr is not None, EVERY=EVERY,
    )  # fmt: skip
    loader = LoaderArgs(
        q_desc=q_desc, k_desc=k_desc, v_desc=v_desc, ag_desc=ag_desc,
        beta32_ptr=beta32_ptr, g2_ptr=g2_ptr, r_k_ptr=r_k_ptr, stride_gates_h=stride_gates_h,
        tiles=tiles, factors=factors, barriers=barriers, items=items, saves=saves,
    )  # fmt: skip
    products = ProductsArgs(
        tiles=tiles, factors=factors, barriers=barriers, scale=scale,
        NORMALIZE_QK=r_k_ptr is not None,
    )  # fmt: skip
    state = StateArgs(
        tiles=tiles, factors=factors, barriers=barriers, items=items, o_desc=o_desc, o_ptr=o_ptr,
        state_ptr=state_ptr, stride_state_p=stride_state_p, segments_ptr=segments_ptr, HV=HV,
        stride_o_t=stride_o_t, hard_ptr=hard_ptr, stride_gates_h=stride_gates_h, saves=saves,
    )  # fmt: skip
    # (role, arguments); then the warps and the registers per thread of all roles but the first
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (run_state, (state, sizes, 0)),
                (run_products, (products, sizes)),
                (run_loader, (loader, sizes)),
                (run_planner, (planner, sizes)),
            ],
            [4, 1, 1],
            [152, 32, 32],
        )
    else:
        gl.warp_specialize(
            [
                (run_state, (state, sizes, 0)),
                (run_state, (state, sizes, 1)),
                (run_products, (products, sizes)),
                (run_loader, (loader, sizes)),
                (run_planner, (planner, sizes)),
            ],
            [4, 4, 1, 1],
            [200, 80, 32, 32],
        )


@gluon.jit
def allocate_tiles(k_desc, v_desc, ag_desc, sizes):
    """The tiles. TMA and the tensor cores share the descriptors' layouts."""
    dtype: gl.constexpr = k_desc.dtype
    KEYS: gl.constexpr = 2 * C if sizes.OUTPUT else C
    VALUES: gl.constexpr = sizes.STAGES * sizes.GROUPS
    kq = gl.allocate_shared_memory(dtype, [sizes.STAGES, KEYS, sizes.K], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [VALUES, C, GROUP_V], v_desc.layout)
    ag = gl.allocate_shared_memory(dtype, [sizes.STAGES, C, C], ag_desc.layout)
    if sizes.OUTPUT:
        square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.float16)
        qkg = gl.allocate_shared_memory(gl.float16, [sizes.STAGES, C, C], square)
        o = gl.allocate_shared_memory(dtype, [sizes.GROUPS, C, GROUP_V], v_desc.layout)
    else:  # never read
        qkg = ag
        o = v
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    left = gl.allocate_shared_memory(gl.int32, [sizes.STAGES, 1], layout)
    return Tiles(kq, v, ag, qkg, o, left)


@gluon.jit
def allocate_factors(STAGES: gl.constexpr):
    """The factors."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    beta_decay_in = gl.allocate_shared_memory(gl.float32, [STAGES, C], layout)
    decay_out = gl.allocate_shared_memory(gl.float32, [STAGES, C], layout)
    qs_up = gl.allocate_shared_memory(gl.float32, [STAGES, C], layout)
    o_down = gl.allocate_shared_memory(gl.float32, [STAGES, C], layout)
    decay_all = gl.allocate_shared_memory(gl.float32, [STAGES, C], layout)
    beta = gl.allocate_shared_memory(gl.float32, [STAGES, C], layout)
    r_q = gl.allocate_shared_memory(gl.float32, [C], layout)
    g2 = gl.allocate_shared_memory(gl.float32, [STAGES, C], layout)
    r_k = gl.allocate_shared_memory(gl.float32, [STAGES, C], layout)
    return Factors(beta, beta_decay_in, decay_out, qs_up, o_down, decay_all, g2, r_k, r_q)


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """The mbarriers, initialised."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    tiles_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    factors_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    qkg_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    stage_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(tiles_ready.index(stage), count=1)
        mbarrier.init(factors_ready.index(stage), count=1)
        mbarrier.init(qkg_ready.index(stage), count=1)
        mbarrier.init(stage_free.index(stage), count=GROUPS)
    for group in gl.static_range(2):
        mbarrier.init(turn.index(group), count=1)
    return Barriers(tiles_ready, factors_ready, qkg_ready, stage_free, turn)
