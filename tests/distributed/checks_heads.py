"""Checks of heads over ranks, and of state that moves between divisions; every rank runs them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from sluice.distributed import (
    HeadParallel,
    Ranks,
    Split,
    forward,
    gather_weights,
    join_weights,
    move,
    parallelize,
    plan,
    reshard,
    whole_shape,
)
from sluice.layers import GatedDeltaNet, QwenShape, shard_weights
from sluice.state_geometry import GeometryError
from sluice.state_pool import PoolGeometry, StatePool, StateSnapshot
from sluice.testing.compare import FLOAT32_CPU, assert_same_bits, assert_within

HIDDEN = 24


def shape(order: str = "split", r: int = 2, HK: int = 4) -> QwenShape:
    return QwenShape("small", HIDDEN, HK, HK * r, 1, (0,), head_k_dim=16, head_v_dim=8, order=order)


def whole_layer(s: QwenShape, seed: int = 0) -> GatedDeltaNet:
    torch.manual_seed(seed)
    layer = GatedDeltaNet(s)
    nn.init.uniform_(layer.A_log, -5.0, 0.0)  # weak decay
    nn.init.normal_(layer.norm.weight, mean=1.0, std=0.1)
    return layer.requires_grad_(False)


def exact_products(layer: GatedDeltaNet) -> Tensor:
    """Make projections sums of small integers, which are exact in any order; returns an input."""
    for name, child in layer.named_children():
        if name.startswith("in_proj"):
            child.weight.copy_(torch.randint(-4, 5, child.weight.shape) / 16)
    return torch.randint(-4, 5, (2, 70, HIDDEN)) / 4


def value_heads(layer: GatedDeltaNet, x: Tensor, **states: Tensor) -> Tensor:
    """The input of the layer's output projection: [B, T, HV V]."""
    seen: list[Tensor] = []
    hook = layer.out_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    layer(x, **states, batch_invariant=True)
    hook.remove()
    return seen[0]


def heads_have_the_bits_of_one_device(rank: int, size: int) -> None:
    """Prefill, then decode, in both orders and with r of 1 and 3: outputs and both states."""
    ranks = Ranks(timeout=30)
    for order in ("split", "interleaved"):
        for r in (1, 3):
            layer = whole_layer(shape(order, r))
            x = exact_products(layer)
            mine = parallelize(copy.deepcopy(layer), None, ranks=ranks)
            names = ("conv_state", "state")
            whole_states = dict(zip(names, layer.zero_states(2), strict=True))
            own_states = dict(zip(names, mine.zero_states(2), strict=True))
            for at in (slice(0, 67), slice(67, 70)):  # prefill, and one step of three tokens
                whole = value_heads(layer, x[:, at], **whole_states)
                own = value_heads(mine, x[:, at], **own_states)
                assert_same_bits(own, whole.chunk(size, -1)[rank].contiguous(), f"{order} {at}")
            state = whole_states["state"].chunk(size, 1)[rank].contiguous()
            assert_same_bits(own_states["state"], state, "state")
            s = layer.shape
            parts = whole_states["conv_state"].split([s.key_dim, s.key_dim, s.value_dim], 1)
            window = torch.cat([part.chunk(size, 1)[rank] for part in parts], 1)
            assert_same_bits(own_states["conv_state"], window, "conv state")


def the_sum_over_ranks_is_the_layer(rank: int, size: int) -> None:
    ranks = Ranks(timeout=30)
    for order in ("split", "interleaved"):
        layer = whole_layer(shape(order))
        mine = parallelize(copy.deepcopy(layer), None, ranks=ranks)
        x = torch.randn(2, 70, HIDDEN)
        ranks.exchanges.clear()
        y = mine(x)
        assert_within(y, layer(x).double(), FLOAT32_CPU, name=order)
        assert ranks.costs()["heads.output"].calls == 1, "one all-reduce a layer"
        every = ranks.all_gather("test", y)
        assert_same_bits(every[0], every[-1], "all ranks have the same output")


def weights_divide_load_and_join_exactly(rank: int, size: int) -> None:
    ranks = Ranks(timeout=30)
    for order in ("split", "interleaved"):
        layer, other = whole_layer(shape(order)), whole_layer(shape(order), seed=1)
        whole = copy.deepcopy(layer.state_dict())
        mine = parallelize(layer, None, ranks=ranks)
        assert whole_shape(mine) == shape(order)
        assert mine.shape == shape(order).shard(size)
        share = copy.deepcopy(mine.state_dict())
        gathered = gather_weights(mine)
        shares: list[dict[str, Tensor]] = [{} for _ in range(size)]
        for name, x in share.items():
            for r, part in enumerate(ranks.all_gather("test", x)):
                shares[r][name] = part
        joined = join_weights(shares, shape(order))
        for name, x in whole.items():
            assert_same_bits(gathered[name], x, name)
            assert_same_bits(joined[name], x, name)
        # a whole checkpoint loads, into the layer and into a model that holds it
        model = nn.ModuleDict({"a": nn.ModuleDict({"linear_attn": mine})})
        full = {f"a.linear_attn.{name}": x for name, x in other.state_dict().items()}
        model.load_state_dict(full)
        for name, x in gather_weights(mine).items():
            assert_same_bits(x, other.state_dict()[name], f"{name}, loaded")
        mine.load_state_dict(share)  # and so does a share
        for name, x in gather_weights(mine).items():
            assert_same_bits(x, whole[name], f"{name}, loaded again")
    empty = parallelize(GatedDeltaNet(shape(), device="meta"), None, ranks=ranks)
    empty.load_state_dict(other_weights(), assign=True)
    for name, x in gather_weights(empty).items():
        assert_same_bits(x, other_weights()[name], f"{name}, from meta")


def other_weights() -> dict[str, Tensor]:
    return whole_layer(shape(), seed=2).state_dict()


def a_plan_divides_a_model(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    layers = [whole_layer(shape(order)) for order in ("split", "interleaved")]
    model = nn.Sequential(layers[0], nn.Linear(HIDDEN, HIDDEN), layers[1]).requires_grad_(False)
    x = torch.randn(1, 20, HIDDEN)
    expected = model(x)
    styles = plan(model, timeout=30)
    assert set(styles) == {"0", "2"}
    parallelize_module(model, mesh["tp"], styles)
    assert model[2].shape.num_k_heads * size == 4
    assert_within(model(x), expected.double(), FLOAT32_CPU, name="model")
    one = whole_layer(shape())
    expected = one(x)
    one = parallelize_module(one, mesh, HeadParallel(timeout=30))
    assert_within(one(x), expected.double(), FLOAT32_CPU, name="layer")


def heads_and_sequences_at_once(rank: int, size: int) -> None:
    """A mesh of two dimensions: heads over one, tokens over the other."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("cp", "tp"))
    layer = whole_layer(shape())
    split = Split.even(150, size // 2, (0, 100, 150))
    x = torch.randn(150, HIDDEN)
    expected = layer(x, cu_seqlens=torch.tensor([0, 100, 150]))
    mine = parallelize(layer, mesh["tp"], timeout=30)
    ranks = Ranks(mesh["cp"], timeout=30)
    part = split.part(ranks.rank)
    y = forward(mine, x[part.start : part.stop], ranks=ranks, split=split)
    assert_within(y, expected[part.start : part.stop].double(), FLOAT32_CPU, name="y")


def transformers_layers_are_divided(rank: int, size: int) -> None:
    """A stock layer, divided and accelerated, with a cache that holds this rank's heads only."""
    if size > 2:
        return  # two ranks are enough: importing transformers takes longer than all the rest
    try:
        from transformers import DynamicCache
    except ImportError:
        return
    from sluice.integrations.transformers import accelerate
    from tests import models

    ranks = Ranks(timeout=30)
    for family in ("qwen3_next", "qwen3_5"):
        stock = models.stock_layer(family, HK=4)
        whole = accelerate(copy.deepcopy(stock))
        mine = accelerate(parallelize(stock, None, ranks=ranks))
        caches = [DynamicCache(config=models.config(family, HK=4)) for _ in range(2)]
        for T in (40, 1, 3):
            x = torch.randn(1, T, 48, generator=torch.Generator().manual_seed(T))
            expected = whole(x, cache_params=caches[0])
            y = mine(x, cache_params=caches[1])
            assert_within(y, expected.double(), FLOAT32_CPU, name=f"{family} {T}")
        state = caches[1].get_recurrent_state(0)
        assert state.shape[1] * size == caches[0].get_recurrent_state(0).shape[1]


def full_snapshot(g: PoolGeometry, n: int = 3) -> StateSnapshot:
    """Arbitrary bits, including NaN: moving must copy them."""
    gen = torch.Generator().manual_seed(7)

    def bits(*size: int, dtype: torch.dtype) -> Tensor:
        raw = torch.randint(0, 256, (*size, dtype.itemsize), dtype=torch.uint8, generator=gen)
        return raw.view(dtype).squeeze(-1)

    lead = (g.layers, n)
    conv = bits(*lead, *g.conv_shape, dtype=g.conv_dtype)
    return StateSnapshot(g, conv, bits(*lead, *g.state_shape, dtype=g.state_dtype))


def geometry(dtype: torch.dtype = torch.bfloat16) -> PoolGeometry:
    s = shape(r=3)
    return PoolGeometry(2, s.num_v_heads, s.conv_channels, 16, 8, state_dtype=dtype, tag="test")


def state_moves_between_divisions(rank: int, size: int) -> None:
    ranks = Ranks(timeout=30)
    everyone = list(range(size))
    for sources, targets in (
        (everyone, [0]),
        ([size - 1], everyone),
        (everyone, everyone[::-1]),
        (everyone, everyone[1::2]),
        (everyone[: size // 2], everyone),
        ([0], [1]),
    ):
        for dtype in (torch.bfloat16, torch.float32):
            whole = full_snapshot(geometry(dtype))
            before, after = reshard([whole], len(sources)), reshard([whole], len(targets))
            have = before[sources.index(rank)] if rank in sources else None
            expected = after[targets.index(rank)] if rank in targets else None
            got = move(
                have,
                ranks=ranks,
                sources=sources,
                targets=targets,
                geometry=None if expected is None else expected.geometry,
            )
            assert (got is None) == (expected is None)
            if got is not None and expected is not None:
                assert got.geometry == expected.geometry
                assert_same_bits(got.conv, expected.conv, "conv")
                assert_same_bits(got.recurrent, expected.recurrent, "recurrent")


def a_pool_moves_from_prefill_to_decode(rank: int, size: int) -> None:
    """Half the ranks prefill; the others continue the same sequences in their own pools."""
    ranks = Ranks(timeout=30)
    sources = list(range(size // 2))
    targets = list(range(size // 2, size))
    g = geometry(torch.float32).resharded(1, size // 2)
    pool = StatePool(g, slots=6, conv_order="ld" if rank in targets else "dl")
    snapshot = None
    if rank in sources:
        pool.restore(reshard([full_snapshot(geometry(torch.float32))], len(sources))[rank])
        snapshot = pool.snapshot([2, 0])
    moved = move(snapshot, ranks=ranks, sources=sources, targets=targets, geometry=pool.geometry)
    if moved is not None:
        slots = pool.restore(moved)
        share = reshard([full_snapshot(geometry(torch.float32))], len(targets))[rank - size // 2]
        kept = pool.snapshot(slots)
        assert_same_bits(kept.conv, share.conv[:, [2, 0]], "conv")
        assert_same_bits(kept.recurrent, share.recurrent[:, [2, 0]], "recurrent")


def another_geometry_is_refused_on_every_rank(rank: int, size: int) -> None:
    ranks = Ranks(timeout=30)
    sources, targets = list(range(size // 2)), [size - 1]
    have = reshard([full_snapshot(geometry())], len(sources))
    wrong = geometry(torch.float32) if rank in targets else None
    mine = have[rank] if rank in sources else None
    with pytest.raises(GeometryError) as caught:
        move(mine, ranks=ranks, sources=sources, targets=targets, geometry=wrong)
    assert "state_dtype: expected torch.float32, got torch.bfloat16" in str(caught.value)
    assert f"rank {size - 1}" in str(caught.value)
    ranks.agree("still in step", {})


@torch.enable_grad()
def gradients_of_divided_heads_equal_those_of_the_whole_layer(rank: int, size: int) -> None:
    layer = whole_layer(shape()).double().requires_grad_()
    torch.manual_seed(1)
    x, weight = torch.randn(2, 30, HIDDEN).double(), torch.randn(2, 30, HIDDEN).double()
    part = parallelize(copy.deepcopy(layer), None)
    found = []
    for one in (layer, part):
        leaf = x.clone().requires_grad_()
        (one(leaf) * weight).sum().backward()
        found.append(leaf.grad)
    assert_within(found[1], found[0], 1e-10, name="dx")
    assert_within(part.norm.weight.grad, layer.norm.weight.grad, 1e-10, name="norm")
    grads = {name: p.grad for name, p in layer.named_parameters()}
    mine = shard_weights(grads, shape(), rank=rank, tp=size)
    for name, p in part.named_parameters():
        assert_within(p.grad, mine[name], 1e-10, name=name)


CHECKS = (
    gradients_of_divided_heads_equal_those_of_the_whole_layer,
    heads_have_the_bits_of_one_device,
    the_sum_over_ranks_is_the_layer,
    weights_divide_load_and_join_exactly,
    a_plan_divides_a_model,
    heads_and_sequences_at_once,
    transformers_layers_are_divided,
    state_moves_between_divisions,
    a_pool_moves_from_prefill_to_decode,
    another_geometry_is_refused_on_every_rank,
)
