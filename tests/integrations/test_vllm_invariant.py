"""The vLLM plug-in's batch-invariant mode on made-up batches: no vLLM is needed.

A sequence has the same bits alone and beside others, whatever they do at that moment.
"""

from __future__ import annotations

import pytest
import torch
from tests.integrations.vllm_layer import Engine, cat, decode_batch, draft_batch, part, prompt_batch

from sluice.integrations.vllm import warm
from sluice.testing.compare import assert_same_bits

SLOT = 2


def _pair(order: str = "split", drafts: int = 0, dtype: torch.dtype = torch.float32):
    """Two servers of the same layer, in batch-invariant mode: with other sequences, and without."""
    return tuple(Engine(order, drafts, dtype=dtype, batch_invariant=True) for _ in range(2))


def _same(together: Engine, alone: Engine, slot: int = SLOT) -> None:
    for name in ("state", "conv_state"):
        a, b = (getattr(e.layer, name)[slot] for e in (together, alone))
        assert_same_bits(a, b, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("order", ["split", "interleaved"])
def test_a_sequence_has_the_same_bits_alone_and_beside_others(order, dtype):
    """Its prompt beside others; then steps beside a prompt, beside steps and in a padded graph."""
    e, alone = _pair(order, dtype=dtype)
    x, others = e.inputs(104), [e.inputs(n) for n in (70, 1, 33)]
    got = e.run(
        prompt_batch([9, SLOT, 4, 6], [70, 100, 1, 33], [False] * 4),
        *cat(others[0], part(x, 0, 100), *others[1:]),
    )
    want = alone.run(prompt_batch([SLOT], [100], [False]), *part(x, 0, 100))
    assert_same_bits(got[70:170], want, "prompt")
    _same(e, alone)
    batches = (
        ("beside a prompt", prompt_batch([SLOT, 12], [1, 30], [True, False], decodes=1), 0, 30),
        ("beside steps", decode_batch([9, SLOT, 4]), 1, 1),
        ("beside steps and a prompt", prompt_batch([9, SLOT, 6], [1, 1, 5], [True] * 3, 2), 1, 5),
        ("in a padded graph", decode_batch([SLOT, 0, 0, 0]), 0, 3),
    )
    for t, (name, metadata, before, after) in enumerate(batches, 100):
        token = part(x, t, t + 1)
        got = e.run(metadata, *cat(e.inputs(before), token, e.inputs(after)))
        want = alone.run(decode_batch([SLOT]), *token)
        assert_same_bits(got[before : before + 1], want, name)
        _same(e, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafts_have_the_same_bits_alone_and_beside_others(dtype):
    """Beside a prompt, and beside a sequence with fewer drafts."""
    e, alone = _pair(drafts=3, dtype=dtype)
    slots, x = [SLOT, 7, 8, 9], e.inputs(60)
    for engine in (e, alone):
        engine.run(prompt_batch([SLOT], [40], [False]), *part(x, 0, 40))
    e.run(prompt_batch([20], [9], [False]), *e.inputs(9))
    new = e.inputs(12)
    beside_a_prompt = draft_batch(
        [slots],
        [4],
        [1],
        num_actual_tokens=16,
        num_prefills=1,
        non_spec_query_start_loc=torch.tensor([0, 12], dtype=torch.int32),
        non_spec_state_indices_tensor=torch.tensor([15], dtype=torch.int32),
        has_initial_state=torch.tensor([False]),
        non_spec_token_indx=torch.arange(12),
        spec_token_indx=torch.arange(12, 16),
    )
    got = e.run(beside_a_prompt, *cat(new, part(x, 40, 44)))[12:]
    want = alone.run(draft_batch([slots], [4], [1]), *part(x, 40, 44))
    assert_same_bits(got, want, "beside a prompt")
    beside_drafts = draft_batch([[20, 21, 22, 23], slots], [2, 4], [1, 3])
    got = e.run(beside_drafts, *cat(e.inputs(2), part(x, 43, 47)))[2:]
    want = alone.run(draft_batch([slots], [4], [3]), *part(x, 43, 47))
    assert_same_bits(got, want, "beside drafts")
    for slot in slots:
        _same(e, alone, slot)


def test_the_plan_is_that_of_the_mode():
    """Row 10: what is not in the plan is compiled while a request waits."""
    plan = warm.plan(Engine(batch_invariant=True).layer, torch.float32, 0, True, False)
    modes = [call.make()[1]["batch_invariant"] for call in plan if call.op == "prefill"]
    assert modes
    assert all(modes)
    assert "step" not in {call.op for call in plan}
    steps = [call for call in plan if call.op == "conv_qkv" and call.make()[0][0].dim() == 3]
    assert {call.make()[0][0].shape[1] for call in steps} == {1}
