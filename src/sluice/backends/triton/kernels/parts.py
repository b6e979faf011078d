"""Sums over what programs left behind, in one order: the same bits each time."""

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.math import begin


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["made_ptr"])
def sum_parts_kernel(
    parts_ptr,  # [parts, D] float32
    made_ptr,  # [D]
    parts,
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    begin()
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_p = tl.arange(0, BLOCK_P)
    total = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for first in range(0, parts, BLOCK_P):
        part = first + offs_p
        at = parts_ptr + part.to(tl.int64)[:, None] * D + offs_d[None, :]
        total += tl.load(at, mask=(part < parts)[:, None] & (offs_d < D)[None, :], other=0.0)
    made = tl.sum(total, axis=0).to(made_ptr.dtype.element_ty)
    tl.store(made_ptr + offs_d, made, mask=offs_d < D)
