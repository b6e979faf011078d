"""Speculative decoding: verify leaves the state as it is, commit folds in what was accepted.

Verify keeps k, d and g of the draft tokens. Commit repeats (C1) and (C3) with them, which is
``decode`` of the accepted tokens, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sluice.backends.reference import rows
from sluice.backends.reference.conv import rolled
from sluice.backends.reference.prefill import sequences
from sluice.backends.reference.recurrence import (
    Tokens,
    decayed,
    over_value_heads,
    prepare,
    recur,
    update,
)
from sluice.contract.draft_spec import CommitSpec, VerifySpec


def verify(p: VerifySpec, t: Any) -> None:
    """Serve ``verify``: outputs of the draft tokens, and the draft itself."""
    assert t.draft_k is not None
    assert t.draft_d is not None
    corrections: list[Tensor] = []

    def run(x: Tokens, S: Tensor, o: Tensor, _: object) -> Tensor:
        S, d = recur(x, S, o)
        corrections.append(d)
        return S

    sequences(p, t, run)
    x = prepare(p, t)
    if p.buffered:
        keep_rows(p, t, t.draft_k, x.k)
        keep_rows(p, t, t.draft_d, _joined(corrections, x.v))
        if x.g is not None:
            keep_rows(p, t, t.draft_g, x.g)
        if t.draft_x is not None:
            keep_rows(p, t, t.draft_x, t.conv_inputs)
        return
    t.draft_k.copy_(x.k)
    t.draft_d[:, : sum(d.shape[1] for d in corrections)] = _joined(corrections, t.draft_d)
    if x.g is not None and t.draft_g is not None:
        t.draft_g.copy_(x.g)


def keep_rows(p: VerifySpec, t: Any, buffer: Tensor, tokens: Tensor) -> None:
    """Tokens [B, T, ..] of each row to its row of a buffer [S, M, ..]."""
    index, live = draft_rows(p, t)
    if not p.varlen:
        rows.scatter(buffer[:, : tokens.shape[1]], index, live, tokens)
        return
    for i, (a, b) in enumerate(rows.spans(t)):
        one = slice(i, i + 1)
        rows.scatter(buffer[:, : b - a], index[one], live[one], tokens[:, a:b])


def draft_rows(p: VerifySpec | CommitSpec, t: Any) -> tuple[Tensor, Tensor]:
    """[N] the row of the buffers that each sequence has, and whether it has one."""
    given = t.slots if t.draft_slots is None else t.draft_slots
    live = ~rows.padded(p, t)
    if given is None:
        return torch.arange(p.N, device=p.device), live
    return given, live & (given > p.pad_slot)


def commit(p: CommitSpec, t: Any) -> None:
    """Serve ``commit``: fold the first ``num_accepted`` tokens of each row."""
    if not p.stacked:
        _commit(p, t)
        return
    index, live = draft_rows(p, t)
    index = index.clamp(0, p.S - 1)
    names = ("draft_k", "draft_d", "draft_g", "state", "conv_inputs", "conv_state")
    for i in range(p.layers if p.N > 0 else 0):
        one = {name: None if (x := getattr(t, name)) is None else x[i] for name in names}
        for name in ("draft_k", "draft_d", "draft_g", "conv_inputs"):
            if one[name] is not None:
                one[name] = one[name].index_select(0, index)
        _commit(p, t._replace(**one), live)


def _commit(p: CommitSpec, t: Any, kept: Tensor | None = None) -> None:
    """One layer, its draft by row; ``kept``: rows that have one."""
    S = rows.read_rows(t.state, p, t, p.dtype)
    S = S.transpose(-1, -2) if p.state_layout == "vk" else S
    window = None
    if t.conv_state is not None:
        window = rows.read_rows(t.conv_state, p, t, t.conv_state.dtype)
    if not p.varlen:
        S = _fold(t.draft_k, t.draft_d, t.draft_g, S, t.num_accepted)
        if window is not None and t.conv_inputs is not None:
            window = rolled(window, t.conv_inputs.mT.to(window.dtype), t.num_accepted)
    else:
        for i, (a, b) in enumerate(rows.spans(t)):
            one = slice(i, i + 1)
            g = None if t.draft_g is None else t.draft_g[:, a:b]
            S[one] = _fold(t.draft_k[:, a:b], t.draft_d[:, a:b], g, S[one], t.num_accepted[one])
            if window is not None and t.conv_inputs is not None:
                x = t.conv_inputs[:, a:b].mT.to(window.dtype)
                window[one] = rolled(window[one], x, t.num_accepted[one])
    S = S.transpose(-1, -2) if p.state_layout == "vk" else S
    rows.write_rows(t.state, p, t, S, kept=kept)
    if window is not None and t.conv_state is not None:
        rows.write_rows(t.conv_state, p, t, window, kept=kept)


def _fold(k: Tensor, d: Tensor, g: Tensor | None, S: Tensor, accepted: Tensor) -> Tensor:
    """(C1) and (C3) for the accepted tokens."""
    for t in range(k.shape[1]):
        after = decayed(S, None if g is None else g[:, t])
        after = update(after, over_value_heads(k[:, t], d.shape[2]), d[:, t])
        S = torch.where((accepted > t).view(-1, 1, 1, 1), after, S)
    return S


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """Dense rows come as one part, packed sequences one after another."""
    return torch.cat(parts, dim=1) if parts else like[:, :0]
