"""The tokens of one head: rows of q, k, v and o moved to and from scratch memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sluice.backends.cpu.delta import MOST
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.llvm import F32
from sluice.backends.cpu.operands import load_tokens, padded_tokens
from sluice.backends.cpu.scratch_rows import fill, load_row, prefetch_row, store_row


def share_heads(p: Any) -> Callable[[int], dict[str, int]]:
    """Value heads per task: those of a key head, if that leaves every thread some tasks."""

    def share(threads: int) -> dict[str, int]:
        heads = p.HV // p.HK if 2 * threads <= p.N * p.HK else 1
        return {"tasks": p.N * p.HV // heads, "heads_per_task": heads}

    return share


def has_one_token(spec: Any) -> bool:
    """Whether every sequence of a call has one token."""
    return spec.T == 1 and not getattr(spec, "varlen", False)


@jit
def readers_of_state(p):
    """How many query heads read one state."""
    return max(p.HQ // p.HV, 1)


@jit
def share_keys(p):
    """Whether the value heads of a key head have the same query head too."""
    return p.HK % p.HQ == 0


@jit
def load_keys(p, w, batch, token, head, m):
    """k and q of m tokens of a value head, and their products."""
    head_q = head * w.readers if p.HQ >= p.HV else head // (p.HV // p.HQ)
    head_k = head // (p.HV // p.HK)
    k_at = batch * p.k_b + token * p.k_t + head_k * p.k_h
    load_tokens(p, w, k_at, batch * p.q_b + token * p.q_t + head_q * p.q_h, m)


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
    if p.draft_d != 0 and p.buffered == 0:
        prefetch_row(p.draft_d, F32, ((batch * p.T + token) * p.HV + head) * p.V, p.V)


@jit
def load_values(p, w, batch, token, head, m):
    """v of m tokens, and zeros for those that pad them."""
    ld_v = w.ld_v
    for t in range(padded_tokens(m)):
        if t < m:
            at = batch * p.v_b + (token + t) * p.v_t + head * p.v_h
            load_row(w.v + t * ld_v, p.v, p.io, at, p.V)
        else:
            fill(w.v + t * ld_v, ld_v, 0.0)


@jit
def store_outputs(p, w, batch, token, head, m):
    """o of m tokens, for every reader of the state."""
    at = batch * p.o_b + token * p.o_t + head * w.readers * p.o_h
    for r in range(w.readers):
        for t in range(m):
            row = w.o + (r * MOST + t) * w.ld_v
            store_row(p.o, p.io, at + r * p.o_h + t * p.o_t, row, p.V)


@jit
def zero_outputs(p, w, batch, start, count, head):
    """Zeros as the output of `count` tokens, for every reader of the state."""
    fill(w.o, w.ld_v, 0.0)
    at = batch * p.o_b + start * p.o_t + head * w.readers * p.o_h
    for t in range(count):
        for r in range(w.readers):
            store_row(p.o, p.io, at + t * p.o_t + r * p.o_h, w.o, p.V)
