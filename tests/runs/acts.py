"""How an action is performed, and what it must leave: slots, prefill and decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import sluice
from tests.runs import exact
from tests.runs.plan import FLOAT32, LAYERS
from tests.runs.world import Batch, FaultError, Kept, Pools, World, batch

EPS = 1e-6


@dataclass(frozen=True)
class Action:
    """One step of an engine. ``counts``, if any, has a number for each of ``names``."""

    number: int
    kind: str
    names: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    args: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"{self.number:4d} {self.kind}", " ".join(self.names)]
        words += [f"counts={list(self.counts)}"] if self.counts else []
        words += [f"{name}={value}" for name, value in self.args.items() if value]
        return "  ".join(word for word in words if word)


Performer = Callable[[World, Action], bool]
PERFORMERS: dict[str, Performer] = {}


def performs(kind: str) -> Callable[[Performer], Performer]:
    def keep(function: Performer) -> Performer:
        PERFORMERS[kind] = function
        return function

    return keep


def perform(w: World, action: Action) -> bool:
    """Do it and compare; False if there was nothing to do, as its sequences are not there."""
    done = PERFORMERS[action.kind](w, action)
    if done:
        w.settle(action.kind)
    return done


def present(w: World, a: Action) -> tuple[list[exact.Sequence], list[int]]:
    """The sequences of an action that exist, and their counts."""
    counts = a.counts or (0,) * len(a.names)
    pairs = [(w.live[n], c) for n, c in zip(a.names, counts, strict=True) if n in w.live]
    return [m for m, _ in pairs], [c for _, c in pairs]


# ---------------------------------------------------------------------------------------- slots


@performs("admit")
def admit(w: World, a: Action) -> bool:
    n = a.args["n"]
    if n > len(w.free_rows):
        return False
    slots = w.pool.allocate(n)
    w.take(slots)
    conv, state = w.rows_of(w.layers, [int(s) for s in slots])
    for x in (conv, state):
        w.equal(x, torch.zeros_like(x), "a new row")
    w.accept([int(s) for s in slots])
    for i, slot in enumerate(slots):
        w.add(f"{a.number}.{i}", slot, None, dirty=a.args["dirty"])
    if a.args["dirty"]:
        w.poison([int(s) for s in slots], float("nan"))
    return True


@performs("claim")
def claim(w: World, a: Action) -> bool:
    if not w.free_rows:
        return False
    row = w.free_rows[a.args["which"] % len(w.free_rows)]
    slots = w.pool.claim([row])
    w.take(slots, [row])
    w.add(f"{a.number}.0", slots[0], None, dirty=True)
    return True


@performs("free")
def free(w: World, a: Action) -> bool:
    members, _ = present(w, a)
    if not members:
        return False
    slots = [m.slot for m in members]
    given = torch.tensor([int(s) for s in slots]) if a.args["tensor"] else slots
    w.pool.free(given)
    w.give(slots)
    for m in members:
        del w.live[m.name]
    w.drop([m.name for m in members], stale=False)
    if a.args["late"]:
        w.poison([int(s) for s in slots], a.args["late"])
    return True


@performs("fork")
def fork(w: World, a: Action) -> bool:
    members, _ = present(w, a)
    copies = a.args["copies"]
    if not members or copies * len(members) > len(w.free_rows):
        return False
    children = w.pool.fork([m.slot for m in members], copies)
    w.take(children)
    parents = [m for m in members for _ in range(copies)]
    before = w.rows_of(w.shadow_layers, [int(m.slot) for m in parents])
    after = w.rows_of(w.layers, [int(s) for s in children])
    for x, y in zip(after, before, strict=True):
        w.equal(x, y, "a fork")
    w.accept([int(s) for s in children])
    for i, (slot, parent) in enumerate(zip(children, parents, strict=True)):
        w.add(f"{a.number}.{i}", slot, parent)
    return True


@performs("snapshot")
def snapshot(w: World, a: Action) -> bool:
    """Kept on the host, or in a file; the rows are freed if the sequences are preempted."""
    members, _ = present(w, a)
    if not members:
        return False
    slots = [m.slot for m in members]
    bits = list(w.rows_of(w.layers, [int(s) for s in slots]))
    saved = w.pool.snapshot(slots, device="cpu" if a.args["host"] else None)
    if a.args["file"]:
        path = w.folder / "snapshot.safetensors"
        saved.save(path)
        saved = sluice.StateSnapshot.load(path)
    copies = [exact.Sequence(**vars(m)) for m in members]
    w.kept[str(a.number)] = Kept(saved, copies, bits)
    for key in [*w.kept][:-4]:
        del w.kept[key]
    if not a.args["preempt"]:
        return True
    return free(w, Action(a.number, "free", a.names, (), {"tensor": False, "late": a.args["late"]}))


@performs("restore")
def restore(w: World, a: Action) -> bool:
    """Into new rows, or over the sequences that are named."""
    kept = w.kept.get(a.args["kept"])
    members, _ = present(w, a)
    if kept is None or (a.names and len(members) != len(kept.members)):
        return False
    if not a.names and len(kept.members) > len(w.free_rows):
        return False
    state = kept.snapshot.recurrent.cpu().mT
    for x, y in zip((kept.snapshot.conv.cpu(), state), kept.bits, strict=True):
        w.equal(x, y, "a snapshot that lay aside")
    slots = w.pool.restore(kept.snapshot, [m.slot for m in members] if a.names else None)
    rows = [int(s) for s in slots]
    if a.names:
        w.same(rows, [int(m.slot) for m in members], "rows that were restored")
        w.drop(a.names, stale=False)
    else:
        w.take(slots)
    for x, y in zip(w.rows_of(w.layers, rows), kept.bits, strict=True):
        w.equal(x, y, "a restored row")
    w.accept(rows)
    for i, (slot, old) in enumerate(zip(slots, kept.members, strict=True)):
        name = members[i].name if a.names else f"{a.number}.{i}"
        w.add(name, slot, old)
    return True


# ------------------------------------------------------------------------------ one layer's calls


@dataclass
class Ready:
    """Arguments of the recurrence, one dict a layer, and the exact inputs of the same tokens."""

    calls: list[dict[str, Any]]
    inputs: tuple[Tensor, ...]  # q, k, v, g, beta [R, T, ..] float64
    stream: Tensor  # [layers, N, D, L + T]


def indices(w: World, b: Batch) -> tuple[Tensor, Tensor | None]:
    """``slots`` and ``has_state`` of a batch."""
    n = b.N if b.packed else b.N + b.pads
    slots = w.pool.indices([m.slot for m in b.members], pad_to=n, dtype=w.plan.index)
    if not any(m.dirty for m in b.members):
        return slots, None
    known = [not m.dirty for m in b.members] + [True] * (n - b.N)
    return slots, torch.tensor(known, device=w.plan.device)


def front(
    w: World,
    pools: Pools,
    b: Batch,
    slots: Tensor,
    has_state: Tensor | None,
    fused: bool,
    **options: Any,
) -> list[dict[str, Any]]:
    """The convolution of every layer, and what the recurrence gets from it."""
    p, found = w.plan, []
    common = {
        "slots": slots,
        "has_state": has_state,
        "pad_slot": w.pool.pad_slot,
        "activation": p.activation,
        **b.bounds(p.index),
        **options,
    }
    x, a, beta = b.call("x"), b.call("a"), b.call("b")
    for i, weights in enumerate(w.weights.on):
        raw = {"A_log": weights["A_log"], "dt_bias": weights["dt_bias"], "neg_eigval": p.neg_eigval}
        filters = (x[i], weights["conv"], weights["bias"])
        if fused:
            made = sluice.conv_qkv(
                *filters, num_k_heads=p.Hk, num_v_heads=p.Hv, head_k_dim=p.K, a=a[i], b=beta[i],
                state=pools[i][0], **raw, **common,
            )  # fmt: skip
            found.append(dict(zip(("q", "k", "v", "g", "beta"), made, strict=True)))
            continue
        y, _ = sluice.causal_conv1d(*filters, state=pools[i][0], **common)
        q, k, v = y.split((p.Hk * p.K, p.Hk * p.K, p.Hv * p.V), -1)
        heads = {"q": q.unflatten(-1, (p.Hk, p.K)), "k": k.unflatten(-1, (p.Hk, p.K))}
        heads |= {"v": v.unflatten(-1, (p.Hv, p.V)), "y": y, "normalize_qk": True}
        found.append(heads | {"g": a[i], "beta": beta[i]} | raw)
    return found


def ready(w: World, b: Batch, *, fused: bool, **options: Any) -> Ready:
    """``front`` on the pool, compared; the exact recurrence goes on from what it gave."""
    p = w.plan
    calls = front(w, w.layers, b, fused=fused, **options)
    want, stream = exact_front(w, b)
    tolerance = w.limit(p.dtype)
    if not fused:
        y = b.back([c.pop("y") for c in calls], "causal_conv1d")
        w.near(y, torch.cat([x.flatten(2) for x in want[:3]], 2), tolerance, "causal_conv1d")
        q, k, v = y.double().split((p.Hk * p.K, p.Hk * p.K, p.Hv * p.V), -1)
        q, k = (exact.normalised(x.unflatten(-1, (p.Hk, p.K))) for x in (q, k))
        return Ready(calls, (q, k, v.unflatten(-1, (p.Hv, p.V)), *want[3:]), stream)
    want = (*map(exact.normalised, want[:2]), *want[2:])
    names = ("q", "k", "v", "g", "beta")
    found = tuple(b.back([c[n] for c in calls], f"conv_qkv: {n}").double() for n in names)
    for part, most in ((slice(0, 3), tolerance), (slice(3, 5), w.limit(FLOAT32))):
        got, x = (torch.cat([y.flatten(2) for y in z[part]], 2) for z in (found, want))
        w.near(got, x, most, f"conv_qkv: {' '.join(names[part])}")
    return Ready(calls, found, stream)


def exact_front(w: World, b: Batch) -> tuple[tuple[Tensor, ...], Tensor]:
    """Exact q, k (not normalised), v, g, beta [layers · N, T, ..], and [window | x]."""
    p, N = w.plan, b.N

    def each(x: Tensor) -> Tensor:
        """Weights for every row."""
        return x[:, None].expand(LAYERS, N, *x.shape[1:]).flatten(0, 1)

    window = torch.stack([m.window for m in b.members], 1)
    for n, m in enumerate(b.members):
        if m.dirty:
            window[:, n] = 0
    bias = None if w.weights.bias is None else each(w.weights.bias)
    x = b.x.flatten(0, 1)
    silu = p.activation == "silu"
    y, stream = exact.convolve(window.flatten(0, 1), x, each(w.weights.conv), bias, silu)
    mask = b.mask.repeat(LAYERS, 1)[..., None]
    y = y * mask
    q, k, v = y.split((p.Hk * p.K, p.Hk * p.K, p.Hv * p.V), -1)
    rates = each(w.weights.A_log), each(w.weights.dt_bias)
    g, beta = exact.gates(b.a.flatten(0, 1), b.b.flatten(0, 1), *rates, p.neg_eigval)
    heads = (q.unflatten(-1, (p.Hk, p.K)), k.unflatten(-1, (p.Hk, p.K)))
    gates = (g * mask, beta * mask)
    return (*heads, v.unflatten(-1, (p.Hv, p.V)), *gates), stream.unflatten(0, (LAYERS, N))


def advance(w: World, b: Batch, inputs: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
    """Exact outputs [R, T, Hv, V], and states [layers, N, ..] after 0, 1, … tokens."""
    S = torch.stack([m.S for m in b.members], 1).flatten(0, 1)
    o, states = exact.recurrence(S, *inputs)
    return o, [s.unflatten(0, (LAYERS, b.N)) for s in states]


def natural(states: list[Tensor], q: Tensor) -> Tensor:
    """The usual size of each row's outputs, ‖S‖ ‖q‖ / K over all tokens and heads: [R].

    An output is S^T q K^-1/2; for a direction at random it has 1/√K of the length of S and q.
    """
    Hk, K = q.shape[2:]
    sizes = torch.stack([s.flatten(0, 1).square().sum((2, 3)) for s in states[1:]], 1)  # [R, T, Hv]
    lengths = q.square().sum(3).repeat_interleave(sizes.shape[2] // Hk, 2)
    return (sizes * lengths).sum((1, 2)).sqrt() / K


def picked(states: list[Tensor], rows: list[tuple[int, int]]) -> Tensor:
    """State after ``count`` tokens of row ``n``, for each (n, count): [layers, len, ..]."""
    return torch.stack([states[count][:, n] for n, count in rows], 1)


def windows(stream: Tensor, rows: list[tuple[int, int]], columns: int) -> Tensor:
    """The conv window after ``count`` tokens of row ``n``, for each (n, count)."""
    return torch.stack([stream[:, n, :, c : c + columns] for n, c in rows], 1)


def recurrence(
    w: World, pools: Pools, b: Batch, op: str, calls: list[dict[str, Any]], **options: Any
) -> list[Any]:
    """``prefill``, ``decode`` or ``verify`` in every layer."""
    common = {
        "pad_slot": w.pool.pad_slot,
        "state_layout": w.plan.state_layout,
        **b.bounds(w.plan.index),
        **options,
    }
    operator = getattr(sluice, op)
    return [
        operator(**call, state=pools[i][1], **common)
        for i, call in enumerate({n: x for n, x in c.items() if n != "y"} for c in calls)
    ]


def step(w: World, pools: Pools, b: Batch, **options: Any) -> list[Tensor]:
    """``step`` in every layer; qkvz and ba as pairs or joined, by the size of the batch."""
    p, found = w.plan, []
    x, z, beta, a = (b.call(name) for name in ("x", "z", "b", "a"))
    for i, weights in enumerate(w.weights.on):
        pairs: tuple[Any, Any] = ((x[i], z[i]), (beta[i], a[i]))
        if b.N % 2:
            pairs = tuple(torch.cat(pair, -1) for pair in pairs)  # type: ignore[assignment]
        found.append(
            sluice.step(
                *pairs, conv_weight=weights["conv"], conv_bias=weights["bias"],
                A_log=weights["A_log"], dt_bias=weights["dt_bias"], norm_weight=weights["norm"],
                conv_state=pools[i][0], state=pools[i][1], pad_slot=w.pool.pad_slot,
                state_layout=p.state_layout, conv_activation=p.activation, gate_activation=p.gate,
                neg_eigval=p.neg_eigval, **options,
            )
        )  # fmt: skip
    return found


def make(w: World, a: Action) -> Batch | None:
    """The batch of an action; None if none of its sequences is there, or no token is left."""
    members, counts = present(w, a)
    if not members:
        return None
    made = batch(w.plan, w.plan.seed * 100_003 + a.number, members, counts, a.args["alike"])
    made.packed = a.args["packed"] or min(counts) < made.T
    made.hard = a.args["hard"]
    size = sum(counts) if made.packed else len(members)
    made.pads = -size % (a.args["graph"] * (4 if made.packed else 1))
    return made


def norm(w: World, b: Batch, o: list[Tensor], want: Tensor, what: str) -> None:
    """``rms_norm_gated`` of outputs, which may hold rows of padding."""
    p = w.plan
    z = [x.unflatten(-1, (p.Hv, p.V)) for x in b.call("z")]
    made = [
        sluice.rms_norm_gated(o[i], torch.nan_to_num(z[i]), x["norm"], activation=p.gate)
        for i, x in enumerate(w.weights.on)
    ]
    got = b.back(made, what)
    w.near(got, exact_norm(w, b, want), w.limit(p.dtype), what)


def exact_norm(w: World, b: Batch, o: Tensor) -> Tensor:
    p = w.plan
    weight = w.weights.norm[:, None, None, None].expand(LAYERS, b.N, 1, 1, p.V).flatten(0, 1)
    z = b.z.flatten(0, 1).unflatten(-1, (p.Hv, p.V))
    return exact.gated_norm(o, z, weight, EPS, p.gate)


def refuses(w: World, errors: Any, call: Callable[[], Any], what: str) -> None:
    """A mistake must be refused with one of these errors; values are looked at on a GPU too."""
    try:
        with sluice.validate():
            call()
    except errors:
        return
    raise FaultError(f"{what}: was not refused")
