"""Prefill and decode: read the states, run the recurrence, write outputs, states, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sluice.backends.reference import rows
from sluice.backends.reference.recurrence import Tokens, prepare, recur
from sluice.contract.spec import DeltaSpec

Run = Callable[[Tokens, Tensor, Tensor, "Callable[[int, Tensor], None] | None"], Tensor]


def prefill(p: DeltaSpec, t: Any) -> None:
    """Serve ``prefill`` (any length)."""
    S = sequences(p, t, lambda x, S, o, after: recur(x, S, o, after)[0])
    rows.write_rows(t.state, p, t, stored(p, S))


def sequences(p: DeltaSpec, t: Any, run: Run) -> Tensor:
    """Run every sequence, writing ``out`` and checkpoints; return the final states [N, HV, K, V].

    ``run(tokens, S, o, after)`` serves a batch of equally long sequences.
    """
    x = prepare(p, t)
    S = initial_state(p, t)
    after = None if p.checkpoints == "none" else Checkpointer(p, t)
    if after is not None:
        after(0, S)
    if not p.varlen:
        o = x.v.new_empty(t.out.shape)
        S = run(x, S, o, after)
        dead = rows.padded(p, t)
        t.out.copy_(torch.where(dead.view(-1, 1, 1, 1), o.new_zeros(()), o))
        return S
    t.out.zero_()  # tokens after the last sequence, and padded rows
    dead = rows.padded(p, t)
    finals = []
    for i, (start, stop) in enumerate(rows.spans(t)):
        o = x.v.new_empty(1, stop - start, *t.out.shape[2:])
        finals.append(run(x.span(start, stop), S[i : i + 1], o, after and after.of(i)))
        t.out[:, start:stop] = torch.where(dead[i], o.new_zeros(()), o)
    return torch.cat(finals) if finals else S


def initial_state(p: DeltaSpec, t: Any) -> Tensor:
    """[N, HV, K, V] in the arithmetic's dtype."""
    S = rows.read_rows(t.state, p, t, rows.compute_dtype(p.dtype))
    return S.transpose(-1, -2).contiguous() if p.state_layout == "vk" else S


def stored(p: DeltaSpec, S: Tensor) -> Tensor:
    """[N, HV, K, V] as the pool keeps it."""
    return S.transpose(-1, -2) if p.state_layout == "vk" else S


class Checkpointer:
    """Writes states after given numbers of tokens to given slots."""

    def __init__(self, p: DeltaSpec, t: Any, row: int | None = None) -> None:
        self.p, self.t, self.row = p, t, row
        assert t.checkpoint_slots is not None
        self.slots, positions = t.checkpoint_slots, t.checkpoint_positions
        self.live = self.slots > p.pad_slot
        self.live &= ~rows.padded(p, t).unsqueeze(1)
        self.columns: dict[int, list[tuple[int, Tensor]]] = {}
        if positions is None:
            for j in range(self.slots.shape[1]):
                self.columns[(j + 1) * p.checkpoint_every] = [(j, self.live[:, j])]
        else:
            for n in sorted(set(positions.flatten().tolist())):
                hits = self.live & (positions == n)
                self.columns[n] = [(j, hits[:, j]) for j in range(hits.shape[1])]

    def of(self, row: int) -> Checkpointer:
        """The same for one packed sequence alone."""
        one = object.__new__(Checkpointer)
        one.__dict__.update(self.__dict__, row=row)
        return one

    def positions(self, most: int) -> list[int]:
        """The token counts at which something is to be written, up to ``most``."""
        return [n for n in sorted(self.columns) if n <= most]

    def __call__(self, n: int, S: Tensor) -> None:
        pick = slice(None) if self.row is None else slice(self.row, self.row + 1)
        for j, live in self.columns.get(n, ()):
            rows.scatter(self.t.state, self.slots[pick, j], live[pick], stored(self.p, S))
