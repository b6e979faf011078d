"""The gradients of queries, keys and gates after the walks on Hopper, in Gluon: one kernel.

For a chunk of C = 64 tokens and each value head that shares a key head, docs/kernels/backward.md
(G6) to (G9). With S the state before the chunk, dS the gradient of the state after it, r_q and r_k
the inverse lengths of queries and keys, D = beta E and dV = beta Y:

    N = s r_q (dO Dᵀ ∘ Γ) r_k,     H = −r_k strictLower(dV Dᵀ ∘ Γ) r_k,     dbeta = diagonal(Y Eᵀ)
    r_q dQ̂ = s r_q e^γ dO Sᵀ + N K
    r_k dK̂ = Nᵀ Q + (H + Hᵀ) K + r_k e^(γ_C−γ) D dSᵀ − r_k e^γ dV Sᵀ

A program goes from chunk to chunk of one key head, which is a query head too, and in each chunk
through that head's value heads. It has warps of four roles. The loader, one warp, brings tiles by
TMA, those of the next chunk included (gradients_loader.py). Three groups of four warps compute: one
makes N, H and dbeta, a head ahead of the others (gradients_pairs.py), one dQ and dg
(gradients_queries.py), one dK (gradients_keys.py). N and H pass from group to group in shared
memory; they are not stored to memory.

dQ and dK are summed over heads in registers, in the order of the heads.

Every product has both operands in shared memory, except the sums over pairs of tokens: their left
operands are in registers, in the layout in which products made them. No operand is transposed in
registers (docs/kernels/backward.md).

In a hard chunk (triton/kernels/backward_chunks.py) E, Y and N are two terms each. Its rows use only
the first of two places, and the low terms use the other. What the low terms of S and dS add to dg
was made before (triton/kernels/backward_lows.py).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sluice.backends.hopper.kernels.constants import GROUP_V, C
from sluice.backends.hopper.kernels.gradients_args import (
    CHUNKS,
    NUMBERS,
    Barriers,
    KeysArgs,
    LoaderArgs,
    PairsArgs,
    QueriesArgs,
    Shared,
    Sums,
    Tiles,
)
from sluice.backends.hopper.kernels.gradients_keys import run_keys
from sluice.backends.hopper.kernels.gradients_loader import run_loader
from sluice.backends.hopper.kernels.gradients_pairs import run_pairs
from sluice.backends.hopper.kernels.gradients_queries import run_queries
from sluice.backends.triton.kernels.alignment import GATES, INDICES


@gluon.jit(
    do_not_specialize=["N", "T", "tokens", "HK", "HV", "chunks", "stride_g_b"],
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
    before_desc,  # [chunk_slots * HV * V, K], block [64, K]: the state before each chunk
    after_desc,  # the same: the gradient of the state after it
    g_ptr,  # [B, T, HV]; read if it is a raw gate
    A_log_ptr,  # [HV]; None: g is no raw gate
    dt_bias_ptr,  # [HV]; None: 0
    hard_ptr,  # [HV, chunk_slots] int32; None: no chunk is hard
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
    chunks,  # of all key heads
    stride_g_b,
    stride_g_t,
    stride_g_h,
    K: gl.constexpr,
    V: gl.constexpr,
    RAW_BETA: gl.constexpr,
):
    gl.static_assert(V == 2 * GROUP_V)
    tiles = allocate_tiles(q_desc, e_desc, before_desc, K)
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = Shared(
        tiles=tiles, sums=allocate_sums(), barriers=allocate_barriers(),
        chunks=gl.allocate_shared_memory(gl.int32, [CHUNKS * NUMBERS, 1], layout),
        tokens=tokens, heads=HV // HK, HK=HK, LOWS=hard_ptr is not None,
    )  # fmt: skip
    gdc_wait()  # for the kernels before this one: see begin in triton/kernels/math.py
    gdc_launch_dependents()
    loader = LoaderArgs(
        q_desc=q_desc, k_desc=k_desc, do_desc=do_desc, e_desc=e_desc, y_desc=y_desc,
        e_low_desc=e_low_desc, y_low_desc=y_low_desc,
        before_desc=before_desc, after_desc=after_desc, hard_ptr=hard_ptr,
        by_gate_ptr=by_gate_ptr, cu_seqlens_ptr=cu_seqlens_ptr, N=N, T=T, chunks=chunks,
        shared=shared,
    )  # fmt: skip
    pairs = PairsArgs(
        shared=shared, beta32_ptr=beta32_ptr, g2_ptr=g2_ptr, r_k_ptr=r_k_ptr, r_q_ptr=r_q_ptr,
        dbeta_ptr=dbeta_ptr, scale=scale, beta_scale=beta_scale, RAW_BETA=RAW_BETA,
    )  # fmt: skip
    queries = QueriesArgs(
        shared=shared, g2_ptr=g2_ptr, by_low_ptr=by_low_ptr, decay_q_ptr=decay_q_ptr,
        r_q_ptr=r_q_ptr, dq_ptr=dq_ptr,
        dg_ptr=dg_ptr, g_ptr=g_ptr, A_log_ptr=A_log_ptr, dt_bias_ptr=dt_bias_ptr,
        by_gate_ptr=by_gate_ptr,
        stride_g_b=stride_g_b, stride_g_t=stride_g_t, stride_g_h=stride_g_h,
    )  # fmt: skip
    keys = KeysArgs(
        shared=shared, beta32_ptr=beta32_ptr, decay_in_ptr=decay_in_ptr,
        decay_out_ptr=decay_out_ptr, r_k_ptr=r_k_ptr, dk_ptr=dk_ptr, DECAY=g2_ptr is not None,
    )  # fmt: skip
    # (role, arguments); then the warps and the registers per thread of all roles but the first
    gl.warp_specialize(
        [(run_pairs, (pairs,)), (run_queries, (queries,)), (run_keys, (keys,)),
         (run_loader, (loader,))],
        [4, 4, 1],
        [144, 176, 32],
    )  # fmt: skip


@gluon.jit
def allocate_tiles(q_desc, e_desc, before_desc, K: gl.constexpr):
    """The tiles. TMA and the tensor cores share the descriptors' layouts."""
    dtype: gl.constexpr = q_desc.dtype
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    ones: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.float16)
    return Tiles(
        qk=gl.allocate_shared_memory(dtype, [2, C, K], q_desc.layout),
        rows=gl.allocate_shared_memory(dtype, [12, C, GROUP_V], e_desc.layout),
        states=gl.allocate_shared_memory(dtype, [4, GROUP_V, K], before_desc.layout),
        pairs=gl.allocate_shared_memory(dtype, [2, C, C], square),
        ones=gl.allocate_shared_memory(gl.float16, [C, C], ones),
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
        kept=gl.allocate_shared_memory(gl.float32, [C], layout),
        asked=gl.allocate_shared_memory(gl.float32, [C], layout),
        wrote=gl.allocate_shared_memory(gl.float32, [C], layout),
    )


@gluon.jit
def allocate_barriers():
    """The mbarriers, initialised with the arrivals that each waits for."""
    chunk_ready = allocate_barrier(CHUNKS, 1)
    keys_loaded = allocate_barrier(0, 1)
    keys_ready = allocate_barrier(0, 1)
    keys_free = allocate_barrier(0, 3)
    rows_ready = allocate_barrier(2, 1)
    rows_free = allocate_barrier(2, 3)
    states_ready = allocate_barrier(0, 1)
    states_free = allocate_barrier(0, 2)
    pairs_ready = allocate_barrier(0, 1)
    pairs_free = allocate_barrier(0, 2)
    spans_ready = allocate_barrier(0, 1)
    asked_ready = allocate_barrier(0, 1)
    sums_free = allocate_barrier(0, 1)
    fence_async_shared()
    return Barriers(
        chunk_ready, keys_loaded, keys_ready, keys_free, rows_ready, rows_free,
        states_ready, states_free, pairs_ready, pairs_free, spans_ready, asked_ready, sums_free,
    )  # fmt: skip


@gluon.jit
def allocate_barrier(many: gl.constexpr, count: gl.constexpr):
    """An mbarrier; ``many`` of them, unless that is 0."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    shape: gl.constexpr = [1] if many == 0 else [many, 1]
    bars = gl.allocate_shared_memory(gl.int64, shape, layout)
    if many == 0:
        mbarrier.init(bars, count=count)
    for i in gl.static_range(many):
        mbarrier.init(bars.index(i), count=count)
    return bars
