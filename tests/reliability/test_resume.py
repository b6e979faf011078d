"""Continuing from a saved state: reliability row 12."""

from __future__ import annotations

import pytest
import torch

import sluice
from sluice.testing import compare
from tests import calls, serving
from tests.calls import Shape, make
from tests.serving import servers

SHAPE = Shape(Hk=1, r=2, K=8, V=6, dtype=torch.bfloat16)
T = 130  # two chunks of 64 and two tokens: cuts leave tails of one token too


@pytest.mark.parametrize("server", servers("prefill"))
def test_row_12_a_prefill_resumed_at_every_position_equals_the_whole(server):
    """Within tolerance anywhere, and the same bits at multiples of 64."""
    start = make("prefill", SHAPE, 1, T)
    whole = start.copy()
    expected = server.run(whole)["o"]
    for cut in range(T + 1):
        parts = start.copy()
        o = torch.cat([server.run(parts.span(*part))["o"] for part in ((0, cut), (cut, T))], dim=1)
        judge = serving.same_bits if cut % 64 == 0 else serving.close
        judge(o, expected, SHAPE, f"o, cut at {cut}")
        judge(parts.pools["state"], whole.pools["state"], SHAPE, f"state, cut at {cut}")


@pytest.mark.parametrize("length", [65, 128, 129, 130])
@pytest.mark.parametrize("server", servers("prefill"))
def test_row_12_a_checkpoint_resumes_with_the_same_bits(server, length):
    """Checkpoints every 64 tokens in other slots; the row itself is overwritten."""
    call = make("prefill", SHAPE, 1, length, P=4)
    before = call.pools["state"].clone()
    columns = length // 64
    kept = sluice.Checkpoints(calls.index([3, 1][:columns]).view(1, -1), every=64)
    expected = server.run(call, slots=calls.index([2]), checkpoints=kept)["o"]
    final = call.pools["state"][2].clone()
    for j, slot in enumerate([3, 1][:columns]):
        call.pools["state"][2] = float("nan")
        rest = call.span(64 * (j + 1), length)
        o = server.run(rest, slots=calls.index([slot]), write_slots=calls.index([2]))["o"]
        compare.assert_same_bits(o, expected[:, 64 * (j + 1) :], f"o after checkpoint {j}")
        compare.assert_same_bits(call.pools["state"][2], final, f"state after checkpoint {j}")
    compare.assert_same_bits(call.pools["state"][0], before[0], "a slot of nobody")


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("server", servers("causal_conv1d", "conv_qkv"))
def test_row_12_a_convolution_resumed_at_every_position_equals_the_whole(server, spare):
    """From its window, and from a checkpoint of it, which have the same bits."""
    shape = Shape(Hk=1, r=2, K=4, V=3, spare=spare)
    start = make(server.op, shape, 1, 9, P=3)
    whole = start.copy()
    expected = server.run(whole)
    for cut in range(10):
        parts = start.copy()
        position = calls.index([cut]).view(1, 1)
        kept = sluice.Checkpoints(calls.index([2]).view(1, 1), positions=position)
        first = server.run(parts, checkpoints=kept)
        split = start.copy()
        server.run(split.span(0, cut))
        window = split.pools["state"][0]
        compare.assert_same_bits(parts.pools["state"][2], window, f"window at {cut}")
        parts.index = {"slots": calls.index([2])}
        rest = server.run(parts.span(cut, 9))
        for name, x in expected.items():
            compare.assert_same_bits(first[name], x, f"{name} beside a checkpoint")
            serving.close(rest[name], x[:, cut:], shape, f"{name} from {cut}")
        window = whole.pools["state"][0]
        compare.assert_same_bits(parts.pools["state"][2], window, "last window")
