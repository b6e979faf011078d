"""What serves a layer of SGLang, without SGLang: prefixes of its cache, and draft tokens."""

from __future__ import annotations

import pytest
import torch

from sluice import ops
from sluice.integrations.sglang import drafts, serve
from sluice.testing.compare import assert_same_bits, assert_within

HK, HV, K, V, W = 2, 4, 16, 16, 4
D = 2 * HK * K + HV * V


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(P: int = 9, seed: int = 0) -> serve.Layer:
    return serve.Layer(
        (HK, HV, K, V),
        random(D, W, seed=seed + 1),
        None,
        "silu",
        -random(HV, seed=seed + 2).abs(),
        random(HV, seed=seed + 3),
        random(P, D, W - 1, seed=seed + 4),
        random(P, HV, V, K, seed=seed + 5),
        pad_slot=0,
    )


def run(mine: serve.Layer, lengths: list[int], kept=None, slots=(1, 2)) -> torch.Tensor:
    T = sum(lengths)
    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    new = torch.zeros(len(lengths), dtype=torch.bool)
    prompts = serve.Prompts(torch.tensor(slots), borders, new, kept, True)
    x, b, a = random(T, D, seed=6), random(T, HV, seed=7), random(T, HV, seed=8)
    return serve.extend(ops, mine, x, b, a, prompts)


def test_a_prefix_is_kept_for_the_rows_of_the_mask_alone():
    mine = layer()
    before = mine.conv_state.clone(), mine.state.clone()
    mask = torch.tensor([True, False])
    kept = serve.checkpoints(mask, torch.tensor([5, 6]), torch.tensor([64, 99]), mine.pad_slot)
    run(mine, [70, 40], kept)
    cut = layer()
    T = 64
    x, b, a = random(110, D, seed=6)[:T], random(110, HV, seed=7)[:T], random(110, HV, seed=8)[:T]
    prompt = serve.Prompts(
        torch.tensor([5]), torch.tensor([0, T]), torch.tensor([False]), None, True
    )
    serve.extend(ops, cut, x, b, a, prompt)
    assert_same_bits(mine.conv_state[5], cut.conv_state[5], "window of the prefix")
    assert_within(mine.state[5], cut.state[5].double(), 1e-5, name="state of the prefix")
    others = [0, 3, 4, 6, 7, 8]
    assert_same_bits(mine.conv_state[others], before[0][others], "windows of other slots")
    assert_same_bits(mine.state[others], before[1][others], "states of other slots")


def test_decode_goes_on_from_a_prompt_and_padding_writes_nothing():
    mine, whole = layer(), layer()
    run(mine, [20, 30])
    before = mine.conv_state.clone(), mine.state.clone()
    slots = torch.tensor([2, 0])
    x, b, a = random(50, D, seed=6), random(50, HV, seed=7), random(50, HV, seed=8)
    out = serve.decode(ops, mine, x[:2], b[:2], a[:2], slots)
    assert bool((out[1] == 0).all())
    rest = [0, 1, 3, 4, 5, 6, 7, 8]
    assert_same_bits(mine.conv_state[rest], before[0][rest], "windows of other slots")
    assert_same_bits(mine.state[rest], before[1][rest], "states of other slots")
    T = 31
    parts = [torch.cat([y[20:50], y[:1]]) for y in (x, b, a)]
    prompt = serve.Prompts(
        torch.tensor([2]), torch.tensor([0, T]), torch.tensor([False]), None, True
    )
    want = serve.extend(ops, whole, *parts, prompt)
    assert_within(out[0, 0], want[-1].double(), 1e-5, name="the next token")


@pytest.mark.parametrize("alike", [False, True])
def test_the_plan_has_the_mode_that_prompts_are_served_in(alike):
    """Row 10: what is not in the plan is compiled while a request waits."""
    plan = serve.plan(layer(), torch.float32, torch.int64, alike, False)
    modes = [call.make()[1]["batch_invariant"] for call in plan if call.op == "prefill"]
    assert set(modes) == {alike}


T = 4


class Model:
    """Two layers whose pools lie in one tensor each, as SGLang's do, with drafts in its memory."""

    def __init__(self) -> None:
        made = [layer(), layer(seed=10)]
        self.conv_state = torch.stack([one.conv_state for one in made])
        self.state = torch.stack([one.state for one in made])
        self.layers = [
            one._replace(conv_state=self.conv_state[i], state=self.state[i])
            for i, one in enumerate(made)
        ]
        space = torch.full((2, 5, T, HV, V, K), float("nan"))
        buffers = drafts.buffers_within(space, self.layers[0], torch.float32)
        assert buffers is not None
        self.drafts = drafts.Drafts(buffers, self.state, self.conv_state, 0)

    def inputs(self, i: int, N: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            random(N, T, D, seed=20 + i),
            random(N, T, HV, seed=30 + i),
            random(N, T, HV, seed=40 + i),
        )

    def verify(self, slots: list[int]) -> list[torch.Tensor]:
        rows = torch.tensor(slots, dtype=torch.int32)
        return [
            drafts.verify(ops, one, self.drafts.buffers.layer(i), *self.inputs(i, len(slots)), rows)
            for i, one in enumerate(self.layers)
        ]

    def decode(self, slots: list[int], row: int, n: int, to: int | None = None) -> None:
        """The first n tokens of a row of ``verify(slots)``, without drafts, read from its slot."""
        where = {"slots": torch.tensor([slots[row]])}
        if to is not None:
            where["write_slots"] = torch.tensor([to])
        for i, one in enumerate(self.layers):
            x, b, a = (y[row : row + 1, :n] for y in self.inputs(i, len(slots)))
            tokens = ops.conv_qkv(x, one.conv_weight, a=a, b=b, **where, **one.conv())
            ops.decode(*tokens, state=one.state, pad_slot=0, **where)

    def same(self, other: Model) -> None:
        assert_same_bits(self.conv_state, other.conv_state, "windows")
        assert_same_bits(self.state, other.state, "states")


def test_accepted_drafts_leave_the_bits_of_decode():
    """Reliability row 34. Rows in another order; one of padding, one whose drafts do not count."""
    mine, plain, slots = Model(), Model(), [3, 0, 7, 5]
    out = mine.verify(slots)
    mine.same(plain)
    assert not any(o[1].any() for o in out)
    steps = torch.tensor([3, 0, -1])
    drafts.commit(ops, mine.drafts, torch.tensor([7, 3, 5], dtype=torch.int32), steps)
    plain.decode(slots, 2, 4)
    plain.decode(slots, 0, 1)
    mine.same(plain)


def test_a_prefix_is_kept_from_among_the_accepted_drafts():
    """Reliability row 35. Of two rows one has a prefix to keep; the other's slot says anything."""
    mine, plain, slots = Model(), Model(), [3, 5]
    mine.verify(slots)
    rows, steps = torch.tensor(slots, dtype=torch.int32), torch.tensor([2, 3])
    drafts.commit(ops, mine.drafts, rows, steps, torch.tensor([8, 1]), torch.tensor([1, -1]))
    plain.decode(slots, 0, 2, to=8)
    plain.decode(slots, 0, 3)
    plain.decode(slots, 1, 4)
    mine.same(plain)


def test_drafts_fit_into_the_memory_for_states_or_not_at_all():
    one = layer()
    size = 4 * (HK * K + HV * V + HV + D)  # bytes of a token
    enough = -(-size * 9 * T // (4 * HV * V * K * T)) + 1  # rows
    space = torch.zeros(1, enough, T, HV, V, K)
    buffers = drafts.buffers_within(space, one, torch.float32)
    assert buffers is not None
    assert [tuple(x.shape) for x in buffers if x is not None] == [
        (1, 9, T, HK, K), (1, 9, T, HV, V), (1, 9, T, HV), (1, 9, T, D),
    ]  # fmt: skip
    for number, x in enumerate(buffers, 1):
        assert x is not None
        assert x.data_ptr() % 16 == 0
        assert not x.any(), "two buffers share memory"
        x.fill_(number)
    assert drafts.buffers_within(space[:, :-2], one, torch.float32) is None


def test_the_plan_has_drafts_of_every_number_of_states():
    model = Model()
    plan = drafts.plan(model.layers[0], model.drafts, torch.float32, torch.int32)
    for op in ("verify", "commit_layers"):
        calls = [call.make() for call in plan if call.op == op]
        assert {options["slots"].shape[0] for _, options in calls} == {8, 64, 256, 1024}
