"""What hopper_state_kernel hands to its warps: constants, shared memory, and each role's arguments.

``gl.warp_specialize`` copies a role's arguments through shared memory, in the order of the fields,
without those that the role does not use. Another order compiles to other code, so measure a change.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from sluice.backends.hopper.kernels.gluon_api import aggregate
from sluice.backends.hopper.kernels.state_checkpoints import PoolCheckpoints
from sluice.backends.hopper.kernels.state_items import Items


@aggregate
class Sizes:
    """Constants of one compiled kernel."""

    K: gl.constexpr
    V: gl.constexpr
    GROUPS: gl.constexpr  # state groups per program
    STAGES: gl.constexpr  # chunks whose tiles are in shared memory
    STATE_KV: gl.constexpr  # states are [K, V], not [V, K]
    OUTPUT: gl.constexpr  # else: the effect of a segment


@aggregate
class Tiles:
    """Tiles in shared memory, by stage unless stated."""

    kq: gl.shared_memory_descriptor  # [C, K], or [2 C, K] with OUTPUT: K above Q
    v: gl.shared_memory_descriptor  # [C, 64], by stage and group
    ag: gl.shared_memory_descriptor  # [C, C]
    qkg: gl.shared_memory_descriptor  # [C, C] float16, rows scaled; unused without OUTPUT
    o: gl.shared_memory_descriptor  # [C, 64], by group; unused without OUTPUT
    left: gl.shared_memory_descriptor  # int32: the chunk's tokens; 0 after the last chunk


@aggregate
class Factors:
    """Float32 numbers per token in shared memory, by stage unless stated."""

    beta: gl.shared_memory_descriptor
    beta_decay_in: gl.shared_memory_descriptor  # beta e^γ r_k: multiplies K S
    decay_out: gl.shared_memory_descriptor  # e^(γ_C - γ) r_k: multiplies D for the state
    qs_up: gl.shared_memory_descriptor  # e^γ and the power of two of QKg's row: multiplies Q S
    o_down: gl.shared_memory_descriptor  # scale r_q over that power of two: multiplies the output
    decay_all: gl.shared_memory_descriptor  # e^γ_C, C times: multiplies S
    g2: gl.shared_memory_descriptor  # γ in powers of two
    r_k: gl.shared_memory_descriptor  # inverse lengths of the keys
    r_q: gl.shared_memory_descriptor  # inverse lengths of the queries, of one chunk


@aggregate
class Barriers:
    """Mbarriers, by stage unless stated."""

    tiles_ready: gl.shared_memory_descriptor  # loader: kq, v and ag have arrived
    factors_ready: gl.shared_memory_descriptor  # loader: the factors from the gates are stored
    qkg_ready: gl.shared_memory_descriptor  # products: qkg, qs_up and o_down are stored
    stage_free: gl.shared_memory_descriptor  # every state group: it has read the stage
    turn: gl.shared_memory_descriptor  # by group: the other group has issued its products


@aggregate
class StateArgs:
    """Arguments of a state group."""

    tiles: Tiles
    factors: Factors
    barriers: Barriers
    items: Items
    o_desc: tma.tensor_descriptor
    o_ptr: gl.tensor
    state_ptr: gl.tensor
    stride_state_p: gl.tensor | gl.constexpr
    segments_ptr: gl.tensor | gl.constexpr  # None without a split
    HV: gl.tensor
    stride_o_t: gl.tensor | gl.constexpr
    hard_ptr: gl.tensor
    stride_gates_h: gl.tensor
    saves: PoolCheckpoints


@aggregate
class ProductsArgs:
    """Arguments of the warps that make QKg."""

    tiles: Tiles
    factors: Factors
    barriers: Barriers
    scale: gl.tensor
    NORMALIZE_QK: gl.constexpr


@aggregate
class LoaderArgs:
    """Arguments of the warp that loads."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    ag_desc: tma.tensor_descriptor
    beta32_ptr: gl.tensor
    g2_ptr: gl.tensor | gl.constexpr  # None without decay
    r_k_ptr: gl.tensor | gl.constexpr  # None without norm
    stride_gates_h: gl.tensor
    tiles: Tiles
    factors: Factors
    barriers: Barriers
    items: Items
    saves: PoolCheckpoints


@aggregate
class PlannerArgs:
    """Arguments of the warp that takes the program's next item."""

    cu_seqlens_ptr: gl.tensor | gl.constexpr
    slots_ptr: gl.tensor | gl.constexpr
    write_slots_ptr: gl.tensor | gl.constexpr
    has_state_ptr: gl.tensor | gl.constexpr
    hard_ptr: gl.tensor
    state_ptr: gl.tensor
    stride_state_p: gl.tensor | gl.constexpr
    taken_ptr: gl.tensor
    number: gl.tensor  # of items, of all programs
    N: gl.tensor
    T: gl.tensor
    HV: gl.tensor
    R_Q: gl.tensor
    R_K: gl.tensor
    pad_slot: gl.tensor
    segment_size: gl.tensor
    stride_gates_h: gl.tensor
    items: Items
    SPLIT: gl.constexpr
    EVERY: gl.constexpr


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage of the ring of buffers. The phase of its mbarriers changes once per round."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase = phase ^ 1
    return stage, phase
