"""The serial half of chunked prefill, chunk by chunk: the state stays in registers.

Per chunk of C = 64 tokens, docs/kernels/prefill.md:

    W  = beta (V - e^γ K S)                                                  (K9)
    D  = Ag W                                                                (K10)
    O  = scale (e^γ Q S + QKg D)                                             (K11)
    S <- e^γ_C S + Kᵀ (e^(γ_C - γ) D)                                        (K12)

Everything is transposed here. Sᵀ [BLOCK_V, K], Wᵀ and Dᵀ are left operands of their products. So
results of the tensor cores become operands without leaving registers, and shared memory holds only
tiles of the inputs. Vᵀ is added by a product with the identity, which is exact: a tile that only
tensor cores read can arrive asynchronously and need not be transposed. Ag, QKg and the factors per
token come from prefill_chunks.py.

Operands are rounded to the inputs' type, with two exceptions: QKg D (prefill_chunks.py), and hard
chunks, whose keys nearly repeat. There the rounding errors of Ag, W and D add up from token to
token, to 1e-2 and more of o and of the state. So in a hard chunk Ag (times 2⁸) and W (scaled by a
power of two per value column) are float16, and the state takes D in two terms, Kᵀ high + Kᵀ low.

Each serial kernel is launched twice: HARD=False skips programs that have a hard chunk, HARD=True
runs the rest, with one loop for hard and one for easy chunks. HARD=False has no register to spare:
with both loops in one kernel, calls took 7 to 31% longer.
"""
# ruff: noqa: SIM108 (constexpr branches stay if/else)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sluice.backends.triton.kernels.math import float16_scale
from sluice.backends.triton.kernels.prefill_chunks import C

RUN = tl.constexpr(256)
"""How many chunks a program searches at a time for the next hard one."""


class QKVO(NamedTuple):
    """q, k, v and o from the batch row's first token on: k of the key head, v of the value head, q
    and o of all heads."""

    q_ptr: Any  # None, as o_ptr, in segment_loop
    k_ptr: Any
    v_ptr: Any
    o_ptr: Any
    q_t: Any  # strides
    q_h: Any
    k_t: Any
    v_t: Any
    o_t: Any
    o_h: Any


class Workspace(NamedTuple):
    """The results of prefill_chunks.py, over all B * T tokens."""

    ag_ptr: Any  # None without beta, as beta32_ptr
    beta32_ptr: Any
    qkg_ptr: Any
    qkg_down_ptr: Any
    decay_in_ptr: Any
    decay_out_ptr: Any
    decay_q_ptr: Any
    g2_ptr: Any
    r_k_ptr: Any
    tokens: Any  # B * T


class Checkpoints(NamedTuple):
    """Which states inside the sequences are stored, and where."""

    slots_ptr: Any  # [N, M]; None: none
    positions_ptr: Any  # [N, M]; None: after every ``every`` tokens
    M: Any
    every: Any
    state_ptr: Any  # this head in slot 0
    stride_state_p: Any
    offs: Any  # [BLOCK_V, BLOCK_K] this program's part of a head's state
    mask: Any  # [BLOCK_V, BLOCK_K]
    pad_slot: Any


class Place(NamedTuple):
    """Where a program works: a sequence and its tokens, a value head and what belongs to it."""

    seq: Any
    batch: Any  # batch row
    start: Any  # the sequence's first token, in its batch row
    end: Any
    head_q: Any  # the first of its query heads; None in segment_loop
    head_k: Any
    head_v: Any
    T: Any  # tokens per batch row


class Sizes(NamedTuple):
    """Constants. In a kernel: ``sizes: tl.constexpr = Sizes(...)``."""

    READERS: Any  # query heads per value head, 1 if there are fewer; None in segment_loop
    K: Any
    V: Any
    BLOCK_K: Any
    BLOCK_V: Any
    STAGES: Any
    PRECISION: Any


@triton.constexpr_function
def stages(STAGES, dtype, HARD):
    """Chunks whose tiles lie in shared memory at a time: one fewer for hard chunks of float16.

    If both loops had tiles of the same shapes, Triton would merge their ends into one piece of code
    in which the tiles of both are live, and would need shared memory for both at once.
    """
    return max(1, STAGES - 1) if HARD and dtype == tl.float16 else STAGES


@triton.jit
def load_rows(ptr, offs_c, offs, stride_t, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Token rows of a chunk, [C, BLOCK]; zeros where not ``rows``, and beyond SIZE columns."""
    at = ptr + (offs_c[:, None] * stride_t + offs[None, :])
    mask = rows[:, None]
    if SIZE % BLOCK != 0:
        mask = mask & (offs < SIZE)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def counted():
    """0, 1, .. C - 1, as a cumulative sum.

    Triton computes an arange again for every layout, and then loads a short vector 16 times, once
    per thread that needs it. It does not repeat a scan: a vector addressed by one is loaded once.
    """
    return tl.cumsum(tl.full([C], 1, tl.int32), axis=0) - 1


@triton.jit
def load_factors(ptr, token, offs_f, left):
    """One number per token of a chunk; ones without a pointer."""
    if ptr is None:
        factors = tl.full(offs_f.shape, 1.0, tl.float32)
    else:
        factors = tl.load(ptr + token + offs_f, mask=offs_f < left, other=0.0)
    return factors


@triton.jit
def store_columns(ptr, o, offs_c, offs_v, stride_t, rows, V: tl.constexpr):
    """Outputs [BLOCK_V, C] as token rows."""
    at = ptr + (offs_v[:, None] + offs_c[None, :] * stride_t)
    tl.store(at, o.to(ptr.dtype.element_ty), mask=rows[None, :] & (offs_v < V)[:, None])


@triton.jit
def plus_values(x, v, one):
    """x + vᵀ."""
    if v.dtype == tl.float32:
        x = x + tl.trans(v)
    else:
        x = tl.dot(tl.trans(v), one, acc=x)
    return x


@triton.jit
def corrections(
    S_low, k, v, one, ag_ptr, beta32_ptr, decay_in, t, offs_f, offs_c, left,
    sizes: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """Dᵀ of one chunk."""
    if ag_ptr is None:
        d = plus_values(tl.zeros([sizes.BLOCK_V, C], tl.float32), v, one)
    else:
        if HARD:
            ag_ptr = ag_ptr.to(tl.pointer_type(tl.float16), bitcast=True)
        ag_ptr += tl.cast(t, tl.int64) * C
        ag = load_rows(ag_ptr, offs_c, offs_c, C, offs_c < left, C, C)
        u = tl.dot(S_low, tl.trans(k), input_precision=sizes.PRECISION)
        beta = load_factors(beta32_ptr, t, offs_f, left)
        w = plus_values(u * -decay_in[None, :], v, one) * beta[None, :]
        if HARD:
            up, down = float16_scale(tl.max(tl.abs(w), axis=1), 80)
            d = tl.dot((w * up[:, None]).to(tl.float16), tl.trans(ag)) * (down[:, None] / 256)
        else:
            d = tl.dot(w.to(k.dtype), tl.trans(ag), input_precision=sizes.PRECISION)
    return d


@triton.jit
def next_state(S, k, d, decay_all, decay_out, PRECISION: tl.constexpr, HARD: tl.constexpr):
    """(e^γ_C S + Kᵀ (e^(γ_C - γ) D))ᵀ; in a hard chunk D is two terms."""
    d_out = d * decay_out[None, :]
    high = d_out.to(k.dtype)
    S = S * decay_all
    if HARD:
        S = tl.dot((d_out - high.to(tl.float32)).to(k.dtype), k, acc=S)
    return tl.dot(high, k, acc=S, input_precision=PRECISION)


@triton.jit
def any_hard(hard_ptr, chunk, chunks):
    """Whether one of these chunks is hard."""
    found = tl.full([], 0, tl.int32)
    for first in range(0, tl.cast(chunks, tl.int32), RUN):
        offs = first + tl.arange(0, RUN)
        found = tl.maximum(
            found, tl.max(tl.load(hard_ptr + chunk + offs, mask=offs < chunks, other=0))
        )
    return found != 0


@triton.jit
def load_marks(hard_ptr, chunk, left):
    """Whether each of the next RUN chunks is hard: 0 or 1, and -1 after ``left`` chunks."""
    offs = tl.arange(0, RUN)
    return tl.load(hard_ptr + chunk + offs, mask=offs < left, other=-1)


@triton.jit
def run_of(marks, mark):
    """How many chunks from the first on have this mark."""
    return tl.min(tl.where(marks == mark, RUN, tl.arange(0, RUN)))


@triton.jit
def decay_of(g2_ptr, token):
    """e^γ at a token; 1 without decay."""
    if g2_ptr is None:
        decay = 1.0
    else:
        decay = tl.exp2(tl.load(g2_ptr + token))
    return decay


@triton.jit
def decay_between(g2_ptr, r_k_ptr, token, n, offs_c):
    """e^(γ_n - γ) r_k for the n tokens before a checkpoint; zeros after it."""
    before = offs_c < n
    decay_out = tl.where(before, 1.0, 0.0)
    if g2_ptr is not None:
        g2 = tl.load(g2_ptr + token + offs_c, mask=before, other=0.0)
        g2_n = tl.load(g2_ptr + token + n - 1)
        decay_out = tl.where(before, tl.exp2(tl.where(before, g2_n - g2, 0.0)), 0.0)
    if r_k_ptr is not None:
        decay_out *= tl.load(r_k_ptr + token + offs_c, mask=before, other=0.0)
    return decay_out


@triton.jit
def chunk_loop(
    S, first, stop, qkvo, workspace, checkpoints, place, offs_v, scale,
    sizes: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """The state after the tokens ``first`` to ``stop`` - 1; stores outputs and checkpoints."""
    READERS: tl.constexpr = sizes.READERS
    K: tl.constexpr = sizes.K
    V: tl.constexpr = sizes.V
    BLOCK_K: tl.constexpr = sizes.BLOCK_K
    BLOCK_V: tl.constexpr = sizes.BLOCK_V
    PRECISION: tl.constexpr = sizes.PRECISION
    AHEAD: tl.constexpr = stages(sizes.STAGES, qkvo.k_ptr.dtype.element_ty, HARD)
    head_v = place.head_v
    offs_c = tl.arange(0, C)
    offs_k = tl.arange(0, BLOCK_K)
    offs_f = counted()
    one = tl.where(offs_c[:, None] == offs_c[None, :], 1.0, 0.0).to(qkvo.v_ptr.dtype.element_ty)
    # from here on t counts from ``first``: 32 bits are enough
    token = place.batch * place.T + first  # in the workspace
    k_ptr = qkvo.k_ptr + first * qkvo.k_t
    v_ptr = qkvo.v_ptr + first * qkvo.v_t
    q_ptr = qkvo.q_ptr + first * qkvo.q_t
    o_ptr = qkvo.o_ptr + first * qkvo.o_t
    of_head = head_v.to(tl.int64) * workspace.tokens + token
    ag_ptr = workspace.ag_ptr
    beta32_ptr = workspace.beta32_ptr
    if ag_ptr is not None:
        ag_ptr += of_head * C
        beta32_ptr += of_head
    decay_in_ptr = workspace.decay_in_ptr
    decay_out_ptr = workspace.decay_out_ptr
    if decay_in_ptr is not None:
        decay_in_ptr += of_head
        decay_out_ptr += of_head
    g2_ptr = workspace.g2_ptr
    if g2_ptr is not None:
        g2_ptr += of_head
    r_k_ptr = workspace.r_k_ptr
    if r_k_ptr is not None:
        r_k_ptr += place.head_k.to(tl.int64) * workspace.tokens + token
    size = (place.end - first).to(tl.int32)
    for t in tl.range(0, (stop - first).to(tl.int32), C, num_stages=AHEAD):
        left = tl.minimum(size - t, C)
        rows = offs_c < left
        wide_t = tl.cast(t, tl.int64)
        k = load_rows(k_ptr + wide_t * qkvo.k_t, offs_c, offs_k, qkvo.k_t, rows, K, BLOCK_K)
        v = load_rows(v_ptr + wide_t * qkvo.v_t, offs_c, offs_v, qkvo.v_t, rows, V, BLOCK_V)
        decay_in = load_factors(decay_in_ptr, t, offs_f, left)
        S_low = S.to(k.dtype)
        d = corrections(
            S_low, k, v, one, ag_ptr, beta32_ptr, decay_in, t, offs_f, offs_c, left, sizes, HARD
        )
        for reader in tl.static_range(READERS):
            head_o = head_v * READERS + reader
            q_at = q_ptr + (place.head_q + reader) * qkvo.q_h + wide_t * qkvo.q_t
            q = load_rows(q_at, offs_c, offs_k, qkvo.q_t, rows, K, BLOCK_K)
            of_reader = head_o.to(tl.int64) * workspace.tokens + token
            qkg_at = workspace.qkg_ptr + of_reader * C + wide_t * C
            qkg = load_rows(qkg_at, offs_c, offs_c, C, rows, C, C)
            if workspace.decay_q_ptr is None:
                decay_q = decay_in * scale
            else:
                decay_q = load_factors(workspace.decay_q_ptr + of_reader, t, offs_f, left)
            o = tl.dot(S_low, tl.trans(q), input_precision=PRECISION) * decay_q[None, :]
            if workspace.qkg_down_ptr is None:
                o = tl.dot(d, tl.trans(qkg), acc=o, input_precision=PRECISION)
            else:
                up, down = float16_scale(tl.max(tl.abs(d), axis=1), 80)
                down *= tl.load(workspace.qkg_down_ptr + of_reader + t)
                qkg_d = tl.dot((d * up[:, None]).to(tl.float16), tl.trans(qkg))
                o = qkg_d * down[:, None] + o
            if reader + 1 < READERS:
                at = o_ptr + head_o * qkvo.o_h + wide_t * qkvo.o_t
                store_columns(at, o, offs_c, offs_v, qkvo.o_t, rows, V)
        if checkpoints.slots_ptr is not None:
            for j in range(checkpoints.M):
                position = tl.cast((j + 1) * checkpoints.every, tl.int64)
                if checkpoints.positions_ptr is not None:
                    position_at = checkpoints.positions_ptr + place.seq * checkpoints.M + j
                    position = tl.load(position_at).to(tl.int64)
                # tokens of this chunk before the checkpoint
                n = position - (first + t - place.start)
                if (n > 0) & (n <= left):
                    slot_at = checkpoints.slots_ptr + place.seq * checkpoints.M + j
                    slot = tl.load(slot_at).to(tl.int64)
                    decay_out_n = decay_between(g2_ptr, r_k_ptr, t, n, offs_c)
                    decay_all_n = decay_of(g2_ptr, t + n - 1)
                    S_n = next_state(S, k, d, decay_all_n, decay_out_n, PRECISION, HARD)
                    saved = checkpoints.state_ptr + slot * checkpoints.stride_state_p
                    saved += checkpoints.offs
                    rounded = S_n.to(checkpoints.state_ptr.dtype.element_ty)
                    mask = checkpoints.mask & (slot > checkpoints.pad_slot)
                    tl.store(saved, rounded, mask=mask)
        decay_out = load_factors(decay_out_ptr, t, offs_f, left)
        decay_all = decay_of(g2_ptr, t + left - 1)
        S = next_state(S, k, d, decay_all, decay_out, PRECISION, HARD)
        # after the product: the next state does not wait for the barriers of the last output
        at = o_ptr + (head_v * READERS + READERS - 1) * qkvo.o_h + wide_t * qkvo.o_t
        store_columns(at, o, offs_c, offs_v, qkvo.o_t, rows, V)
    return S


@triton.jit
def segment_loop(
    S, first, stop, qkvo, workspace, place, offs_v, is_transition,
    sizes: tl.constexpr, HARD: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """``chunk_loop`` without outputs; without values if ``is_transition``.

    Without TAIL no sequence's last segment is here, so all chunks are whole.
    """
    K: tl.constexpr = sizes.K
    V: tl.constexpr = sizes.V
    BLOCK_K: tl.constexpr = sizes.BLOCK_K
    BLOCK_V: tl.constexpr = sizes.BLOCK_V
    AHEAD: tl.constexpr = stages(sizes.STAGES, qkvo.k_ptr.dtype.element_ty, HARD)
    offs_c = tl.arange(0, C)
    offs_k = tl.arange(0, BLOCK_K)
    offs_f = counted()
    one = tl.where(offs_c[:, None] == offs_c[None, :], 1.0, 0.0).to(qkvo.v_ptr.dtype.element_ty)
    # from here on t counts from ``first``: 32 bits are enough
    token = place.batch * place.T + first  # in the workspace
    k_ptr = qkvo.k_ptr + first * qkvo.k_t
    v_ptr = qkvo.v_ptr + first * qkvo.v_t
    of_head = place.head_v.to(tl.int64) * workspace.tokens + token
    ag_ptr = workspace.ag_ptr
    beta32_ptr = workspace.beta32_ptr
    if ag_ptr is not None:
        ag_ptr += of_head * C
        beta32_ptr += of_head
    decay_in_ptr = workspace.decay_in_ptr
    decay_out_ptr = workspace.decay_out_ptr
    if decay_in_ptr is not None:
        decay_in_ptr += of_head
        decay_out_ptr += of_head
    g2_ptr = workspace.g2_ptr
    if g2_ptr is not None:
        g2_ptr += of_head
    for t in tl.range(0, (stop - first).to(tl.int32), C, num_stages=AHEAD):
        wide_t = tl.cast(t, tl.int64)
        left = C
        if TAIL:
            left = tl.minimum((place.end - first).to(tl.int32) - t, C)
        rows = offs_c < left
        k = load_rows(k_ptr + wide_t * qkvo.k_t, offs_c, offs_k, qkvo.k_t, rows, K, BLOCK_K)
        some = rows & (is_transition == 0)
        v = load_rows(v_ptr + wide_t * qkvo.v_t, offs_c, offs_v, qkvo.v_t, some, V, BLOCK_V)
        decay_in = load_factors(decay_in_ptr, t, offs_f, left)
        d = corrections(
            S.to(k.dtype), k, v, one, ag_ptr, beta32_ptr, decay_in, t, offs_f, offs_c, left, sizes,
            HARD,
        )  # fmt: skip
        decay_out = load_factors(decay_out_ptr, t, offs_f, left)
        decay_all = decay_of(g2_ptr, t + left - 1)
        S = next_state(S, k, d, decay_all, decay_out, sizes.PRECISION, HARD)
    return S
