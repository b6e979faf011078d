"""Speculative decoding: verify keeps k, d and g of draft tokens, commit folds in the accepted.

Verify is decode that writes a draft instead of the state. Commit is (B3) of delta.py alone, with
the same functions and operands, so it leaves the bits that decode would have left. It also moves
conv windows on.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sluice.backends import Launch
from sluice.backends.cpu import decode
from sluice.backends.cpu.addressing import NOWHERE, draft_row, span, state_rows
from sluice.backends.cpu.conv import CHANNELS, blocks_of, roll_task
from sluice.backends.cpu.conv_lines import front_lines, make_lines
from sluice.backends.cpu.delta import BLOCK_V, fold_kv, fold_vk
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import bind as bind_kernel
from sluice.backends.cpu.llvm import F32, LANES
from sluice.backends.cpu.memory import address_of, release
from sluice.backends.cpu.operands import (
    HEAD_DECAY,
    KEY_DECAY,
    head_decays,
    key_decays,
    make_work,
    pad_keys,
    padded_tokens,
)
from sluice.backends.cpu.params import PARAMS
from sluice.backends.cpu.scratch_rows import fill, load_row, read_index, round_up
from sluice.backends.cpu.simd import get, load, pointer, put, store
from sluice.backends.cpu.state import (
    block_floats,
    copy_head,
    head_at,
    is_direct,
    load_block,
    store_block,
)
from sluice.backends.cpu.threads import tasks_of
from sluice.backends.cpu.vmath import vexp
from sluice.backends.reference.verify import keep_rows
from sluice.contract import values
from sluice.contract.draft_spec import CommitSpec, VerifySpec

VK1, VK2, VK4, VK8 = (fold_vk(M, True) for M in (1, 2, 4, 8))
KV1, KV2, KV4, KV8 = (fold_kv(M, 2, True) for M in (1, 2, 4, 8))

view = PARAMS.view


@jit
def _load_factors(p, w, token, head, m):
    """Keys and decays, and from them k_out and decay_all."""
    K, n = p.K, round_up(p.K, LANES)
    head_k = head // (p.HV // p.HK)
    for t in range(m):
        load_row(w.kq + t * n, p.draft_k, F32, ((token + t) * p.HK + head_k) * K, K)
    if p.decay == KEY_DECAY:
        for t in range(m):
            decays = w.decay_k + t * n
            load_row(decays, p.draft_g, F32, ((token + t) * p.HV + head) * K, K)
            for i in range(0, n, LANES):
                store(decays, i, vexp(load(decays, i)))
            key_decays(w, w.kq, t, n)
    else:
        count = round_up(m, LANES)
        fill(w.alpha, count, 1.0)
        if p.decay == HEAD_DECAY:
            log_decays = pointer(p.draft_g, F32)
            for t in range(m):
                put(w.g, t, get(log_decays, (token + t) * p.HV + head))
            for t in range(m, count):
                put(w.g, t, 0.0)
            for t in range(0, count, LANES):
                store(w.alpha, t, vexp(load(w.g, t)))
        head_decays(w, w.kq, w.alpha, m, n)
    pad_keys(w, m, n)


@jit
def _load_corrections(p, w, token, head, v0, m):
    """d [M, BLOCK_V] of the accepted tokens, zeros where there are none."""
    width = min(BLOCK_V, p.V - v0)
    for t in range(padded_tokens(m)):
        row = w.d + t * BLOCK_V
        if t >= m or width <= BLOCK_V - LANES:
            fill(row, BLOCK_V, 0.0)
        if t < m:
            load_row(row, p.draft_d, F32, ((token + t) * p.HV + head) * p.V + v0, width)


@jit
def fold(p, w, s, ld, to, ld_to, soon, m):
    """(B3) for m tokens whose k_out, decay_all and d are there, from `s` to `to`."""
    n = round_up(p.K, LANES)
    if p.kv:
        if m == 1:
            KV1(w.k_out, n, w.decay_all, w.d, s, ld, to, ld_to, p.K, BLOCK_V, soon)
        elif m == 2:
            KV2(w.k_out, n, w.decay_all, w.d, s, ld, to, ld_to, p.K, BLOCK_V, soon)
        elif m <= 4:
            KV4(w.k_out, n, w.decay_all, w.d, s, ld, to, ld_to, p.K, BLOCK_V, soon)
        else:
            KV8(w.k_out, n, w.decay_all, w.d, s, ld, to, ld_to, p.K, BLOCK_V, soon)
    elif m == 1:
        VK1(w.k_out, n, w.decay_all, w.d, s, ld, to, ld_to, n, BLOCK_V, soon)
    elif m == 2:
        VK2(w.k_out, n, w.decay_all, w.d, s, ld, to, ld_to, n, BLOCK_V, soon)
    elif m <= 4:
        VK4(w.k_out, n, w.decay_all, w.d, s, ld, to, ld_to, n, BLOCK_V, soon)
    else:
        VK8(w.k_out, n, w.decay_all, w.d, s, ld, to, ld_to, n, BLOCK_V, soon)


@jit
def draft_token(p, layer, seq):
    """The draft's token at which a sequence's begin, NOWHERE if there is none."""
    if p.buffered:
        row = draft_row(p, seq)
        return NOWHERE if row == NOWHERE else (layer * p.S + row) * p.draft_tokens
    batch, start, _ = span(p, seq)
    return batch * p.T + start


@jit
def task(p, w, layer, seq, head):
    """The accepted tokens of one value head of one sequence."""
    padding, read, write = state_rows(p, seq)
    token = draft_token(p, layer, seq)
    if padding or write == NOWHERE or token == NOWHERE:
        return
    m, base = read_index(p.accepted, p.accepted_wide, seq), layer * p.state_layer
    source, target = base + head_at(p, read, head), base + head_at(p, write, head)
    if m == 0:
        if read != write:
            copy_head(p, w, source, target, read == NOWHERE)
        return
    K, V, n = p.K, p.V, round_up(p.K, LANES)
    _load_factors(p, w, token, head, m)
    direct = is_direct(p) and read != NOWHERE
    memory = pointer(p.state, F32)
    for v0 in range(0, V, BLOCK_V):
        _load_corrections(p, w, token, head, v0, m)
        soon = address_of(memory + source + (K * (V + v0) if p.kv else (v0 + BLOCK_V) * K))
        if direct:
            step = v0 if p.kv else v0 * K
            s, to, ld = memory + source + step, memory + target + step, V if p.kv else K
            fold(p, w, s, ld, to, ld, soon, m)
        else:
            load_block(p, w.tile, source, v0, read == NOWHERE)
            ld = BLOCK_V if p.kv else n
            fold(p, w, w.tile, ld, w.tile, ld, soon, m)
            store_block(p, w.tile, target, v0)


def commit_kernel(block):
    p = view(block)
    w, memory = make_work(p, 1, 1, block_floats(p))
    c, more = make_lines(CHANNELS if p.conv != 0 else LANES, front_lines(p), 1)
    blocks = (p.D + CHANNELS - 1) // CHANNELS
    heads, each = p.N * p.HV, p.N * (p.HV + blocks)
    for number in tasks_of(p):
        layer, i = number // each, number % each
        if i < heads:
            task(p, w, layer, i // p.HV, i % p.HV)
        else:
            seq = (i - heads) // blocks
            token = draft_token(p, layer, seq)
            if token != NOWHERE:
                roll_task(p, c, layer, token, seq, (i - heads) % blocks * CHANNELS)
    release(more)
    release(memory)


KERNEL = Kernel("commit", commit_kernel)


def bind(spec: VerifySpec | CommitSpec) -> Launch:
    """A launch of ``verify`` or ``commit``."""
    if isinstance(spec, VerifySpec):
        return _verify(spec)
    tasks = spec.layers * spec.N * (spec.HV + blocks_of(spec.D))
    return bind_kernel(KERNEL, spec, lambda threads: {"tasks": tasks}, values.commit)


def _verify(spec: VerifySpec) -> Launch:
    """Decode's kernel; raw inputs of the convolution are copied to their buffer beside it."""
    launch = decode.bind(spec)
    if spec.draft_x is None:
        return launch

    def both(tensors: Sequence[Tensor | None]) -> None:
        launch(tensors)
        t = spec.views(tensors)
        keep_rows(spec, t, t.draft_x, t.conv_inputs)

    return both
