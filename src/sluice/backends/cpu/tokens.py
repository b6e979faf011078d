"""The rows of a head's tokens between the call's tensors and scratch memory."""

from __future__ import annotations

import torch

from sluice.backends.cpu.delta import BLOCK_V, MOST
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.llvm import F32
from sluice.backends.cpu.prepare import load_tokens, padded_tokens
from sluice.backends.cpu.rows import fill, load_row, prefetch_row, round_up, store_row


def heads_together(N: int, HK: int, HV: int) -> int:
    """Value heads a task takes: those of a key head, if that leaves every thread some tasks."""
    return HV // HK if 2 * torch.get_num_threads() <= N * HK else 1


@jit
def query_groups(p):
    """Query heads that read one state."""
    return max(p.HQ // p.HV, 1)


@jit
def share_keys(p):
    """Whether value heads of one key head have the same query head too."""
    return p.HK % p.HQ == 0


@jit
def load_keys(p, w, batch, token, head, m, groups):
    """k and q of m tokens of a value head, and their products."""
    head_q = head * groups if p.HQ >= p.HV else head // (p.HV // p.HQ)
    head_k = head // (p.HV // p.HK)
    k_at = batch * p.k_b + token * p.k_t + head_k * p.k_h
    load_tokens(p, w, k_at, batch * p.q_b + token * p.q_t + head_q * p.q_h, m, groups)


@jit
def prefetch_token(p, batch, token, head, keys):
    """Ask for the rows of one token of a value head, and with `keys` for those of its key head.

    Rows of a head's tokens lie pages apart, where nothing else asks for them in time.
    """
    if keys:
        head_q = head * p.HQ // p.HV
        k_at = batch * p.k_b + token * p.k_t + head // (p.HV // p.HK) * p.k_h
        prefetch_row(p.k, p.io, k_at, p.K)
        prefetch_row(p.q, p.io, batch * p.q_b + token * p.q_t + head_q * p.q_h, p.K)
    prefetch_row(p.v, p.io, batch * p.v_b + token * p.v_t + head * p.v_h, p.V)
    prefetch_row(p.o, p.io, batch * p.o_b + token * p.o_t + head * p.o_h, p.V)
    if p.draft_d != 0:
        prefetch_row(p.draft_d, F32, ((batch * p.T + token) * p.HV + head) * p.V, p.V)


@jit
def load_values(p, w, batch, token, head, m):
    """v of m tokens, zeros for those that pad them."""
    ld_v = round_up(p.V, BLOCK_V)
    for t in range(padded_tokens(m)):
        if t < m:
            at = batch * p.v_b + (token + t) * p.v_t + head * p.v_h
            load_row(w.v + t * ld_v, p.v, p.io, at, p.V)
        else:
            fill(w.v + t * ld_v, ld_v, 0.0)


@jit
def store_outputs(p, w, batch, token, head, m, groups):
    """o of m tokens, for every query head of the state."""
    ld_v = round_up(p.V, BLOCK_V)
    at = batch * p.o_b + token * p.o_t + head * groups * p.o_h
    for g in range(groups):
        for t in range(m):
            row = w.o + (g * MOST + t) * ld_v
            store_row(p.o, p.io, at + g * p.o_h + t * p.o_t, row, p.V)


@jit
def zero_outputs(p, w, batch, start, count, head, groups):
    """Zeros as the output of `count` tokens of the query heads of one value head."""
    fill(w.o, round_up(p.V, BLOCK_V), 0.0)
    at = batch * p.o_b + start * p.o_t + head * groups * p.o_h
    for t in range(count):
        for g in range(groups):
            store_row(p.o, p.io, at + t * p.o_t + g * p.o_h, w.o, p.V)
