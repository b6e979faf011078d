"""flash-linear-attention's convolution (0.6.0): ``causal_conv1d`` and its one-token update.

Inputs are channel-last, states ``[N, D, W]``: W columns, one more than the convolution reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sluice import gradients, ops
from sluice.compat import common
from sluice.compat.common import need

WIDTHS = (2, 3, 4)
"""Conv widths that have a kernel; others run in plain torch."""


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``fla.modules.causal_conv1d.causal_conv1d``: y, and the final state [N, D, W] or None.

    ``residual`` is added after the activation. Refused: ``cp_context``, a ``backend`` other than
    upstream's default (sluice chooses its own kernel), ``chunk_indices`` (sluice needs none), and
    any keyword upstream does not have.
    """
    op = "causal_conv1d"
    common.tensors(op, x=x, weight=weight, residual=residual, initial_state=initial_state)
    common.refuse(op, "cp_context", cp_context)
    common.refuse(op, "chunk_indices", chunk_indices)
    need(backend == "triton", op, "backend", "'triton', the default", repr(backend))
    common.no_more(op, kwargs)
    taps = _taps(op, weight)
    act, shape, (D, W) = common.silu_or_none(op, activation), x.shape, taps.shape
    x = x.reshape(*shape[:2], -1)
    need(x.shape[-1] == D, op, "x", f"{D} channels", f"shape {list(shape)}")
    common.packed_rows(op, x, initial_state, cu_seqlens)
    if initial_state is not None:
        got = f"shape {list(initial_state.shape)}"
        need(list(initial_state.shape[1:]) == [D, W], op, "initial_state", f"[N, {D}, {W}]", got)
    if W not in WIDTHS or gradients.wanted(x, taps, bias, residual, initial_state):
        y, final = gradients.conv(
            x, taps, bias, initial_state, length=W, activation=act, cu_seqlens=cu_seqlens
        )
    else:
        N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = x.new_zeros(N, D, W) if initial_state is None else initial_state.to(x.dtype)
        state = state.clone() if state is initial_state else state
        y, final = ops.causal_conv1d(
            x,
            taps,
            bias,
            activation=act,
            state=state,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
        )
    y = y.view(shape) if residual is None else y.view(shape) + residual
    return y, final.to(x.dtype) if output_final_state else None


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``fla.modules.causal_conv1d.causal_conv1d_update``: one token per row; ``cache`` in place.

    ``x`` is [N, D], [1, N, D] or [N, 1, D], ``cache`` [N, D, W]. No gradient, as upstream.
    """
    op = "causal_conv1d_update"
    common.tensors(op, x=x, cache=cache, residual=residual, weight=weight)
    taps = _taps(op, weight)
    act, shape, (D, W) = common.silu_or_none(op, activation), x.shape, taps.shape
    if shape[-1] != D:
        x = x.flatten(2)
    ok = x.dim() == 2 or (x.dim() == 3 and 1 in x.shape[:2])
    need(ok and x.shape[-1] == D, op, "x", f"[N, {D}], [1, N, {D}] or [N, 1, {D}]", list(shape))
    rows = x.reshape(-1, 1, D)
    need(cache.shape[0] == rows.shape[0], op, "cache", f"{rows.shape[0]} rows", cache.shape[0])
    if W in WIDTHS:
        y, _ = ops.causal_conv1d(rows, taps, bias, activation=act, state=cache)
    else:
        asked = gradients.wanted(rows, taps, bias, residual)
        need(not asked, op, "x", "no gradient asked for", "tensors that require one")
        with torch.no_grad():
            y, window = gradients.conv(rows, taps, bias, cache, length=W, activation=act)
            cache.copy_(window)
    y = y.reshape(shape)
    return y if residual is None else y + residual.reshape(shape), cache


def _taps(op: str, weight: Tensor | None) -> Tensor:
    need(weight is not None, op, "weight", "a tensor [D, W]", None)
    assert weight is not None
    need(weight.dim() == 2, op, "weight", "shape [D, W]", f"shape {list(weight.shape)}")
    return weight
