"""The state role of hopper_state_kernel: a group of four warps holds 64 value columns of a state.

state_kernel.py has the equations. The chain from one state to the next has three products: K S, D,
and the update of S. Everything else (the output, its store, the next chunk's values) happens while
the tensor cores work on the next chunk's first product.

QKg and D meet in float16. Each row of QKg is multiplied by a power of two (state_products.py), and
so is each value column of D, here. In bfloat16 their product would lose two bits where keys repeat
(docs/numerics.md). Hard chunks, whose keys nearly repeat, run one by one with more bits
(``hard_chunk``).
"""

# ruff: noqa: RET505 (constexpr branches stay if/else)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sluice.backends.hopper.kernels.constants import GROUP_V, C
from sluice.backends.hopper.kernels.gluon_api import async_store, barrier, reinterpret
from sluice.backends.hopper.kernels.layouts import accumulator, left_operand
from sluice.backends.hopper.kernels.state_args import advance
from sluice.backends.hopper.kernels.state_checkpoints import (
    candidates,
    checkpoints_of,
    first_saved,
    next_border,
    slot_ahead,
    slot_of,
    tail_of,
    token_of,
    waiting_at,
)
from sluice.backends.hopper.kernels.state_items import (
    BEFORE,
    FIRST_V,
    FLAGS,
    HAS_SOURCE,
    HEAD_K,
    HEAD_V,
    IS_SPLIT,
    LIVE,
    RING,
    ROW,
    SEGMENT,
    SEQ,
    SOURCE,
    TARGET,
    TOKENS,
    VALUES,
    WRITE,
    first_mark,
    first_run,
    load_marks,
    wait_item,
    word,
)


@gluon.jit
def run_state(args, sizes, GROUP: gl.constexpr):
    """Take 64 value columns of a state through each of the program's items."""
    OUTPUT: gl.constexpr = sizes.OUTPUT
    TAILS: gl.constexpr = args.saves.TAILS
    # Whether there are registers for the next state before this one is stored
    AHEAD: gl.constexpr = OUTPUT and args.segments_ptr is None and not TAILS
    items = args.items
    gdc_wait()  # for the kernels before this one: see begin in triton/kernels/math.py
    if GROUP == 0:
        gdc_launch_dependents()
    n = 0
    turns = 0
    stage = 0
    phase = 0
    wait_item(items, n)
    tokens = word(items, n, TOKENS, 4)
    if AHEAD:
        S = load_state(args, n, sizes, GROUP)
    while tokens >= 0:
        if not AHEAD:
            S = load_state(args, n, sizes, GROUP)
        if (word(items, n, FLAGS, 4) & LIVE) != 0:
            S, turns, stage, phase = run_item(args, sizes, n, S, tokens, turns, stage, phase, GROUP)
        elif OUTPUT:
            store_zeros(args, sizes, n, tokens, GROUP)
        wait_item(items, n + 1)
        if AHEAD:
            S_next = load_state(args, n + 1, sizes, GROUP)
        if not TAILS:
            put_state(args, n, S, sizes, GROUP)
        if AHEAD:
            S = S_next
        tokens = word(items, n + 1, TOKENS, 4)
        barrier()
        mbarrier.arrive(items.free.index(n % RING), count=1)
        n += 1
    if OUTPUT:
        tma.store_wait(0)


@gluon.jit
def run_item(args, sizes, n, S, tokens, turns, stage, phase, GROUP: gl.constexpr):
    """Take the state through the tokens of the program's n-th item.

    Returns the state after them, and the turn, stage and phase that come next.
    """
    K: gl.constexpr = sizes.K
    GROUPS: gl.constexpr = sizes.GROUPS
    OUTPUT: gl.constexpr = sizes.OUTPUT
    TAILS: gl.constexpr = args.saves.TAILS
    AT_BORDERS: gl.constexpr = args.saves.slots_ptr is not None and not TAILS
    tiles = args.tiles
    factors = args.factors
    barriers = args.barriers
    items = args.items
    dtype: gl.constexpr = tiles.kq.dtype
    acc_c: gl.constexpr = accumulator(C)
    acc_k: gl.constexpr = accumulator(K)
    left_c: gl.constexpr = left_operand(C)
    left_k: gl.constexpr = left_operand(K)
    zero = gl.zeros([GROUP_V, C], gl.float32, acc_c)
    zero_uo = zero
    if OUTPUT:
        zero_uo = gl.zeros([GROUP_V, 2 * C], gl.float32, acc_k)
    row = word(items, n, ROW, 4)
    head_v = word(items, n, HEAD_V, 4)
    first_v = word(items, n, FIRST_V, 4) + GROUP * GROUP_V
    column_v = head_v * sizes.V + first_v
    values = (word(items, n, FLAGS, 4) & VALUES) // VALUES
    has_values = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, acc_c)) < values * C, 0)
    chunks = gl.cdiv(tokens, C)
    chunk = 0
    seq = word(items, n, SEQ, 4)
    before = word(items, n, BEFORE, 4)
    saves = checkpoints_of(args.saves, seq, before, tokens, head_v, sizes.V * K)
    if AT_BORDERS:
        saved, border = first_saved(saves)
        slot = slot_ahead(saves, saved, border >= 0)
    while chunk < chunks:
        if chunk == 0:
            run = first_run(items, n)
        else:
            head_k = word(items, n, HEAD_K, 4).to(gl.int64)
            hard_ptr = args.hard_ptr + head_k * args.stride_gates_h + row
            run = first_mark(load_marks(hard_ptr + chunk * C, chunks - chunk, 4), 4)
        if saves.TAILS:
            keep_states(saves, S, chunk, first_v, sizes)
            run = gl.minimum(run, next_border(saves, chunk) - chunk)
        mbarrier.wait(barriers.tiles_ready.index(stage), phase)
        mbarrier.wait(barriers.qkg_ready.index(stage), phase)
        if run == 0:
            S, o = hard_chunk(S, args, sizes, stage, zero_uo, has_values, GROUP)
            barrier()
            mbarrier.arrive(barriers.stage_free.index(stage), count=1)
            if OUTPUT:
                first = row + chunk * C
                count = tokens - chunk * C
                store_output(args.o_ptr + column_v, o.to(dtype), first, count, args.stride_o_t)
            chunk += 1
            if AT_BORDERS:
                saved, border, slot = keep_state(
                    saves, S, chunk, saved, border, slot, first_v, sizes
                )
            stage, phase = advance(stage, phase, sizes.STAGES)
        else:
            s_left = gl.convert_layout(S, left_c).to(dtype)
            kq_t = tiles.kq.index(stage).permute((1, 0))
            u = warpgroup_mma(s_left, kq_t, zero_uo, use_acc=False)  # with OUTPUT: U and Q S
            v = load_values(tiles.v.index(stage * GROUPS + GROUP), has_values, OUTPUT)
            v = v * per_token(factors.beta, stage)
            beta_decay_in = per_token(factors.beta_decay_in, stage)
            for i in range(run):
                if GROUPS == 2:  # in turns: one computes while the other has the tensor cores
                    mine = barriers.turn.index(GROUP)
                    number = turns + i
                    mbarrier.wait(mine, (number + 1 - GROUP) % 2, pred=number >= 1 - GROUP)
                if OUTPUT:
                    u, o = split_uo(u)
                w = v - u * beta_decay_in
                w_left = gl.convert_layout(w, left_c).to(dtype)
                ag_t = tiles.ag.index(stage).permute((1, 0))
                d = warpgroup_mma(w_left, ag_t, zero, use_acc=False, is_async=True)
                decay_all = factors.decay_all.index(stage).load(gl.SliceLayout(1, acc_k))
                S = S * gl.expand_dims(decay_all, 1)
                decay_out = per_token(factors.decay_out, stage)
                next_stage = stage + 1
                if next_stage == sizes.STAGES:
                    next_stage = 0
                    phase = phase ^ 1
                d = warpgroup_mma_wait(0, deps=[d])
                d_k = gl.convert_layout(d * decay_out, left_k).to(dtype)
                k_smem = tiles.kq.index(stage).slice(0, C, 0)
                # The chain waits for the state. A group alone issues its product first and has
                # registers for the output's after it. With two groups, issue the output first:
                # registers cannot hold both.
                if GROUPS == 1:
                    S = warpgroup_mma(d_k, k_smem, S, is_async=True)
                if OUTPUT:
                    d_left, up, down = to_float16(d)
                    o = o * per_token(factors.qs_up, stage) * up
                    qkg_t = tiles.qkg.index(stage).permute((1, 0))
                    o = warpgroup_mma(d_left, qkg_t, o, is_async=True)
                if GROUPS == 2:
                    S = warpgroup_mma(d_k, k_smem, S, is_async=True)
                    mbarrier.arrive(barriers.turn.index(1 - GROUP), count=1)
                    if OUTPUT:
                        o = warpgroup_mma_wait(1, deps=[o])
                        o = o * per_token(factors.o_down, stage) * down
                        stage_output(o, tiles.o, GROUP)
                    S = warpgroup_mma_wait(0, deps=[S])
                elif OUTPUT:
                    S = warpgroup_mma_wait(1, deps=[S])
                else:
                    S = warpgroup_mma_wait(0, deps=[S])
                # Round S again for each chunk: the compiler would unpack and repack 16-bit
                # pairs that a loop carries.
                s_left = gl.convert_layout(S, left_c).to(dtype)
                mbarrier.wait(barriers.tiles_ready.index(next_stage), phase, pred=i + 1 < run)
                kq_t = tiles.kq.index(next_stage).permute((1, 0))
                u = warpgroup_mma(s_left, kq_t, zero_uo, use_acc=False, is_async=True)
                # Meanwhile: checkpoints, the output, the next chunk's values and factors.
                if AT_BORDERS:
                    saved, border, slot = keep_state(
                        saves, S, chunk + i + 1, saved, border, slot, first_v, sizes
                    )
                if OUTPUT and GROUPS == 1:
                    o = warpgroup_mma_wait(1, deps=[o])
                    o = o * per_token(factors.o_down, stage) * down
                    stage_output(o, tiles.o, GROUP)
                barrier()
                mbarrier.arrive(barriers.stage_free.index(stage), count=1)
                if OUTPUT:
                    t = row + (chunk + i) * C
                    o_smem = tiles.o.index(GROUP)
                    async_store(args.o_desc, [t, column_v], o_smem)
                v = load_values(tiles.v.index(next_stage * GROUPS + GROUP), has_values, OUTPUT)
                mbarrier.wait(barriers.qkg_ready.index(next_stage), phase, pred=i + 1 < run)
                if GROUPS == 1:
                    v = v * per_token(factors.beta, next_stage)
                    beta_decay_in = per_token(factors.beta_decay_in, next_stage)
                u = warpgroup_mma_wait(0, deps=[u])
                if GROUPS == 2:  # there were no registers for it before
                    v = v * per_token(factors.beta, next_stage)
                    beta_decay_in = per_token(factors.beta_decay_in, next_stage)
                stage = next_stage
            chunk += run
            turns += run
    if TAILS:
        keep_states(saves, S, chunk, first_v, sizes)
        put_state(args, n, S, sizes, GROUP)
        begin, stop = candidates(saves, 0, tokens)
        for j in range(begin, stop):
            border, count = tail_of(saves, j)
            if count > 0:
                saved_ptr, kept = slot_of(saves, j)
                border_ptr = waiting_at(saves, j, saved_ptr)
                nothing = gl.minimum(count, 0)
                at = state_offsets(first_v + nothing, K, sizes.V, sizes.STATE_KV)
                S = gl.load(border_ptr + at, mask=(at >= 0) & kept, other=0.0)
                mbarrier.wait(barriers.tiles_ready.index(stage), phase)
                mbarrier.wait(barriers.qkg_ready.index(stage), phase)
                S, o = hard_chunk(S, args, sizes, stage, zero_uo, has_values, GROUP)
                barrier()
                mbarrier.arrive(barriers.stage_free.index(stage), count=1)
                if kept:
                    store_state(saved_ptr, S, first_v + nothing, sizes)
                stage, phase = advance(stage, phase, sizes.STAGES)
    return S, turns, stage, phase


@gluon.jit
def store_zeros(args, sizes, n, tokens, GROUP: gl.constexpr):
    """The output of an item whose sequence has no slot."""
    row = word(args.items, n, ROW, 4)
    column_v = word(args.items, n, HEAD_V, 4) * sizes.V + word(args.items, n, FIRST_V, 4)
    o_ptr = args.o_ptr + column_v + GROUP * GROUP_V
    zero = gl.zeros([GROUP_V, C], args.tiles.kq.dtype, accumulator(C))
    for t in range(0, tokens, C):
        store_output(o_ptr, zero, row + t, tokens - t, args.stride_o_t)


@gluon.jit
def keep_state(saves, S, chunks, saved, border, slot, first_v, sizes):
    """Store the state after ``chunks`` chunks if checkpoint ``saved`` lies there.

    Returns what it needs for the next checkpoint. It has a mask and no branch, because the tensor
    cores are at work.
    """
    here = (chunks == border) & (chunks * C <= saves.tokens)
    kept = here & (saved < saves.number) & (slot > saves.pad_slot)
    nothing = gl.minimum(chunks, 0)  # see keep_states
    at = state_offsets(first_v + nothing, sizes.K, sizes.V, sizes.STATE_KV)
    target_ptr = saves.state_ptr + slot.to(gl.int64) * saves.stride_state_p
    mask = gl.full([GROUP_V, sizes.K], kept, gl.int1, accumulator(sizes.K))
    gl.store(target_ptr + at, S.to(target_ptr.dtype.element_ty), mask=mask)
    saved = gl.where(here, saved + 1, saved)
    border = gl.where(here, border + saves.every // C, border)
    next_slot = slot_ahead(saves, saved, here)
    return saved, border, gl.where(here, next_slot, slot)


@gluon.jit
def keep_states(saves, S, chunk, first_v, sizes):
    """Store the state before ``chunk`` for every checkpoint there, and for those with a tail."""
    begin, stop = candidates(saves, chunk * C, chunk * C + C - 1)
    for j in range(begin, stop):
        at = token_of(saves, j)
        if (at >= 0) & (at // C == chunk):
            saved_ptr, kept = slot_of(saves, j)
            # The compiler cannot know that this is 0. If it did, it would keep the offsets of
            # load_state through the loop, in half of the registers.
            nothing = gl.minimum(chunk, 0)
            if kept & (at % C == 0):
                store_state(saved_ptr, S, first_v + nothing, sizes)
            if kept & (at % C != 0):
                store_state(waiting_at(saves, j, saved_ptr), S, first_v + nothing, sizes)


@gluon.jit
def hard_chunk(S, args, sizes, stage, zero_uo, has_values, GROUP: gl.constexpr):
    """A hard chunk: the state after it and Oᵀ [64, C].

    Its Ag is float16 times 2⁸ in the same memory. βW is float16 too, and the state takes D as a sum
    of two terms.
    """
    OUTPUT: gl.constexpr = sizes.OUTPUT
    factors = args.factors
    kq_smem = args.tiles.kq.index(stage)
    v_smem = args.tiles.v.index(stage * sizes.GROUPS + GROUP)
    ag_smem = args.tiles.ag.index(stage)
    qkg_smem = args.tiles.qkg.index(stage)
    dtype: gl.constexpr = kq_smem.dtype
    acc_c: gl.constexpr = accumulator(C)
    left_c: gl.constexpr = left_operand(C)
    left_k: gl.constexpr = left_operand(sizes.K)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.float16)
    s_left = gl.convert_layout(S, left_c).to(dtype)
    u = warpgroup_mma(s_left, kq_smem.permute((1, 0)), zero_uo, use_acc=False)
    o = u
    if OUTPUT:
        u, o = split_uo(u)
    v = load_values(v_smem, has_values, OUTPUT)
    # fused by hand: the compiler may choose either product, and the bits would depend on the kernel
    w = gl.fma(-u, per_token(factors.beta_decay_in, stage), v * per_token(factors.beta, stage))
    w_left, _, down = to_float16(w)
    ag_t = reinterpret(ag_smem, gl.float16, [C, C], square).permute((1, 0))
    zero = gl.zeros([GROUP_V, C], gl.float32, acc_c)
    d = warpgroup_mma(w_left, ag_t, zero, use_acc=False) * (down / 256.0)
    if OUTPUT:
        d_left, up, down = to_float16(d)
        o = o * per_token(factors.qs_up, stage) * up
        o = warpgroup_mma(d_left, qkg_smem.permute((1, 0)), o)
        o = o * per_token(factors.o_down, stage) * down
    decay_out = per_token(factors.decay_out, stage)
    d_out = (d * decay_out).to(dtype)
    rest = gl.fma(d, decay_out, -d_out.to(gl.float32))
    decay_all = factors.decay_all.index(stage).load(gl.SliceLayout(1, S.type.layout))
    S = S * gl.expand_dims(decay_all, 1)
    k_smem = kq_smem.slice(0, C, 0)
    S = warpgroup_mma(gl.convert_layout(rest, left_k).to(dtype), k_smem, S)
    S = warpgroup_mma(gl.convert_layout(d_out, left_k), k_smem, S)
    return S, o


@gluon.jit
def per_token(factor, stage):
    """A factor of a chunk as [1, C], to multiply [64, C]."""
    return gl.expand_dims(factor.index(stage).load(gl.SliceLayout(0, accumulator(C))), 0)


@gluon.jit
def load_values(v_smem, has_values, OUTPUT: gl.constexpr):
    """Vᵀ [64, C] in float32; zeros for a segment's transition."""
    v = v_smem.permute((1, 0)).load(accumulator(C)).to(gl.float32)
    if not OUTPUT:
        v = gl.where(has_values, v, 0.0)
    return v


@gluon.jit
def split_uo(uo):
    """(S [Kᵀ Qᵀ]) [64, 2 C] as Uᵀ and Oᵀ [64, C], which stay in their registers."""
    uo = gl.permute(gl.reshape(uo, [GROUP_V, 2, C]), (0, 2, 1))
    u, o = gl.split(uo)
    return gl.convert_layout(u, accumulator(C)), gl.convert_layout(o, accumulator(C))


@gluon.jit
def to_float16(x):
    """x [64, C] in float16 as a left operand, each row times a power of two.

    Returns that power and its inverse, too, as ``row_scale`` makes them.
    """
    up, down = row_scale(x)
    x_left = gl.convert_layout(x * up, left_operand(C)).to(gl.float16)
    return x_left, up, down


@gluon.jit
def row_scale(x):
    """For each row of x [64, C] a power of two and its inverse, [64, 1].

    The power brings the row's largest entry to [2¹³, 2¹⁴), or lower if that is less than 2⁻⁴⁷: Q S
    is multiplied by the same power and must not overflow. For rows of zeros both are 1.
    """
    bits = gl.max(gl.abs(x), axis=1).to(gl.int32, bitcast=True) & 0x7F800000
    bits = gl.where(bits == 0, (127 + 13) * (1 << 23), gl.maximum(bits, (127 - 47) * (1 << 23)))
    up = (254 * (1 << 23) - bits + 13 * (1 << 23)).to(gl.float32, bitcast=True)
    down = (bits - 13 * (1 << 23)).to(gl.float32, bitcast=True)
    return gl.expand_dims(up, 1), gl.expand_dims(down, 1)


@gluon.jit
def stage_output(o, o_bufs, GROUP: gl.constexpr):
    """Put Oᵀ [64, C] into shared memory, once the store of the previous chunk has read from it."""
    tma.store_wait(0)
    o_bufs.index(GROUP).permute((1, 0)).store(o.to(o_bufs.dtype))
    fence_async_shared()


@gluon.jit
def store_output(o_ptr, o, row, count, stride_o_t):
    """Store the first ``count`` columns of Oᵀ [64, C] as tokens from ``row`` on."""
    acc: gl.constexpr = accumulator(C)
    tokens = gl.arange(0, C, gl.SliceLayout(0, acc))
    columns = gl.arange(0, GROUP_V, gl.SliceLayout(1, acc))
    at = gl.expand_dims((row + tokens).to(gl.int64) * stride_o_t, 0) + gl.expand_dims(columns, 1)
    mask = gl.expand_dims(tokens < count, 0) & gl.expand_dims(columns < GROUP_V, 1)
    gl.store(o_ptr + at, o, mask=mask)


@gluon.jit
def state_offsets(first_v, K: gl.constexpr, V: gl.constexpr, STATE_KV: gl.constexpr):
    """Where the elements of Sᵀ [64, K] lie in a state [V, K], or [K, V] with STATE_KV."""
    layout: gl.constexpr = accumulator(K)
    rows = first_v + gl.arange(0, GROUP_V, gl.SliceLayout(1, layout))
    columns = gl.arange(0, K, gl.SliceLayout(0, layout))
    if STATE_KV:
        return gl.expand_dims(rows, 1) + gl.expand_dims(columns, 0) * V
    else:
        return gl.expand_dims(rows, 1) * K + gl.expand_dims(columns, 0)


@gluon.jit
def load_state(args, n, sizes, GROUP: gl.constexpr):
    """Sᵀ [64, K] before the tokens of the program's n-th item.

    A segment's effect begins with zeros, or with the identity.
    """
    K: gl.constexpr = sizes.K
    V: gl.constexpr = sizes.V
    items = args.items
    flags = word(items, n, FLAGS, 4)
    first_v = word(items, n, FIRST_V, 4) + GROUP * GROUP_V
    if sizes.OUTPUT:
        head_v = word(items, n, HEAD_V, 4)
        source_ptr = args.state_ptr + head_v * (V * K)
        source_ptr += word(items, n, SOURCE, 4).to(gl.int64) * args.stride_state_p
        at = state_offsets(first_v, K, V, sizes.STATE_KV)
        on = (at >= 0) & ((flags & HAS_SOURCE) != 0)
        S = gl.load(source_ptr + at, mask=on, other=0.0).to(gl.float32)
        if args.segments_ptr is not None:
            before = word(items, n, SEGMENT, 4).to(gl.int64) * args.HV + head_v
            at = state_offsets(first_v, K, V + K, True)
            on = (at >= 0) & ((flags & IS_SPLIT) != 0)
            S += gl.load(args.segments_ptr + before * (K * (V + K)) + at, mask=on, other=0.0)
    else:
        layout: gl.constexpr = accumulator(K)
        rows = first_v + gl.arange(0, GROUP_V, gl.SliceLayout(1, layout))
        columns = gl.arange(0, K, gl.SliceLayout(0, layout))
        diagonal = gl.expand_dims(rows, 1) == gl.expand_dims(columns, 0)
        S = diagonal.to(gl.float32) * (1 - (flags & VALUES) // VALUES).to(gl.float32)
    return S


@gluon.jit
def put_state(args, n, S, sizes, GROUP: gl.constexpr):
    """Store the state after the program's n-th item where it is kept."""
    K: gl.constexpr = sizes.K
    V: gl.constexpr = sizes.V
    items = args.items
    flags = word(items, n, FLAGS, 4)
    if (flags & WRITE) != 0:
        head_v = word(items, n, HEAD_V, 4)
        first_v = word(items, n, FIRST_V, 4) + GROUP * GROUP_V
        target = word(items, n, TARGET, 4).to(gl.int64)
        if sizes.OUTPUT:
            target_ptr = args.state_ptr + head_v * (V * K) + target * args.stride_state_p
        else:
            target_ptr = args.segments_ptr + (target * args.HV + head_v) * (K * (V + K))
            target_ptr += gl.where((flags & VALUES) != 0, 0, V)
        store_state(target_ptr, S, first_v, sizes)


@gluon.jit
def store_state(target_ptr, S, first_v, sizes):
    """Store Sᵀ [64, K] after the tokens: a state, or half of a segment's effect [K, V + K]."""
    if sizes.OUTPUT:
        at = state_offsets(first_v, sizes.K, sizes.V, sizes.STATE_KV)
    else:
        at = state_offsets(first_v, sizes.K, sizes.V + sizes.K, True)
    gl.store(target_ptr + at, S.to(target_ptr.dtype.element_ty))
