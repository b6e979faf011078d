"""The pool rows that one rank reads and writes, by sequence number, on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sluice.contract.errors import ContractError

Slots = Sequence[int] | Tensor


class PoolRows:
    """The row of this rank's pool that each sequence reads, and the row it writes.

    The operators' padding rule holds: a slot of at most ``pad_slot`` marks a padded sequence, whose
    output is zeros and whose state is neither read nor written. The host reads tensors of slots,
    and waits for a GPU that holds them: pass lists or CPU tensors.
    """

    def __init__(
        self,
        op: str,
        pool: Tensor,  # [P, ..], in the layout of the computation
        n: int,
        slots: Slots | None,
        write_slots: Slots | None,
        has_state: Sequence[bool] | Tensor | None,
        pad_slot: int,
    ) -> None:
        if pad_slot not in (-1, 0):
            raise ContractError(op, "pad_slot", "-1 or 0", pad_slot)
        self.pool, P = pool, pool.shape[0]
        read = list(range(n)) if slots is None else _ints(op, "slots", slots, n, P)
        write = read if write_slots is None else _ints(op, "write_slots", write_slots, n, P)
        if slots is None and n > P:
            raise ContractError(op, "state", f"a row for each of {n} sequences", f"{P} rows")
        given = [True] * n if has_state is None else _flags(op, has_state, n)
        pad = -1 if slots is None else pad_slot
        self.live = [slot > pad for slot in read]
        written = [w for w, ok in zip(write, self.live, strict=True) if ok and w > pad]
        if len(set(written)) < len(written):
            raise ContractError(op, "write_slots", "each slot written once", written)
        self._read = [
            s if ok and h else None for s, ok, h in zip(read, self.live, given, strict=True)
        ]
        self._write = [
            w if ok and w > pad else None for w, ok in zip(write, self.live, strict=True)
        ]

    def read(self, sequences: Iterable[int], into: Tensor) -> None:
        """Fill ``into`` [n, ..], which holds zeros, with the states of sequences that have one."""
        for row, sequence in enumerate(sequences):
            slot = self._read[sequence]
            if slot is not None:
                into[row].copy_(self.pool[slot])

    def write(self, sequence: int, state: Tensor) -> None:
        """Write a final state, rounded once to the pool's dtype."""
        slot = self._write[sequence]
        if slot is not None:
            self.pool[slot].copy_(state)


def _list(values: Sequence[int] | Tensor) -> list[int]:
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


def _ints(op: str, name: str, values: Slots, n: int, P: int) -> list[int]:
    slots = [int(v) for v in _list(values)]
    if len(slots) != n:
        raise ContractError(op, name, f"{n} slots, one for each sequence", f"{len(slots)}")
    if any(slot >= P for slot in slots):
        raise ContractError(op, name, f"slots below {P}, the rows of the state", slots)
    return slots


def _flags(op: str, values: Sequence[bool] | Tensor, n: int) -> list[bool]:
    flags = [bool(v) for v in _list(values)]
    if len(flags) != n:
        raise ContractError(op, "has_state", f"{n} flags, one for each sequence", f"{len(flags)}")
    return flags
