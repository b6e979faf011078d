"""One rank's share of a prefill: what it does before the exchange, and after it.

A rank's tokens are a head, which is the piece of a sequence that began on an earlier rank, and the
rest, which are sequences that begin here. The rest is an ordinary prefill. The head is run from
zero together with its transition (transition.py), and finished once the state before it is known.
Nothing here communicates, so the same code can run R shares one after the other on one device.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from sluice.distributed.rows import PoolRows
from sluice.distributed.split import Split
from sluice.distributed.transition import (
    Call,
    Piece,
    behind,
    correct,
    decay_piece,
    delta_piece,
)

Method = Literal["correct", "rerun"]


class Share:
    """A rank's tokens [B, T, ..] of a split prefill, and the states they begin from.

    ``method`` says how to compute the head's outputs: "correct" adds the incoming state's part,
    ``o = o_zero + S^T u`` (one pass over the tokens); "rerun" runs the operator again from the
    incoming state (two passes, and the operator's own rounding of outputs).
    """

    def __init__(
        self, call: Call, split: Split, rank: int, rows: PoolRows | None, method: Method
    ) -> None:
        self.call, self.split, self.part = call, split, split.part(rank)
        self.rows, self.method = rows, method
        (B, T, HQ, self.K), (self.HV, self.V) = call.q.shape, call.v.shape[2:]
        self.n = 1 if split.packed else B  # sequences that may cross a border
        self.head = self.part.incoming
        self.begins, self.ends = self.sequences(self.part.begins), self.sequences(self.part.ends)
        self.o = call.v.new_empty(B, T, max(HQ, self.HV), self.V)
        self.finals: dict[int, Tensor] = {}
        self.piece: Piece | None = None

    def sequences(self, of_part: range) -> range:
        """The numbers of sequences; a batch is cut in the same place in all rows."""
        return of_part if self.split.packed else range(len(of_part) * self.n)

    def begin(self) -> Tensor:
        """Do all that needs no other rank; return the message to later ranks.

        The message [n, HV, V + K or 1, K] holds the state that the outgoing sequence leaves and,
        below it, the transition of its piece here: zeros if the sequence begins here or there is
        none, the identity if it passes through a rank without tokens.
        """
        c, part = self.call, self.part
        shape = (self.n, self.HV, self.V + c.width, self.K)
        message = torch.zeros(shape, dtype=c.exact, device=c.v.device)
        if self.part.through:
            message[:, :, self.V :] = torch.eye(self.K, device=c.v.device) if c.delta else 1.0
        X = self._run_rest()
        if X is not None and part.outgoing:
            message[:, :, : self.V] = X[-self.n :]
        passes_on = part.outgoing and X is None
        if self.head and (passes_on or self.method == "correct"):
            head = c.span(0, self.head)
            outputs = self.method == "correct"
            self.piece = delta_piece(head) if c.delta else decay_piece(head, outputs)
            if passes_on:
                message = self.piece.message
            if not outputs:
                self.piece = None
        return message

    def finish(self, X: Tensor | None) -> tuple[Tensor, dict[int, Tensor]]:
        """Outputs [B, T, HO, V], and the final states of the sequences that end here.

        ``X`` [n, HV, V, K] is the state before the head, if there is a head.
        """
        if self.head:
            assert X is not None
            c, out = self.call, self.o[:, : self.head]
            if self.piece is None:
                X = X.clone()  # the operator writes the final state into it
                c.span(0, self.head).run(X, out=out)
            else:
                correct(self.piece, X, out)
                X = behind(X, self.piece.message, self.V, c.delta)
            heads = self.sequences(range(self.part.first, self.part.first + 1))
            for row, sequence in enumerate(heads):
                if not self._live(sequence):
                    out[row].zero_()
                if sequence in self.ends:
                    self.finals[sequence] = X[row]
        return self.o, self.finals

    def _run_rest(self) -> Tensor | None:
        """Run the sequences that begin here; their final states, or None without any."""
        c, T = self.call, self.call.v.shape[1]
        if not self.begins:
            self.o[:, self.head :] = 0  # any tokens after the last sequence
            return None
        shape = (len(self.begins), self.HV, self.V, self.K)
        X = torch.zeros(shape, dtype=c.exact, device=c.v.device)
        if self.rows is not None:
            self.rows.read(self.begins, X)
        if self.head < T:
            bounds, more = None, self._padding()
            if self.split.packed:
                skipped = int(self.head > 0)
                bounds = tuple(b - self.head for b in self.part.bounds[skipped:])
            c.span(self.head, T).run(X, bounds, out=self.o[:, self.head :], **more)
        for row, sequence in enumerate(self.begins):
            if sequence in self.ends:
                self.finals[sequence] = X[row]
        return X

    def _padding(self) -> dict[str, Any]:
        live = [self._live(sequence) for sequence in self.begins]
        if all(live):
            return {}
        slots = [row if ok else -1 for row, ok in enumerate(live)]
        return {"slots": torch.tensor(slots, device=self.call.v.device)}

    def _live(self, sequence: int) -> bool:
        return self.rows is None or self.rows.live[sequence]
