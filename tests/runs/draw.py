"""The next action of an episode, by dice: what an engine might do with the sequences it has."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

from tests.runs.acts import Action
from tests.runs.world import World

KINDS = {
    "admit": 10,
    "claim": 1,
    "prefill": 9,
    "decode": 30,
    "verify": 9,
    "commit": 4,
    "reject": 1,
    "stale": 3,
    "fork": 6,
    "snapshot": 6,
    "restore": 6,
    "free": 10,
    "mistake": 6,
}
MISTAKES = (
    "free twice", "use after free", "too many", "count", "restore", "slot twice", "row of another",
    "out of range", "gate", "inside",
)  # fmt: skip
FILES = importlib.util.find_spec("safetensors") is not None


def draw(w: World, dice: random.Random, number: int) -> Action:
    """An action that can be done now, mostly."""
    live = list(w.live)
    while True:
        kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
        if w.pending and dice.random() < 0.25:
            kind = "commit"
        if kind in ("prefill", "decode", "verify", "fork", "snapshot", "free") and not live:
            kind = "admit"
        if kind == "free" and len(live) < 3 and dice.random() < 0.7:
            continue
        if kind == "admit" and not w.free_rows:
            kind = "free"
        if kind in ("commit", "reject") and not w.pending:
            continue
        if (kind == "stale" and not w.stale) or (kind == "restore" and not w.kept):
            continue
        return _DRAW[kind](w, dice, number, live)


def some(dice: random.Random, live: list[str], most: int) -> tuple[str, ...]:
    return tuple(dice.sample(live, dice.randint(1, max(1, min(most, len(live))))))


def _admit(w: World, dice: random.Random, number: int, live: list[str]) -> Action:
    n = dice.randint(1, min(3, len(w.free_rows)) or 1)
    return Action(number, "admit", args={"n": n, "dirty": dice.random() < 0.4})


def _claim(w: World, dice: random.Random, number: int, live: list[str]) -> Action:
    return Action(number, "claim", args={"which": dice.randrange(16)})


def _tokens(dice: random.Random) -> dict[str, Any]:
    return {
        "alike": dice.random() < 0.2,
        "hard": dice.random() < 0.1,
        "fused": dice.random() < 0.7,
        "twin": dice.random() < 0.08,
        "norm": dice.random() < 0.1,
    }


def _prefill(w: World, dice: random.Random, number: int, live: list[str]) -> Action:
    names = some(dice, live, 3)
    longest = dice.choice((3, 6, 12, 12, 20)) if dice.random() < 0.97 else 80
    packed = dice.random() < 0.7
    lengths = [dice.randint(0, longest) for _ in names] if packed else [longest] * len(names)
    return Action(
        number,
        "prefill",
        names,
        tuple(lengths),
        {
            **_tokens(dice),
            "packed": packed,
            "graph": dice.choice((1, 4, 4, 8)),
            "invariant": dice.random() < 0.5,
            "where": dice.choice(("own",) * 5 + ("child", "positions", "every", "nowhere")),
            "every": dice.choice((3, 5, 8)),
        },
    )


def _decode(w: World, dice: random.Random, number: int, live: list[str]) -> Action:
    names = some(dice, live, len(live))
    T = 1 if dice.random() < 0.75 else dice.choice((2, 3, 5, 8))
    packed = dice.random() < 0.15
    counts = [dice.randint(0, T) for _ in names] if packed else [T] * len(names)
    return Action(
        number,
        "decode",
        names,
        tuple(counts),
        {
            **_tokens(dice),
            "whole": dice.random() < 0.4,
            "packed": packed,
            "graph": dice.choice((1, 4, 4, 8)),
            "where": dice.choice(("own",) * 8 + ("child", "each", "nowhere")),
        },
    )


def _verify(w: World, dice: random.Random, number: int, live: list[str]) -> Action:
    names = some(dice, live, 4)
    T, packed = dice.choice((1, 3, 4, 8)), dice.random() < 0.2
    counts = [dice.randint(0, T) for _ in names] if packed else [T] * len(names)
    args = {"packed": packed, "graph": dice.choice((1, 4, 4)), "buffered": dice.random() < 0.4}
    return Action(number, "verify", names, tuple(counts), {**_tokens(dice), **args})


def _commit(w: World, dice: random.Random, number: int, live: list[str]) -> Action:
    args = {
        "draft": dice.choice(list(w.pending)),
        "tracked": dice.random() < 0.25,
        "stacked": dice.random() < 0.6,
        "twin": dice.random() < 0.25,
    }
    return Action(number, "commit", args=args)


def _reject(w: World, dice: random.Random, number: int, live: list[str]) -> Action:
    return Action(number, "reject", args={"draft": dice.choice(list(w.pending))})


def _stale(w: World, dice: random.Random, number: int, live: list[str]) -> Action:
    return Action(number, "stale", args={"draft": dice.choice(list(w.stale))})


def _fork(w: World, dice: random.Random, number: int, live: list[str]) -> Action:
    return Action(number, "fork", some(dice, live, 2), args={"copies": dice.randint(1, 2)})


def _late(dice: random.Random) -> float:
    return dice.choice((0.0, float("nan"), 3.0))


def _snapshot(w: World, dice: random.Random, number: int, live: list[str]) -> Action:
    args = {
        "host": dice.random() < 0.6,
        "preempt": dice.random() < 0.5,
        "late": _late(dice),
        "file": FILES and dice.random() < 0.05,
    }
    return Action(number, "snapshot", some(dice, live, 3), args=args)


def _restore(w: World, dice: random.Random, number: int, live: list[str]) -> Action:
    key = dice.choice(list(w.kept))
    n = len(w.kept[key].members)
    over = dice.random() < 0.3 and n <= len(live)
    names = tuple(dice.sample(live, n)) if over else ()
    return Action(number, "restore", names, args={"kept": key})


def _free(w: World, dice: random.Random, number: int, live: list[str]) -> Action:
    args = {"tensor": dice.random() < 0.3, "late": _late(dice)}
    return Action(number, "free", some(dice, live, 3), args=args)


def _mistake(w: World, dice: random.Random, number: int, live: list[str]) -> Action:
    names = some(dice, live, 3) if live else ()
    args = {
        "which": dice.choice(MISTAKES),
        "draft": dice.choice([*w.pending, ""]),
        "kept": dice.choice([*w.kept, ""]),
    }
    return Action(number, "mistake", names, args=args)


_DRAW = {
    "admit": _admit,
    "claim": _claim,
    "prefill": _prefill,
    "decode": _decode,
    "verify": _verify,
    "commit": _commit,
    "reject": _reject,
    "stale": _stale,
    "fork": _fork,
    "snapshot": _snapshot,
    "restore": _restore,
    "free": _free,
    "mistake": _mistake,
}
