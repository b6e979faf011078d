"""Calls of all sizes, of the kinds that ``sluice warmup`` covers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sluice.layers import GatedDeltaNet
from sluice.model_calls import ModelCall, ModelCalls

ROWS = (1, 3, 8, 9, 17, 20, 33, 65, 130, 300, 1030)
TOKENS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 130, 1030, 3000, 4096, 16384, 65536, 1 << 18)


class Sliced(ModelCalls):
    """Indices and gates start one element into another tensor: not at a multiple of 16 bytes."""

    def zeros(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        narrow = len(size) == 3 and size[-1] < self.shape.head_v_dim
        if not narrow or size[1] == self.shape.conv_channels:  # no gates; the window
            return super().zeros(*size, dtype=dtype)
        return super().zeros(1 + math.prod(size), dtype=dtype)[1:].view(size)

    def rows(self, N: int) -> dict[str, Any]:
        return {name: torch.cat((x[:1], x))[1:] for name, x in super().rows(N).items()}

    def packed(self, N: int, T: int) -> dict[str, Any]:
        return {name: torch.cat((x[:1], x))[1:] for name, x in super().packed(N, T).items()}


def every_size(model: ModelCalls) -> Iterator[ModelCall]:
    """Calls of every operator."""
    for N in ROWS:
        for T in (1, 2, 3, 5, 8):
            yield model.call("decode", f"{N} x {T}", N, T)
            yield model.call("step", f"pooled {N} x {T}", N, T, True)
            if T > 1:
                yield model.call("verify", f"{N} x {T}", N, T)
                yield model.call("commit", f"{N} x {T}", N, T)
            yield model.call("causal_conv1d", f"pooled {N} x {T}", N, T, None)
        for T in TOKENS:
            what = f"packed {N} x {T}"
            if N * T <= 1 << 18:
                yield model.call("causal_conv1d", what, N, T, True)
                yield model.call("conv_qkv", what, N, T, True)
                yield model.call("conv_qkv", f"{what} beside z", N, T, True, True)
                yield model.call("prefill", what, N, T, True)
        yield model.call("rms_norm_gated", str(N), N)
    for T in (1, 2, 3, 5, 8):
        yield model.call("step", f"dense 2 x {T}", 2, T, False)
    for T in TOKENS[6:-1]:  # fewer run as a step; with more, rows lie 2**31 elements apart
        yield model.call("conv_qkv", f"dense 2 x {T}", 2, T, False)
        yield model.call("prefill", f"dense 2 x {T}", 2, T, False)


def kept_states(model: ModelCalls) -> Iterator[ModelCall]:
    """Calls that keep states and windows of prefixes."""
    for N, T, every in itertools.product(ROWS, TOKENS, (64, 1024, None)):
        if N * T <= 1 << 18:
            what = f"{N} x {T} every {every}"
            yield model.call("prefill_kept", what, N, T, every)
            yield model.call("conv_qkv_kept", what, N, T, every)


def run_layer(model: ModelCalls) -> None:
    """A layer with a pool, with states of its own, and with a padded batch."""
    shape, on = model.shape, {"device": model.device}
    layer = GatedDeltaNet(shape, dtype=model.kinds.dtype, **on)
    windows, states = layer.zero_states(5)
    pool = {"conv_state": windows, "state": states, "slots": torch.tensor([3, 1, 4], **on)}
    own = {"conv_state": windows[:3], "state": states[:3]}
    x = torch.zeros(300, shape.hidden, dtype=model.kinds.dtype, **on)
    new = torch.tensor([True, False, True], **on)
    with torch.no_grad():
        for T in (1, 2, 5, 8, 9, 100):
            batch = x[: 3 * T].view(3, T, -1)
            layer(batch, **own)
            layer(batch, **own, attention_mask=torch.ones(3, T, dtype=torch.int64, **on))
            if T <= 8:
                layer(batch, **pool)
            bounds = torch.arange(0, 3 * T + 1, T, dtype=torch.int32, **on)
            layer(batch.view(1, 3 * T, -1), **pool, cu_seqlens=bounds, has_state=new)
