"""What hopper_walk_kernel hands to its warps: constants, shared memory, each role's arguments."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from sluice.backends.hopper.kernels.gluon_api import aggregate


@aggregate
class WalkSizes:
    """Constants of one compiled kernel."""

    K: gl.constexpr
    V: gl.constexpr
    STAGES: gl.constexpr  # chunks whose tiles are in shared memory
    STATE_KV: gl.constexpr  # initial states and their gradients are [K, V], not [V, K]
    BACK: gl.constexpr  # from the last chunk to the first
    EFFECT: gl.constexpr  # only X after a segment
    HARD: gl.constexpr  # a chunk may be hard


@aggregate
class WalkTiles:
    """Tiles in shared memory, by stage unless stated."""

    k: gl.shared_memory_descriptor  # [C, K]
    q: gl.shared_memory_descriptor  # [C, K]; used with BACK
    v: gl.shared_memory_descriptor  # [C, 64]: values, or dO with BACK
    b: gl.shared_memory_descriptor  # [C, C] float16: Bg over a power of two
    p: gl.shared_memory_descriptor  # [C, C]; used with BACK
    p_low: gl.shared_memory_descriptor  # [C, C], one: its low terms in a hard chunk
    b_low: gl.shared_memory_descriptor  # [C, C] float16, one: those of b
    x: gl.shared_memory_descriptor  # [64, K], one: X on its way to memory
    y: gl.shared_memory_descriptor  # [C, 64], one: E, or Y
    dv: gl.shared_memory_descriptor  # [C, 64], one; used with BACK


@aggregate
class WalkFactors:
    """Float32 numbers per token in shared memory, by stage. Zeros after the last token."""

    beta: gl.shared_memory_descriptor
    read: gl.shared_memory_descriptor  # multiplies K X: -e^γ r_k; BACK: e^(γ_C - γ) r_k
    write: gl.shared_memory_descriptor  # multiplies what X takes: e^(γ_C - γ) r_k; BACK: -e^γ r_k
    decay_q: gl.shared_memory_descriptor  # multiplies dO for X; used with BACK
    decay_all: gl.shared_memory_descriptor  # e^γ_C, C times: multiplies X
    b_down: gl.shared_memory_descriptor  # the power of two of Bg, C times


@aggregate
class WalkBarriers:
    """Mbarriers by stage."""

    tiles_ready: gl.shared_memory_descriptor  # TMA: the tiles have arrived
    factors_ready: gl.shared_memory_descriptor  # loader: the factors are stored
    stage_free: gl.shared_memory_descriptor  # the other warps: the stage is read


@aggregate
class WalkArgs:
    """Arguments of the warps that hold X."""

    tiles: WalkTiles
    factors: WalkFactors
    barriers: WalkBarriers
    x_desc: tma.tensor_descriptor
    y_desc: tma.tensor_descriptor
    dv_desc: tma.tensor_descriptor | gl.constexpr
    y_ptr: gl.tensor  # of this program's first column, as the next three
    y_low_ptr: gl.tensor | gl.constexpr  # None: no low terms
    x_low_ptr: gl.tensor | gl.constexpr  # of the first row of x_desc; None: not wanted
    dv_ptr: gl.tensor | gl.constexpr
    p_low_ptr: gl.tensor | gl.constexpr
    b_low_ptr: gl.tensor | gl.constexpr  # None: no low terms
    hard_ptr: gl.tensor | gl.constexpr  # of this program's first chunk; None: no chunk is hard
    source_ptr: gl.tensor | gl.constexpr  # X at the start [V, K] or [K, V]; None: zeros
    has_source: gl.tensor
    segments_ptr: gl.tensor | gl.constexpr  # [V, K] float32; None: no sequence is split
    is_split: gl.tensor
    target_ptr: gl.tensor | gl.constexpr  # X at the end; None: not wanted
    write: gl.tensor
    values: gl.tensor | gl.constexpr  # 1, or 0 for a transition
    row: gl.tensor  # first token
    tokens: gl.tensor
    column_v: gl.tensor
    first_v: gl.tensor  # the same within the head
    row_x: gl.tensor  # of the first chunk's X, in rows of x_desc
    step_x: gl.tensor | gl.constexpr  # from one chunk to the next, likewise
    stride_v_t: gl.tensor | gl.constexpr  # of y, y_low and dv
    stride_p_t: gl.tensor | gl.constexpr  # of p_low and b_low


@aggregate
class WalkLoaderArgs:
    """Arguments of the warp that loads."""

    k_desc: tma.tensor_descriptor
    q_desc: tma.tensor_descriptor | gl.constexpr
    v_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    p_desc: tma.tensor_descriptor | gl.constexpr
    row: gl.tensor
    tokens: gl.tensor
    column_k: gl.tensor
    column_q: gl.tensor
    column_v: gl.tensor
    column_c: gl.tensor  # of b and p
    beta32_ptr: gl.tensor  # of this head, as all that follow
    decay_in_ptr: gl.tensor
    decay_out_ptr: gl.tensor
    decay_q_ptr: gl.tensor | gl.constexpr
    g2_ptr: gl.tensor | gl.constexpr  # None without decay
    b_down_ptr: gl.tensor
    tiles: WalkTiles
    factors: WalkFactors
    barriers: WalkBarriers
