"""How a bound call runs: write addresses into a block, and enter native code once.

``bind`` prepares blocks in which nothing but the addresses of tensors is missing. A launch takes a
block that no other call uses, writes the addresses, and calls the entry: it looks at values
(``screen.py``), starts the threads (``threads.py``) and returns when all tasks are done.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

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
    if checked_first:
        values["trusted"] = 1
    if not copied:
        launch = bind_fields(kernel, PARAMS, values, sources, share, ask, elements)
    else:
        dense = {spec.TENSORS[i]: meta.new_empty(*meta.shape) for i, meta in copied.items()}
        seen = _asking(check, replace(spec, **dense))
        launch = bind_fields(kernel, PARAMS, values, sources, share, seen, elements)
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
    check: Launch = lambda tensors: None,
    elements: int | None = None,
) -> Launch:
    """A launch of a kernel whose blocks have these fields.

    Args:
        values: of all fields but addresses and what ``share`` says.
        sources: for each address field that is set, the index of its tensor.
        elements: how many the call makes, if a short one is to have one thread.
    """
    short = elements is not None and elements <= SHORT
    enter, worker = _HOLDING(ENTRY.address) if short else ENTRY.function, kernel.address
    given = tuple(field for field in fields.addresses if field in sources)
    layout, start = fields.address_struct(given)
    put_addresses = layout.pack_into
    order = [sources[field] for field in given]
    take = itemgetter(*order) if len(order) > 1 else lambda tensors: (tensors[order[0]],)
    pools: dict[int, list[Block]] = {}
    threads_of_torch = torch.get_num_threads

    def block_for(team: int) -> Block:
        team = 1 if short else team
        head = {
            "team": team,
            "worker": worker,
            "parallel": threads.parallel,
            "identify": threads.identify,
            "crowd": threads.CROWD_ADDRESS,
            "clock": threads.clock,
        }
        block = Block(fields.pack({**values, **share(team), **head}), fields.offset, team)
        _blocks.add(block)
        return block

    def launch(tensors: Sequence[Any]) -> None:
        team = threads_of_torch()
        try:
            block = pools[team].pop()
        except (KeyError, IndexError):
            pools.setdefault(team, [])
            block = block_for(team)
        put_addresses(block.buffer, start, *[x.data_ptr() for x in take(tensors)])
        code = enter(block.where)
        if code:
            finish(code, block, tensors)
        pools[team].append(block)

    def finish(code: int, block: Block, tensors: Sequence[Any]) -> None:
        if code == SUSPICIOUS:
            check(tensors)
            trusted = fields.offset["trusted"]
            block.put(trusted, 1)
            code = enter(block.where)
            block.put(trusted, 0)
        if code == ASK_PYTHON:
            count = block.get(fields.offset["threads"])
            threads.python_threads(kernel.function, block.where, count)

    return launch


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
