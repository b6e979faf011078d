"""Drafts that were verified and not yet committed: a commit of a stale one is refused.

``verify`` opens a mark for its draft. Every call that writes the recurrent state notes it there,
and a draft whose rows were written is stale. No value is read back from a GPU: there, a write is
known to hit a draft's rows if one tensor addressed both, unchanged, or if neither call had slots.
Where values are looked at (on a CPU, and inside ``sluice.validate()``), rows are compared.

A draft made while torch traces or while a CUDA graph is captured has no mark, because replays do
not pass here.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sluice.contract import values
from sluice.contract.errors import ContractError
from sluice.settings import validating

MOST_OPEN = 256
"""States with marks, above which those whose drafts are all gone are forgotten."""
WRITERS = ("prefill", "decode", "step", "commit")
"""The operators that write a recurrent state."""


class Mark:
    """What became of the rows that one draft has read."""

    __slots__ = ("__weakref__", "address", "by", "rows", "slots", "version")

    def __init__(self, address: int, slots: Tensor | None) -> None:
        self.address, self.slots = address, slots
        self.version = _version(slots)
        self.by: str | None = None  # the last operator that wrote
        self.rows: set[int] | None = set()  # rows written; None: all that the draft has read


Marks = tuple[weakref.ref[Mark], ...]
opened: dict[int, Marks] = {}
"""By the address of the recurrent state. Empty, except where a program speculates."""
_lock = threading.Lock()


def begin(state: Tensor, slots: Tensor | None) -> Mark | None:
    """A mark for a draft of these rows; None where later calls are not seen."""
    if torch.compiler.is_compiling() or type(state) is not Tensor or _capturing(state):
        return None
    if not (address := state.data_ptr()):
        return None
    mark = Mark(address, slots)
    _open(mark)
    return mark


def _open(mark: Mark) -> None:
    with _lock:
        others = opened.get(mark.address)
        new = weakref.ref(mark)
        opened[mark.address] = (new,) if others is None else (*_unsettled(others), new)
        if len(opened) > MOST_OPEN:
            for address in [x for x, marks in opened.items() if not _unsettled(marks)]:
                del opened[address]


def require_fresh(
    mark: Mark, slots: Tensor | None, writes: Tensor | None, pad_slot: int, n: int
) -> None:
    """Refuse a commit of rows that were written after ``verify`` read them. n: rows of it."""
    if mark.by is None:
        return
    if mark.rows is not None:
        reads = list(range(n)) if slots is None else slots.tolist()
        if writes is not None and _by_value(writes):
            kept = writes.tolist()
            reads = [row for row, to in zip(reads, kept, strict=False) if to > pad_slot]
        if not mark.rows.intersection(reads):
            return
    got = f"one whose rows {mark.by} has written since; call verify again"
    raise ContractError("commit", "draft", "a draft whose rows are as verify read them", got)


@contextlib.contextmanager
def ended(mark: Mark, state: Tensor) -> Iterator[None]:
    """Commit a draft to the rows that it has read: it is stale afterwards, unless that raises."""
    if _capturing(state):
        yield
        return
    before = mark.by, mark.rows
    mark.by, mark.rows = "commit", None
    _forget(mark.address)
    try:
        yield
    except BaseException:
        mark.by, mark.rows = before
        _open(mark)
        raise


def note(spec: Any, tensors: Sequence[Any]) -> None:
    """A call has run: drafts whose rows it wrote are stale. Called only while some are open."""
    if spec.op not in WRITERS:
        return
    state = tensors[spec.TENSORS.index("state")]
    place = state.data_ptr()
    places = [place]
    if spec.op == "commit" and spec.stacked:
        step = state.stride(0) * state.element_size()
        places = [place + i * step for i in range(spec.layers)]
    for place in places:
        if place in opened and not _capturing(state):
            _write(place, spec, spec.Tensors(*tensors))


def _write(place: int, spec: Any, t: Any) -> None:
    target = t.slots if t.write_slots is None else t.write_slots
    rows = None
    if target is None:
        rows = set(range(spec.N))
    elif _by_value(t.state):
        rows = values.written(spec, spec.views(t))
    for ref in opened.get(place, ()):
        mark = ref()
        if mark is None or mark.rows is None:
            continue
        if target is not None and _same(mark, target):
            mark.by, mark.rows = spec.op, None
        elif rows and (mark.slots is None or _by_value(t.state)):
            mark.by, mark.rows = spec.op, mark.rows | rows
    _forget(place)


def _forget(place: int) -> None:
    """Forget marks of which there is nothing more to learn."""
    with _lock:
        if left := _unsettled(opened.get(place, ())):
            opened[place] = left
        else:
            opened.pop(place, None)


def _unsettled(marks: Marks) -> Marks:
    return tuple(r for r in marks if (mark := r()) is not None and mark.rows is not None)


def _same(mark: Mark, x: Tensor) -> bool:
    """Whether these are the draft's slots, and torch has counted no change of them."""
    if mark.slots is None or mark.slots.data_ptr() != x.data_ptr():
        return False
    return mark.version == _version(x) >= 0


def _version(x: Tensor | None) -> int:
    """How often a tensor was changed in place; -1 if torch does not count that."""
    try:
        return -1 if x is None else x._version
    except RuntimeError:  # of inference tensors
        return -1


def _by_value(x: Tensor) -> bool:
    return x.device.type == "cpu" or validating()


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
