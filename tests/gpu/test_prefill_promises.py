"""What prefill promises on a GPU: the same bits, no waiting, graphs, large sizes, warm-up."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import sluice
from sluice.layers import QwenShape
from sluice.model_calls import ModelCalls
from sluice.testing import compare
from tests.gpu.compiled import variants
from tests.gpu.prompts import BACKENDS, FP32, Prompts
from tests.gpu.sizes import Sliced, every_size, run_layer

pytestmark = pytest.mark.gpu


SIZES = {
    "split": ((2, 8), [4096]),
    "whole": ((16, 32), [1024]),
    "many": ((16, 32), [256] * 8),
    "ragged": ((4, 4), [100, 1000, 37, 64, 0, 1, 2000]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SIZES)
def test_row_1_a_thousand_repeats_give_the_same_bits(backend, name):
    (HK, HV), lengths = SIZES[name]
    prompts = Prompts(lengths, HK, HV)
    o, state = prompts.once(backend)
    assert torch.isfinite(o).all()
    different = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(1000):
        o_again, state_again = prompts.once(backend)
        different += (o_again != o).any() | (state_again != state).any()
    assert int(different) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_3_a_graph_replays_with_other_lengths_in_the_same_buffers(backend):
    prompts = Prompts([300, 20, 704], T=1024)
    pool = prompts.pool.clone()
    prompts.run(pool, backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = prompts.run(pool, backend)
    for lengths in ([300, 20, 704], [0, 1000, 24], [64, 64, 512], [1, 0, 129]):
        prompts.set_lengths(lengths)
        pool.copy_(prompts.pool)
        graph.replay()
        got, got_pool = o.clone(), pool.clone()
        expected, expected_pool = prompts.once(backend)
        compare.assert_same_bits(got, expected, f"o of {lengths}")
        compare.assert_same_bits(got_pool, expected_pool, f"state of {lengths}")
        assert not got[sum(lengths) :].any(), "tokens of no sequence"


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_31_prefill_does_not_wait_for_the_device(backend):
    prompts = Prompts([3000, 50], 2, 8)
    prompts.run(prompts.pool, backend)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        prompts.run(prompts.pool, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_streams_at_once_have_the_bits_of_one(backend):
    """Reliability row 22."""
    calls = [Prompts([700, 333], seed=seed) for seed in (1, 2)]
    alone = [prompts.once(backend) for prompts in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(100):
        found = []
        for prompts, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(prompts.once(backend))
        torch.cuda.synchronize()
        for got, expected in zip(found, alone, strict=True):
            assert torch.equal(got[0], expected[0])
            assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_depend_on_its_batch_when_asked(backend):
    """Reliability row 13: neither other sequences nor the number of heads changes a bit."""
    lengths = [2000, 300, 50, 4000, 1]
    prompts = Prompts(lengths, 4, 8)
    o, pool = prompts.once(backend, batch_invariant=True)
    start = 0
    for i, length in enumerate(lengths):
        alone = Prompts([length], 4, 8)
        alone.tokens = {n: x[start : start + length] for n, x in prompts.tokens.items()}
        alone.rates, alone.pool = prompts.rates, prompts.pool[i : i + 3]
        got, state = alone.once(backend, batch_invariant=True)
        compare.assert_same_bits(got, o[start : start + length], f"o of sequence {i}")
        compare.assert_same_bits(state[1], pool[i + 1], f"state of sequence {i}")
        half = Prompts([length], 2, 4)  # the first half of the heads, as on one of two ranks
        half.tokens = {n: x[:, : x.shape[1] // 2] for n, x in alone.tokens.items()}
        half.rates = {n: x[:4] for n, x in prompts.rates.items()}
        half.pool = alone.pool[:, :4].contiguous()
        got, _ = half.once(backend, batch_invariant=True)
        compare.assert_same_bits(got, o[start : start + length, :4], f"half the heads of {i}")
        start += length


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_prompt_is_its_parts_one_after_the_other(backend):
    """More chunks than the kernels look ahead for hard ones (256), and some hard ones."""
    whole = Prompts([20_000], 2, 4)
    for begin in (6_400, 12_736, 17_000):
        whole.tokens["k"][begin : begin + 200] = whole.tokens["k"][begin]
    o, pool = whole.once(backend, batch_invariant=True)
    before, found = whole.pool, []
    for begin, end in itertools.pairwise((0, 6_464, 12_800, 20_000)):
        part = Prompts([end - begin], 2, 4)
        part.tokens = {name: x[begin:end].clone() for name, x in whole.tokens.items()}
        part.rates, part.pool = whole.rates, before
        o_part, before = part.once(backend, batch_invariant=True)
        found.append(o_part)
    compare.assert_same_bits(torch.cat(found), o, "o")
    compare.assert_same_bits(before[1], pool[1], "state")


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_5_tokens_past_two_to_the_31_elements(backend):
    """A short sequence whose values and outputs lie beyond 2**31 elements."""
    HK, HV, far, length = 1, 8, 2**21 + 64, 300
    prompts = Prompts([far, length], HK, HV)
    prompts.slots[0] = -1  # padding, whose zeros are quick
    assert prompts.tokens["v"].numel() > 2**31
    near = Prompts([length], HK, HV)
    near.tokens = {n: x[far:].clone() for n, x in prompts.tokens.items()}
    near.rates, near.pool = prompts.rates, prompts.pool[1:]
    o, pool = prompts.once(backend, batch_invariant=True)
    expected, expected_pool = near.once(backend, batch_invariant=True)
    assert not o[:far].any()
    compare.assert_same_bits(o[far:], expected, "o")
    compare.assert_same_bits(pool[2], expected_pool[1], "state")


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_9_more_programs_than_a_grid_has_in_y_and_z(backend):
    """9,000 sequences of 8 heads equal 9 sequences repeated a thousand times."""
    lengths = [1, 2, 70, 64, 0, 3, 65, 5, 10]
    few = Prompts(lengths)
    many = Prompts(lengths * 1000)
    many.tokens = {n: torch.cat([x] * 1000) for n, x in few.tokens.items()}
    many.rates = few.rates
    many.pool = torch.cat((few.pool[:1], few.pool[1:10].repeat(1000, 1, 1, 1), few.pool[:1]))
    o, pool = few.once(backend, batch_invariant=True)
    o_many, pool_many = many.once(backend, batch_invariant=True)
    compare.assert_same_bits(o_many, o.repeat(1000, 1, 1), "o")
    compare.assert_same_bits(pool_many[1:9001], pool[1:10].repeat(1000, 1, 1, 1), "state")


def test_row_10_after_warmup_a_serving_process_compiles_nothing():
    shape = QwenShape("small", 256, 4, 8, 4, (0, 1, 2))
    sluice.warmup(shape)
    before = variants()
    for model in (ModelCalls(shape, device="cuda"), Sliced(shape, device="cuda")):
        for call in every_size(model):
            call.run()
    run_layer(ModelCalls(shape, device="cuda"))
    for lengths in ([20], [1], [2] * 9, [77], [5000], [30000], [1000] * 5, [3, 90, 4000]):
        prompts = Prompts(lengths, 4, 8)
        rows = {"slots": prompts.slots, "cu_seqlens": prompts.bounds}
        new = torch.zeros(len(lengths), dtype=torch.bool, device="cuda")
        sluice.prefill(**served(prompts.tokens), **rows, has_state=new, state=prompts.pool)
    assert variants() == before


def served(inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs as conv_qkv returns them, with gates in float32; slots in int64."""
    kept = ("q", "k", "v", "g", "beta", "slots")
    kinds = {"g": FP32, "beta": FP32, "slots": torch.int64}
    return {n: x.to(kinds.get(n, x.dtype)) for n, x in inputs.items() if n in kept}
