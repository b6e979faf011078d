"""Actions that compute: chunks of prompts, decoding, and where their states go."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sluice
from tests.runs import acts
from tests.runs.acts import Action, performs
from tests.runs.plan import FLOAT32, LAYERS
from tests.runs.world import Batch, Pools, World

Targets = list[tuple[Any, int, int]]
"""(sequence, row of the batch, tokens): whose row gets the state after how many tokens."""


@performs("prefill")
def prefill(w: World, a: Action) -> bool:
    b = acts.make(w, a)
    if b is None:
        return False
    slots, has = acts.indices(w, b)
    options, targets = _places(w, a, b, "prefill")
    shared = {"slots": slots, "has_state": has, **options}
    before = w.copy_of_pools() if a.args["twin"] and a.args["invariant"] else None
    ready = acts.ready(w, b, fused=a.args["fused"], **shared)
    invariant = {"batch_invariant": a.args["invariant"]}
    made = acts.recurrence(w, w.layers, b, "prefill", ready.calls, **shared, **invariant)
    _finish(w, a, b, ready.inputs, ready.stream, [o for o, _ in made], targets)
    if before is not None:
        _alone(w, a, b, [o for o, _ in made], targets, before, has)
    _settled(w, a, b, targets)
    return True


@performs("decode")
def decode(w: World, a: Action) -> bool:
    """By ``step``, or by the operators one after another."""
    b = acts.make(w, a)
    if b is None or b.T == 0:
        return False
    slots, has = acts.indices(w, b)
    whole = a.args["whole"] and not b.packed
    options, targets = _places(w, a, b, "step" if whole else "decode")
    shared = {"slots": slots, "has_state": has, **options}
    before = w.copy_of_pools() if a.args["twin"] else None
    if whole:
        y = acts.step(w, w.layers, b, **shared)
        want, stream = acts.exact_front(w, b)
        want = (*map(acts.exact.normalised, want[:2]), *want[2:])
        o, states = acts.advance(w, b, want)
        got = b.back(y, "step").unflatten(-1, (w.plan.Hv, w.plan.V))
        _same_layer(w, b, got, o, lambda: acts.natural(states, want[0]))
        _written(w, a, states, stream, targets, FLOAT32)
        made = y
    else:
        each = shared.pop("each", None)
        ready = acts.ready(w, b, fused=a.args["fused"], **shared)
        if each is not None:
            shared = {"slots": slots, "has_state": has, "write_slots": each}
        made = [o for o, _ in acts.recurrence(w, w.layers, b, "decode", ready.calls, **shared)]
        _finish(w, a, b, ready.inputs, ready.stream, made, targets)
    if before is not None:
        _alone(w, a, b, made, targets, before, has)
    _settled(w, a, b, targets)
    return True


def _same_layer(w: World, b: Batch, got: Tensor, o: Tensor, natural: Callable[[], Tensor]) -> None:
    """Outputs of ``step``: compared before the norm, which makes small heads as large as others."""
    before = (o.square().mean(-1, keepdim=True) + acts.EPS).sqrt()
    factor = acts.exact_norm(w, b, o) * before

    def size() -> Tensor:
        gate = (factor.flatten(1).norm(dim=1) / o.flatten(1).norm(dim=1)).nan_to_num(1.0)
        return natural() * gate

    w.near(got * before, factor, w.limit(w.plan.dtype), "step", size)


def _finish(
    w: World,
    a: Action,
    b: Batch,
    inputs: tuple[Tensor, ...],
    stream: Tensor,
    made: list[Tensor],
    targets: Targets,
) -> None:
    o, states = acts.advance(w, b, inputs)
    got = b.back(made, a.kind)
    size = functools.partial(acts.natural, states, inputs[0])
    w.near(got, o, w.limit(w.plan.dtype), f"{a.kind}: o", size)
    if a.args.get("norm"):
        acts.norm(w, b, made, got.double(), "rms_norm_gated")
    dtype = w.plan.dtype if a.kind == "prefill" else FLOAT32
    _written(w, a, states, stream, targets, dtype)


def _written(
    w: World, a: Action, states: list[Tensor], stream: Tensor, targets: Targets, dtype: torch.dtype
) -> None:
    if not targets:
        return
    rows = [(n, count) for _, n, count in targets]
    after = acts.picked(states, rows)
    w.written(
        [m for m, _, _ in targets],
        after,
        acts.windows(stream, rows, w.plan.columns),
        a.kind,
        dtype,
    )


def _settled(w: World, a: Action, b: Batch, targets: Targets) -> None:
    """Drafts of rows that were written are stale now."""
    own = [m for m, n, _ in targets if m is b.members[n]]
    for m, n, count in targets:
        m.tokens = b.members[n].tokens + count
    w.drop([m.name for m in own], stale=True)


def _places(w: World, a: Action, b: Batch, op: str) -> tuple[dict[str, Any], Targets]:
    """Options that say where states go, and which sequences must hold what afterwards."""
    own: Targets = [(m, n, b.lengths[n]) for n, m in enumerate(b.members)]
    where = a.args["where"]
    index, pad = {"dtype": w.plan.index, "device": w.plan.device}, w.pool.pad_slot
    rows = b.N if b.packed else b.N + b.pads
    if where == "nowhere":
        return {"write_slots": torch.full((rows,), pad, **index)}, []
    if where == "child":
        children = _children(w, a, b, [(n, b.lengths[n]) for n in range(b.N)])
        if children is None:
            return {}, own
        slots = [int(m.slot) for m, _, _ in children] + [pad] * (rows - b.N)
        return {"write_slots": torch.tensor(slots, **index)}, children
    if where in ("positions", "every") and op == "prefill":
        return _checkpoints(w, a, b, own, rows)
    if where == "each" and op == "decode" and b.T > 1 and min(b.lengths) > 0:
        return _each(w, a, b, own, rows)
    return {}, own


def _children(w: World, a: Action, b: Batch, points: list[tuple[int, int]]) -> Targets | None:
    """New sequences for the states at these points; None if rows do not suffice."""
    if len(points) > len(w.free_rows):
        return None
    slots = w.pool.allocate(len(points))
    w.take(slots)
    w.accept([int(s) for s in slots])
    found: Targets = []
    for i, (slot, (n, count)) in enumerate(zip(slots, points, strict=True)):
        name = f"{a.number}.{i}"
        w.add(name, slot, b.members[n])
        found.append((w.live[name], n, count))
    return found


def _checkpoints(
    w: World, a: Action, b: Batch, own: Targets, rows: int
) -> tuple[dict[str, Any], Targets]:
    every = a.args["every"]
    if a.args["where"] == "every":
        points = [(n, c) for n, T in enumerate(b.lengths) for c in range(every, T + 1, every)]
    else:
        points = [(n, every * T // 8) for n, T in enumerate(b.lengths)]
    children = _children(w, a, b, points)
    if children is None:
        return {}, own
    index, pad = {"dtype": w.plan.index, "device": w.plan.device}, w.pool.pad_slot
    M = max(1, max(b.lengths) // every) if a.args["where"] == "every" else 1
    slots, places = torch.full((rows, M), pad), torch.zeros(rows, M, dtype=torch.int64)
    for m, n, count in children:
        j = count // every - 1 if a.args["where"] == "every" else 0
        slots[n, j], places[n, j] = int(m.slot), count
    slots, places = slots.to(**index), places.to(**index)
    kept = sluice.Checkpoints(slots, every=every)
    if a.args["where"] == "positions":
        kept = sluice.Checkpoints(slots, positions=places)
    return {"checkpoints": kept}, own + children


def _each(w: World, a: Action, b: Batch, own: Targets, rows: int) -> tuple[dict[str, Any], Targets]:
    """One state for each token: the last to the row itself, the first to new ones."""
    children = _children(w, a, b, [(n, 1) for n, T in enumerate(b.lengths) if T > 1])
    if children is None:
        return {}, own
    index, pad = {"dtype": w.plan.index, "device": w.plan.device}, w.pool.pad_slot
    slots = torch.full((rows, b.T), pad)
    for n, (m, T) in enumerate(zip(b.members, b.lengths, strict=True)):
        slots[n, T - 1] = int(m.slot)
    kept, places = torch.full((rows, 1), pad), torch.zeros(rows, 1, dtype=torch.int64)
    for m, n, count in children:
        slots[n, 0] = int(m.slot)
        kept[n, 0], places[n, 0] = int(m.slot), count
    checkpoints = sluice.Checkpoints(kept.to(**index), positions=places.to(**index))
    return {"checkpoints": checkpoints, "each": slots.to(**index)}, own + children


# ------------------------------------------------------------------------------- the same bits


def _alone(
    w: World,
    a: Action,
    b: Batch,
    made: list[Tensor],
    targets: Targets,
    pools: Pools,
    has: Tensor | None,
) -> None:
    """Each row by itself, in ``pools``, which are as they were: the same bits."""
    together = b.back(made, a.kind).unflatten(0, (LAYERS, b.N))
    ends = {n: m for m, n, count in targets if count == b.lengths[n]}
    for n, member in enumerate(b.members):
        one = b.one(n)
        at = w.pool.indices([member.slot], dtype=w.plan.index)
        shared: dict[str, Any] = {"slots": at, "has_state": None if has is None else has[n : n + 1]}
        if a.kind == "decode" and a.args["whole"] and not b.packed:
            alone = acts.step(w, pools, one, **shared)
        else:
            calls = acts.front(w, pools, one, fused=a.args["fused"], **shared)
            more = {"batch_invariant": True} if a.kind == "prefill" else {}
            alone = [o for o, _ in acts.recurrence(w, pools, one, a.kind, calls, **shared, **more)]
        got = one.back(alone, a.kind)
        w.equal(together[:, n, : b.lengths[n]], got, f"{a.kind}: row {n} alone")
        if n in ends:
            here, there = [int(ends[n].slot)], [int(member.slot)]
            pairs = zip(w.rows_of(w.layers, here), w.rows_of(pools, there), strict=True)
            for x, y in pairs:
                w.equal(x, y, f"{a.kind}: state of row {n} alone")
