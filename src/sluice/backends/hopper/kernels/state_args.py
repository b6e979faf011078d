"""What hopper_state_kernel hands to its warps: constants, shared memory, and each role's arguments.

``gl.warp_specialize`` copies a role's arguments through shared memory, in the order of the fields,
without those that the role does not use. Another order compiles to other code, so measure a change.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from sluice.backends.hopper.kernels.gluon_api import aggregate
from sluice.backends.hopper.kernels.state_checkpoints import Checkpoints


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
    o_desc: tma.tensor_descriptor
    o_ptr: gl.tensor
    source_ptr: gl.tensor  # the state before the tokens
    has_source: gl.tensor  # else: zeros
    segments_ptr: gl.tensor | gl.constexpr  # the state before a segment; None without a split
    is_split: gl.tensor
    target_ptr: gl.tensor  # the state after the tokens
    write: gl.tensor  # whether this program writes it
    live: gl.tensor  # else: the sequence has no slot, and its output is zeros
    row: gl.tensor  # first token
    tokens: gl.tensor
    column_v: gl.tensor  # of v and o
    first_v: gl.tensor  # the same within the head
    values: gl.tensor | gl.constexpr  # 1, or 0 for a segment's transition, which has no values
    stride_o_t: gl.tensor | gl.constexpr
    hard_ptr: gl.tensor
    saves: Checkpoints


@aggregate
class ProductsArgs:
    """Arguments of the warps that make QKg."""

    row: gl.tensor
    tokens: gl.tensor  # 0 for a sequence without a slot
    tiles: Tiles
    factors: Factors
    barriers: Barriers
    scale: gl.tensor
    NORMALIZE_QK: gl.constexpr
    saves: Checkpoints


@aggregate
class LoaderArgs:
    """Arguments of the warp that loads."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    ag_desc: tma.tensor_descriptor
    row: gl.tensor
    tokens: gl.tensor  # 0 for a sequence without a slot
    column_q: gl.tensor
    column_k: gl.tensor
    column_ag: gl.tensor
    column_v: gl.tensor
    has_values: gl.tensor | gl.constexpr  # False for a segment's transition
    beta32_ptr: gl.tensor
    g2_ptr: gl.tensor | gl.constexpr  # None without decay
    r_k_ptr: gl.tensor | gl.constexpr  # None without norm
    tiles: Tiles
    factors: Factors
    barriers: Barriers
    saves: Checkpoints


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage of the ring of buffers. The phase of its mbarriers changes once per round."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase = phase ^ 1
    return stage, phase
