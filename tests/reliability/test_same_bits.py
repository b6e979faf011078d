"""Bits do not depend on other calls or rows: reliability rows 11, 13, 21 and 23."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice.testing import compare
from tests import calls, serving
from tests.calls import FLOATS, OPS, Shape, ask, make
from tests.serving import Server, servers
from tests.suite import DEVICE

SHAPE = Shape(Hk=2, r=2, K=12, V=8)
PACKED = servers("prefill", "decode", "verify", "causal_conv1d", "conv_qkv")
INVARIANT = [server for server in servers(*OPS) if server.values[0].invariant]


@pytest.fixture(params=(1, 2), ids=("one_thread", "two_threads"))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many threads torch uses; they must not divide a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def run_twice_from_the_same_state() -> None:
    """Every operator on every backend, the first time in this process and once more."""
    for parameter in servers(*OPS):
        server: Server = parameter.values[0]
        first = make(server.op, SHAPE, 2, 3)
        second, untouched = first.copy(), first.copy()
        outputs = server.run(first)
        again = server.run(second)
        for name, x in outputs.items():
            compare.assert_same_bits(again[name], x, f"{server}: {name}")
        for name, pool in first.pools.items():
            compare.assert_same_bits(second.pools[name], pool, f"{server}: {name}")
        serving.assert_exact(first, outputs, untouched.exact())


def test_row_11_the_first_call_of_a_process_updates_the_state_once():
    """In a new process, where everything that compiles or tunes does so for the first time."""
    code = f"from {__name__} import {run_twice_from_the_same_state.__name__} as f; f()"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("server", INVARIANT)
def test_row_13_bits_do_not_depend_on_batch_mates_or_local_heads(server, threads):
    """16 heads as 4 ranks of 4, and 3 rows one by one; large enough for several threads."""
    shape = Shape(Hk=16, r=1, K=128, V=32, gates="mixed")
    batch = make(server.op, shape, 3, 3)
    alone, ranks = batch.copy(), [batch.shard(rank, 4) for rank in range(4)]
    expected = server.run(batch)
    for i in range(3):
        options = {"slots": calls.index([i])} if batch.pools else {}
        for name, x in server.run(alone.pick(slice(i, i + 1)), **options).items():
            compare.assert_same_bits(x, expected[name][i : i + 1], f"{name} of row {i} alone")
    for name, pool in batch.pools.items():
        compare.assert_same_bits(alone.pools[name], pool, f"{name} of rows alone")
    for rank, part in enumerate(ranks):
        outputs = server.run(part)
        for name, x in expected.items():
            sizes = shape.qkv if server.op == "causal_conv1d" else (x.shape[2],)
            mine = calls.sections(x, 2, sizes, rank, 4)
            compare.assert_same_bits(outputs[name], mine, f"{name} of rank {rank}")
        for name, pool in batch.shard(rank, 4).pools.items():
            compare.assert_same_bits(part.pools[name], pool, f"{name} of rank {rank}")


@pytest.mark.parametrize("server", servers(*OPS))
def test_row_21_dtypes_interleaved_in_one_process_are_each_exact(server):
    """Twice over all pairs of dtypes: a cached kernel of one must not serve another."""
    kept: dict[Any, dict[str, torch.Tensor]] = {}
    pairs = [*product(FLOATS, FLOATS), (torch.float64, torch.float64)]
    for repeat, (dtype, state_dtype) in product(range(2), pairs):
        shape = replace(SHAPE, dtype=dtype, state_dtype=state_dtype)
        call = make(server.op, shape, 2, 3)
        if serving.refusals(server.backend, call):
            continue
        expected = call.exact()
        outputs = server.run(call)
        serving.assert_exact(call, outputs, expected)
        for name, x in outputs.items():
            wide = server.op == "conv_qkv" and name in ("g", "beta")
            assert x.dtype == (torch.promote_types(dtype, torch.float32) if wide else dtype)
        results = {**outputs, **{f"pool {name}": x for name, x in call.pools.items()}}
        if repeat:
            for name, x in kept[dtype, state_dtype].items():
                compare.assert_same_bits(results[name], x, f"{name}, {dtype}, {state_dtype}")
        kept[dtype, state_dtype] = {name: x.clone() for name, x in results.items()}
    assert len(kept) >= 4, f"too few dtypes are served: {list(kept)}"


@pytest.mark.parametrize("server", servers(*OPS))
def test_row_21_two_outputs_never_share_memory(server):
    """Neither with each other nor with an input; a later call does not change them."""
    first, second = make(server.op, SHAPE, 2, 3, seed=1), make(server.op, SHAPE, 2, 3, seed=2)
    outputs = server.run(first)
    copies = {name: x.clone() for name, x in outputs.items()}
    later = server.run(second)
    given = [*first.rows.values(), *first.fixed.values(), *first.pools.values()]
    tensors = [*outputs.values(), *later.values()]
    tensors += [x for x in given if isinstance(x, torch.Tensor)]
    addresses = [x.untyped_storage().data_ptr() for x in tensors]
    made = len(outputs) + len(later)
    for i, address in enumerate(addresses[:made]):
        assert addresses.count(address) == 1, f"output {i} shares memory"
    for name, x in copies.items():
        compare.assert_same_bits(outputs[name], x, f"{name} after another call")


@pytest.mark.parametrize("server", servers("verify"))
def test_row_21_two_drafts_never_share_memory(server):
    """Two batches may be verified before either is committed."""
    batches = [make("verify", SHAPE, 2, 3, seed=seed) for seed in (1, 2)]
    expected = [call.copy() for call in batches]
    drafts = []
    for call in (*batches, *expected):
        call.rows["num_accepted"] = calls.index([3, 2])
    for call in batches:
        rows = {name: x for name, x in call.rows.items() if name != "num_accepted"}
        drafts.append(ask("verify", server.backend, **rows, **call.fixed, **call.pools)[1])
    for call, draft in zip(batches, drafts, strict=True):
        ask("commit", server.backend, draft, call.rows["num_accepted"])
    for call, one in zip(batches, expected, strict=True):
        server.run(one)
        for name, pool in call.pools.items():
            compare.assert_same_bits(pool, one.pools[name], name)


@pytest.mark.parametrize("host", [False, True], ids=("device", "host"))
@pytest.mark.parametrize("server", PACKED)
def test_row_23_index_tensors_changed_in_place_are_read_again(server, host):
    """The same tensors with other values: no value may be cached."""
    new = torch.tensor
    index = {
        "slots": (new([0, 1, 2]), new([3, 0, 1])),
        "write_slots": (new([0, 4, 2]), new([3, 2, 5])),
        "has_state": (new([True, True, False]), new([False, True, True])),
        "cu_seqlens": (new([0, 2, 5, 9]), new([0, 4, 4, 7])),
    }
    if host or DEVICE != "cpu":
        index["cu_seqlens_cpu"] = index["cu_seqlens"]
    if server.op == "verify":
        index["num_accepted"] = (new([2, 1, 4]), new([0, 0, 3]))
    place = {name: "cpu" if name == "cu_seqlens_cpu" else DEVICE for name in index}
    kept = {name: x[0].clone().to(place[name]) for name, x in index.items()}
    call = make(server.op, SHAPE, 1, 9, P=6)
    for turn in (0, 1, 0):
        for name, x in kept.items():
            x.copy_(index[name][turn])
        fresh = {name: x[turn].clone().to(place[name]) for name, x in index.items()}
        same, other = call.copy(), call.copy()
        got, expected = server.run(same, **kept), server.run(other, **fresh)
        for name, x in got.items():
            compare.assert_same_bits(x, expected[name], f"{name}, turn {turn}")
        for name, pool in same.pools.items():
            compare.assert_same_bits(pool, other.pools[name], f"{name}, turn {turn}")
        live = [int(i) for i in index["write_slots"][turn]]
        serving.assert_exact(same, got, call.exact(**fresh), live)
