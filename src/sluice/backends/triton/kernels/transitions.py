"""The effects of a row's segments joined to the map of the row, for sequences over ranks."""

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.math import begin, divide


@triton.jit(do_not_specialize=["segments", "HV", "inverse_HV"])
def chain_kernel(
    effects_ptr,  # [B, segments, HV, K, V + K] float32: S_zero | M of each segment
    map_ptr,  # [B, HV, K, V + K] float32, written: S_zero | M of the row
    segments,
    HV,
    inverse_HV,  # of divide
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(K17) for zero and the identity, side by side. A program owns BLOCK_V columns of a head."""
    BLOCKS: tl.constexpr = (V + K + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    batch, head_v = divide(pid // BLOCKS, HV, inverse_HV)
    batch = batch.to(tl.int64)
    begin()
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = pid % BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (offs_k < K)[:, None] & (offs_v < V + K)[None, :]
    square = (offs_k < K)[:, None] & (offs_k < K)[None, :]
    S = tl.where(offs_k[:, None] + V == offs_v[None, :], 1.0, 0.0)
    for i in tl.range(segments, num_stages=STAGES):
        row = (batch * segments + i) * HV + head_v
        at = row * (K * (V + K)) + offs_k[:, None] * (V + K)
        M = tl.load(effects_ptr + at + V + offs_k[None, :], mask=square, other=0.0)
        S_zero = tl.load(
            effects_ptr + at + offs_v[None, :], mask=tile & (offs_v < V)[None, :], other=0.0
        )
        S = tl.dot(M, S, acc=S_zero, input_precision=PRECISION)
    at = (batch * HV + head_v) * (K * (V + K)) + offs_k[:, None] * (V + K) + offs_v[None, :]
    tl.store(map_ptr + at, S, mask=tile)
