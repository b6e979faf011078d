"""Speculation: drafts that are verified, committed, rejected or stale; and plain mistakes."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sluice
from sluice.contract.errors import ContractError
from sluice.state_pool import DoubleFreeError, PoolExhaustedError, UseAfterFreeError
from tests.runs import acts
from tests.runs.acts import Action, performs
from tests.runs.plan import LAYERS
from tests.runs.world import Pending, Pools, World


@performs("verify")
def verify(w: World, a: Action) -> bool:
    b = acts.make(w, a)
    if b is None or b.T == 0:
        return False
    buffered = a.args["buffered"] and w.buffers is not None
    if buffered and b.packed:
        return False
    slots, has = acts.indices(w, b)
    shared = {"slots": slots, "has_state": has}
    ready = acts.ready(w, b, fused=a.args["fused"], freeze=True, **shared)
    options: list[dict[str, Any]] = [
        {"conv_inputs": x, "conv_state": w.layers[i][0]} for i, x in enumerate(b.call("x"))
    ]
    if buffered:
        assert w.buffers is not None
        for i, more in enumerate(options):
            more["buffers"] = w.buffers.layer(i)
        _end_buffered(w, {m.name for m in b.members})
    calls = [c | more for c, more in zip(ready.calls, options, strict=True)]
    made = acts.recurrence(w, w.layers, b, "verify", calls, **shared)
    o, states = acts.advance(w, b, ready.inputs)
    got, size = (
        b.back([x for x, _ in made], "verify"),
        partial(acts.natural, states, ready.inputs[0]),
    )
    w.near(got, o, w.limit(w.plan.dtype), "verify: o", size)

    def again(pools: Pools, counts: list[int]) -> None:
        """Decode the first tokens of each row, one row after the other."""
        for n, count in enumerate(counts):
            if count == 0:
                continue
            start = sum(b.lengths[:n])
            cut = (slice(0, 1), slice(start, start + count))
            cut = cut if b.packed else (slice(n, n + 1), slice(0, count))
            for i, call in enumerate(ready.calls):
                tokens = {x: y[cut] if x in _TOKENS else y for x, y in call.items() if x != "y"}
                sluice.decode(
                    **tokens,
                    state=pools[i][1],
                    slots=slots[n : n + 1],
                    has_state=None if has is None else has[n : n + 1],
                    pad_slot=w.pool.pad_slot,
                    state_layout=w.plan.state_layout,
                )

    drafts = [draft for _, draft in made]
    w.pending[str(a.number)] = Pending(
        drafts, b.members, states, ready.stream, slots.shape[0] - b.N, slots, has, buffered, again
    )
    while len(w.pending) > 3:
        w.pending.pop(next(iter(w.pending)))
    return True


_TOKENS = ("q", "k", "v", "g", "beta")


def _end_buffered(w: World, names: set[str]) -> None:
    """A new draft in the same rows of the buffers takes the place of an older one."""
    for key, draft in [*w.pending.items()]:
        if draft.buffered and names.intersection(m.name for m in draft.members):
            del w.pending[key]


@performs("commit")
def commit(w: World, a: Action) -> bool:
    """To prefixes of its own first, if asked, then to the rows themselves."""
    key = a.args["draft"]
    draft = w.pending.get(key)
    if draft is None:
        return False
    T = len(draft.states) - 1
    lengths = _lengths(draft)
    dice = random.Random(a.number)
    counts = [dice.randint(0, n) for n in lengths]
    if a.args["tracked"] and len(draft.members) <= len(w.free_rows) and not draft.buffered:
        _track(w, a, draft, [dice.randint(0, n) for n in lengths])
    before = w.copy_of_pools() if a.args["twin"] else None
    accepted = _numbers(w, counts, draft.pads)
    if draft.buffered and a.args["stacked"]:
        _stacked(w, draft, counts, dice)
    else:
        for layer in draft.drafts:
            sluice.commit(layer, accepted)
    rows = list(enumerate(counts))
    after = acts.picked(draft.states, rows)
    w.written(draft.members, after, acts.windows(draft.stream, rows, w.plan.columns), "commit")
    if before is not None:
        draft.again(before, counts)
        for n, member in enumerate(draft.members):
            if counts[n]:
                at = [int(member.slot)]
                states = w.rows_of(w.layers, at)[1], w.rows_of(before, at)[1]
                w.equal(*states, f"commit of {counts[n]} of {T} tokens and their decode")
    del w.pending[key]
    w.drop([m.name for m in draft.members], stale=True)
    if not draft.buffered:
        w.stale[key] = draft
    return True


def _lengths(draft: Pending) -> list[int]:
    bounds = draft.drafts[0].cu_seqlens
    if bounds is None:
        return [len(draft.states) - 1] * len(draft.members)
    return bounds.diff().tolist()


def _numbers(w: World, counts: list[int], pads: int) -> Tensor:
    return torch.tensor(counts + [0] * pads, dtype=w.plan.index, device=w.plan.device)


def _track(w: World, a: Action, draft: Pending, counts: list[int]) -> None:
    """A commit to new rows leaves the draft open, and its own rows as they are."""
    slots = w.pool.allocate(len(draft.members))
    w.take(slots)
    w.accept([int(s) for s in slots])
    children = []
    for i, (slot, parent) in enumerate(zip(slots, draft.members, strict=True)):
        w.add(f"{a.number}.{i}", slot, parent)
        children.append(w.live[f"{a.number}.{i}"])
    to = [int(s) for s in slots] + [w.pool.pad_slot] * draft.pads
    write = torch.tensor(to, dtype=w.plan.index, device=w.plan.device)
    for layer in draft.drafts:
        sluice.commit(layer, _numbers(w, counts, draft.pads), write_slots=write)
    rows = list(enumerate(counts))
    windows = acts.windows(draft.stream, rows, w.plan.columns)
    w.written(children, acts.picked(draft.states, rows), windows, "commit to other rows")


def _stacked(w: World, draft: Pending, counts: list[int], dice: random.Random) -> None:
    """One call for all layers, with the rows in another order."""
    order = list(range(draft.slots.shape[0]))
    dice.shuffle(order)
    at = torch.tensor(order, device=w.plan.device)
    sluice.commit_layers(
        w.buffers,  # type: ignore[arg-type]
        _numbers(w, counts, draft.pads)[at],
        state=w.pool.recurrent,
        conv_state=w.pool.conv,
        slots=draft.slots[at],
        has_state=None if draft.has is None else draft.has[at],
        pad_slot=w.pool.pad_slot,
        state_layout=w.plan.state_layout,
    )


@performs("reject")
def reject(w: World, a: Action) -> bool:
    """Nothing to call: the draft is forgotten."""
    return w.pending.pop(a.args["draft"], None) is not None


@performs("stale")
def stale(w: World, a: Action) -> bool:
    """A draft whose rows were written since must be refused."""
    draft = w.stale.get(a.args["draft"])
    if draft is None or not w.plan.watched:  # unwatched, a GPU does not see every write
        return False
    counts = _numbers(w, [min(1, n) for n in _lengths(draft)], draft.pads)
    for i in range(LAYERS):
        acts.refuses(
            w, ContractError, lambda i=i: sluice.commit(draft.drafts[i], counts), "a stale draft"
        )
    return True


# -------------------------------------------------------------------------------------- mistakes


@performs("mistake")
def mistake(w: World, a: Action) -> bool:
    """A call that breaks the contract is refused and changes nothing."""
    members, _ = acts.present(w, a)
    which, pool = a.args["which"], w.pool
    old = w.old_slots[-1] if w.old_slots else None
    slots = [m.slot for m in members if old is None or int(m.slot) != int(old)]
    if which == "free twice" and old is not None:
        given = [*slots, old]
        acts.refuses(w, DoubleFreeError, lambda: pool.free(given), which)
    elif which == "use after free" and old is not None:
        acts.refuses(w, UseAfterFreeError, lambda: pool.indices([*slots, old]), which)
        acts.refuses(w, UseAfterFreeError, lambda: pool.fork([old]), which)
    elif which == "too many":
        n = len(w.free_rows) + 1
        acts.refuses(w, PoolExhaustedError, lambda: pool.allocate(n), which)
        if slots:
            acts.refuses(w, PoolExhaustedError, lambda: pool.fork(slots[0], n), which)
    elif which == "count" and a.args["draft"] in w.pending:
        draft = w.pending[a.args["draft"]]
        if draft.buffered:  # up to the buffers' length, the caller answers for the count
            return False
        counts = _numbers(w, [n + 1 for n in _lengths(draft)], draft.pads)
        acts.refuses(w, ContractError, lambda: sluice.commit(draft.drafts[0], counts), which)
    elif which == "restore" and a.args["kept"] in w.kept:
        kept = w.kept[a.args["kept"]]
        if len(slots) == len(kept.members):
            return False
        acts.refuses(w, ContractError, lambda: pool.restore(kept.snapshot, slots), which)
    elif which in _ROWS and len(slots) > 1:
        _decode_wrongly(w, which, slots)
    else:
        return False
    return True


_ROWS = ("slot twice", "row of another", "out of range", "gate", "inside")


def _decode_wrongly(w: World, which: str, slots: list[Any]) -> None:
    p, state = w.plan, w.layers[0][1]
    gen = torch.Generator().manual_seed(1)

    def tokens(*shape: int) -> Tensor:
        return torch.randn(2, 1, *shape, generator=gen).to(p.dtype).to(p.device)

    q, k, v, beta = tokens(p.Hk, p.K), tokens(p.Hk, p.K), tokens(p.Hv, p.V), tokens(p.Hv)
    g = -tokens(p.Hv).abs()
    first, second = int(slots[0]), int(slots[1])
    rows, more = [first, second], {}
    index = {"dtype": p.index, "device": p.device}
    if which == "slot twice":
        rows = [first, first]
    elif which == "out of range":
        rows = [first, p.slots]
    elif which == "row of another":
        more = {"write_slots": torch.tensor([second, -1], **index)}
    elif which == "gate":
        g[1, 0, 0] = float("nan")
    elif which == "inside":
        if p.state_dtype != p.dtype or state[0].numel() < 2 * p.Hv * p.V or p.paged:
            return
        more = {"out": state.flatten()[: 2 * p.Hv * p.V].view(2, 1, p.Hv, p.V)}
    where = {"slots": torch.tensor(rows, **index), "pad_slot": w.pool.pad_slot, **more}
    call = {"state": state, "state_layout": p.state_layout, **where}
    acts.refuses(w, ContractError, lambda: sluice.decode(q, k, v, g, beta, **call), which)
