"""Every block of tokens finds the sequence it belongs to, whatever the lengths.

This runs on a GPU, or on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import bisect
import itertools
import random

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from sluice import dispatch
from sluice.backends.triton.kernels.work_units import probe_sequence
from tests.gpu.random_layer import DEVICE

pytestmark = [
    pytest.mark.skipif(
        dispatch.unavailable("triton") is not None, reason=str(dispatch.unavailable("triton"))
    ),
    pytest.mark.gpu,
]
BLOCK = 16


@triton.jit
def found_kernel(cu_seqlens_ptr, blocks_ptr, found_ptr, N, T, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    block = tl.load(blocks_ptr + pid)
    seq, inner, start, length = probe_sequence(block, cu_seqlens_ptr, N, T, BLOCK)
    tl.store(found_ptr + 4 * pid, seq)
    tl.store(found_ptr + 4 * pid + 1, inner)
    tl.store(found_ptr + 4 * pid + 2, start)
    tl.store(found_ptr + 4 * pid + 3, length)


# one step of 32 probes is enough for 31 bounds, two for 992
@pytest.mark.parametrize("N", [0, 1, 2, 30, 31, 32, 33, 64, 65, 991, 992, 993])
@pytest.mark.parametrize("tail", [0, 1, 35])
def test_a_block_finds_its_sequence_in_triton(N, tail):
    choose = random.Random(100 * N + tail)
    lengths = (0, 0, 1, 5, 16, 17, 40) if N <= 65 else (0, 0, 0, 0, 0, 1, 17)
    bounds = [0, *itertools.accumulate(choose.choice(lengths) for _ in range(N))]
    T = bounds[-1] + tail
    first = [bound // BLOCK + i for i, bound in enumerate(bounds)]
    blocks = list(range(T // BLOCK + N + 1))
    if len(blocks) > 40:
        blocks = sorted({0, len(blocks) - 1, *choose.sample(blocks, 38)})
    found = torch.full((len(blocks), 4), -9, dtype=torch.int32, device=DEVICE)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    chosen = torch.tensor(blocks, dtype=torch.int32, device=DEVICE)
    found_kernel[(len(blocks),)](cu_seqlens, chosen, found, N, T, BLOCK)
    expected = []
    for block in blocks:
        seq = bisect.bisect_right(first, block) - 1
        end = bounds[seq + 1] if seq < N else T
        expected.append([seq, block - first[seq], bounds[seq], end - bounds[seq]])
    assert found.tolist() == expected
