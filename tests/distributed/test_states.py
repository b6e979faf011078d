"""State moved from one number of ranks to another: bit for bit, by sections, or refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from sluice.contract.errors import ContractError
from sluice.distributed import reshard
from sluice.distributed.states import overlaps
from sluice.layers import QwenShape, shard_channels
from sluice.state_geometry import GeometryError, PoolGeometry, StateSnapshot

HK, R, K, V, LAYERS = 12, 3, 4, 5, 2
SHAPE = QwenShape("s", 8, HK, HK * R, LAYERS, (0, 1), head_k_dim=K, head_v_dim=V)
DIVISORS = (1, 2, 3, 4, 6, 12)


def snapshot(n=3, **change):
    """Every element is a different number, so that a wrong place shows."""
    g = PoolGeometry.for_model(SHAPE, conv_dtype=torch.float32, conv_columns=4, **change)
    sizes = (LAYERS, n, *g.conv_shape), (LAYERS, n, *g.state_shape)
    conv, state = (torch.arange(torch.Size(size).numel()).view(size) for size in sizes)
    return StateSnapshot(g, conv.to(g.conv_dtype), state.to(g.state_dtype))


def shares(whole, tp):
    """A share made by the layer's own rule for conv channels, and by heads."""
    made = []
    for rank in range(tp):
        conv = shard_channels(whole.conv, SHAPE, rank=rank, tp=tp, dim=2)
        state = whole.recurrent.chunk(tp, 2)[rank]
        g = PoolGeometry.for_model(SHAPE, tp=tp, conv_dtype=torch.float32, conv_columns=4)
        made.append(StateSnapshot(g, conv, state))
    return made


@pytest.mark.parametrize(("tp", "to"), [*itertools.product(DIVISORS, DIVISORS)])
def test_shares_of_one_division_become_those_of_another(tp, to):
    whole = snapshot()
    for got, expected in zip(reshard(shares(whole, tp), to), shares(whole, to), strict=True):
        assert got.geometry == expected.geometry
        assert got.geometry.digest == expected.geometry.digest
        assert torch.equal(got.conv, expected.conv)
        assert torch.equal(got.recurrent, expected.recurrent)


@pytest.mark.parametrize(("tp", "to"), [*itertools.product(DIVISORS, DIVISORS)])
def test_every_head_moves_once_from_where_it_is_to_where_it_belongs(tp, to):
    moved = {}
    for o in overlaps(HK, tp, to):
        for have, need in zip(o.have, o.need, strict=True):
            head = o.source * HK // tp + have
            assert head not in moved
            moved[head] = o.target * HK // to + need
    assert moved == {head: head for head in range(HK)}


def test_a_share_of_no_sequences_moves():
    assert [len(share) for share in reshard(shares(snapshot(0), 4), 2)] == [0, 0]


def test_shares_that_differ_are_refused():
    whole = snapshot()
    odd = snapshot(tag="another model")
    with pytest.raises(GeometryError, match="tag: expected '', got 'another model'"):
        reshard([whole, odd], 1)
    with pytest.raises(GeometryError, match="expected 3 sequences, got 2"):
        reshard([whole, snapshot(2)], 1)
    with pytest.raises(ContractError, match="at least one"):
        reshard([], 1)


def test_ranks_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(ContractError, match="ranks that divide 12 key heads, got 5"):
        reshard([snapshot()], 5)
    with pytest.raises(ContractError, match="ranks that divide 12 key heads, got 0"):
        reshard([snapshot()], 0)


def test_key_heads_follow_from_the_conv_channels():
    assert snapshot().geometry.num_k_heads == HK
    for model, tp, heads in (("qwen3.5-27b", 4, 4), ("qwen3.5-0.8b", 16, 1)):
        assert PoolGeometry.for_model(model, tp=tp).num_k_heads == heads
    with pytest.raises(GeometryError, match="num_k_heads"):
        _ = PoolGeometry(layers=1, num_v_heads=2, conv_channels=8).num_k_heads
