"""The gradients of queries, keys and gates after the walks on Hopper, in Gluon: one kernel.

For a chunk of C = 64 tokens and each value head that shares a key head, docs/kernels/backward.md
(G6) to (G9). With S the state before the chunk, dS the gradient of the state after it, r_q and r_k
the inverse lengths of queries and keys, D = beta E and dV = beta Y:

    N = s r_q (dO Dᵀ ∘ Γ) r_k,     H = −r_k strictLower(dV Dᵀ ∘ Γ) r_k,     dbeta = diagonal(Y Eᵀ)
    r_q dQ̂ = s r_q e^γ dO Sᵀ + N K
    r_k dK̂ = Nᵀ Q + (H + Hᵀ) K + r_k e^(γ_C−γ) D dSᵀ − r_k e^γ dV Sᵀ

A program owns a chunk of one key head, which is a query head too, and goes over its value heads. It
has warps of three roles. The loader, one warp, brings tiles by TMA, up to three stages ahead
(gradients_loader.py). Four warps make N, H and dQ (gradients_queries.py), four more dK and dg
(gradients_keys.py). N and H pass from one to the other through shared memory, and never leave it.

A stage is half of the value columns of a head: every product that reads it is a sum over value
columns. dQ and dK are summed over heads in registers, in the order of the heads.

Every product has both operands in shared memory, but for two whose left one is in registers as its
product made it: none is transposed there (docs/kernels/backward.md).

In a hard chunk (backward_chunks.py) E, Y and N are two terms each. Its ring has two stages, and the
low terms of E and Y lie in the third. What the low terms of S and dS add to dg has been made before
(triton/kernels/backward_lows.py).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sluice.backends.hopper.kernels.constants import GROUP_V, C
from sluice.backends.hopper.kernels.gradients_args import (
    Barriers,
    Chunk,
    KeysArgs,
    LoaderArgs,
    QueriesArgs,
    Sums,
    Tiles,
)
from sluice.backends.hopper.kernels.gradients_keys import run_keys
from sluice.backends.hopper.kernels.gradients_loader import run_loader
from sluice.backends.hopper.kernels.gradients_queries import run_queries
from sluice.backends.hopper.kernels.work_units import unit_span
from sluice.backends.triton.kernels.alignment import GATES, INDICES

STAGES = gl.constexpr(3)


@gluon.jit(
    do_not_specialize=["N", "T", "tokens", "HK", "HV", "stride_g_b"],
    do_not_specialize_on_alignment=[*INDICES, *GATES],
)
def hopper_gradients_kernel(
    q_desc,  # [B * T, HK * K], block [C, K]
    k_desc,  # [B * T, HK * K], block [C, K]
    do_desc,  # [B * T, HV * V], block [C, 64], as the next four
    e_desc,
    y_desc,
    e_low_desc,  # low terms in hard chunks; None: there are none
    y_low_desc,
    before_desc,  # [slots * HV * V, K], block [64, K]: the state before each chunk
    after_desc,  # the same: the gradient of the state after it
    g_ptr,  # [B, T, HV]; read if it is a raw gate
    A_log_ptr,  # [HV]; None: g is no raw gate
    dt_bias_ptr,  # [HV]; None: 0
    hard_ptr,  # [HV, slots] int32; None: no chunk is hard
    by_low_ptr,  # [HV, B * T] float32: what low terms of states add to dg in hard chunks
    beta32_ptr,  # [HV, B * T] float32
    g2_ptr,  # [HV, B * T] float32: γ in powers of two; None without g
    decay_in_ptr,  # [HV, B * T] float32: e^γ r_k
    decay_out_ptr,  # [HV, B * T] float32: e^(γ_C - γ) r_k
    decay_q_ptr,  # [HV, B * T] float32: scale e^γ r_q
    r_k_ptr,  # [HK, B * T] float32: inverse lengths of the keys; None without norm
    r_q_ptr,  # [B * T, HK] float32: of the queries
    dq_ptr,  # [B * T, HK, K]
    dk_ptr,  # [B * T, HK, K]
    dg_ptr,  # [B * T, HV]; None without g
    dbeta_ptr,  # [B * T, HV]
    by_gate_ptr,  # [units, 2, HV] float32: Σ g dg and Σ da of each chunk; None: no raw gates
    cu_seqlens_ptr,  # [N + 1]; None: N rows of T tokens
    scale,
    beta_scale,
    N,
    T,
    tokens,  # B * T
    HK,
    HV,
    stride_g_b,
    stride_g_t,
    stride_g_h,
    K: gl.constexpr,
    V: gl.constexpr,
    RAW_BETA: gl.constexpr,
):
    gdc_wait()  # for the kernels before this one: see begin in triton/kernels/math.py
    gdc_launch_dependents()
    gl.static_assert(V == 2 * GROUP_V)
    pid = gl.program_id(0)
    head_k = pid % HK
    unit = pid // HK
    heads = HV // HK
    seq, start, number, end = unit_span(unit, cu_seqlens_ptr, N, T, C)
    row = start + number * C
    count = gl.minimum(end - row, C)
    if seq >= N:
        count = count * 0
    slot = row // C + seq
    stages = count * 0 + STAGES
    is_hard = count < 0
    if hard_ptr is not None:
        hard_at = hard_ptr + (head_k * heads).to(gl.int64) * (tokens // C + N) + slot
        is_hard = gl.load(hard_at, mask=count > 0, other=0) != 0
        stages = gl.where(is_hard, 2, STAGES)
    if by_gate_ptr is not None:
        by_gate_ptr += unit.to(gl.int64) * (2 * HV)
        if count <= 0:
            for head in range(head_k * heads, (head_k + 1) * heads):
                gl.store(by_gate_ptr + head, 0.0)
                gl.store(by_gate_ptr + HV + head, 0.0)
    if g_ptr is not None:
        batch = seq * 0
        t = row
        if cu_seqlens_ptr is None:
            batch = seq
            t = row - seq * T
        g_ptr += batch.to(gl.int64) * stride_g_b + t.to(gl.int64) * stride_g_t

    tiles = allocate_tiles(q_desc, e_desc, before_desc, K)
    sums = allocate_sums()
    barriers = allocate_barriers()
    chunk = Chunk(
        row=row, count=count, tokens=tokens, first_head=head_k * heads, heads=heads,
        head_k=head_k, heads_k=HK, stages=stages, is_hard=is_hard, LOWS=hard_ptr is not None,
    )  # fmt: skip
    loader = LoaderArgs(
        q_desc=q_desc, k_desc=k_desc, do_desc=do_desc, e_desc=e_desc, y_desc=y_desc,
        e_low_desc=e_low_desc, y_low_desc=y_low_desc,
        before_desc=before_desc, after_desc=after_desc, slot=slot, HV=HV,
        chunk=chunk, tiles=tiles, barriers=barriers,
    )  # fmt: skip
    queries = QueriesArgs(
        chunk=chunk, tiles=tiles, sums=sums, barriers=barriers,
        beta32_ptr=beta32_ptr, g2_ptr=g2_ptr, decay_q_ptr=decay_q_ptr,
        r_k_ptr=r_k_ptr, r_q_ptr=r_q_ptr, dq_ptr=dq_ptr, dbeta_ptr=dbeta_ptr,
        scale=scale, beta_scale=beta_scale, RAW_BETA=RAW_BETA,
    )  # fmt: skip
    keys = KeysArgs(
        chunk=chunk, tiles=tiles, sums=sums, barriers=barriers,
        beta32_ptr=beta32_ptr, g2_ptr=g2_ptr, by_low_ptr=by_low_ptr, decay_in_ptr=decay_in_ptr,
        decay_out_ptr=decay_out_ptr, r_k_ptr=r_k_ptr, dk_ptr=dk_ptr, dg_ptr=dg_ptr,
        g_ptr=g_ptr, A_log_ptr=A_log_ptr, dt_bias_ptr=dt_bias_ptr, by_gate_ptr=by_gate_ptr,
        stride_g_t=stride_g_t, stride_g_h=stride_g_h,
    )  # fmt: skip
    # (role, arguments); then the warps and the registers per thread of all roles but the first
    gl.warp_specialize(
        [(run_queries, (queries,)), (run_keys, (keys,)), (run_loader, (loader,))],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def allocate_tiles(q_desc, e_desc, before_desc, K: gl.constexpr):
    """The tiles. TMA and the tensor cores share the descriptors' layouts."""
    dtype: gl.constexpr = q_desc.dtype
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    return Tiles(
        qk=gl.allocate_shared_memory(dtype, [2, C, K], q_desc.layout),
        rows=gl.allocate_shared_memory(dtype, [3 * STAGES, C, GROUP_V], e_desc.layout),
        states=gl.allocate_shared_memory(dtype, [2 * STAGES, GROUP_V, K], before_desc.layout),
        pairs=gl.allocate_shared_memory(dtype, [2, C, C], square),
    )


@gluon.jit
def allocate_sums():
    """The sums."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    columns = gl.allocate_shared_memory(gl.int32, [C], layout)
    columns.store(gl.arange(0, C, gl.BlockedLayout([1], [32], [4], [0])))
    return Sums(
        columns=columns,
        g2=gl.allocate_shared_memory(gl.float32, [C], layout),
        by_column=gl.allocate_shared_memory(gl.float32, [C], layout),
        by_pair=gl.allocate_shared_memory(gl.float32, [C], layout),
        by_query=gl.allocate_shared_memory(gl.float32, [C], layout),
        asked=gl.allocate_shared_memory(gl.float32, [C], layout),
        wrote=gl.allocate_shared_memory(gl.float32, [C], layout),
        kept=gl.allocate_shared_memory(gl.float32, [C], layout),
    )


@gluon.jit
def allocate_barriers():
    """The mbarriers, initialised."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    keys_loaded = gl.allocate_shared_memory(gl.int64, [1], layout)
    keys_ready = gl.allocate_shared_memory(gl.int64, [1], layout)
    stage_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    stage_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    pairs_ready = gl.allocate_shared_memory(gl.int64, [1], layout)
    asked_ready = gl.allocate_shared_memory(gl.int64, [1], layout)
    pairs_free = gl.allocate_shared_memory(gl.int64, [1], layout)
    low_ready = gl.allocate_shared_memory(gl.int64, [1], layout)
    low_free = gl.allocate_shared_memory(gl.int64, [1], layout)
    mbarrier.init(keys_loaded, count=1)
    mbarrier.init(keys_ready, count=1)
    mbarrier.init(pairs_ready, count=1)
    mbarrier.init(asked_ready, count=1)
    mbarrier.init(pairs_free, count=1)
    mbarrier.init(low_ready, count=1)
    mbarrier.init(low_free, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(stage_ready.index(stage), count=1)
        mbarrier.init(stage_free.index(stage), count=2)
    fence_async_shared()
    return Barriers(
        keys_loaded, keys_ready, stage_ready, stage_free,
        pairs_ready, asked_ready, pairs_free, low_ready, low_free,
    )  # fmt: skip
