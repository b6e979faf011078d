"""Checkpoints on a GPU: a prefix-cache hit equals a miss, bit for bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import sluice
from sluice.testing import compare
from tests import checkpoint_bits
from tests.gpu.prompts import BACKENDS, Prompts

pytestmark = pytest.mark.gpu
LENGTHS = [2000, 300, 0, 64, 4000, 1]
ASKED = [0, 1, 63, 64, 65, 128, 191, 700, 1999, 2000, -1, 3000]


def kept(every: int | None) -> list[list[int]]:
    """Positions of each sequence's checkpoints; -1 for those that it is too short for."""
    if every is None:
        return [[x if x <= length else -1 for x in ASKED] for length in LENGTHS]
    columns = max(LENGTHS) // every
    return [
        [j * every if j * every <= length else -1 for j in range(1, columns + 1)]
        for length in LENGTHS
    ]


KINDS = [
    (backend, every)
    for backend in BACKENDS
    for every in (64, 256, 50, None)
    if backend == "hopper" or every in (64, 256)
]
"""Triton's kernels have these bits where checkpoints lie between chunks of 64 tokens."""


@pytest.mark.parametrize("size", [(16, 16), (32, 16), (40, 33), (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("per_key", [False, True], ids=["decay per head", "per key"])
def test_on_triton_chunks_that_end_early_agree_with_checkpoints(dtype, size, per_key):
    checkpoint_bits.check("triton", dtype, size, per_key=per_key)


@pytest.mark.parametrize(("backend", "every"), KINDS)
@pytest.mark.parametrize("heads", [(2, 8), (16, 32)])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_the_state_of_a_call_that_ended_there(backend, pool_dtype, heads, every):
    prompts = Prompts(LENGTHS, *heads)
    prompts.tokens["k"][640:900] = prompts.tokens["k"][640]  # chunks that need care
    prompts.pool = prompts.pool.to(pool_dtype)
    positions = kept(every)
    columns, first = len(positions[0]), prompts.pool.shape[0]
    slots = first + torch.arange(len(LENGTHS) * columns, device="cuda").view(-1, columns)
    pool = torch.cat([prompts.pool, prompts.pool.new_full((slots.numel(), heads[1], 128, 128), 7)])
    where = torch.tensor(positions, device="cuda")
    if every:
        checkpoints = sluice.Checkpoints(slots, every=every)
    else:  # a sequence that is too short names no slot
        slots_or_none = slots.masked_fill(where < 0, -1)
        checkpoints = sluice.Checkpoints(slots_or_none, positions=where.clamp(min=0))
    o = prompts.run(pool, backend, checkpoints=checkpoints, batch_invariant=True)
    expected, expected_pool = prompts.once(backend, batch_invariant=True)
    compare.assert_same_bits(o, expected, "o")
    compare.assert_same_bits(pool[:first], expected_pool, "final states")
    found = pool[first:].view(len(LENGTHS), columns, heads[1], 128, 128)
    starts = prompts.bounds.tolist()
    # one call per column: each sequence ends at its own checkpoint of that column
    for j in range(columns):
        ends = [row[j] for row in positions]
        states = prompts.pool  # what a call without tokens leaves
        if max(ends) > 0:
            short = Prompts([max(end, 0) for end in ends], *heads)
            short.rates, short.pool = prompts.rates, prompts.pool
            short.tokens = {
                name: torch.cat([x[a : a + max(e, 0)] for a, e in zip(starts, ends, strict=False)])
                for name, x in prompts.tokens.items()
            }
            _, states = short.once(backend, batch_invariant=True)
        for i, end in enumerate(ends):
            if end >= 0:
                compare.assert_same_bits(found[i, j], states[i + 1], f"sequence {i} at {end}")
            else:
                assert (found[i, j] == 7).all(), f"sequence {i}: slot {j} was written"


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_at_the_borders_of_segments_have_the_bits_of_the_whole(backend):
    """One long prompt that is split: outputs and the final state do not notice checkpoints."""
    prompts = Prompts([16_384], 2, 8)
    slots = 3 + torch.arange(64, device="cuda")[None]
    room = prompts.pool.new_zeros(64, 8, 128, 128)
    pool = torch.cat([prompts.pool, room])
    o = prompts.run(pool, backend, checkpoints=sluice.Checkpoints(slots, every=256))
    expected, expected_pool = prompts.once(backend)
    compare.assert_same_bits(o, expected, "o")
    compare.assert_same_bits(pool[:3], expected_pool, "state")
    compare.assert_same_bits(pool[-1], pool[1], "the last checkpoint is the final state")
