"""What hopper_gradients_kernel hands to its warps: shared memory, mbarriers, arguments of roles."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from sluice.backends.hopper.kernels.gluon_api import aggregate

CHUNKS = gl.constexpr(4)  # descriptions of chunks in shared memory
NUMBERS = gl.constexpr(8)  # of each


@aggregate
class Tiles:
    """Tiles in shared memory. Rows come for a whole head, into one of two places."""

    qk: gl.shared_memory_descriptor  # [C, K], two: Q, K
    rows: gl.shared_memory_descriptor  # [C, V / 2], six per place: dO, E, Y of each half
    states: gl.shared_memory_descriptor  # [V / 2, K], four: S, dS of each half
    pairs: gl.shared_memory_descriptor  # [C, C], two: N, H
    ones: gl.shared_memory_descriptor  # [C, C]: ones above the diagonal


@aggregate
class Sums:
    """Numbers per token in shared memory, float32: decays, and the terms of their gradients.

    A read of the state has a term in dg of its own token and of those before it in the chunk
    ("asks"), a write in dg of the tokens after it ("wrote").
    """

    columns: gl.shared_memory_descriptor  # int32: 0 to C - 1
    g2: gl.shared_memory_descriptor  # pairs: γ in powers of two
    by_column: gl.shared_memory_descriptor  # pairs: beta r_k
    by_pair: gl.shared_memory_descriptor  # pairs: sums over the pairs of tokens that span a token
    by_query: gl.shared_memory_descriptor  # queries: what is asked by the output of each token
    kept: gl.shared_memory_descriptor  # queries: parts of the overlap of S and dS
    asked: gl.shared_memory_descriptor  # keys: what is asked by the read of each token
    wrote: gl.shared_memory_descriptor  # keys: the term of the write of each token


@aggregate
class Barriers:
    """Mbarriers."""

    chunk_ready: gl.shared_memory_descriptor  # loader: a chunk is described
    keys_loaded: gl.shared_memory_descriptor  # loader: q and k have arrived
    keys_ready: gl.shared_memory_descriptor  # queries: other sequences' tokens in them are zeros
    keys_free: gl.shared_memory_descriptor  # all three groups
    rows_ready: gl.shared_memory_descriptor  # loader, by place
    rows_free: gl.shared_memory_descriptor  # all three groups, by place
    states_ready: gl.shared_memory_descriptor  # loader
    states_free: gl.shared_memory_descriptor  # queries, keys
    pairs_ready: gl.shared_memory_descriptor  # pairs: N and H are stored
    pairs_free: gl.shared_memory_descriptor  # queries, keys
    spans_ready: gl.shared_memory_descriptor  # pairs: by_pair is stored
    asked_ready: gl.shared_memory_descriptor  # keys: asked and wrote are stored
    sums_free: gl.shared_memory_descriptor  # queries: they are read


@aggregate
class Shared:
    """What all roles know."""

    tiles: Tiles
    sums: Sums
    barriers: Barriers
    chunks: gl.shared_memory_descriptor  # descriptions, int32
    tokens: gl.tensor  # B * T
    heads: gl.tensor  # value heads per key head
    HK: gl.tensor  # key heads, which are the query heads too
    LOWS: gl.constexpr  # whether a chunk may be hard


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
    hard_ptr: gl.tensor | gl.constexpr
    by_gate_ptr: gl.tensor | gl.constexpr
    cu_seqlens_ptr: gl.tensor | gl.constexpr
    N: gl.tensor
    T: gl.tensor
    chunks: gl.tensor  # of all key heads
    shared: Shared


@aggregate
class PairsArgs:
    """Arguments of the group that makes N, H and dbeta."""

    shared: Shared
    beta32_ptr: gl.tensor
    g2_ptr: gl.tensor | gl.constexpr  # None without decay
    r_k_ptr: gl.tensor | gl.constexpr  # None without norm
    r_q_ptr: gl.tensor | gl.constexpr
    dbeta_ptr: gl.tensor
    scale: gl.tensor
    beta_scale: gl.tensor
    RAW_BETA: gl.constexpr


@aggregate
class QueriesArgs:
    """Arguments of the group that makes dQ and dg."""

    shared: Shared
    g2_ptr: gl.tensor | gl.constexpr
    by_low_ptr: gl.tensor | gl.constexpr  # None: no low terms, or no decay
    decay_q_ptr: gl.tensor
    r_q_ptr: gl.tensor | gl.constexpr
    dq_ptr: gl.tensor
    dg_ptr: gl.tensor | gl.constexpr
    g_ptr: gl.tensor | gl.constexpr
    A_log_ptr: gl.tensor | gl.constexpr  # None: g is no raw gate
    dt_bias_ptr: gl.tensor | gl.constexpr
    by_gate_ptr: gl.tensor | gl.constexpr
    stride_g_b: gl.tensor | gl.constexpr
    stride_g_t: gl.tensor | gl.constexpr
    stride_g_h: gl.tensor | gl.constexpr


@aggregate
class KeysArgs:
    """Arguments of the group that makes dK."""

    shared: Shared
    beta32_ptr: gl.tensor
    decay_in_ptr: gl.tensor
    decay_out_ptr: gl.tensor
    r_k_ptr: gl.tensor | gl.constexpr
    dk_ptr: gl.tensor
    DECAY: gl.constexpr


@aggregate
class Chunk:
    """A chunk of one key head."""

    row: gl.tensor  # first token, over all B * T
    count: gl.tensor  # tokens; 0: there is no further chunk
    head_k: gl.tensor
    is_hard: gl.tensor  # whether low terms are read
    number: gl.tensor  # how many the program had before it


@aggregate
class Place:
    """The place that comes next, of the two for rows.

    Each place has a bit in ``phases``: the phase of its mbarriers.

    The rows of a hard chunk always lie in the first place, and their low terms in the second.
    """

    number: gl.tensor
    phases: gl.tensor


@gluon.jit
def first_place(zero):
    return Place(zero, zero)


@gluon.jit
def place_of(place, is_hard):
    """The place of a head's rows: the one that comes next, but in a hard chunk the first."""
    return gl.where(is_hard, 0, place.number)


@gluon.jit
def phase_of(place, number):
    """The phase of a place."""
    return (place.phases >> number) & 1


@gluon.jit
def next_place(place, is_hard):
    """The place that comes next after a head, which has used one place or, if hard, both."""
    used = gl.where(is_hard, 3, 1 << place.number)
    return Place(gl.where(is_hard, 0, place.number ^ 1), place.phases ^ used)


@gluon.jit
def put_chunk(shared, chunk, unit, batch, t):
    """Describe a chunk to the other warps; for a raw gate also its unit, batch row and token."""
    at = (chunk.number % CHUNKS) * NUMBERS
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    is_hard = chunk.is_hard.to(gl.int32)
    numbers = (chunk.row, chunk.count, chunk.head_k, is_hard, unit, batch, t)
    for i in gl.static_range(7):
        shared.chunks.index(at + i).store(gl.full([1], 0, gl.int32, layout) + numbers[i])


@gluon.jit
def get_chunk(shared, number):
    """The ``number``-th chunk that this program's loader describes."""
    mbarrier.wait(shared.barriers.chunk_ready.index(number % CHUNKS), (number // CHUNKS) & 1)
    at = (number % CHUNKS) * NUMBERS
    return Chunk(
        row=get(shared.chunks, at),
        count=get(shared.chunks, at + 1),
        head_k=get(shared.chunks, at + 2),
        is_hard=get(shared.chunks, at + 3) != 0,
        number=number,
    )


@gluon.jit
def place_of_gates(shared, chunk):
    """The unit of tokens, the row of the batch and the token in it, of a raw gate."""
    at = (chunk.number % CHUNKS) * NUMBERS
    return get(shared.chunks, at + 4), get(shared.chunks, at + 5), get(shared.chunks, at + 6)


@gluon.jit
def get(smem, at):
    """One number of shared memory."""
    return gl.sum(smem.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)
