"""Heads, widths, strides and shards: reliability rows 15, 16, 17 and 30."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sluice.testing import compare
from sluice.testing import inputs as draw
from sluice.testing.case import whole_storage
from tests import calls, serving
from tests.calls import OPS, Call, Shape, ask, make
from tests.serving import servers
from tests.suite import DEVICE, backends

NAN = float("nan")
POOLED = servers(*(op for op in OPS if op != "rms_norm_gated"))
TOKENS = {"prefill": 66}


@pytest.mark.parametrize("Hk", [1, 2, 3, 16])
@pytest.mark.parametrize("r", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("server", servers(*OPS))
def test_row_15_every_ratio_and_number_of_heads_is_exact(server, r, Hk):
    """Widths that no block divides."""
    shape = Shape(Hk=Hk, r=r, K=11, V=7, gates="mixed", order="interleaved" if r == 3 else "split")
    call = make(server.op, shape, 1, TOKENS.get(server.op, 2) if Hk < 16 else 2)
    expected = call.exact()
    serving.assert_exact(call, server.run(call), expected)


def as_views(call: Call) -> Call:
    """The same numbers as views of wider tensors, with NaN between them, and pools in pages."""
    rows = dict(call.rows)
    for names in (("q", "k", "v"), ("g", "beta"), ("b", "a"), ("x", "z"), ("qkvz",), ("ba",)):
        parts = [rows[name].double().cpu() for name in names if name in rows]
        found = [name for name in names if name in rows]
        if found:
            dtype = rows[found[0]].dtype
            views = draw.packed_views(parts, dtype, DEVICE, spare=5)
            rows |= dict(zip(found, views, strict=True))
    if "conv_inputs" in rows:
        x = rows["conv_inputs"]
        rows["conv_inputs"] = torch.stack([x, torch.full_like(x, NAN)], dim=-1)[..., 0]
    return replace(call, rows=rows)


@pytest.mark.parametrize("order", ["dl", "ld"])
@pytest.mark.parametrize("server", POOLED)
def test_row_16_views_of_a_projection_and_pages_of_a_pool_lose_no_update(server, order):
    """Both orders of the conv state; memory between rows keeps its bits."""
    shape = Shape(Hk=2, r=2, K=6, V=5, spare=1)
    plain = make(server.op, shape, 3, 4, P=5)
    if "num_accepted" in plain.rows:
        plain.rows["num_accepted"] = calls.index([4, 1, 3])
    call = as_views(plain)
    conv = server.op in ("causal_conv1d", "conv_qkv")
    for name, pool in plain.pools.items():
        inner = order if conv or name == "conv_state" else None
        call.pools = call.pools | {name: draw.padded_pool(pool, 9, inner)}
    inputs = {name: x.clone() for name, x in call.rows.items()}
    before = call.copy()
    slots = {"slots": calls.index([4, 0, 2], torch.int32)}
    expected, got = server.run(plain, **slots), server.run(call, **slots)
    for name, x in expected.items():
        serving.close(got[name], x, shape, name)
    for name, pool in plain.pools.items():
        serving.close(call.pools[name], pool, shape, name)
        rest = torch.ones_like(whole_storage(call.pools[name]), dtype=torch.bool)
        rest.as_strided(pool.shape, call.pools[name].stride())[[4, 0, 2]] = False
        now, then = whole_storage(call.pools[name]), whole_storage(before.pools[name])
        compare.assert_same_bits(now[rest], then[rest], f"{name} between and beside the rows")
        assert not torch.equal(pool[4], before.pools[name][4]), f"{name}: the update was lost"
    for name, x in inputs.items():
        compare.assert_same_bits(call.rows[name], x, f"input {name}")


@pytest.mark.parametrize("backend", backends("step"))
def test_row_16_pairs_that_are_views_are_the_packed_projection(backend):
    call = make("step", Shape(Hk=2, r=3, K=6, V=5), 3, 2)
    pairs = call.copy()
    s, wide = call.shape, as_views(call).rows
    qkvz, ba = wide["qkvz"], wide["ba"]
    pairs.rows = {"qkvz": (qkvz[..., : s.D], qkvz[..., s.D :]), "ba": (ba[..., :6], ba[..., 6:])}
    serving.close(pairs.run(backend)["o"], call.run(backend)["o"], s, "y")
    for name, pool in call.pools.items():
        serving.close(pairs.pools[name], pool, s, name)


def layer(call: Call, backend: str) -> Tensor:
    """conv_qkv, then decode, as a rank runs them between its projections."""
    q, k, v, g, beta = ask("conv_qkv", backend, **call.rows, **call.fixed, **call.pools)
    o, _ = ask("decode", serving.beside(backend, "decode"), q, k, v, g, beta)
    return o


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backend", backends("conv_qkv"))
def test_row_17_conv_channels_are_sharded_by_section_and_recombine_exactly(backend, ranks):
    """Q, K and V are each divided by heads, in weights and windows."""
    shape = Shape(Hk=4, r=2, K=6, V=5)
    whole = make("conv_qkv", shape, 2, 4)
    shards = [whole.shard(rank, ranks) for rank in range(ranks)]
    expected = layer(whole, backend)
    got = torch.cat([layer(shard, backend) for shard in shards], dim=2)
    compare.assert_same_bits(got, expected, "o of all ranks")
    for rank, shard in enumerate(shards):
        mine = calls.sections(whole.pools["state"], 1, shape.qkv, rank, ranks)
        compare.assert_same_bits(shard.pools["state"], mine, f"window of rank {rank}")
    parts = [shard.pools["state"].split([n // ranks for n in shape.qkv], 1) for shard in shards]
    joined = torch.cat([x for section in zip(*parts, strict=True) for x in section], dim=1)
    compare.assert_same_bits(joined, whole.pools["state"], "window of all ranks")


@pytest.mark.parametrize("name", ["state", "weight", "bias", "x"])
@pytest.mark.parametrize("backend", backends("conv_qkv"))
def test_row_17_channels_sharded_as_one_block_are_noticed(backend, name):
    """The fault: [q | k | v] cut into equal ranges gives a rank the channels of another."""
    shape, ranks = Shape(Hk=4, r=2, K=6, V=5), 4
    whole = make("conv_qkv", shape, 2, 4)
    shards = [whole.shard(rank, ranks) for rank in range(ranks)]
    for rank, shard in enumerate(shards):
        source: Any = shard.pools if name == "state" else shard.rows if name == "x" else shard.fixed
        everything = {**whole.rows, **whole.fixed, **whole.pools}[name]
        dim = {"state": 1, "x": 2}.get(name, 0)
        source[name] = everything.chunk(ranks, dim)[rank].contiguous()
    expected = layer(whole, backend)
    got = torch.cat([layer(shard, backend) for shard in shards], dim=2)
    assert compare.relative_error(got, expected.double()) > 0.05


WIDTHS = (32, 48, 64, 96, 128, 192, 256)


@pytest.mark.parametrize("K", WIDTHS)
@pytest.mark.parametrize("server", servers(*OPS))
def test_row_30_head_widths_from_32_to_256_are_exact(server, K):
    for V in (32, 80, 256):
        shape = Shape(Hk=1, r=2, K=K, V=V, keys="correlated")
        call = make(server.op, shape, 1, TOKENS.get(server.op, 3))
        expected = call.exact()
        serving.assert_exact(call, server.run(call), expected)


@pytest.mark.parametrize(("K", "V"), [(264, 8), (8, 264), (520, 512), (1030, 4)])
@pytest.mark.parametrize("server", servers(*OPS))
def test_row_30_wider_heads_are_exact_or_refused_with_a_reason(server, K, V):
    call = make(server.op, Shape(Hk=1, r=1, K=K, V=V), 1, 2)
    expected = call.exact()
    if reasons := serving.refusals(server.backend, call):
        assert any(str(n) in reason for n in (K, V) for reason in reasons), reasons
    else:
        serving.assert_exact(call, server.run(call), expected)
