"""Many wrong calls, one after another: which kind each is, and what came of them."""

from __future__ import annotations

import collections
from collections.abc import Callable

from tests.wrong_calls import judge, others

Counts = collections.Counter[str]
HUNDRED: tuple[tuple[int, str, Callable[[int], str]], ...] = (
    (80, "operators", judge.operator),
    (12, "methods of a pool", others.method),
    (6, "other functions", others.made),
    (2, "commands", others.command),
)
"""Of a hundred calls, so many of each kind."""


def one(seed: int) -> str:
    """One wrong call: its kind and what came of it. Raises ``judge.WrongAnswerError``."""
    place = seed % 100
    for share, kind, call in HUNDRED:
        if place < share:
            return f"{kind}: {call(seed)}"
        place -= share
    raise AssertionError(place)


def describe(seed: int, error: judge.WrongAnswerError) -> str:
    return f"{error}\n  again: python -m tests.wrong_calls --calls 1 --seed {seed}"
