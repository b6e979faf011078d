"""How a bound call runs: write addresses into a block, and enter native code once.

``bind`` prepares blocks in which nothing but the addresses of tensors is missing. A launch takes a
block that no other call uses, writes the addresses, and calls the entry: it looks at values
(``screen.py``), starts the threads (``threads.py``) and returns when all tasks are done.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice.backends import Launch
from sluice.backends.cpu import threads
from sluice.backends.cpu.block import Block, Fields
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.params import (
    PARAMS,
    constants,
    describe,
    is_readable,
    one_layer,
    sources_of,
)
from sluice.backends.cpu.screen import plain
from sluice.backends.cpu.threads import ASK_PYTHON, SUSPICIOUS, run_tasks
from sluice.contract.meta import Meta

Share = Callable[[int], dict[str, int]]
"""For a number of threads: ``tasks``, and other fields that depend on it."""
Check = Callable[[Any, Any], None]
"""A check of ``contract/values.py``: raises if a value breaks the contract."""

view = PARAMS.view


def entry(block):
    p = view(block)
    if p.trusted == 0 and not plain(p):
        return SUSPICIOUS
    return run_tasks(p, block)


ENTRY = Kernel("entry", entry, returns_int=True)


_blocks: weakref.WeakSet[Block] = weakref.WeakSet()
"""Every block of the process."""


def _after_fork() -> None:
    """OpenMP's threads stay with the parent, and it would wait for them for ever: in a forked
    process Python's threads serve."""
    for name in ("parallel", "identify"):
        setattr(threads, name, 0)
        for block in _blocks:
            block.put(PARAMS.offset[name], 0)  # the head is the same in every layout


os.register_at_fork(after_in_child=_after_fork)


SHORT = 16384
"""Elements that a convolution or a norm makes in less time than a team needs to start and end."""
_threads_of_torch = torch.get_num_threads
_HOLDING = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
"""Of a function that keeps Python's lock: to give it back and wait for it takes longer than a short
call, where other threads want it too."""


def bind(
    kernel: Kernel, spec: Any, share: Share, check: Check, elements: int | None = None
) -> Launch:
    """A launch of an operator's kernel.

    ``check`` is asked when values look suspicious, and always where checkpoints are kept.
    ``elements``: how many it makes, if a short call is to have one thread.
    """
    values, sources, copied = constants(spec), {}, {}
    for field, name in sources_of(spec).items():
        meta, index = getattr(spec, name), spec.TENSORS.index(name)
        if not is_readable(field, meta):
            copied[index] = meta
            meta = meta.new_empty(*meta.shape)
        values |= describe(field, one_layer(spec, name, meta))
        sources[field] = index

    ask = _asking(check, spec)
    if share(1)["tasks"] <= 0:
        return ask
    checked_first = getattr(spec, "checkpoint_slots", None) is not None
    seen = ask
    if copied:
        dense = {spec.TENSORS[i]: meta.new_empty(*meta.shape) for i, meta in copied.items()}
        seen = _asking(check, replace(spec, **dense))
    suspicious = None if checked_first else seen
    launch = bind_fields(kernel, PARAMS, values, sources, share, suspicious, elements)
    if copied:
        launch = with_copies(launch, copied)
    return _in_turn(ask, launch) if checked_first else launch


def _asking(check: Check, spec: Any) -> Launch:
    """The check of a call that looks like ``spec``."""

    def ask(tensors: Sequence[Tensor | None]) -> None:
        check(spec, spec.views(tensors))

    return ask


def bind_fields(
    kernel: Kernel,
    fields: Fields,
    values: Mapping[str, Any],
    sources: Mapping[str, int],
    share: Share,
    check: Launch | None = None,
    elements: int | None = None,
) -> Launch:
    """A launch of a kernel whose blocks have these fields.

    Args:
        values: of all fields but addresses and what ``share`` says.
        sources: for each address field that is set, the index of its tensor.
        check: asked when values look suspicious; without one they are not looked at.
        elements: how many the call makes, if a short one is to have one thread.
    """
    short = elements is not None and elements <= SHORT
    return _Bound(_way(kernel, fields, tuple(sources.items()), short), values, share, check).launch


class _Way(NamedTuple):
    """What launches share that differ in sizes and strides alone."""

    kernel: Kernel
    fields: Fields
    short: bool
    enter: Callable[[int], int]
    put_addresses: Callable[..., None]
    start: int
    take: Callable[[Sequence[Any]], tuple[Any, ...]]


@functools.cache  # as many as there are kernels and sets of optional tensors
def _way(kernel: Kernel, fields: Fields, sources: tuple[tuple[str, int], ...], short: bool) -> _Way:
    places = dict(sources)
    given = tuple(field for field in fields.addresses if field in places)
    layout, start = fields.address_struct(given)
    order = [places[field] for field in given]
    take = itemgetter(*order) if len(order) > 1 else lambda tensors: (tensors[order[0]],)
    enter = _HOLDING(ENTRY.address) if short else ENTRY.function
    return _Way(kernel, fields, short, enter, layout.pack_into, start, take)


class _Bound:
    """A bound call. It is kept small, since thousands are kept: a block, and how to make others."""

    __slots__ = ("check", "first", "free", "share", "way")

    def __init__(
        self, way: _Way, values: Mapping[str, Any], share: Share, check: Launch | None
    ) -> None:
        self.way, self.share, self.check = way, share, check
        team = 1 if way.short else _threads_of_torch()
        template = way.fields.pack({**values, **self._head(team)})
        self.first = Block(template, way.fields.offset, team)
        _blocks.add(self.first)
        self.free = [self.first]

    def launch(self, tensors: Sequence[Any]) -> None:
        """Run the call with these tensors."""
        _, _, short, enter, put_addresses, start, take = self.way
        team = 1 if short else _threads_of_torch()
        free = self.free
        try:
            block = free.pop()
            if block.team != team:
                block = self._exchanged(block, team)
        except IndexError:  # others run
            block = self._another(team)
        put_addresses(block.memory, start, *[x.data_ptr() for x in take(tensors)])
        code = enter(block.where)
        if code:
            self._finish(code, block, tensors)
        free.append(block)

    def _exchanged(self, block: Block, team: int) -> Block:
        """A free block for so many threads, in place of one for another number."""
        self.free.append(block)
        for i, other in enumerate(self.free):
            if other.team == team:
                return self.free.pop(i)
        return self._another(team)

    def _another(self, team: int) -> Block:
        """A block like the first one: what calls change of it is the head, and addresses."""
        fields = self.way.fields
        block = Block(fields.again(self.first.memory, self._head(team)), fields.offset, team)
        _blocks.add(block)
        return block

    def _head(self, team: int) -> dict[str, int]:
        """The fields of the head, and those that depend on the number of threads."""
        return {
            **self.share(team),
            "team": team,
            "worker": self.way.kernel.address,
            "parallel": threads.parallel,
            "identify": threads.identify,
            "trusted": int(self.check is None),
            "crowd": threads.CROWD_ADDRESS,
            "clock": threads.clock,
        }

    def _finish(self, code: int, block: Block, tensors: Sequence[Any]) -> None:
        kernel, fields, _, enter, *_ = self.way
        if code == SUSPICIOUS:
            assert self.check is not None
            self.check(tensors)
            trusted = fields.offset["trusted"]
            block.put(trusted, 1)
            code = enter(block.where)
            block.put(trusted, 0)
        if code == ASK_PYTHON:
            count = block.get(fields.offset["threads"])
            threads.python_threads(kernel.function, block.where, count)


def _in_turn(first: Launch, second: Launch) -> Launch:
    def both(tensors: Sequence[Tensor | None]) -> None:
        first(tensors)
        second(tensors)

    return both


def with_zeros(launch: Launch, spec: Any, *names: str) -> Launch:
    """A launch that also fills outputs with zeros: of packed tokens that no sequence has."""
    where = [spec.TENSORS.index(name) for name in names if getattr(spec, name) is not None]

    def zero(tensors: Sequence[Any]) -> None:
        for i in where:
            tensors[i].zero_()

    return _in_turn(launch, zero) if spec.varlen and spec.N == 0 else launch


def with_copies(launch: Launch, copied: Mapping[int, Meta], output: int = -1) -> Launch:
    """A launch that sees dense copies of some tensors, one of which may be an output."""

    def copying(tensors: Sequence[Any]) -> None:
        dense = list(tensors)
        for i, meta in copied.items():
            dense[i] = tensors[i].as_strided(meta.shape, meta.strides).contiguous()
        launch(dense)
        if output in copied:
            tensors[output].copy_(dense[output].view(tensors[output].shape))

    return copying
