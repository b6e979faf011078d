"""The vLLM plug-in's calls on made-up batches: no vLLM is needed.

The judge is the same layer over each sequence alone, from its first token, without pages.
"""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from tests.integrations.vllm_layer import (
    PAGES,
    TOLERANCE,
    Engine,
    cat,
    decode_batch,
    draft_batch,
    part,
    prompt_batch,
)

from sluice.integrations import engine_calls
from sluice.integrations.vllm import batch, private, warm
from sluice.testing.compare import assert_within


@pytest.mark.parametrize("order", ["split", "interleaved"])
@pytest.mark.parametrize("dim_first", [False, True])
def test_chunks_decode_and_padding_continue_a_prompt(order, dim_first):
    e = Engine(order, dim_first=dim_first)
    one, two = e.inputs(30), e.inputs(90)
    want = [e.alone(*x) for x in (one, two)]
    got = e.run(
        prompt_batch([3, 5], [20, 70], [False, False]), *cat(part(one, 0, 20), part(two, 0, 70))
    )
    assert_within(got, torch.cat([want[0][:20], want[1][:70]]), TOLERANCE, name="first chunks")
    # a decode step beside the next chunk of a prompt
    got = e.run(
        prompt_batch([3, 5], [1, 15], [True, True], decodes=1),
        *cat(part(one, 20, 21), part(two, 70, 85)),
    )
    assert_within(got, torch.cat([want[0][20:21], want[1][70:85]]), TOLERANCE, name="mixed")
    # a captured graph's decode step: the last two rows are padding, whatever they hold
    rows = cat(part(two, 85, 86), part(one, 21, 22), e.inputs(2))
    rows[0][2:] = float("nan")
    got = e.run(decode_batch([5, 3, 0, 0]), *rows)
    assert_within(got[:2], torch.cat([want[1][85:86], want[0][21:22]]), TOLERANCE, name="decode")
    assert not got[2:].any()
    untouched = [i for i in range(PAGES) if i not in (3, 5)]
    assert e.page[untouched].isnan().all()


@pytest.mark.parametrize("prompts", [False, True])
def test_every_layer_finds_what_the_first_one_read(prompts):
    metadata = prompt_batch([3], [5], [False]) if prompts else decode_batch([3, 4])
    assert batch.kept(metadata) is None
    read = batch.read(metadata)
    assert private.unknown_fields(metadata) == []  # or vLLM's own kernels would serve the rest
    assert batch.kept(metadata) is read


def test_metadata_with_other_slots_are_read_anew():
    metadata = decode_batch([3, 4])
    batch.read(metadata)
    other = copy.copy(metadata)
    other.non_spec_state_indices_tensor = torch.tensor([5, 6], dtype=torch.int32)
    assert batch.kept(other) is None
    assert batch.read(other).rows.slots.tolist() == [5, 6]
    assert batch.kept(metadata).rows.slots.tolist() == [3, 4]


@pytest.mark.parametrize("order", ["split", "interleaved"])
def test_drafts_continue_from_the_accepted_token(order):
    """Reliability row 34: every step keeps some drafts; sequences differ in how many they had."""
    T, e = 4, Engine(order, drafts=3)
    prompts = [11, 2, 40]
    slots = [[7, 8, 9, 10], [4, 3, 2, 1], [20, 22, 21, 23]]
    truth = [e.inputs(n + 30) for n in prompts]
    want = [e.alone(*x) for x in truth]
    first = cat(*(part(x, 0, n) for x, n in zip(truth, prompts, strict=True)))
    got = e.run(prompt_batch([s[0] for s in slots], prompts, [False] * 3), *first)
    expected = torch.cat([w[:n] for w, n in zip(want, prompts, strict=True)])
    assert_within(got, expected, TOLERANCE, name="prompts")
    at, kept = list(prompts), [1, 1, 1]
    # (tokens of each sequence, how many of them are right)
    for lengths, right in (
        ([4, 1, 3], [2, 1, 3]),
        ([2, 4, 4], [1, 4, 1]),
        ([1, 3, 4], [1, 1, 4]),
        ([4, 4, 1], [4, 3, 1]),
        ([3, 2, 4], [3, 2, 2]),
    ):
        parts = []
        for x, p, n, good in zip(truth, at, lengths, right, strict=True):
            parts += [part(x, p, p + good), e.inputs(n - good)]  # then wrong ones
        got = e.run(draft_batch(slots, lengths, kept), *cat(*parts))
        begin = 0
        for i, (n, good) in enumerate(zip(lengths, right, strict=True)):
            expected = want[i][at[i] : at[i] + good]
            assert_within(got[begin : begin + good], expected, TOLERANCE, name=f"row {i}")
            begin += n
            at[i] += good
        kept = list(right)
    assert e.drafts + 1 == T


def test_drafts_beside_a_prompt_and_padding():
    e = Engine(drafts=2)
    old, new = e.inputs(30), e.inputs(12)
    want = [e.alone(*x) for x in (old, new)]
    e.run(prompt_batch([5], [20], [False]), *part(old, 0, 20))
    # tokens of the batch: the prompt's 12, then the drafts' 3
    metadata = draft_batch(
        [[5, 6, 7]],
        [3],
        [1],
        num_actual_tokens=15,
        num_prefills=1,
        non_spec_query_start_loc=torch.tensor([0, 12], dtype=torch.int32),
        non_spec_state_indices_tensor=torch.tensor([9], dtype=torch.int32),
        has_initial_state=torch.tensor([False]),
        non_spec_token_indx=torch.arange(12),
        spec_token_indx=torch.arange(12, 15),
    )
    got = e.run(metadata, *cat(new, part(old, 20, 23)))
    assert_within(got, torch.cat([want[1], want[0][20:23]]), TOLERANCE, name="both")
    # a captured graph: one real row, one padded, and token places behind the last border
    metadata = draft_batch([[5, 6, 7], [0, 0, 0]], [3, 0], [3, 1], num_actual_tokens=6)
    got = e.run(metadata, *cat(part(old, 23, 26), e.inputs(3)))
    assert_within(got[:3], want[0][23:26], TOLERANCE, name="padded")
    assert not got[3:].any()
    assert e.page[0].isnan().all()
    # a padded row that has tokens, and stale slots behind its first one
    metadata = draft_batch([[5, 6, 7], [0, 10, 11]], [3, 3], [3, 2], num_actual_tokens=6)
    got = e.run(metadata, *cat(part(old, 26, 29), e.inputs(3)))
    assert_within(got[:3], want[0][26:29], TOLERANCE, name="beside stale slots")
    assert not got[3:].any()
    assert e.page[[0, 10, 11]].isnan().all()


def test_a_checkpoint_is_the_state_of_a_prompt_cut_there():
    e, whole = Engine(), Engine()
    x = e.inputs(50)
    checkpoint = SimpleNamespace(
        state_indices=torch.tensor([0, 12], dtype=torch.int32),
        checkpoint_offsets=torch.tensor([0, 37], dtype=torch.int32),
    )
    other = e.inputs(1)
    e.run(prompt_batch([6], [4], [False]), *e.inputs(4))
    e.run(
        prompt_batch([6, 8], [1, 50], [True, False], decodes=1, checkpoint=checkpoint),
        *cat(other, x),
    )
    whole.run(prompt_batch([8], [37], [False]), *part(x, 0, 37))
    for name in ("conv_state", "state"):
        kept, cut = getattr(e.layer, name)[12], getattr(whole.layer, name)[8]
        assert_within(kept, cut, TOLERANCE, name=name)
    assert e.page[0].isnan().all()


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("order", ["split", "interleaved"])
def test_the_plan_lists_calls_that_operators_take(order, drafts):
    e = Engine(order, drafts=drafts)
    plan = warm.plan(e.layer, torch.float32, drafts, True, False)
    engine_calls.check(plan, torch.device("cpu"))
    assert {call.op for call in plan} == {"step", "conv_qkv", "prefill", "decode", "rms_norm_gated"}


@pytest.mark.parametrize("kept", [False, True])
def test_the_plan_has_every_number_of_states_and_prompts_that_keep_some(kept):
    """Row 10: what is not in the plan is compiled while a request waits."""
    e = Engine(drafts=3)
    plan = warm.plan(e.layer, torch.float32, 3, kept, False)
    few = {max(1, states // e.layer.shape.num_v_heads) for states in warm.STATES}
    sizes = {call.make()[0][0].shape[0] for call in plan if call.op == "decode"}
    # one token beside prompts, and steps with drafts, with fewer and with none
    assert sizes == {T * n for T in (1, 3, 4) for n in few}
    for drafts, op in itertools.product((0, 3), ("prefill", "conv_qkv")):
        plan = warm.plan(Engine(drafts=drafts).layer, torch.float32, drafts, kept, False)
        given = [call.make()[1].get("checkpoints") is not None for call in plan if call.op == op]
        assert set(given) == {False, kept}
