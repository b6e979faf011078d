"""The pool, the sequences in it, and what is compared after every step."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sluice.state_pool import StateSnapshot
from sluice.testing import compare
from tests.runs import exact
from tests.runs.plan import FLOAT32, LAYERS, Plan, pool, weights

Pools = list[tuple[Tensor, Tensor]]
"""(conv, recurrent) of each layer."""


class FaultError(AssertionError):
    """The library did something else than the sequences kept beside it."""


@dataclass
class Kept:
    """A snapshot, and the sequences that were in it."""

    snapshot: StateSnapshot
    members: list[exact.Sequence]
    bits: list[Tensor]


@dataclass
class Pending:
    """Drafts of every layer, and each sequence's states and windows after 0, 1, … tokens."""

    drafts: list[Any]
    members: list[exact.Sequence]
    states: list[Tensor]  # after each token: [layers, N, Hv, K, V]
    stream: Tensor  # [layers, N, D, L + T]
    pads: int
    slots: Tensor
    has: Tensor | None
    buffered: bool
    again: Any = None  # decodes the first n tokens of each row in other pools


class World:
    """Everything that an episode changes."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.weights = weights(plan)
        self.pool, self.memory = pool(plan)
        self.layers: Pools = [self.pool.layer(i) for i in range(LAYERS)]
        self.shadow = [m.clone() for m in self.memory]
        self.shadow_layers = self._views(self.shadow)
        self.live: dict[str, exact.Sequence] = {}
        self.kept: dict[str, Kept] = {}
        self.pending: dict[str, Pending] = {}
        self.stale: dict[str, Pending] = {}
        self.free_rows = list(range(self.pool.pad_slot + 1, plan.slots))
        self.old_slots: list[Any] = []  # handles of slots that were freed
        self.buffers = None if plan.paged else self.pool.draft_buffers(8, dtype=plan.dtype)

    def _views(self, memory: list[Tensor]) -> Pools:
        """Conv and state of each layer, in a copy of the pool's memory."""
        found: list[Any] = []
        for i, pair in enumerate(self.layers):
            places = (memory[i], memory[i]) if self.plan.paged else (memory[0], memory[1])
            found.append(
                tuple(
                    m.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())
                    for m, x in zip(places, pair, strict=True)
                )
            )
        return found

    def copy_of_pools(self) -> Pools:
        """The pools' bits before this step, in memory of their own with the same strides."""
        return self._views([m.clone() for m in self.shadow])

    # ---- slots ----------------------------------------------------------------------------------

    def take(self, slots: Sequence[Any], among: Iterable[int] | None = None) -> None:
        """Slots were allocated: they must be the lowest that were free."""
        rows = [int(s) for s in slots]
        expected = self.free_rows[: len(rows)] if among is None else list(among)
        self.same(rows, expected, "rows that were allocated")
        for row in rows:
            self.free_rows.remove(row)

    def give(self, slots: Sequence[Any]) -> None:
        for slot in slots:
            bisect.insort(self.free_rows, int(slot))
        self.old_slots = [*self.old_slots, *slots][-8:]

    def drop(self, names: Iterable[str], stale: bool) -> None:
        """The rows of these sequences have changed: their drafts are over.

        ``stale``: by an operator, which a commit must notice; else by the pool, which it cannot.
        """
        gone = set(names)
        for key, draft in [*self.pending.items()]:
            if gone.intersection(m.name for m in draft.members):
                del self.pending[key]
                if stale and not draft.buffered:
                    self.stale[key] = draft
        for key, draft in [*self.stale.items()]:
            if not stale and gone.intersection(m.name for m in draft.members):
                del self.stale[key]
        for key in [*self.stale][:-4]:
            del self.stale[key]

    def add(self, name: str, slot: Any, like: exact.Sequence | None, **changes: Any) -> None:
        """A new sequence, empty or as another one is."""
        p = self.plan
        if like is None:
            S = torch.zeros(LAYERS, p.Hv, p.K, p.V, dtype=exact.EXACT)
            window = torch.zeros(LAYERS, p.D, p.columns, dtype=p.conv_dtype)
            like = exact.Sequence(name, slot, S, window)
        self.live[name] = replace(like, name=name, slot=slot, **changes)

    # ---- comparisons ----------------------------------------------------------------------------

    def same(self, got: Any, expected: Any, what: str) -> None:
        if got != expected:
            raise FaultError(f"{what}: expected {expected}, got {got}")

    def near(
        self,
        actual: Tensor,
        want: Tensor,
        tolerance: float,
        what: str,
        natural: Callable[[], Tensor] | None = None,
    ) -> None:
        """Within the contract's error, over all and over each row; ``compare`` has the last word.

        The quick look here is at least as strict. ``natural()`` is the size [R] that a row usually
        has: where terms cancel (a query at right angles to all keys), the error is relative to
        that instead of to the rest that is left.
        """
        if want.numel() == 0:
            return
        error = (actual - want).flatten(1)
        rows, sizes = error.square().sum(1), want.flatten(1).square().sum(1)
        most = (compare.SLICE * tolerance) ** 2
        ok = (rows <= most * sizes).all() & (rows.sum() <= tolerance**2 * sizes.sum())
        peak = compare.PEAK * tolerance * (sizes.sum() / want.numel()).sqrt()
        if bool(ok & (error.abs().max() <= peak)):
            return
        if natural is not None:
            missing = (natural().square() - sizes).clamp(min=0).sqrt()[:, None]
            actual, want = (torch.cat([x.flatten(1), missing], 1) for x in (actual, want))
        compare.assert_within(actual, want, tolerance, name=what, per=0)

    def equal(self, a: Tensor, b: Tensor, what: str) -> None:
        if not torch.equal(a, b):  # NaN is not expected where this is asked
            compare.assert_same_bits(a, b, what)

    def limit(self, dtype: torch.dtype, state: torch.dtype = FLOAT32) -> float:
        return compare.tolerance(dtype, state, "cuda" if self.plan.gpu else "cpu")

    def rows_of(self, pools: Pools, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Windows [layers, n, D, L] and states [layers, n, Hv, K, V] of some rows, on the host."""
        at = torch.tensor(rows, device=self.plan.device)
        conv = torch.stack([c[at] for c, _ in pools]).cpu()
        state = torch.stack([s[at] for _, s in pools]).cpu()
        return conv, state.mT if self.plan.state_layout == "vk" else state

    def written(
        self,
        members: list[exact.Sequence],
        states: Tensor,
        windows: Tensor,
        what: str,
        dtype: torch.dtype = FLOAT32,
    ) -> None:
        """A call has written the rows of these sequences: [layers, n, ..] is what must be there."""
        rows = [int(m.slot) for m in members]
        if not rows:
            return
        conv, state = self.rows_of(self.layers, rows)
        tolerance = self.limit(dtype, self.plan.state_dtype)
        self.near(state.flatten(0, 1), states.flatten(0, 1), tolerance, f"{what}: state")
        self.equal(conv, windows, f"{what}: conv window")
        known = states if self.plan.carried else state.double()
        for n, member in enumerate(members):
            member.S, member.window, member.dirty = known[:, n], windows[:, n], False
        self.accept(rows)

    def accept(self, rows: list[int]) -> None:
        """What these rows hold now was compared or was written by the engine itself."""
        at = torch.tensor(rows, dtype=torch.int64, device=self.plan.device)
        for pair, shadow in zip(self.layers, self.shadow_layers, strict=True):
            for x, y in zip(pair, shadow, strict=True):
                y[at] = x[at]

    def settle(self, what: str) -> None:
        """After every step: all other bytes are as they were, and slots are counted alike."""
        for m, s in zip(self.memory, self.shadow, strict=True):
            if not torch.equal(m, s):
                self._blame(what)
        rows = sorted(int(m.slot) for m in self.live.values())
        self.same([int(s) for s in self.pool.allocated], rows, f"{what}: allocated")
        self.same(self.pool.available, len(self.free_rows), f"{what}: available")

    def _blame(self, what: str) -> None:
        owners = {int(m.slot): m.name for m in self.live.values()}
        names = ("conv", "state")
        for i, (pair, shadow) in enumerate(zip(self.layers, self.shadow_layers, strict=True)):
            for name, x, y in zip(names, pair, shadow, strict=True):
                for row in range(self.plan.slots):
                    a, b = (z[row].contiguous().view(torch.uint8) for z in (x, y))
                    if not torch.equal(a, b):
                        owner = owners.get(row, "nobody")
                        raise FaultError(
                            f"{what}: {name} of layer {i}, row {row} ({owner}) changed"
                        )
        raise FaultError(f"{what}: bytes between the rows of the pool changed")

    def poison(self, rows: list[int], value: float) -> None:
        """A late write of a former owner."""
        for c, s in self.layers:
            c[rows], s[rows] = value, value
        self.accept(rows)


# ------------------------------------------------------------------------------------ the tokens


@dataclass
class Batch:
    """Tokens of some sequences: [layers, N, T, ..], zeros behind the end of a shorter row."""

    members: list[exact.Sequence]
    lengths: list[int]
    x: Tensor
    a: Tensor
    b: Tensor
    z: Tensor
    mask: Tensor  # [N, T]
    packed: bool = False
    pads: int = 0  # rows of padding behind the batch; of packed tokens: a tail behind the last
    device: str = "cpu"
    hard: bool = False  # NaN in the gates of padding, too: values are then looked at in Python
    cache: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def T(self) -> int:  # noqa: N802
        return self.x.shape[2]

    @property
    def N(self) -> int:  # noqa: N802
        return len(self.members)

    def call(self, name: str) -> list[Tensor]:
        """One tensor a layer, as an operator gets it, with NaN wherever nothing may be read."""
        if name not in self.cache:
            x = getattr(self, name)
            nan = float("nan") if self.hard or name in "xz" else 0.0
            if self.packed:
                x = x[:, self.mask]
                tail = x.new_full((LAYERS, self.pads, *x.shape[2:]), nan)
                x = torch.cat([x, tail], 1).unsqueeze(1)
            elif self.pads:
                x = torch.cat([x, x.new_full((LAYERS, self.pads, *x.shape[2:]), nan)], 1)
            self.cache[name] = list(x.to(self.device).unbind(0))
        return self.cache[name]

    def back(self, results: list[Tensor], what: str) -> Tensor:
        """Results of a call as [layers · N, T, ..] on the host; those of padding must be zeros."""
        x = torch.stack(results).cpu()
        if self.packed:
            total = sum(self.lengths)
            kept, rest = x[:, 0, :total], x[:, 0, total:]
            dense = x.new_zeros(LAYERS, *self.mask.shape, *x.shape[3:])
            dense[:, self.mask] = kept
        else:
            dense, rest = x[:, : self.N], x[:, self.N :]
        if rest.numel() and bool((rest != 0).any()):
            raise FaultError(f"{what}: rows of padding are not zeros")
        return dense.flatten(0, 1)

    def bounds(self, dtype: torch.dtype) -> dict[str, Tensor]:
        if not self.packed:
            return {}
        ends = [0, *itertools.accumulate(self.lengths)]
        host = torch.tensor(ends, dtype=dtype)
        if self.device == "cpu":
            return {"cu_seqlens": host}
        return {"cu_seqlens": host.to(self.device), "cu_seqlens_cpu": host}

    def one(self, n: int) -> Batch:
        """Row n alone, dense."""
        T = self.lengths[n]
        cut = {name: getattr(self, name)[:, n : n + 1, :T] for name in "xabz"}
        mask = self.mask[n : n + 1, :T]
        members, lengths = [self.members[n]], [T]
        return Batch(members, lengths, **cut, mask=mask, device=self.device)

    def first(self, counts: list[int]) -> Batch:
        """The first tokens of each row, packed."""
        T = max(counts)
        cut = {name: getattr(self, name)[:, :, :T] for name in "xabz"}
        mask = torch.arange(T) < torch.tensor(counts)[:, None]
        return Batch(self.members, counts, **cut, mask=mask, packed=True, device=self.device)


def batch(
    plan: Plan, seed: int, members: list[exact.Sequence], lengths: list[int], alike: bool
) -> Batch:
    """Random tokens. ``alike``: all tokens of a row nearly agree, which is hard on the delta rule.

    Drawn row by row, so that a row's tokens do not depend on the rows beside it.
    """
    T = max(lengths)
    p, widths = plan, (plan.D, plan.Hv, plan.Hv, plan.Hv * plan.V)
    rows = []
    for member in members:
        gen = torch.Generator().manual_seed(_mixed(seed, member.name))
        drawn = torch.randn(LAYERS, T, sum(widths), generator=gen)
        rows.append(drawn[:, :1] + 0.1 * drawn if alike else drawn)
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    whole = (torch.stack(rows, 1) * mask[..., None]).to(p.dtype)
    x, a, b, z = whole.split(widths, -1)
    return Batch(members, lengths, x, a, b, z, mask, device=p.device)


def _mixed(seed: int, name: str) -> int:
    number, _, part = name.partition(".")
    return (seed * 1_000_003 + int(number) * 64 + int(part)) % (1 << 62)
