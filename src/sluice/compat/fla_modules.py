"""flash-linear-attention's modules around the recurrence (0.6.0): gated norm, short convolution.

Parameter names and shapes are upstream's, so its state dicts load. With gradients the functions
run in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sluice import ops
from sluice.compat import common
from sluice.compat.common import need
from sluice.compat.fla_conv import causal_conv1d, causal_conv1d_update
from sluice.contract.names import GateActivation

GATES: dict[str, GateActivation] = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """``fla.modules.fused_norm_gate.rms_norm_gated``: norm(x + residual) · weight · act(g).

    ``prenorm`` returns the sum too, in the residual's dtype; without a residual it is x, in float32
    with ``residual_in_fp32``. Refused: ``bias``.
    """
    op = "rms_norm_gated"
    common.tensors(op, x=x, g=g, residual=residual)
    common.refuse(op, "bias", bias)
    need(activation in GATES, op, "activation", f"one of {list(GATES)}", repr(activation))
    if residual is not None:
        size = list(x.shape)
        need(residual.shape == x.shape, op, "residual", f"shape {size}", list(residual.shape))
    total = x if residual is None else x.to(common.wide(x)) + residual
    scale = x.new_ones(x.shape[-1], dtype=torch.float32) if weight is None else weight
    rows, gate = common.unit_stride(total), common.unit_stride(g)
    y = ops.rms_norm_gated(rows, gate, scale, eps=eps, activation=GATES[activation]).to(x.dtype)
    if not prenorm:
        return y
    if residual is not None:
        return y, total.to(residual.dtype)
    return y, x.float() if residual_in_fp32 else x


class FusedRMSNormGated(nn.Module):
    """``fla.modules.FusedRMSNormGated``: ``weight`` [hidden_size], ones at first; no bias."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        op = "FusedRMSNormGated"
        need(activation in GATES, op, "activation", f"one of {list(GATES)}", repr(activation))
        self.hidden_size, self.elementwise_affine = hidden_size, elementwise_affine
        self.eps, self.activation = eps, activation
        ones = torch.empty(hidden_size, device=device, dtype=dtype) if elementwise_affine else None
        self.weight = None if ones is None else nn.Parameter(ones)
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        """Sizes and options."""
        affine = "" if self.elementwise_affine else ", elementwise_affine=False"
        return f"{self.hidden_size}{affine}, eps={self.eps}, activation={self.activation}"

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """:func:`rms_norm_gated` with this weight."""
        options = (self.activation, residual, prenorm, residual_in_fp32, self.eps)
        return rms_norm_gated(x, g, self.weight, None, *options)


class ShortConvolution(nn.Conv1d):
    """``fla.modules.ShortConvolution``: a depthwise causal convolution, ``weight`` [D, 1, W].

    Refused: a ``backend`` other than upstream's default, ``cp_context`` and ``chunk_indices``.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        op = "ShortConvolution"
        need(backend == "triton", op, "backend", "'triton', the default", repr(backend))
        common.silu_or_none(op, activation)
        common.no_more(op, kwargs)
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            padding=kernel_size - 1,
            groups=hidden_size,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.hidden_size, self.activation, self.backend = hidden_size, activation, backend

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """y [B, T, D], and the windows [N, D, W] if asked.

        As upstream, a call with autograd off and one token per sequence updates ``cache`` in place;
        any other returns new windows. ``mask`` [B, T] multiplies a copy of x.
        """
        op, (B, T) = "ShortConvolution", x.shape[:2]
        common.refuse(op, "chunk_indices", chunk_indices)
        if mask is not None:
            common.refuse(op, "cu_seqlens", cu_seqlens, "None beside mask")
            x = x * mask.unsqueeze(-1).to(x.dtype)
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        one = not torch.is_grad_enabled() and B * T == N
        if one and (cu_seqlens is None or bool((cu_seqlens.diff() == 1).all())):
            kwargs.pop("cu_seqlens_cpu", None)
            common.refuse(op, "cp_context", kwargs.pop("cp_context", None))
            common.no_more(op, kwargs)
            return self.step(x, residual, cache, output_final_state, cu_seqlens)
        return causal_conv1d(
            x,
            self.weight.squeeze(1),
            self.bias,
            residual,
            cache,
            output_final_state,
            self.activation,
            cu_seqlens=cu_seqlens,
            **kwargs,
        )

    def step(
        self,
        x: Tensor,
        residual: Tensor | None,
        cache: Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One token per sequence; ``cache`` [N, D, W] in place, a new one if it is None."""
        N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if cache is None:
            cache = x.new_zeros(N, self.hidden_size, self.kernel_size[0])
        y, cache = causal_conv1d_update(
            x, cache, residual, self.weight.squeeze(1), self.bias, self.activation
        )
        return y, cache if output_final_state else None
