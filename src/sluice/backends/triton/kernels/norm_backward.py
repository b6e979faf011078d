"""The backward of the gated RMSNorm. With x̂ = ρ x and y = weight x̂ act(z):

    dx̂ = weight act(z) dy,   dx = ρ (dx̂ − x̂ mean(x̂ dx̂))
    dz = weight x̂ act'(z) dy,   dweight = Σ x̂ act(z) dy

Of n programs, each owns every n-th block of rows, and leaves its sum for dweight in its own row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sluice.backends.triton.kernels.math import begin, sigmoid
from sluice.backends.triton.kernels.norm import row_offsets


@triton.jit(do_not_specialize=["rows", "D1", "D2", "part"])
def norm_backward_kernel(
    x_ptr,  # [D0, D1, D2, V]
    z_ptr,
    weight_ptr,  # [V]
    dy_ptr,  # [D0, D1, D2, V]
    dx_ptr,
    dz_ptr,
    parts_ptr,  # [parts, V] float32
    eps,
    rows,
    D1,
    D2,
    part,  # the first program's row of parts
    stride_x_0,
    stride_x_1,
    stride_x_2,
    stride_z_0,
    stride_z_1,
    stride_z_2,
    stride_dy_0,
    stride_dy_1,
    stride_dy_2,
    stride_dx_0,
    stride_dx_1,
    stride_dx_2,
    stride_dz_0,
    stride_dz_1,
    stride_dz_2,
    V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    begin()
    pid = tl.program_id(0)
    offs_v = tl.arange(0, BLOCK_V)
    weight = tl.load(weight_ptr + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for first in range(pid * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        mask = (row < rows)[:, None] & (offs_v < V)[None, :]
        x_at = row_offsets(row, D1, D2, stride_x_0, stride_x_1, stride_x_2)
        z_at = row_offsets(row, D1, D2, stride_z_0, stride_z_1, stride_z_2)
        y_at = row_offsets(row, D1, D2, stride_dy_0, stride_dy_1, stride_dy_2)
        x = tl.load(x_ptr + x_at[:, None] + offs_v[None, :], mask=mask, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + z_at[:, None] + offs_v[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + y_at[:, None] + offs_v[None, :], mask=mask, other=0.0)
        dy = dy.to(tl.float32)
        rho = tl.rsqrt(tl.sum(x * x, axis=1) / V + eps)
        rho = tl.where(row < rows, rho, 0.0)[:, None]  # infinite without eps after the last row
        ready = x * rho
        gate = sigmoid(z)
        if SIGMOID:
            act = gate
            slope = gate * (1.0 - gate)
        else:
            act = z * gate
            slope = gate * (1.0 + z * (1.0 - gate))
        total += ready * act * dy
        by = weight[None, :] * act * dy
        dx = rho * (by - ready * (tl.sum(ready * by, axis=1) / V)[:, None])
        dz = weight[None, :] * ready * slope * dy
        x_at = row_offsets(row, D1, D2, stride_dx_0, stride_dx_1, stride_dx_2)
        z_at = row_offsets(row, D1, D2, stride_dz_0, stride_dz_1, stride_dz_2)
        at = dx_ptr + x_at[:, None] + offs_v[None, :]
        tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        at = dz_ptr + z_at[:, None] + offs_v[None, :]
        tl.store(at, dz.to(dz_ptr.dtype.element_ty), mask=mask)
    at = parts_ptr + (part + pid).to(tl.int64) * V + offs_v
    tl.store(at, tl.sum(total, axis=0), mask=offs_v < V)
