"""Decode and verify: one to eight tokens per sequence, on the state where it lies.

One task is some value heads of one sequence that share their key head. A float32 state whose rows
are whole vectors is read and written in place, and for one token also a 16-bit one. Any other goes
block by block through float32 scratch memory, with the same operations.
"""

from __future__ import annotations

import functools
import importlib

from sluice.backends import Launch
from sluice.backends.cpu.addressing import NOWHERE, draft_row, span, state_rows
from sluice.backends.cpu.delta import BLOCK_V, Function, block
from sluice.backends.cpu.jit import jit, jit_as, named
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import bind as bind_kernel
from sluice.backends.cpu.launch import with_zeros
from sluice.backends.cpu.llvm import BF16, F16, F32, LANES, REGISTERS
from sluice.backends.cpu.memory import address_of, release
from sluice.backends.cpu.one_token import USUAL, functions
from sluice.backends.cpu.operands import (
    KEY_DECAY,
    load_gates,
    load_key_gates,
    make_operands,
    make_work,
    padded_tokens,
)
from sluice.backends.cpu.params import PARAMS
from sluice.backends.cpu.scratch_rows import deal_row, round_up, store_row
from sluice.backends.cpu.simd import pointer
from sluice.backends.cpu.state import (
    block_floats,
    head_at,
    is_direct,
    load_block,
    load_dealt,
    pass_through,
    store_block,
    store_dealt,
)
from sluice.backends.cpu.threads import tasks_of
from sluice.backends.cpu.tokens import (
    has_one_token,
    load_keys,
    load_values,
    prefetch_token,
    readers_of_state,
    share_heads,
    share_keys,
    store_outputs,
    zero_outputs,
)
from sluice.contract import values
from sluice.contract.draft_spec import VerifySpec
from sluice.contract.spec import DeltaSpec

VK1, VK2, VK4, VK8 = (block("vk", M) for M in (1, 2, 4, 8))
KV1, KV2, KV4, KV8 = (block("kv", M) for M in (1, 2, 4, 8))
KV_WIDE = block("kv", 1, 8)
NEAR, FAR = functions(F32)
NEAR_BF16, NEAR_F16 = functions(BF16)[0], functions(F16)[0]
USUAL_K = 128  # the K of most models: with it, K is known when kernels are compiled
HELD = REGISTERS >= 32  # k and q are held in registers: K is known when kernels are compiled

WIDE = 8 * LANES  # columns of one token's pass through a "kv" state

view = PARAMS.view


@jit
def is_one_token(p, w, m):
    """Whether one_token.py serves, which needs neither k_out nor decay_all."""
    return m == 1 and w.readers == 1 and p.one_token != 0


@jit
def deal_keys(p, w, m):
    """Where rows of the state come dealt (tiles.py), deal k and q in the same way, at w.kq_raw."""
    if is_dealt(p, w):
        deal_row(w.kq_raw, w.kq, 2 * padded_tokens(m) * p.K)


@jit
def is_dealt(p, w):
    """Whether every path sums dealt rows: bfloat16 states that one_token.py serves.

    It does not depend on the number of tokens. Verify reads a state for all tokens of a draft, of
    which commit may accept one, and decode of that one must have left the same bits.
    """
    return p.state_code == BF16 and w.readers == 1 and p.one_token != 0


@jit
def _one_token(p, w, source, target):
    """All rows of one head in place, whatever their storage type."""
    K, V = USUAL if HELD else p.K, p.V
    if p.state_code == F32:
        s = pointer(p.state, F32)
        if p.far:
            FAR(w, w.beta, s + source, s + target, K, 0, V)
        else:
            NEAR(w, w.beta, s + source, s + target, K, 0, V)
    elif p.state_code == BF16:
        h = pointer(p.state, BF16)
        NEAR_BF16(w, w.beta, h + source, h + target, K, 0, V)
    else:
        f = pointer(p.state, F16)
        NEAR_F16(w, w.beta, f + source, f + target, K, 0, V)


@jit
def vk_block(p, w, s, ld, to, ld_to, soon, n, v0, m, write):
    beta = w.beta
    if m == 1:
        VK1(w, beta, s, ld, to, ld_to, soon, n, n, v0, write)
    elif m == 2:
        VK2(w, beta, s, ld, to, ld_to, soon, n, n, v0, write)
    elif m <= 4 and n == USUAL_K and ld == USUAL_K and ld_to == USUAL_K:
        VK4(w, beta, s, USUAL_K, to, USUAL_K, soon, USUAL_K, USUAL_K, v0, write)
    elif m <= 4:
        VK4(w, beta, s, ld, to, ld_to, soon, n, n, v0, write)
    else:
        VK8(w, beta, s, ld, to, ld_to, soon, n, n, v0, write)


@jit
def _vk_one(p, w, s, ld, to, ld_to, soon, n, v0, m, write):
    VK1(w, w.beta, s, ld, to, ld_to, soon, n, n, v0, write)


@jit
def _kv_one(p, w, s, ld, to, ld_to, soon, n, v0, m, write):
    KV1(w, w.beta, s, ld, to, ld_to, soon, p.K, n, v0, write)


@jit
def kv_block(p, w, s, ld, to, ld_to, soon, n, v0, m, write):
    beta, K = w.beta, p.K
    if m == 1:
        KV1(w, beta, s, ld, to, ld_to, soon, K, n, v0, write)
    elif m == 2:
        KV2(w, beta, s, ld, to, ld_to, soon, K, n, v0, write)
    elif m <= 4:
        KV4(w, beta, s, ld, to, ld_to, soon, K, n, v0, write)
    else:
        KV8(w, beta, s, ld, to, ld_to, soon, K, n, v0, write)


@jit
def _keep_corrections(p, w, head, v0, m):
    """Verify's d of one block."""
    width = min(BLOCK_V, p.V - v0)
    for t in range(m):
        at = ((w.draft + t) * p.HV + head) * p.V + v0
        store_row(p.draft_d, F32, at, w.d + t * BLOCK_V, width)


@jit
def _prefetch_next(p, batch, start, m, head, v0):
    """While a block is computed, prefetch a part of what the next head will read and write."""
    blocks = (p.V + BLOCK_V - 1) // BLOCK_V
    i = v0 // BLOCK_V
    for t in range(i * m // blocks, (i + 1) * m // blocks):
        prefetch_token(p, batch, start + t, head + 1, (head + 1) % (p.HV // p.HK) == 0)


@jit
def _in_place(p, w, read, write, head, m):
    """One token on the state where it lies; False where that is not possible."""
    if read == NOWHERE or write == NOWHERE or m > 1:
        return False
    K, V, n = p.K, p.V, round_up(p.K, LANES)
    source, target = head_at(p, read, head), head_at(p, write, head)
    if V % BLOCK_V == 0 and is_one_token(p, w, m):
        _one_token(p, w, source, target)
        return True
    if is_direct(p) and p.kv and V % WIDE == 0:
        memory = pointer(p.state, F32)
        for v0 in range(0, V, WIDE):
            s, to = memory + source + v0, memory + target + v0
            soon = address_of(s + K * V)
            KV_WIDE(w, w.beta, s, V, to, V, soon, K, n, v0, True)
        return True
    return False


@functools.cache
def head_runner(many: bool) -> Function:
    """A function for all blocks of one head; without `many`, for one token alone.

    What serves one token takes half the time to compile, and most calls have no more.
    """
    vk, kv = (vk_block, kv_block) if many else (_vk_one, _kv_one)

    @jit_as("by_blocks", many)
    def by_blocks(p, w, read, write, head, token, m):
        """Block by block, in memory or through scratch memory."""
        K, V, n = p.K, p.V, round_up(p.K, LANES)
        keep = write != NOWHERE
        source, target = head_at(p, read, head), head_at(p, write if keep else read, head)
        direct, dealt = is_direct(p) and read != NOWHERE, is_dealt(p, w)
        memory = pointer(p.state, F32)
        batch, start = token // max(p.T, 1), token % max(p.T, 1)
        for v0 in range(0, V, BLOCK_V):
            if head + 1 < p.HV and p.q != 0:
                _prefetch_next(p, batch, start, m, head, v0)
            if direct:
                step = v0 if p.kv else v0 * K
                s, to, ld = memory + source + step, memory + target + step, V if p.kv else K
            else:
                if dealt:
                    load_dealt(p, w.tile, source, v0, read == NOWHERE)
                else:
                    load_block(p, w.tile, source, v0, read == NOWHERE)
                s, to, ld = w.tile, w.tile, BLOCK_V if p.kv else n
            if p.kv:
                soon = address_of(memory + source + K * (V + v0))  # of the next head
                kv(p, w, s, ld, to, ld, soon, n, v0, m, keep)
            elif keep and is_one_token(p, w, m):
                NEAR(w, w.beta, s, to, USUAL if HELD else K, v0, BLOCK_V)
            else:
                soon = address_of(s + BLOCK_V * K)
                vk(p, w, s, ld, to, ld, soon, n, v0, m, keep)
            if keep and not direct:
                if dealt:
                    store_dealt(p, w.tile, target, v0)
                else:
                    store_block(p, w.tile, target, v0)
            if p.draft_d != 0 and w.draft != NOWHERE:
                _keep_corrections(p, w, head, v0, m)

    @jit_as("run_head", many)
    def run_head(p, w, read, write, head, token, m):
        """All blocks of one head: outputs to w.o, the state to its write slot, d to the draft."""
        keys = w.kq
        if is_dealt(p, w):
            w.kq = w.kq_raw
            if m > 1 and write != NOWHERE:
                deal_row(w.k_out, w.k_out, padded_tokens(m) * p.K)
        if not _in_place(p, w, read, write, head, m):
            by_blocks(p, w, read, write, head, token, m)
        w.kq = keys

    return run_head


@jit
def _keep_keys(p, w, head, m):
    """Verify's normalised keys and log decays; each key head's first value head keeps its key."""
    n, token = round_up(p.K, LANES), w.draft
    ratio = p.HV // p.HK
    rows = w.kq_raw if p.decay == KEY_DECAY else w.kq
    for t in range(m):
        if head % ratio == 0:
            at = ((token + t) * p.HK + head // ratio) * p.K
            store_row(p.draft_k, F32, at, rows + t * n, p.K)
        if p.draft_g != 0:
            if p.decay == KEY_DECAY:
                at = ((token + t) * p.HV + head) * p.K
                store_row(p.draft_g, F32, at, w.k_out + t * n, p.K)
            else:
                store_row(p.draft_g, F32, (token + t) * p.HV + head, w.g + t, 1)


def _tasks(many: bool) -> Function:
    run_head = head_runner(many)

    @jit_as("head", many)
    def one_head(p, w, batch, start, m, read, write, head):
        """All tokens of one value head whose keys and queries are loaded."""
        g_at = batch * p.g_b + start * p.g_t + head * p.g_h
        beta_at = batch * p.beta_b + start * p.beta_t + head * p.beta_h
        load_gates(p, w, 0, g_at, beta_at, head, m)
        if p.decay == KEY_DECAY:
            load_key_gates(p, w, g_at, head, m)
        token = batch * p.T + start
        if p.draft_d != 0 and w.draft != NOWHERE:
            _keep_keys(p, w, head, m)
        load_values(p, w, batch, start, head, m)
        make_operands(p, w, w.alpha, m, write != NOWHERE and not is_one_token(p, w, m))
        run_head(p, w, read, write, head, token, m)
        store_outputs(p, w, batch, start, head, m)

    @jit_as("decode_task", many)
    def task(p, w, seq, first):
        """The value heads `first` to `first + heads_per_task` of one sequence."""
        padding, read, write = state_rows(p, seq)
        batch, start, m = span(p, seq)
        shared = share_keys(p)
        if p.draft_d != 0:
            write = NOWHERE
            w.draft = batch * p.T + start
            if p.buffered:
                row = draft_row(p, seq)
                w.draft = NOWHERE if row == NOWHERE else row * p.draft_tokens
        for head in range(first, first + p.heads_per_task):
            if p.cu != 0 and seq == p.N - 1:
                zero_outputs(p, w, 0, start + m, p.T - start - m, head)
            if padding:
                zero_outputs(p, w, batch, start, m, head)
            elif m == 0:
                pass_through(p, w, read, write, head)
            else:
                if head == first or not shared:
                    load_keys(p, w, batch, start, head, m)
                    deal_keys(p, w, m)
                one_head(p, w, batch, start, m, read, write, head)

    return task


def _kernel(name: str, many: bool) -> Kernel:
    task = _tasks(many)

    @named(name)
    def kernel(block):
        p = view(block)
        w, memory = make_work(p, readers_of_state(p), 1, block_floats(p))
        runs = p.HV // p.heads_per_task
        for i in tasks_of(p):
            task(p, w, i // runs, i % runs * p.heads_per_task)
        release(memory)

    return Kernel(name, kernel)


KERNEL, KERNEL_ONE = _kernel("decode", True), _kernel("decode_one", False)


def bind(spec: DeltaSpec) -> Launch:
    """A launch of ``decode``, or of ``verify``, which keeps a draft instead of the state."""
    if spec.states > 0:
        return importlib.import_module("sluice.backends.cpu.states").bind(spec)
    kernel = KERNEL_ONE if has_one_token(spec) else KERNEL
    check = values.verify if isinstance(spec, VerifySpec) else values.delta
    return with_zeros(bind_kernel(kernel, spec, share_heads(spec), check), spec, "out")
