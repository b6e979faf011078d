"""One rank's share of a prefill: what it does before the exchange, meanwhile, and after it.

A rank's tokens are a head, the piece of a sequence that began on an earlier rank; a tail, the piece
of a sequence that begins here and goes on; and the rest, whole sequences. The rest is an ordinary
prefill. Head and tail are pieces (transition.py): the first pass makes what later ranks need of
them, the second makes their outputs. Nothing here communicates, so the same code can run R shares
one after the other on one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sluice.distributed.rows import PoolRows
from sluice.distributed.split import Split
from sluice.distributed.transition import Call, Piece


class Share:
    """A rank's tokens [B, T, ..] of a split prefill, and the states they begin from."""

    def __init__(self, call: Call, split: Split, rank: int, rows: PoolRows) -> None:
        self.call, self.split, self.part, self.rows = call, split, split.part(rank), rows
        (B, T, HQ, self.K), (self.HV, self.V) = call.q.shape, call.v.shape[2:]
        self.n = 1 if split.packed else B  # sequences that may cross a border
        self.begins, self.ends = self.sequences(self.part.begins), self.sequences(self.part.ends)
        self.o = call.v.new_empty(B, T, max(HQ, self.HV), self.V)
        self.finals: dict[int, Tensor] = {}
        self.start, self.stop = self.part.incoming, T  # of the rest
        self.head = self._piece(0, self.start) if self.start else None
        self.tail: Piece | None = None
        if self.begins and self.part.outgoing:
            self.stop = self.part.bounds[-2]
            self.tail = self._piece(self.stop, T)
            self.tail_sequences = self.begins[-self.n :]
            self.begins = self.begins[: -self.n]

    def sequences(self, of_part: range) -> range:
        """The numbers of sequences; a batch is cut in the same place in all rows."""
        return of_part if self.split.packed else range(len(of_part) * self.n)

    def begin(self) -> Tensor:
        """What needs no other rank, and other ranks need: the message to later ranks.

        The message [n, HV, V + K or 1, K] holds the state that the outgoing sequence leaves and,
        below it, the transition of its piece here: zeros if the sequence begins here or there is
        none, the identity if it passes through a rank without tokens.
        """
        c, head, tail = self.call, self.head, self.tail
        shape = (self.n, self.HV, self.V + c.width, self.K)
        message = torch.zeros(shape, dtype=c.exact, device=c.v.device)
        if self.part.through:
            message[:, :, self.V :] = torch.eye(self.K, device=c.v.device) if c.delta else 1.0
        if tail is not None:
            self.X = self._read(self.tail_sequences)
            # without segments, an ordinary prefill costs less than a map
            X = tail.after(self.X) if tail.split else tail.run(self.X)
            message[:, :, : self.V] = X
        if head is not None:
            passes_on = self.part.outgoing and tail is None
            if passes_on:
                message = head.map
            elif head.split:
                head.first  # noqa: B018 (it is made, and kept for the second pass)
        return message

    def meanwhile(self) -> None:
        """What no other rank needs and needs no other rank: run it while messages travel."""
        if self.tail is not None and self.tail.split:
            self.tail.run(self.X)
        if self.tail is not None:
            self._clear(self.tail_sequences, slice(self.stop, None))
        c, rest = self.call, slice(self.start, self.stop)
        if not self.begins:
            self.o[:, rest] = 0  # any tokens after the last sequence
            return
        X = self._read(self.begins)
        if self.start < self.stop:
            bounds, more = None, self._padding()
            if self.split.packed:
                all_bounds = self.part.bounds[int(self.start > 0) :]
                bounds = tuple(b - self.start for b in all_bounds[: len(self.begins) + 1])
            c.span(self.start, self.stop).run(X, bounds, out=self.o[:, rest], **more)
        for row, sequence in enumerate(self.begins):
            if sequence in self.ends:
                self.finals[sequence] = X[row]

    def finish(self, X: Tensor | None) -> tuple[Tensor, dict[int, Tensor]]:
        """Outputs [B, T, HO, V], and the final states of the sequences that end here.

        ``X`` [n, HV, V, K] is the state before the head, if there is a head.
        """
        if self.head is not None:
            assert X is not None
            X = self.head.run(X)
            heads = self.sequences(range(self.part.first, self.part.first + 1))
            self._clear(heads, slice(self.start))
            for row, sequence in enumerate(heads):
                if sequence in self.ends:
                    self.finals[sequence] = X[row]
        return self.o, self.finals

    def _piece(self, start: int, stop: int) -> Piece:
        return Piece(self.call.span(start, stop), self.o[:, start:stop])

    def _read(self, sequences: range) -> Tensor:
        """The states from which sequences begin."""
        c, shape = self.call, (len(sequences), self.HV, self.V, self.K)
        X = torch.zeros(shape, dtype=c.exact, device=c.v.device)
        self.rows.read(sequences, X)
        return X

    def _clear(self, sequences: range, tokens: slice) -> None:
        """Zeros as the outputs of padded sequences."""
        for row, sequence in enumerate(sequences):
            if not self.rows.live[sequence]:
                self.o[row, tokens].zero_()

    def _padding(self) -> dict[str, Any]:
        live = [self.rows.live[sequence] for sequence in self.begins]
        if all(live):
            return {}
        slots = [row if ok else -1 for row, ok in enumerate(live)]
        return {"slots": torch.tensor(slots, device=self.call.v.device)}
