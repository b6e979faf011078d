"""Drafts accepted in part, and cached prefixes: reliability rows 2, 4 and 19."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.state_pool import PoolGeometry, StatePool
from sluice.testing import compare, oracle
from tests import calls, serving
from tests.calls import Call, Shape, ask, make, seeds
from tests.suite import DEVICE, backends

SHAPE = Shape(Hk=1, r=2, K=5, V=4, dtype=torch.bfloat16)
DELTA = ("q", "k", "v", "g", "beta")
ACTIONS = ("decode", "verify", "verify", "reject", "snapshot", "restore", "restore")


def decode(tokens: Call, backend: str, slots: Any) -> torch.Tensor:
    """Decode the tokens of a verify call in one call, and roll its conv window."""
    rows = {name: tokens.rows[name] for name in DELTA}
    state, window = tokens.pools["state"], tokens.pools["conv_state"]
    o, _ = ask("decode", backend, **rows, **tokens.fixed, state=state, slots=slots)
    x = tokens.rows["conv_inputs"]
    conv = serving.beside(backend, "causal_conv1d")
    ask("causal_conv1d", conv, x, x.new_ones(x.shape[-1], 4), state=window, slots=slots)
    return o


class Engine:
    """Sequences in a pool, each with the groups of tokens that made its state."""

    def __init__(self, backend: str, state_dtype: torch.dtype, seed: int) -> None:
        self.backend, self.seed = backend, seed
        self.call = make("verify", replace(SHAPE, state_dtype=state_dtype), 1, 1)
        geometry = PoolGeometry(
            layers=1, num_v_heads=2, conv_channels=SHAPE.D, head_k_dim=5, head_v_dim=4,
            state_dtype=state_dtype,
        )  # fmt: skip
        self.pool = StatePool(geometry, 7, device=DEVICE)
        self.pool.recurrent.fill_(float("nan"))
        self.pool.conv.fill_(float("nan"))
        self.call.pools = dict(zip(("conv_state", "state"), self.pool.layer(0), strict=True))
        self.slots = self.pool.allocate(4)
        self.logs: list[list[Call]] = [[] for _ in self.slots]
        self.saved = [(self.pool.snapshot(self.slots[0]), list[Call]())]

    def tokens(self, T: int) -> Call:
        """T new tokens for each sequence."""
        self.seed += 1
        return replace(self.call, rows=make("verify", SHAPE, len(self.slots), T, self.seed).rows)

    def act(self, action: str, T: int, who: int, counts: list[int]) -> None:
        where = self.pool.indices(self.slots)
        if action == "decode":
            tokens = self.tokens(T)
            decode(tokens, self.backend, where)
            self.log(tokens, [T] * len(self.slots))
        elif action == "verify":
            tokens = self.tokens(T)
            counts = [min(n, T) for n in counts]
            draft = self.verify(tokens, where)
            if T % 2:  # between the two, the pool still holds the state before the draft
                self.act("snapshot", 0, who, counts)
            ask("commit", self.backend, draft, calls.index(counts))
            self.log(tokens, counts)
        elif action == "reject":
            self.verify(self.tokens(T), where)
        elif action == "snapshot":
            self.saved.append((self.pool.snapshot(self.slots[who]), list(self.logs[who])))
        else:
            snapshot, log = self.saved[counts[0] % len(self.saved)]
            new = self.pool.restore(snapshot)
            self.pool.free(self.slots[who])
            self.slots[who], self.logs[who] = new[0], list(log)

    def verify(self, tokens: Call, slots: torch.Tensor) -> Any:
        rows = {name: x for name, x in tokens.rows.items() if name != "num_accepted"}
        return ask("verify", self.backend, **rows, **tokens.fixed, **tokens.pools, slots=slots)[1]

    def log(self, tokens: Call, counts: list[int]) -> None:
        for i, n in enumerate(counts):
            if n:
                self.logs[i].append(tokens.pick(slice(i, i + 1)).span(0, n))

    def fresh(self, who: int) -> dict[str, torch.Tensor]:
        """The state of a sequence that was alone in a pool and only ever decoded."""
        pools = {name: torch.zeros_like(x[:1]) for name, x in self.call.pools.items()}
        for group in self.logs[who]:
            decode(replace(group, pools=pools), self.backend, calls.index([0]))
        return pools


@pytest.mark.parametrize("backend", backends("verify"))
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(ACTIONS),
            st.integers(1, 8),
            st.integers(0, 3),
            st.lists(st.integers(0, 8), min_size=4, max_size=4),
        ),
        min_size=3,
        max_size=12,
    ),
    state_dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=seeds,
)
def test_row_02_prefix_cache_and_speculation_leave_a_fresh_runs_state(
    backend, actions, state_dtype, seed
):
    engine = Engine(backend, state_dtype, seed)
    for action in actions:
        engine.act(*action)
    for who, slot in enumerate(engine.slots):
        for name, pool in engine.fresh(who).items():
            got = engine.call.pools[name][slot : slot + 1]
            compare.assert_same_bits(got, pool, f"{name} of sequence {who}")


@pytest.mark.parametrize("backend", backends("verify"))
def test_row_04_steps_with_drafts_and_steps_without_alternate(backend):
    """Against the float64 recurrence over the accepted tokens alone."""
    shape, N = Shape(Hk=1, r=3, K=8, V=5), 4
    call = make("verify", shape, N, 8, P=9)
    start, slots = call.pools["state"].clone(), calls.index([7, 2, 5, 0])
    gen = torch.Generator().manual_seed(1)
    accepted: list[list[Call]] = [[] for _ in range(N)]
    outputs: list[list[torch.Tensor]] = [[] for _ in range(N)]
    for number in range(24):
        T = int(torch.randint(2, 9, (), generator=gen)) if number % 2 == 0 else 1
        counts = torch.randint(T + 1, (N,), generator=gen)
        tokens = replace(call, rows=make("verify", shape, N, T, number).rows)
        if number % 2 == 0:
            tokens.rows["num_accepted"] = counts.to(DEVICE)
            o = tokens.run(backend, slots=slots)["o"]
        else:
            counts.fill_(1)
            o = decode(tokens, backend, slots)
        for i, n in enumerate(counts.tolist()):
            accepted[i].append(tokens.pick(slice(i, i + 1)).span(0, n))
            outputs[i].append(o[i : i + 1, :n])
    tolerance = compare.tolerance(shape.dtype, device=DEVICE)
    for i, slot in enumerate(slots.tolist()):
        rows = {n: torch.cat([x.rows[n] for x in accepted[i]], dim=1).cpu() for n in DELTA}
        fixed = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in call.fixed.items()}
        o, state = oracle.delta(**rows, **fixed, state=start[slot : slot + 1].cpu())
        got = torch.cat(outputs[i], dim=1).cpu()
        compare.assert_within(got, o, tolerance, name=f"o of row {i}")
        final = call.pools["state"][slot : slot + 1].cpu()
        compare.assert_within(final, state, tolerance, name=f"state of row {i}")
        window = torch.cat([x.rows["conv_inputs"] for x in accepted[i]], dim=1)[0, -3:].T
        compare.assert_same_bits(call.pools["conv_state"][slot], window, f"window of row {i}")


@pytest.mark.parametrize("T", [1, 3, 8])
@pytest.mark.parametrize("backend", backends("verify"))
def test_row_19_drafts_are_kept_by_row_however_high_the_slots_are(backend, T):
    """A pool far larger than the batch, with NaN in unused slots, and every count at once."""
    shape, P, N = replace(SHAPE, dtype=torch.float32), 3000, T + 1
    call = make("verify", shape, N, T, P=P)
    slots = [P - 1, 0, P - 2, 1500, P - 3, 7, 2047, 2999 - 64, 64][:N]
    unused = [i for i in range(P) if i not in slots]
    for pool in call.pools.values():
        pool[unused] = float("nan")
    call.rows["num_accepted"] = calls.index(list(range(N)))
    decoded = call.copy()
    call.run(backend, slots=calls.index(slots))
    for i, slot in enumerate(slots):
        if i:
            decode(decoded.pick(slice(i, i + 1)).span(0, i), backend, calls.index([slot]))
    for name, pool in call.pools.items():
        compare.assert_same_bits(pool, decoded.pools[name], name)
