"""The calls with which Triton's backward of convolutions and norm is tested.

Each function makes leaves, and the outputs of a call with them. On a GPU they run; elsewhere their
kernels are interpreted, or only compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sluice
from tests.suite import DEVICE

Leaves = dict[str, Tensor]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """A leaf of random numbers."""
    gen = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(*shape, generator=gen, dtype=torch.float64)
    return x.to(DEVICE, dtype).requires_grad_()


def bounds_of(packed: bool) -> Tensor | None:
    """The borders of packed sequences, one of them empty; some tokens lie behind the last."""
    return torch.tensor([0, 1, 1, 5, 71], device=DEVICE) if packed else None


def convolution(
    W: int, L: int, dtype: torch.dtype, packed: bool
) -> tuple[Leaves, dict[str, Any], Any]:
    """Leaves, options and outputs of ``causal_conv1d``."""
    B, T, N = (1, 74, 4) if packed else (2, 66, 2)
    D = 40
    leaves = {
        "x": drawn(B, T, D, dtype=dtype),
        "weight": drawn(D, W, dtype=dtype),
        "bias": drawn(D, dtype=dtype),
        "initial_state": drawn(N, D, L, dtype=dtype),
    }
    options = {"activation": "silu" if W == 4 else None, "cu_seqlens": bounds_of(packed)}
    return leaves, options, sluice.causal_conv1d(**leaves, **options)


def convolution_of_a_view() -> tuple[Leaves, Tensor, Any]:
    """Leaves, the view, and outputs of ``causal_conv1d`` without window and bias."""
    leaves = {"x": drawn(2, 20, 50), "weight": drawn(33, 4)}
    view = leaves["x"][:, :, 7:40]
    return leaves, view, sluice.causal_conv1d(view, leaves["weight"])


def convolution_and_split(
    dtype: torch.dtype, packed: bool, norm: bool
) -> tuple[Leaves, tuple[int, int, int, int], Any]:
    """Leaves, (HK, HV, K, V) and outputs of ``conv_qkv``."""
    HK, HV, K, V = 2, 4, 8, 12
    D = 2 * HK * K + HV * V
    B, T, N = (1, 74, 4) if packed else (2, 66, 2)
    leaves = {
        "x": drawn(B, T, D, dtype=dtype),
        "weight": drawn(D, 4, dtype=dtype),
        "bias": drawn(D, dtype=dtype),
        "initial_state": drawn(N, D, 3, dtype=dtype),
        "a": drawn(B, T, HV, dtype=dtype, seed=1),
        "b": drawn(B, T, HV, dtype=dtype, seed=2),
        "A_log": drawn(HV, seed=3),
        "dt_bias": drawn(HV, seed=4),
    }
    ours = sluice.conv_qkv(
        **leaves,
        num_k_heads=HK,
        num_v_heads=HV,
        head_k_dim=K,
        normalize_qk=norm,
        cu_seqlens=bounds_of(packed),
        neg_eigval=True,
    )
    return leaves, (HK, HV, K, V), ours


def norm(
    dtype: torch.dtype, activation: str, eps: float = 1e-6
) -> tuple[Leaves, dict[str, Any], Any]:
    """Leaves, options and output of ``rms_norm_gated``."""
    leaves = {
        "x": drawn(2, 9, 3, 40, dtype=dtype),
        "z": drawn(2, 9, 3, 40, dtype=dtype, seed=1),
        "weight": drawn(40, seed=2),
    }
    options: dict[str, Any] = {"eps": eps, "activation": activation}
    return leaves, options, sluice.rms_norm_gated(**leaves, **options)


def norm_of_views() -> tuple[Leaves, tuple[Tensor, Tensor], Any]:
    """Leaves, the views, and output of ``rms_norm_gated`` of one projection's halves."""
    leaves = {"fused": drawn(2, 7, 2, 3, 80), "weight": drawn(40)}
    x, z = (y.transpose(1, 2) for y in leaves["fused"].split(40, dim=-1))
    return leaves, (x, z), sluice.rms_norm_gated(x, z, leaves["weight"])


def every(dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each of these calls, by name."""
    for dtype in dtypes:
        kind = str(dtype).removeprefix("torch.")
        for packed in (False, True):
            place = "packed" if packed else "rows"
            for W, L in ((2, 3), (4, 5)):
                made = partial(convolution, W, L, dtype, packed)
                yield f"convolution of {W}, {place}, {kind}", made
            for normed in (False, True):
                name = f"split{', norm' if normed else ''}, {place}, {kind}"
                yield name, partial(convolution_and_split, dtype, packed, normed)
        for activation in ("silu", "sigmoid"):
            yield f"gated norm, {activation}, {kind}", partial(norm, dtype, activation)
    yield "convolution of a view", convolution_of_a_view
    yield "gated norm of views", norm_of_views
