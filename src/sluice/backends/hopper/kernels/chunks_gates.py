"""The gates of hopper_chunks_kernel: betas and cumulative log2 decays, four value heads at a time.

A warp loads the gates of a head. In shared memory they are [4 blocks of 16 tokens, KH, 4 / KH, 16],
for KH key heads with 4 / KH value heads each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sluice.backends.hopper.kernels.constants import LOG2_E, C
from sluice.backends.hopper.kernels.gluon_api import aggregate
from sluice.backends.hopper.kernels.layouts import along


@aggregate
class Gates:
    """The gates of all value heads, from the first token of a chunk on."""

    g_ptr: gl.tensor | gl.constexpr  # None: no decay
    A_log_ptr: gl.tensor | gl.constexpr  # None: g is not a raw gate
    dt_bias_ptr: gl.tensor | gl.constexpr  # None: 0
    beta_ptr: gl.tensor
    beta_scale: gl.tensor  # of raw betas
    stride_g_t: gl.tensor | gl.constexpr
    stride_g_h: gl.tensor | gl.constexpr
    stride_beta_t: gl.tensor | gl.constexpr
    stride_beta_h: gl.tensor | gl.constexpr
    RAW_BETA: gl.constexpr


@gluon.jit
def load_gates(gates, g2_smem, beta_smem, head, heads, count, R: gl.constexpr, KH: gl.constexpr):
    """Put the gates of four value heads, from ``head`` on, into shared memory.

    A key head has R value heads, of which ``heads`` are left. After the first ``count`` tokens the
    decay stays as it is and beta is 0. For heads that do not exist both are 0.
    """
    H: gl.constexpr = 4 // KH
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    token = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, layout)), 0)
    item = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, layout)), 1)
    exists = item % H < heads
    item = head + item // H * R + item % H
    on = (token < count) & exists
    at = token.to(gl.int64) * gates.stride_beta_t + item * gates.stride_beta_h
    beta = gl.load(gates.beta_ptr + at, mask=on, other=0.0).to(gl.float32)
    if gates.g_ptr is not None:
        at = token.to(gl.int64) * gates.stride_g_t + item * gates.stride_g_h
        g = gl.load(gates.g_ptr + at, mask=on, other=0.0).to(gl.float32)
        if gates.A_log_ptr is not None:
            A_log = gl.load(gates.A_log_ptr + item, mask=exists, other=0.0).to(gl.float32)
            if gates.dt_bias_ptr is not None:
                g += gl.load(gates.dt_bias_ptr + item, mask=exists, other=0.0).to(gl.float32)
            g = -gl.exp2(A_log * LOG2_E) * softplus(g)
        g2 = gl.associative_scan(gl.where(on, g * LOG2_E, 0.0), 1, add)
        g2_smem.store(gl.permute(gl.reshape(g2, [KH, H, 4, 16]), (2, 0, 1, 3)))
    if gates.RAW_BETA:
        beta = gl.where(on, sigmoid(beta) * gates.beta_scale, 0.0)
    beta_smem.store(gl.permute(gl.reshape(beta, [KH, H, 4, 16]), (2, 0, 1, 3)))


@gluon.jit
def store_gates(ptr, smem, count, heads, stride_h, R: gl.constexpr, KH: gl.constexpr):
    """Copy one number per head and token from shared memory to [heads, tokens]."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2, 1],
        [1, 1, 2, 16] if KH == 1 else [1, 2, 1, 16],
        [4, 1, 1, 1],
        [2, 1, 3, 0],
    )
    row = along(0, 4, layout, 4) * 16 + along(3, 16, layout, 4)
    h = along(2, 4 // KH, layout, 4)
    on = (row < count) & (h < heads) & (along(1, KH, layout, 4) < KH)
    x = gl.where(on, smem.load(layout), 0.0)
    head = (along(1, KH, layout, 4) * R + h).to(gl.int64)
    gl.store(ptr + head * stride_h + row, x, mask=on)


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp2(x * -LOG2_E))


@gluon.jit
def softplus(x):
    """log(1 + exp(x)) to float32's precision on both sides of zero, as in the Triton kernels."""
    e = gl.exp2(gl.abs(x) * -LOG2_E)
    s = e / (2.0 + e)
    s2 = s * s
    series = s2 * (1.0 / 13.0) + (1.0 / 11.0)
    series = s2 * series + (1.0 / 9.0)
    series = s2 * series + (1.0 / 7.0)
    series = s2 * series + (1.0 / 5.0)
    series = s2 * series + (1.0 / 3.0)
    series = s2 * series + 1.0
    return gl.maximum(x, 0.0) + 2.0 * s * series
