"""Calls whose metadata keeps changing: the cache of bindings below, at and beyond its bound.

Work is always the same, so that times can be compared: only the strides of the inputs differ, and
each stride is a binding of its own. ``mixed`` has other sizes too, and compares with float64.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sluice
from sluice import calls
from sluice.testing import compare, oracle
from tests.load.measure import Memory, Times

N, H, K = 8, 4, 32
ROOM = 1 << 22


class Views:
    """The same call through views of other strides: ``call(i)``, for any i."""

    def __init__(self, device: str = "cpu") -> None:
        gen = torch.Generator().manual_seed(0)
        self.store = torch.randn(ROOM, generator=gen).to(device)
        self.state = torch.zeros(N, H, K, K, device=device)
        self.gates = -torch.rand(N, 1, H, generator=gen).to(device)
        self.weight = torch.ones(K, device=device)

    def view(self, i: int, at: int) -> Tensor:
        step = H * K + 4 * (i % 4096)
        return self.store.as_strided((N, 1, H, K), (step, step, K, 1), at * 1024 + 4 * (i // 4096))

    def decode(self, i: int) -> Any:
        q, k, v = (self.view(i, n) for n in range(3))
        # one of three strides changes with i // 4096, so that i has no end
        v = self.store.as_strided((N, 1, H, K), (H * K + 4 * (i // 4096), H * K, K, 1))
        return sluice.decode(q, k, v, self.gates, normalize_qk=True, state=self.state)

    def control(self, i: int) -> Any:
        """About as long as ``norm``, by torch alone: what its times show is the machine's."""
        x = self.view(i, 0)
        for _ in range(3):
            x = torch.mul(x, 1.5)
        return x

    def norm(self, i: int) -> Any:
        z = self.store.as_strided((N, 1, H, K), (H * K + 4 * (i // 4096), H * K, K, 1))
        return sluice.rms_norm_gated(self.view(i, 0), z, self.weight)


def timed(call: Callable[[int], Any], order: list[int], device: str, found: Times) -> None:
    """Count the seconds of each call; on a GPU those of the host."""
    for i in order:
        begun = time.perf_counter()
        call(i)
        found.add(time.perf_counter() - begun)
    if device != "cpu":
        torch.cuda.synchronize()


def changing(count: int, shapes: int, device: str = "cpu") -> tuple[dict[str, Times], Memory]:
    """``count`` calls of two operators with so many shapes, after each was seen once.

    Beside them a control, which torch serves alone.
    """
    views, dice, memory = Views(device), random.Random(1), Memory(device)
    calls.forget()
    each = shapes // 2
    operators = {
        "decode": views.decode,
        "rms_norm_gated": views.norm,
        "torch.mul, three times (control)": views.control,
    }
    for call in operators.values():
        timed(call, list(range(each)) * 2, device, Times())
    found = {name: Times() for name in operators}
    memory.sample()
    for _ in range(20):
        for name, call in operators.items():
            order = [dice.randrange(each) for _ in range(count // 40)]
            timed(call, order, device, found[name])
        memory.sample()
    return found, memory


def walk(size: int, count: int, device: str = "cpu") -> tuple[Times, float]:
    """At least ``count`` calls, ``size`` shapes in turn: their times, and how many bound anew.

    Every shape has come twice before.
    """
    views = Views(device)
    calls.forget()
    timed(views.norm, list(range(size)) * 2, device, Times())
    before, times = calls.BINDINGS.made, Times()
    order = list(range(size)) * -(-count // size)
    timed(views.norm, order, device, times)
    return times, (calls.BINDINGS.made - before) / len(order)


def mixed(count: int, device: str = "cpu") -> None:
    """Other sizes with every call, within the contract's error of float64."""
    dice = random.Random(2)
    gen = torch.Generator().manual_seed(2)
    for _ in range(count):
        n, t, h, k, v = (dice.randint(1, most) for most in (5, 8, 3, 24, 24))
        q, key = torch.randn(n, t, h, k, generator=gen), torch.randn(n, t, h, k, generator=gen)
        value = torch.randn(n, t, h, v, generator=gen)
        state = torch.randn(n, h, v, k, generator=gen)
        want, after = oracle.delta(q, key, value, state=state, normalize_qk=True)
        given = [x.to(device) for x in (q, key, value, state)]
        o, left = sluice.decode(*given[:3], state=given[3], normalize_qk=True)
        limit = compare.tolerance(torch.float32, device=device)
        compare.assert_within(o.cpu(), want, limit, name="o")
        compare.assert_within(left.cpu(), after, limit, name="state")
