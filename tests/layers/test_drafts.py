"""``GatedDeltaNet.verify``: draft tokens of a layer, and what ``commit`` makes of its states."""

from __future__ import annotations

import pytest
import torch
from tests.models import randomise

import sluice
from sluice.contract.errors import ContractError
from sluice.layers import GatedDeltaNet, QwenShape
from sluice.state_pool import PoolGeometry, StatePool
from sluice.testing.compare import FLOAT32_CPU, assert_same_bits, assert_within

HIDDEN = 48


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def random_layer(order="split"):
    torch.manual_seed(0)
    shape = QwenShape("small", HIDDEN, 2, 4, 1, (0,), head_k_dim=16, head_v_dim=16, order=order)
    return randomise(GatedDeltaNet(shape)).requires_grad_(False)


def hidden(*size):
    return torch.randn(*size, HIDDEN, generator=torch.Generator().manual_seed(1))


def close(actual, exact, name="output"):
    assert_within(actual, exact, FLOAT32_CPU, name=name)


@pytest.mark.parametrize("order", ["split", "interleaved"])
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_verify_and_commit_equal_decoding_the_accepted_tokens(order, layout):
    layer, x, accepted = random_layer(order), hidden(3, 12), torch.tensor([0, 2, 5])
    conv, state = layer.zero_states(4, state_layout=layout)
    where = {"conv_state": conv, "state": state, "state_layout": layout}
    slots = torch.tensor([3, 0, 2])
    layer(x[:, :7], slots=slots, **where)
    before = [conv.clone(), state.clone()]
    y, draft = layer.verify(x[:, 7:], slots=slots, **where)
    assert_same_bits(conv, before[0], name="conv state")
    assert_same_bits(state, before[1], name="state")
    whole = random_layer(order)(x)[:, 7:]
    close(y, whole)
    sluice.commit(draft, accepted)
    for row, n in enumerate(accepted.tolist()):
        other = layer.zero_states(1, state_layout=layout)
        layer(x[row : row + 1, : 7 + n], conv_state=other[0], state=other[1], state_layout=layout)
        close(conv[slots[row]], other[0][0], "conv state")
        close(state[slots[row]], other[1][0], "state")
    assert_same_bits(state[1], before[1][1], name="a slot of nobody")


def test_drafts_of_several_lengths_and_padding_are_verified_packed():
    layer, x = random_layer(), hidden(3, 4)
    conv, state = layer.zero_states(3)
    packed = torch.cat([x[0, :4], x[1, :1], x[2, :2]])
    bounds, slots = torch.tensor([0, 4, 5, 7]), torch.tensor([2, -1, 0])
    y, draft = layer.verify(packed, conv_state=conv, state=state, slots=slots, cu_seqlens=bounds)
    whole = layer(x)
    close(y[:4], whole[0])
    close(y[5:], whole[2, :2])
    assert not y[4].any()
    sluice.commit(draft, torch.tensor([4, 0, 1]))
    one = layer.zero_states(1)
    layer(x[:1], conv_state=one[0], state=one[1])
    close(state[2], one[1][0], "state")
    assert not state[1].any()


def test_one_commit_brings_all_layers_on():
    layer, x, accepted = random_layer(), hidden(3, 4), torch.tensor([0, 2, 4])
    sizes = {"num_v_heads": 4, "conv_channels": 128, "head_k_dim": 16, "head_v_dim": 16}
    pool = StatePool(PoolGeometry(layers=2, conv_dtype=torch.float32, **sizes), 5)
    pool.recurrent.normal_(generator=torch.Generator().manual_seed(2))
    pool.conv.normal_(generator=torch.Generator().manual_seed(3))
    slots, rows = torch.tensor([3, 0, 2]), torch.tensor([1, 2, 0])
    conv, state = pool.conv.clone(), pool.recurrent.clone()
    buffers = pool.draft_buffers(4, rows=3)
    for i in range(2):
        y, draft = layer.verify(x, conv_state=conv[i], state=state[i], slots=slots)
        sluice.commit(draft, accepted)
        own = dict(zip(("conv_state", "state"), pool.layer(i), strict=True))
        y2, _ = layer.verify(x, **own, slots=slots, buffers=buffers.layer(i), draft_slots=rows)
        assert_same_bits(y, y2, name="output")
    where = {"slots": slots, "draft_slots": rows}
    sluice.commit_layers(buffers, accepted, state=pool.recurrent, conv_state=pool.conv, **where)
    assert_same_bits(pool.recurrent, state, name="states")
    assert_same_bits(pool.conv, conv, name="windows")


def test_drafts_need_states():
    with pytest.raises(ContractError, match="state: expected a tensor"):
        random_layer().verify(hidden(1, 2), conv_state=None, state=None)
