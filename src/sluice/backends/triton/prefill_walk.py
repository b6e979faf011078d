"""The serial half of chunked prefill, chunk by chunk: the state stays in registers.

Per chunk of C = 64 tokens, docs/kernels/chunked.md:

    W  = beta (V - e^gc K S)
    Vd = Ag W
    O  = scale (e^gc Q S + P Vd)
    S <- e^gl S + Kᵀ (e^(gl - gc) Vd)

All of it is transposed here: Sᵀ [BLOCK_V, K] is the left operand of its products, and so are Wᵀ and
Vdᵀ, so that what the tensor cores make goes back into them from registers, and shared memory holds
nothing but tiles of the inputs. Vᵀ is added by a product with the identity, which is exact: tiles
that only tensor cores read arrive asynchronously, and need no transposing. Ag, P and the vectors of
gates come from prefill_chunks.py.

Operands are rounded to the inputs' type, but for P Vd (prefill_chunks.py), and in hard chunks,
whose keys nearly repeat: what is rounded off Ag, W and Vd adds up there from token to token, to
1e-2 and more of o and of the state. A hard chunk's Ag, times 2⁸, and W are float16, W over a power
of two for each value column, and the state takes Vd in two terms: Kᵀ high + Kᵀ low. Hard chunks
have a loop of their own, and kernels of their own have it: of each serial kernel two are launched,
one for the programs that have a hard chunk and one for those that have none, which has no register
to spare. With both loops in one, calls took 7 to 31% longer.
"""
# ruff: noqa: SIM108 (constants decide)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.prefill_chunks import powers

RUN = tl.constexpr(256)
"""Chunks that a program looks ahead for the next hard one."""


@triton.constexpr_function
def stages(STAGES, dtype, HARD):
    """Tiles ahead: one less for hard chunks of float16.

    Triton would find the ends of two loops with tiles of the same shapes to be the same code, and
    make it one, where the tiles of both are alive: shared memory for both at a time.
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
def counted(C: tl.constexpr):
    """0, 1, .. C - 1, by a sum.

    Triton makes an arange anew for every layout, and then loads a short vector 16 times over, once
    for each thread that needs it. A scan is not made anew: what is addressed by it is copied once.
    """
    return tl.cumsum(tl.full([C], 1, tl.int32), axis=0) - 1


@triton.jit
def load_factors(ptr, token, offs_f, left):
    """One number for each token of a chunk; ones where there are none to load."""
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
    S_low, k, v, one, a_ptr, b_ptr, forget, t, offs_f, offs_c, left,
    HV: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    HARD: tl.constexpr,
):  # fmt: skip
    """Vdᵀ of one chunk."""
    if a_ptr is None:
        vd = plus_values(tl.zeros([BLOCK_V, C], tl.float32), v, one)
    else:
        if HARD:
            a_ptr = a_ptr.to(tl.pointer_type(tl.float16), bitcast=True)
        a_ptr += tl.cast(t, tl.int64) * (HV * C)
        a = load_rows(a_ptr, offs_c, offs_c, HV * C, offs_c < left, C, C)
        u = tl.dot(S_low, tl.trans(k), input_precision=PRECISION)
        beta = load_factors(b_ptr, t, offs_f, left)
        w = plus_values(u * -forget[None, :], v, one) * beta[None, :]
        if HARD:
            up, down = powers(tl.max(tl.abs(w), axis=1), 80)
            vd = tl.dot((w * up[:, None]).to(tl.float16), tl.trans(a)) * (down[:, None] / 256)
        else:
            vd = tl.dot(w.to(k.dtype), tl.trans(a), input_precision=PRECISION)
    return vd


@triton.jit
def decayed_state(S, k, vd, decay, keep, PRECISION: tl.constexpr, HARD: tl.constexpr):
    """(e^gl S + Kᵀ (e^(gl - gc) Vd))ᵀ; in a hard chunk Vd is two terms."""
    to_end = vd * keep[None, :]
    high = to_end.to(k.dtype)
    S = S * decay
    if HARD:
        S = tl.dot((to_end - high.to(tl.float32)).to(k.dtype), k, acc=S)
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
    """Whether each of the next RUN chunks is hard: 0 or 1, and -1 behind ``left`` chunks."""
    offs = tl.arange(0, RUN)
    return tl.load(hard_ptr + chunk + offs, mask=offs < left, other=-1)


@triton.jit
def run_of(marks, mark):
    """How many chunks have this mark before the first one that has not."""
    return tl.min(tl.where(marks == mark, RUN, tl.arange(0, RUN)))


@triton.jit
def decay_of(g2_ptr, token):
    """e^gc at a token; 1 without decay."""
    if g2_ptr is None:
        decay = 1.0
    else:
        decay = tl.exp2(tl.load(g2_ptr + token))
    return decay


@triton.jit
def decay_between(g2_ptr, r_k_ptr, token, n, offs_c, HK: tl.constexpr):
    """e^(gc_n - gc) and the keys' lengths, for the n tokens before a checkpoint; zeros behind."""
    before = offs_c < n
    keep = tl.where(before, 1.0, 0.0)
    if g2_ptr is not None:
        g2 = tl.load(g2_ptr + token + offs_c, mask=before, other=0.0)
        g2_n = tl.load(g2_ptr + token + n - 1)
        keep = tl.where(before, tl.exp2(tl.where(before, g2_n - g2, 0.0)), 0.0)
    if r_k_ptr is not None:
        keep *= tl.load(r_k_ptr + (token + offs_c) * HK, mask=before, other=0.0)
    return keep


@triton.jit
def walk(
    S, first, stop, HARD: tl.constexpr,
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, p_ptr, lift_ptr, forget_ptr, keep_ptr, read_ptr,
    g2_ptr, r_k_ptr, state_ptr, o_ptr, checkpoint_slots_ptr, checkpoint_positions_ptr,
    in_pool, tile, scale,
    seq, batch, start, end, head_v, pid_v, T, tokens, M, every, pad_slot,
    stride_q_t, stride_q_h, stride_k_t, stride_v_t, stride_o_t, stride_o_h, stride_state_p,
    HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state behind token ``stop``, from the one before ``first``; outputs and checkpoints."""
    C: tl.constexpr = 64
    AHEAD: tl.constexpr = stages(STAGES, k_ptr.dtype.element_ty, HARD)
    HO: tl.constexpr = HQ if HQ > HV else HV
    READERS: tl.constexpr = HO // HV
    offs_c = tl.arange(0, C)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = pid_v * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_f = counted(C)
    one = tl.where(offs_c[:, None] == offs_c[None, :], 1.0, 0.0).to(v_ptr.dtype.element_ty)
    # from here on t counts from ``first``: 32 bits are enough for it
    token = batch * T + first  # of the workspace
    k_ptr += first * stride_k_t
    v_ptr += first * stride_v_t
    q_ptr += first * stride_q_t
    o_ptr += first * stride_o_t
    p_ptr += token * (HO * C)
    of_head = head_v.to(tl.int64) * tokens + token
    if a_ptr is not None:
        a_ptr += (token * HV + head_v) * C
        b_ptr += of_head
    if forget_ptr is not None:
        forget_ptr += of_head
        keep_ptr += of_head
    if g2_ptr is not None:
        g2_ptr += of_head
    if r_k_ptr is not None:
        r_k_ptr += token * HK + head_v // (HV // HK)
    size = (end - first).to(tl.int32)
    for t in tl.range(0, (stop - first).to(tl.int32), C, num_stages=AHEAD):
        left = tl.minimum(size - t, C)
        rows = offs_c < left
        wide_t = tl.cast(t, tl.int64)
        k = load_rows(k_ptr + wide_t * stride_k_t, offs_c, offs_k, stride_k_t, rows, K, BLOCK_K)
        v = load_rows(v_ptr + wide_t * stride_v_t, offs_c, offs_v, stride_v_t, rows, V, BLOCK_V)
        forget = load_factors(forget_ptr, t, offs_f, left)
        S_low = S.to(k.dtype)
        vd = corrections(
            S_low, k, v, one, a_ptr, b_ptr, forget, t, offs_f, offs_c, left,
            HV, C, BLOCK_V, PRECISION, HARD,
        )  # fmt: skip
        for reader in tl.static_range(READERS):
            head_o = head_v * READERS + reader
            q_at = q_ptr + (head_o * HQ // HO) * stride_q_h + wide_t * stride_q_t
            q = load_rows(q_at, offs_c, offs_k, stride_q_t, rows, K, BLOCK_K)
            p_at = p_ptr + wide_t * (HO * C) + head_o * C
            p = load_rows(p_at, offs_c, offs_c, HO * C, rows, C, C)
            if read_ptr is None:
                read = forget * scale
            else:
                of_reader = head_o.to(tl.int64) * tokens + token
                read = load_factors(read_ptr + of_reader, t, offs_f, left)
            o = tl.dot(S_low, tl.trans(q), input_precision=PRECISION) * read[None, :]
            if lift_ptr is None:
                o = tl.dot(vd, tl.trans(p), acc=o, input_precision=PRECISION)
            else:
                up, down = powers(tl.max(tl.abs(vd), axis=1), 80)
                down *= tl.load(lift_ptr + head_o.to(tl.int64) * tokens + token + t)
                pv = tl.dot((vd * up[:, None]).to(tl.float16), tl.trans(p))
                o = pv * down[:, None] + o
            if reader + 1 < READERS:
                at = o_ptr + head_o * stride_o_h + wide_t * stride_o_t
                store_columns(at, o, offs_c, offs_v, stride_o_t, rows, V)
        if checkpoint_slots_ptr is not None:
            for j in range(M):
                position = tl.cast((j + 1) * every, tl.int64)
                if checkpoint_positions_ptr is not None:
                    position = tl.load(checkpoint_positions_ptr + seq * M + j).to(tl.int64)
                n = position - (first + t - start)  # tokens of this chunk before the checkpoint
                if (n > 0) & (n <= left):
                    kept = tl.load(checkpoint_slots_ptr + seq * M + j).to(tl.int64)
                    keep_n = decay_between(g2_ptr, r_k_ptr, t, n, offs_c, HK)
                    decay_n = decay_of(g2_ptr, t + n - 1)
                    S_n = decayed_state(S, k, vd, decay_n, keep_n, PRECISION, HARD)
                    saved = state_ptr + kept * stride_state_p + in_pool
                    rounded = S_n.to(state_ptr.dtype.element_ty)
                    tl.store(saved, rounded, mask=tile & (kept > pad_slot))
        keep = load_factors(keep_ptr, t, offs_f, left)
        decay = decay_of(g2_ptr, t + left - 1)
        S = decayed_state(S, k, vd, decay, keep, PRECISION, HARD)
        # behind the product: the next state does not wait for the barriers of the last output
        at = o_ptr + (head_v * READERS + READERS - 1) * stride_o_h + wide_t * stride_o_t
        store_columns(at, o, offs_c, offs_v, stride_o_t, rows, V)
    return S


@triton.jit
def walk_through(
    S, first, stop, HARD: tl.constexpr,
    k_ptr, v_ptr, a_ptr, b_ptr, forget_ptr, keep_ptr, g2_ptr, batch, head_v, transition,
    offs_v, T, tokens, stride_k_t, stride_v_t, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``walk`` over whole chunks, without outputs; without values where ``transition``."""
    C: tl.constexpr = 64
    AHEAD: tl.constexpr = stages(STAGES, k_ptr.dtype.element_ty, HARD)
    offs_c = tl.arange(0, C)
    offs_k = tl.arange(0, BLOCK_K)
    offs_f = counted(C)
    one = tl.where(offs_c[:, None] == offs_c[None, :], 1.0, 0.0).to(v_ptr.dtype.element_ty)
    # from here on t counts from ``first``: 32 bits are enough for it
    token = batch * T + first  # of the workspace
    k_ptr += first * stride_k_t
    v_ptr += first * stride_v_t
    of_head = head_v.to(tl.int64) * tokens + token
    if a_ptr is not None:
        a_ptr += (token * HV + head_v) * C
        b_ptr += of_head
    if forget_ptr is not None:
        forget_ptr += of_head
        keep_ptr += of_head
    if g2_ptr is not None:
        g2_ptr += of_head
    for t in tl.range(0, (stop - first).to(tl.int32), C, num_stages=AHEAD):
        wide_t = tl.cast(t, tl.int64)
        left = C  # no last segment is here: its chunks are whole
        rows = offs_c < left
        k = load_rows(k_ptr + wide_t * stride_k_t, offs_c, offs_k, stride_k_t, rows, K, BLOCK_K)
        some = rows & (transition == 0)
        v = load_rows(v_ptr + wide_t * stride_v_t, offs_c, offs_v, stride_v_t, some, V, BLOCK_V)
        forget = load_factors(forget_ptr, t, offs_f, left)
        vd = corrections(
            S.to(k.dtype), k, v, one, a_ptr, b_ptr, forget, t, offs_f, offs_c, left,
            HV, C, BLOCK_V, PRECISION, HARD,
        )  # fmt: skip
        keep = load_factors(keep_ptr, t, offs_f, left)
        decay = decay_of(g2_ptr, t + C - 1)
        S = decayed_state(S, k, vd, decay, keep, PRECISION, HARD)
    return S
