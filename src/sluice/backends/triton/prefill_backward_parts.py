"""The workspace of the backward of prefill: what its kernels leave for those after them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sluice.backends.triton.arguments import Binding, Pointer
from sluice.backends.triton.prefill_arguments import units_of
from sluice.contract.backward import DeltaBackwardSpec
from sluice.contract.chunk_length import CHUNK


class Parts(NamedTuple):
    """The workspace. Where one kernel makes all gradients (Hopper), n and h with what belongs to
    them, by_pair and by_query are None."""

    p: Pointer | None  # [tokens, HO, C]; None without dO
    p_low: Pointer | None  # low terms, in hard chunks; None without beta, and with float32
    e_low: Pointer | None  # [tokens, HV, V]
    y: Pointer | None  # [tokens, HV, V]; None without beta
    y_low: Pointer | None
    hard: Pointer | None  # [HV, chunk_slots] int32
    n: Pointer | None  # [tokens, HO, C]; None without dO
    n_low: Pointer | None
    n_down: Pointer | None  # [HO, chunk_slots]; None without dO, unless float16
    h: Pointer | None  # [tokens, HV, C]; None without beta
    h_down: Pointer | None  # [HV, chunk_slots]; None without beta, unless float16
    by_pair: Pointer | None  # [HV, tokens]; None without g
    b: Pointer | None  # [tokens, HV, C]; None without beta
    b_low: Pointer | None  # [tokens, HV, C]: low terms, in hard chunks
    b_down: Pointer | None  # [HV, tokens]; None without beta, and with float32 inputs
    beta32: Pointer | None  # [HV, tokens]
    e: Pointer | None  # [tokens, HV, V]
    g2: Pointer | None  # [HV, tokens]; None without g
    g2_low: Pointer | None  # [HV, tokens]; None without g, unless float32
    by_query: Pointer | None  # [HO, tokens]
    by_low: Pointer | None  # [HV, tokens]; None without g, unless there are low terms
    by_gate: Pointer | None  # [units, 2, HV]; None without raw gates
    decay_in: Pointer  # [HV, tokens]
    decay_out: Pointer
    decay_q: Pointer  # [HO, tokens]
    r_k: Pointer | None  # [HK, tokens]; None without norm
    r_q: Pointer | None  # [tokens, HQ]
    before: Pointer  # [chunk_slots, HV, V, K]: S
    after: Pointer  # [chunk_slots, HV, V, K]: dS
    before_low: Pointer | None  # their low terms, in hard chunks; None without g too
    after_low: Pointer | None
    segments: Pointer | None  # [segments, HV, 2 V + K, K]; None: no sequence is split


MANY_HEADS = 4


def all_hard(p: DeltaBackwardSpec) -> bool:
    """Whether all chunks of a call are hard (kernels/backward_chunks.py).

    With strong decay nearly all of dg may be what the first tokens of a sequence read of its
    initial state, or what its last ones write into its final state; without decay it is one overlap
    <S, dS> per head. So few sums may nearly vanish, whatever the length. From zero, to a final
    state that nobody uses, only those of fewer than MANY_HEADS value heads do.
    """
    return p.state is not None or p.dfinal is not None or p.HV < MANY_HEADS


def workspace(p: DeltaBackwardSpec, memory: Binding, segments: int, pairs: bool = True) -> Parts:
    """Lay out the workspace. ``pairs``: a kernel leaves N and H in it for those after it."""
    tokens, chunk_slots = p.B * p.T, p.B * p.T // CHUNK + p.N
    exact, gated, delta = p.dtype == torch.float32, p.g is not None, p.beta is not None

    def part(wanted: bool, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
        return memory.scratch(name, *shape, dtype=dtype) if wanted else None

    lows = delta and not exact
    scaled = p.dtype == torch.float16
    half = torch.float32 if exact else torch.float16
    asked = pairs and p.do is not None
    return Parts(
        p=part(p.do is not None, "ws.p", tokens, p.HO, CHUNK, dtype=p.dtype),
        p_low=part(lows and p.do is not None, "ws.p_low", tokens, p.HO, CHUNK, dtype=p.dtype),
        e_low=part(lows, "ws.e_low", tokens, p.HV, p.V, dtype=p.dtype),
        y=part(delta, "ws.y", tokens, p.HV, p.V, dtype=p.dtype),
        y_low=part(lows, "ws.y_low", tokens, p.HV, p.V, dtype=p.dtype),
        hard=part(lows, "ws.hard", p.HV, chunk_slots, dtype=torch.int32),
        n=part(asked, "ws.n", tokens, p.HO, CHUNK, dtype=p.dtype),
        n_low=part(asked and lows, "ws.n_low", tokens, p.HO, CHUNK, dtype=p.dtype),
        n_down=part(asked and scaled, "ws.n_down", p.HO, chunk_slots),
        h_down=part(pairs and scaled and delta, "ws.h_down", p.HV, chunk_slots),
        h=part(pairs and delta, "ws.h", tokens, p.HV, CHUNK, dtype=p.dtype),
        by_pair=part(pairs and gated, "ws.by_pair", p.HV, tokens),
        b=part(delta, "ws.b", tokens, p.HV, CHUNK, dtype=half),
        b_low=part(lows, "ws.b_low", tokens, p.HV, CHUNK, dtype=half),
        b_down=part(delta and not exact, "ws.b_down", p.HV, tokens),
        beta32=part(delta, "ws.beta32", p.HV, tokens),
        e=part(delta, "ws.e", tokens, p.HV, p.V, dtype=p.dtype),
        g2=part(gated, "ws.g2", p.HV, tokens),
        g2_low=part(gated and exact, "ws.g2_low", p.HV, tokens),
        by_query=part(pairs and gated, "ws.by_query", p.HO, tokens),
        by_low=part(lows and gated, "ws.by_low", p.HV, tokens),
        by_gate=part(p.raw_gates, "ws.by_gate", units_of(p, CHUNK, tail=True), 2, p.HV),
        decay_in=part(True, "ws.decay_in", p.HV, tokens),
        decay_out=part(True, "ws.decay_out", p.HV, tokens),
        decay_q=part(True, "ws.decay_q", p.HO, tokens),
        r_k=part(p.normalize_qk, "ws.r_k", p.HK, tokens),
        r_q=part(p.normalize_qk, "ws.r_q", tokens, p.HQ),
        before=part(True, "ws.S", chunk_slots, p.HV, p.V, p.K, dtype=p.dtype),
        after=part(True, "ws.dS", chunk_slots, p.HV, p.V, p.K, dtype=p.dtype),
        before_low=part(lows and gated, "ws.S_low", chunk_slots, p.HV, p.V, p.K, dtype=p.dtype),
        after_low=part(lows and gated, "ws.dS_low", chunk_slots, p.HV, p.V, p.K, dtype=p.dtype),
        segments=part(segments > 0, "ws.segments", segments, p.HV, 2 * p.V + p.K, p.K),
    )
