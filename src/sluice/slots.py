"""Slots of a StatePool: which rows are free, who owns the rest, and what a stale slot is."""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from sluice.contract import arguments
from sluice.contract.errors import ContractError
from sluice.state_files import PoolError
from sluice.stream_order import Freed

Slots = int | Sequence[int] | torch.Tensor

_serial = itertools.count()


class PoolExhaustedError(PoolError):
    """More slots were asked for than are free."""


class DoubleFreeError(PoolError):
    """A slot was freed that is not allocated, or that has a new owner."""


class UseAfterFreeError(PoolError):
    """A slot was used that is not allocated, or that has a new owner."""


class Slot(int):
    """A row of a pool: an ``int`` that can index tensors and remembers its allocation.

    Its pool recognises it as stale once the row was freed, even if the row has a new owner. Methods
    also accept a plain ``int``, and then check only that the row is allocated.
    """

    generation: int
    pool: int

    def __new__(cls, row: int, generation: int, pool: int) -> Slot:
        self = super().__new__(cls, row)
        self.generation, self.pool = generation, pool
        return self

    def __getnewargs__(self) -> tuple[int, int, int]:  # type: ignore[override]
        return int(self), self.generation, self.pool


class SlotBook:
    """The rows of one pool after ``pad_slot``: taken lowest first, checked, and freed.

    Its pool holds a lock around every call. A call that raises has changed nothing.
    """

    def __init__(self, slots: int, pad_slot: int, device: torch.device) -> None:
        self.slots, self.pad_slot = slots, pad_slot
        self._pool = next(_serial)
        self._generations = [0] * slots
        self._live: set[int] = set()
        self._free = list(range(pad_slot + 1, slots))  # a valid heap, since it is sorted
        self._freed = Freed(device)

    @property
    def available(self) -> int:
        """How many slots are free."""
        return len(self._free)

    @property
    def allocated(self) -> list[Slot]:
        """The slots in use, ascending."""
        return [self.handle(row) for row in sorted(self._live)]

    def handle(self, row: int) -> Slot:
        """The slot of a row's owner."""
        return Slot(row, self._generations[row], self._pool)

    def require_free(self, op: str, n: int) -> None:
        """At least ``n`` slots are free."""
        if n > len(self._free):
            raise PoolExhaustedError(
                f"{op}: expected {n} free slots, got {len(self._free)} free of "
                f"{self.slots - self.pad_slot - 1} ({len(self._live)} allocated)"
            )

    @contextlib.contextmanager
    def taking(self, op: str, n: int) -> Iterator[list[Slot]]:
        """The ``n`` lowest free slots; they are freed again if the body raises."""
        arguments.integer(op, "n", n, 0)
        self.require_free(op, n)
        new = [self._own(heapq.heappop(self._free)) for _ in range(n)]
        try:
            yield new
        except BaseException:
            self._release(new)
            raise

    def claim(self, slots: Slots) -> list[Slot]:
        """Take these slots, which are free."""
        rows = self._rows("claim", slots)
        if taken := [row for row in rows if row in self._live]:
            raise PoolError(f"claim: expected free slots, got {taken}, which are allocated")
        self._free = sorted(set(self._free).difference(rows))
        return [self._own(row) for row in rows]

    def free(self, slots: Slots) -> None:
        """Free these slots, which are allocated."""
        self._release(self.owned("free", slots, DoubleFreeError))

    def owned(self, op: str, slots: Slots, error: type[PoolError] = UseAfterFreeError) -> list[int]:
        """``slots`` as plain ints, all allocated and none stale."""
        rows = self._rows(op, slots)
        for row in rows:
            if row not in self._live:
                raise error(f"{op}: expected allocated slots, got slot {row}, which is free")
            if isinstance(row, Slot) and row.generation != self._generations[row]:
                raise error(
                    f"{op}: slot {row} was freed and has a new owner since: expected generation "
                    f"{self._generations[row]}, got {row.generation}"
                )
        return [int(row) for row in rows]

    def _rows(self, op: str, slots: Slots) -> list[int]:
        """``slots`` as ints: in range, no slot twice, none from another pool."""
        if isinstance(slots, torch.Tensor) and not slots.is_meta:
            slots = slots.reshape(-1).tolist()
        if isinstance(slots, torch.Tensor) or not isinstance(slots, (int, Iterable)):
            raise ContractError(op, "slots", "ints, or a tensor of ints", arguments.shown(slots))
        rows = [slots] if isinstance(slots, int) else list(slots)
        first, last = self.pad_slot + 1, self.slots - 1
        for row in rows:
            if isinstance(row, bool) or not isinstance(row, int) or not first <= row <= last:
                got = arguments.shown(row)
                raise ContractError(op, "slots", f"ints in {first}..{last}", got)
            if isinstance(row, Slot) and row.pool != self._pool:
                raise ContractError(op, "slots", "slots of this pool", f"{row} of another pool")
        if len(set(rows)) < len(rows):
            raise ContractError(op, "slots", "each slot once", rows)
        return rows

    def _own(self, row: int) -> Slot:
        self._freed.take(row)
        self._generations[row] += 1
        self._live.add(row)
        return self.handle(row)

    def _release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._live.remove(row)
            heapq.heappush(self._free, int(row))
        self._freed.leave(rows)
