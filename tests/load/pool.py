"""Threads, and on a GPU streams, against one pool: every result has the bits of a quiet run.

A script is the life of some sequences: prefill, decode by ``step``, a draft and its commit, a fork,
a snapshot that comes back to other slots. Scripts run once alone, and their outputs are kept. Then
all threads run scripts at random in the same pool, in whatever slots they get, and compare.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import sluice
from sluice.state_pool import PoolExhaustedError, PoolGeometry, StatePool
from tests.load.measure import Memory, Times

HK, HV, K, V, W = 1, 2, 32, 32, 4
D = 2 * HK * K + HV * V
SCRIPTS = 12
NEEDS = 3
"""Slots of one script."""


@dataclass
class Load:
    """What a run under load has seen."""

    scripts: int = 0
    calls: int = 0
    waits: int = 0  # for a pool without free slots
    faults: list[str] = field(default_factory=list)
    times: Times = field(default_factory=Times)


def make_pool(device: str, slots: int) -> StatePool:
    geometry = PoolGeometry(
        layers=1, num_v_heads=HV, conv_channels=D, head_k_dim=K, head_v_dim=V,
        conv_dtype=torch.float32,
    )  # fmt: skip
    return StatePool(geometry, slots, device=device, reserve_slot_0=True)


@dataclass
class Script:
    """Weights and tokens of one life, drawn from its number."""

    number: int
    device: str

    def __post_init__(self) -> None:
        gen = torch.Generator().manual_seed(self.number)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen).to(self.device)

        self.T = 4 + self.number
        self.weight, self.A_log, self.dt = normal(D, W), normal(HV), normal(HV)
        self.norm = normal(V)
        self.prompt, self.a, self.b = (normal(1, self.T, n) for n in (D, HV, HV))
        self.steps = [(normal(2, D + HV * V), normal(2, 2 * HV)) for _ in range(4)]
        self.draft, self.da, self.db = (normal(1, 4, n) for n in (D, HV, HV))

    def run(self, pool: StatePool, seen: Load) -> Tensor:
        """The outputs of a whole life, one after another."""
        slots = self._wait(pool, seen)
        conv, state = pool.layer(0)
        found = []
        where = {"pad_slot": pool.pad_slot}
        try:
            first = pool.indices(slots[:1])
            raw = {"A_log": self.A_log, "dt_bias": self.dt}
            heads = {"num_k_heads": HK, "num_v_heads": HV, **raw}
            tokens = sluice.conv_qkv(
                self.prompt, self.weight, a=self.a, b=self.b, state=conv, slots=first, **heads,
                **where,
            )  # fmt: skip
            o, _ = sluice.prefill(*tokens, state=state, slots=first, batch_invariant=True, **where)
            found.append(o.flatten())
            try:
                (child,) = pool.fork(slots[0])
            except PoolExhaustedError:  # the pool is full: a snapshot gives the same bits
                (child,) = pool.restore(pool.snapshot(slots[0]), [slots[1]])
            both = [slots[0], child]
            try:
                found += [self._step(pool, both, i, seen) for i in range(4)]
                found.append(self._speculate(pool, slots[:1], raw, heads, where))
                saved = pool.snapshot(both)
                (moved,) = pool.restore(pool.snapshot(both[:1]), [slots[2]])
                found.append(self._step(pool, [moved, child], 0, seen))
                pool.restore(saved, both)
                found.append(self._step(pool, both, 1, seen))
            finally:
                if int(child) != int(slots[1]):
                    pool.free(child)
        finally:
            pool.free(slots)
        seen.calls += 15
        return torch.cat(found)

    def _wait(self, pool: StatePool, seen: Load) -> Any:
        while True:
            try:
                return pool.allocate(NEEDS)
            except PoolExhaustedError:
                seen.waits += 1
                time.sleep(0.0005)

    def _step(self, pool: StatePool, slots: Any, i: int, seen: Load) -> Tensor:
        conv, state = pool.layer(0)
        qkvz, ba = self.steps[i]
        rows = pool.indices(slots, pad_to=4)
        qkvz, ba = (torch.cat([x, x.new_full((2, x.shape[1]), 0.5)]) for x in (qkvz, ba))
        begun = time.perf_counter()
        y = sluice.step(
            qkvz, ba, conv_weight=self.weight, A_log=self.A_log, dt_bias=self.dt,
            norm_weight=self.norm, conv_state=conv, state=state, slots=rows, pad_slot=pool.pad_slot,
        )  # fmt: skip
        seen.times.add(time.perf_counter() - begun)
        return y.flatten()

    def _speculate(self, pool: StatePool, slots: Any, raw: Any, heads: Any, where: Any) -> Tensor:
        conv, state = pool.layer(0)
        rows = pool.indices(slots)
        tokens = sluice.conv_qkv(
            self.draft, self.weight, a=self.da, b=self.db, state=conv, slots=rows, freeze=True,
            **heads, **where,
        )  # fmt: skip
        o, draft = sluice.verify(
            *tokens, state=state, slots=rows, conv_inputs=self.draft, conv_state=conv, **where
        )
        sluice.commit(draft, torch.tensor([1 + self.number % 4], device=self.device))
        return o.flatten()


def control(seconds: float, threads: int = 8) -> Times:
    """Times of twelve ``torch.mul`` beside other threads: about as long as a step.

    What Python's lock and the machine do to a call of these threads, without this library.
    """
    x, until = torch.randn(4, 2 * D), time.monotonic() + seconds
    seen = [Times() for _ in range(threads)]

    def work(mine: Times) -> None:
        while time.monotonic() < until:
            begun, y = time.perf_counter(), x
            for _ in range(12):
                y = torch.mul(y, 1.0001)
            mine.add(time.perf_counter() - begun)

    crew = [threading.Thread(target=work, args=(times,)) for times in seen]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    for other in seen[1:]:
        seen[0].take(other)
    return seen[0]


def serve(
    seconds: float, threads: int = 8, streams: int = 4, device: str = "cpu", slots: int = 21
) -> tuple[Load, Memory]:
    """Threads run scripts for so long; returns what they saw, and the memory meanwhile."""
    pool = make_pool(device, slots)
    scripts = [Script(n, device) for n in range(SCRIPTS)]
    expected = [script.run(pool, Load()) for script in scripts]
    lanes = [torch.cuda.Stream() for _ in range(streams)] if device != "cpu" else []
    memory = Memory(device)
    until = time.monotonic() + seconds
    warm = time.monotonic() + min(seconds / 4, 20)
    seen = [Load() for _ in range(threads)]

    def work(number: int) -> None:
        dice, mine = random.Random(number), seen[number]
        lane: Any = (
            torch.cuda.stream(lanes[number % streams]) if lanes else contextlib.nullcontext()
        )
        with lane:
            while time.monotonic() < until and not mine.faults:
                which = dice.randrange(SCRIPTS)
                try:
                    got = scripts[which].run(pool, mine)
                    if not torch.equal(got, expected[which]):
                        mine.faults.append(f"thread {number}: script {which}: other bits")
                except Exception as error:
                    mine.faults.append(f"thread {number}: {type(error).__name__}: {error}")
                mine.scripts += 1
                if time.monotonic() < warm:
                    mine.times.clear()

    if lanes:
        torch.cuda.synchronize()
    crew = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for thread in crew:
        thread.start()
    while time.monotonic() < until and any(t.is_alive() for t in crew):
        time.sleep(min(1.0, seconds / 20))
        if time.monotonic() > warm:
            memory.sample()
    for thread in crew:
        thread.join()
    memory.sample()
    total = Load()
    for one in seen:
        total.scripts += one.scripts
        total.calls += one.calls
        total.waits += one.waits
        total.faults += one.faults
        total.times.take(one.times)
    if pool.available != slots - 1:
        total.faults.append(f"{pool.available} slots are free at the end, of {slots - 1}")
    return total, memory
