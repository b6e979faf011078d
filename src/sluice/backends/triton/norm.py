"""Gated RMSNorm over the last dimension: norm first, gate after.

    y = weight · x / sqrt(mean x² + eps) · act(z)

One program owns BLOCK_R rows. Rows are numbered over up to three leading dimensions with strides of
their own, so views of a packed projection need no copy.
"""
# ruff: noqa: SIM108 (what a kernel may not say, and constants decide)

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from sluice.backends.triton import configs
from sluice.backends.triton.launch import launch, strides
from sluice.backends.triton.tiles import begin, sigmoid, silu
from sluice.contract.problem import NormProblem
from sluice.contract.tensors import NormTensors


@triton.jit
def row_offsets(rows, D1, D2, stride_0, stride_1, stride_2):
    """Where row ``rows`` of a [D0, D1, D2, V] tensor begins."""
    first = (rows // (D1 * D2)).to(tl.int64) * stride_0
    second = (rows // D2 % D1).to(tl.int64) * stride_1
    return first + second + (rows % D2).to(tl.int64) * stride_2


@triton.jit
def gated_norm(x, z, weight, eps, V: tl.constexpr, SIGMOID: tl.constexpr):
    """The equation, for rows x and z [R, V] in float32 that are zero beyond V."""
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


def leading(*tensors: Tensor) -> list[Tensor]:
    """The same tensors with leading dimensions merged where all of them allow it."""
    sizes = list(tensors[0].shape[:-1])
    steps = [list(x.stride()[:-1]) for x in tensors]
    i = 0
    while i + 1 < len(sizes):
        if (
            sizes[i] == 1
            or sizes[i + 1] == 1
            or all(s[i] == s[i + 1] * sizes[i + 1] for s in steps)
        ):
            for s in steps:
                del s[i if sizes[i + 1] != 1 else i + 1]
            sizes[i : i + 2] = [sizes[i] * sizes[i + 1]]
        else:
            i += 1
    V = tensors[0].shape[-1]
    pad = max(0, 3 - len(sizes))
    return [
        x.as_strided([1] * pad + sizes + [V], [0] * pad + s + [1])
        for x, s in zip(tensors, steps, strict=True)
    ]


def rms_norm_gated(p: NormProblem, t: NormTensors) -> None:
    """Serve ``rms_norm_gated``."""
    if p.rows == 0 or p.V == 0:
        return
    x, z, y = leading(t.x, t.z, t.out)
    if x.dim() > 4:  # more than three leading dimensions that do not merge
        for x_i, z_i, y_i in zip(x, z, y, strict=True):
            part = replace(p, rows=p.rows // x.shape[0])
            rms_norm_gated(part, NormTensors(x_i, z_i, t.weight, y_i))
        return
    config = configs.norm(p.V)
    launch(
        rms_norm_gated_kernel,
        configs.blocks(p.rows, config.BLOCK_T),
        config,
        p.device,
        x_ptr=x,
        z_ptr=z,
        weight_ptr=t.weight,
        y_ptr=y,
        eps=p.eps,
        rows=p.rows,
        D1=x.shape[1],
        D2=x.shape[2],
        **strides(x, "x", "012"),
        **strides(z, "z", "012"),
        **strides(y, "y", "012"),
        V=p.V,
        BLOCK_R=config.BLOCK_T,
        BLOCK_V=configs.power_of_two(p.V),
        SIGMOID=p.activation == "sigmoid",
    )
