"""Gated RMSNorm over the last dimension: norm first, then the gate, docs/kernels/conv.md.

    y = weight · x / sqrt(mean x² + eps) · act(z)

One program owns BLOCK_R rows. Rows are numbered over up to three leading dimensions, each with its
own stride, so views of a packed projection need no copy.
"""
# ruff: noqa: SIM108 (constexpr branches stay if/else)

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.math import begin, sigmoid, silu


@triton.jit
def row_offsets(rows, D1, D2, stride_0, stride_1, stride_2):
    """Where row ``rows`` of a [D0, D1, D2, V] tensor begins."""
    first = (rows // (D1 * D2)).to(tl.int64) * stride_0
    second = (rows // D2 % D1).to(tl.int64) * stride_1
    return first + second + (rows % D2).to(tl.int64) * stride_2


@triton.jit
def gated_norm(x, z, weight, eps, V: tl.constexpr, SIGMOID: tl.constexpr):
    """y for rows x and z [R, V] in float32, which are zero beyond V."""
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / V + eps)[:, None] * weight[None, :]
    if SIGMOID:
        y = y * sigmoid(z)
    else:
        y = y * silu(z)
    return y


@triton.jit(do_not_specialize=["rows", "D1", "D2"])
def rms_norm_gated_kernel(
    x_ptr,  # [D0, D1, D2, V]
    z_ptr,  # [D0, D1, D2, V]
    weight_ptr,  # [V]
    y_ptr,  # [D0, D1, D2, V]
    eps,
    rows,
    D1,
    D2,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    stride_z_0,
    stride_z_1,
    stride_z_2,
    stride_y_0,
    stride_y_1,
    stride_y_2,
    V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    begin()
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_v = tl.arange(0, BLOCK_V)
    mask = (row < rows)[:, None] & (offs_v < V)[None, :]
    x_at = row_offsets(row, D1, D2, stride_x_0, stride_x_1, stride_x_2)
    z_at = row_offsets(row, D1, D2, stride_z_0, stride_z_1, stride_z_2)
    y_at = row_offsets(row, D1, D2, stride_y_0, stride_y_1, stride_y_2)
    x = tl.load(x_ptr + x_at[:, None] + offs_v[None, :], mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + z_at[:, None] + offs_v[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)
    y = gated_norm(x, z, weight, eps, V, SIGMOID)
    tl.store(y_ptr + y_at[:, None] + offs_v[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
