"""What hopper_gradients_kernel hands to its warps: shared memory, mbarriers, arguments of roles."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from sluice.backends.hopper.kernels.gluon_api import aggregate


@aggregate
class Tiles:
    """Tiles in shared memory; a stage holds half of the value columns of one head."""

    qk: gl.shared_memory_descriptor  # [C, K], two: Q, K
    rows: gl.shared_memory_descriptor  # [C, V / 2], three per stage: dO, E, Y
    states: gl.shared_memory_descriptor  # [V / 2, K], two per stage: S, dS
    pairs: gl.shared_memory_descriptor  # [C, C], two: N, H


@aggregate
class Sums:
    """Numbers per token in shared memory: decays, and what is asked of them; float32."""

    columns: gl.shared_memory_descriptor  # 0 to C - 1, int32
    g2: gl.shared_memory_descriptor  # queries: γ in powers of two
    by_column: gl.shared_memory_descriptor  # queries: beta r_k
    by_pair: gl.shared_memory_descriptor  # queries: pairs of tokens that span each token
    by_query: gl.shared_memory_descriptor  # queries: what each output asks
    asked: gl.shared_memory_descriptor  # keys: what is read from each token on
    wrote: gl.shared_memory_descriptor  # keys: what was written before each token
    kept: gl.shared_memory_descriptor  # keys: parts of the overlap of S and dS


@aggregate
class Barriers:
    """Mbarriers."""

    keys_loaded: gl.shared_memory_descriptor  # loader: q and k have arrived
    keys_ready: gl.shared_memory_descriptor  # queries: no other sequence's tokens are in them
    stage_ready: gl.shared_memory_descriptor  # loader, by stage
    stage_free: gl.shared_memory_descriptor  # both groups, by stage
    pairs_ready: gl.shared_memory_descriptor  # queries: N, H and by_pair are stored
    asked_ready: gl.shared_memory_descriptor  # queries: by_query is stored
    pairs_free: gl.shared_memory_descriptor  # keys: they are read
    low_ready: gl.shared_memory_descriptor  # loader: low terms of a hard chunk have arrived
    low_free: gl.shared_memory_descriptor  # both groups


@aggregate
class Chunk:
    """The chunk of a program and the value heads that it goes through."""

    row: gl.tensor  # first token, over all B * T
    count: gl.tensor  # tokens; none: 0 or less
    tokens: gl.tensor  # B * T
    first_head: gl.tensor  # the first value head
    heads: gl.tensor  # how many
    head_k: gl.tensor  # the key head, which is the query head too
    heads_k: gl.tensor  # how many there are
    stages: gl.tensor  # of the ring of tiles
    is_hard: gl.tensor  # whether low terms are read
    LOWS: gl.constexpr  # whether there are any


@aggregate
class LoaderArgs:
    """Arguments of the warp that loads."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    do_desc: tma.tensor_descriptor
    e_desc: tma.tensor_descriptor
    y_desc: tma.tensor_descriptor
    e_low_desc: tma.tensor_descriptor | gl.constexpr
    y_low_desc: tma.tensor_descriptor | gl.constexpr
    before_desc: tma.tensor_descriptor
    after_desc: tma.tensor_descriptor
    slot: gl.tensor  # of S and dS
    HV: gl.tensor
    chunk: Chunk
    tiles: Tiles
    barriers: Barriers


@aggregate
class QueriesArgs:
    """Arguments of the group that makes N, H, dQ and dbeta."""

    chunk: Chunk
    tiles: Tiles
    sums: Sums
    barriers: Barriers
    beta32_ptr: gl.tensor
    g2_ptr: gl.tensor | gl.constexpr  # None without decay
    decay_q_ptr: gl.tensor
    r_k_ptr: gl.tensor | gl.constexpr  # None without norm
    r_q_ptr: gl.tensor | gl.constexpr
    dq_ptr: gl.tensor
    dbeta_ptr: gl.tensor
    scale: gl.tensor
    beta_scale: gl.tensor
    RAW_BETA: gl.constexpr


@aggregate
class KeysArgs:
    """Arguments of the group that makes dK and dg."""

    chunk: Chunk
    tiles: Tiles
    sums: Sums
    barriers: Barriers
    beta32_ptr: gl.tensor
    g2_ptr: gl.tensor | gl.constexpr
    by_low_ptr: gl.tensor | gl.constexpr  # None: no low terms, or no decay
    decay_in_ptr: gl.tensor
    decay_out_ptr: gl.tensor
    r_k_ptr: gl.tensor | gl.constexpr
    dk_ptr: gl.tensor
    dg_ptr: gl.tensor | gl.constexpr
    g_ptr: gl.tensor | gl.constexpr  # at the chunk's first token
    A_log_ptr: gl.tensor | gl.constexpr  # None: g is no raw gate
    dt_bias_ptr: gl.tensor | gl.constexpr
    by_gate_ptr: gl.tensor | gl.constexpr  # of this chunk
    stride_g_t: gl.tensor | gl.constexpr
    stride_g_h: gl.tensor | gl.constexpr


@gluon.jit
def advance(stage, phase, stages):
    """The next stage of a ring of ``stages``. The phase of its mbarriers changes once per round."""
    stage += 1
    wraps = stage == stages
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)
