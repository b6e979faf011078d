"""One layer, three paths: what ``step``, ``prefill`` and ``verify`` compute is the same layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sluice
from sluice import ops
from sluice.layers import GatedDeltaNet, QwenShape
from sluice.testing.compare import assert_same_bits, assert_within

SIZES: dict[str, Any] = {"head_k_dim": 8, "head_v_dim": 8, "gate_activation": "sigmoid"}


def layer(order: str = "split") -> GatedDeltaNet:
    """Every option other than its default, and a bias of the convolution."""
    torch.manual_seed(0)
    shape = QwenShape("small", 32, 2, 4, 1, (0,), order=order, norm_eps=0.3, **SIZES)
    net = GatedDeltaNet(shape).requires_grad_(False)
    net.conv1d.bias = torch.nn.Parameter(torch.randn(shape.conv_channels), requires_grad=False)
    return net


def inputs(B: int = 2, T: int = 12) -> torch.Tensor:
    return torch.randn(B, T, 32, generator=torch.Generator().manual_seed(1))


def close(x: torch.Tensor, y: torch.Tensor, name: str) -> None:
    assert_within(x, y.double(), 1e-5, name=name)


@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("order", ["split", "interleaved"])
def test_decode_and_drafts_are_the_layer_that_a_prompt_sees(order, state_layout):
    net, x = layer(order), inputs()
    whole = net(x)
    layout = {"state_layout": state_layout}
    conv, state = net.zero_states(2, **layout)
    parts = [
        net(x[:, a:b], conv_state=conv, state=state, **layout) for a, b in ((0, 1), (1, 9), (9, 10))
    ]
    close(torch.cat(parts, 1), whole[:, :10], "steps")
    y, draft = net.verify(x[:, 10:], conv_state=conv, state=state, **layout)
    close(y, whole[:, 10:], "drafts")
    sluice.commit(draft, torch.tensor([2, 2]))
    again = net.zero_states(2, **layout)
    y = net(x, conv_state=again[0], state=again[1], **layout)
    close(y, whole, "a prompt with states")
    close(state, again[1], "states")
    close(conv, again[0], "windows")


def test_one_token_or_nine_with_states():
    net, x = layer(), inputs(2, 9)
    conv, state = net.zero_states(2)
    close(net(x, conv_state=conv, state=state), net(x), "nine tokens")


def test_a_new_sequence_of_few_tokens_reads_no_old_state():
    net, x = layer(), inputs(2, 3)
    conv, state = net.zero_states(2)
    want = net(x, conv_state=conv.clone(), state=state.clone())
    conv.fill_(7.0)
    state.fill_(float("nan"))
    new = torch.tensor([False, False])
    close(net(x, conv_state=conv, state=state, has_state=new), want, "new sequences")


def test_few_tokens_are_written_where_they_are_told():
    net, x = layer(), inputs(2, 3)
    conv, state = net.zero_states(4)
    before = conv.clone(), state.clone()
    where = {"slots": torch.tensor([0, 1]), "write_slots": torch.tensor([2, 3])}
    net(x, conv_state=conv, state=state, **where)
    assert_same_bits(conv[:2], before[0][:2], "windows that were read")
    assert_same_bits(state[:2], before[1][:2], "states that were read")
    assert bool(state[2:].any(-1).any())


def test_checkpoints_of_few_tokens_are_kept():
    net, x = layer(), inputs(1, 6)
    conv, state = net.zero_states(3)
    kept = sluice.Checkpoints(torch.tensor([[1, 2]]), positions=torch.tensor([[2, 5]]))
    net(x, conv_state=conv, state=state, slots=torch.tensor([0]), checkpoints=kept)
    for slot, n in ((1, 2), (2, 5)):
        cut = net.zero_states(1)
        net(x[:, :n], conv_state=cut[0], state=cut[1])
        close(state[slot], cut[1][0], f"state after {n}")
        close(conv[slot], cut[0][0], f"window after {n}")


def test_batch_invariant_reaches_the_operator(monkeypatch):
    net, seen = layer(), []
    whole = ops.prefill

    def prefill(*tokens: Any, **options: Any) -> Any:
        seen.append(options["batch_invariant"])
        return whole(*tokens, **options)

    monkeypatch.setattr(ops, "prefill", prefill)
    for asked in (True, False):
        net(inputs(), batch_invariant=asked)
    assert seen == [True, False]
