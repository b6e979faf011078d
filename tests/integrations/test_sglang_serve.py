"""What serves a layer of SGLang, without SGLang: prefixes that its cache keeps."""

from __future__ import annotations

import pytest
import torch

from sluice import ops
from sluice.integrations.sglang import serve
from sluice.testing.compare import assert_same_bits, assert_within

HK, HV, K, V, W = 2, 4, 16, 16, 4
D = 2 * HK * K + HV * V


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(P: int = 9) -> serve.Layer:
    return serve.Layer(
        (HK, HV, K, V),
        random(D, W, seed=1),
        None,
        "silu",
        -random(HV, seed=2).abs(),
        random(HV, seed=3),
        random(P, D, W - 1, seed=4),
        random(P, HV, V, K, seed=5),
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
