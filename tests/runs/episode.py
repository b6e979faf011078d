"""One episode, its replay, and the smallest part of it that still fails."""

from __future__ import annotations

import collections
import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import sluice
from tests.runs import advance, drafts
from tests.runs.acts import Action, perform
from tests.runs.draw import draw
from tests.runs.plan import emulated, plan
from tests.runs.world import World

PERFORMING = (advance, drafts)
"""Modules whose import registers their actions, beside those of ``acts``."""
STEPS = 1000
"""Steps of an episode."""
Counts = collections.Counter[str]


class EpisodeError(Exception):
    """An episode failed: ``actions`` up to the one that did."""

    def __init__(self, seed: int, actions: list[Action], error: BaseException) -> None:
        super().__init__(f"seed {seed}, action {actions[-1].number}: {describe(error)}")
        self.seed, self.actions, self.error = seed, actions, error


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def run(seed: int, steps: int = STEPS, device: str = "cpu") -> Counts:
    """Draw and perform ``steps`` actions; returns how many of each kind were done."""
    actions: list[Action] = []
    counts: Counts = collections.Counter()
    dice = random.Random(seed)
    with _world(seed, device) as world:
        number = done = 0
        while done < steps:
            actions.append(draw(world, dice, number))
            number += 1
            try:
                happened = perform(world, actions[-1])
            except Exception as error:
                raise EpisodeError(seed, actions, error) from error
            done += happened
            counts[actions[-1].kind] += happened
    return counts


@contextlib.contextmanager
def _world(seed: int, device: str) -> Iterator[World]:
    """The pool and the model of an episode."""
    made = plan(seed, device)
    with contextlib.ExitStack() as scope:
        if emulated(device):
            from tests.gpu.emulator import driver

            scope.enter_context(driver.emulated(device))
        elif made.gpu:
            scope.enter_context(sluice.validate(made.watched))
        folder = scope.enter_context(tempfile.TemporaryDirectory())
        yield World(made, Path(folder))


def replay(seed: int, actions: Sequence[Action], device: str = "cpu") -> None:
    """Perform these actions alone; those whose sequences are missing do nothing."""
    with _world(seed, device) as world:
        for action in actions:
            perform(world, action)


def minimise(
    fails: Callable[[Sequence[Action]], bool], actions: Sequence[Action], seconds: float = 60.0
) -> list[Action]:
    """As few actions as still fail: parts are left out, halves first, then single ones.

    Before that, only those are tried that made the sequences of the last action, then all that had
    to do with them. The last action stays, as it is the one that failed. Stops after so many
    seconds.
    """
    until = time.monotonic() + seconds
    for every in (False, True):
        part = related(actions, every)
        if len(part) < len(actions) and fails(part):
            actions = part
            break
    *kept, last = actions
    size = max(1, len(kept) // 2)
    while kept:
        start, shorter = 0, False
        while start < len(kept):
            trial = [*kept[:start], *kept[start + size :]]
            if time.monotonic() > until:
                return [*kept, last]
            if fails([*trial, last]):
                kept, shorter = trial, True
            else:
                start += size
        if size == 1 and not shorter:
            break
        size = max(1, size // 2) if not shorter or size > 1 else 1
    return [*kept, last]


def related(actions: Sequence[Action], every: bool) -> list[Action]:
    """Actions that made what the last one names; ``every``: those that only used it, too."""
    needed: set[str] = set()
    found = []
    for action in reversed(actions):
        made = str(action.number)
        mine = made in needed or (every and needed.intersection(action.names)) or not found
        if mine:
            found.append(action)
            needed.update(action.names)
            needed.update(name.partition(".")[0] for name in action.names)
            needed.update(str(action.args[key]) for key in ("draft", "kept") if key in action.args)
    return found[::-1]


def report(failed: EpisodeError, device: str) -> str:
    """What failed, the actions that suffice for it, and the command that does it again."""
    seed = failed.seed

    def fails(actions: Sequence[Action]) -> bool:
        try:
            replay(seed, actions, device)
        except Exception as error:
            return type(error) is type(failed.error)
        return False

    small = minimise(fails, failed.actions)
    numbers = ",".join(str(a.number) for a in small)
    return "\n".join(
        [
            str(failed),
            f"plan: {plan(seed, device)}",
            f"{len(small)} of {len(failed.actions)} actions suffice:",
            *(f"  {a}" for a in small),
            f"again: python -m tests.runs --seed {seed} --steps {STEPS} --device {device}",
            f"only these: python -m tests.runs --seed {seed} --only {numbers} --device {device}",
            f"sluice {sluice.__version__}",
        ]
    )
