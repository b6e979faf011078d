"""Calls of all sizes, of the kinds that ``sluice warmup`` covers."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sluice import ops
from sluice.backends.triton import launch
from sluice.layers import GatedDeltaNet

warmup = importlib.import_module("sluice.warmup")  # the module, not the function
Forms = warmup.Forms

ROWS = (1, 3, 8, 9, 17, 20, 33, 65, 130, 300, 1030)
TOKENS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 130, 1030, 3000, 4096, 16384, 65536, 1 << 18)


class Sliced(Forms):
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


def serve(forms: Forms, begin: Callable[[str], None] = lambda _: None) -> None:
    """Call every operator. ``begin`` gets the name of each call."""

    def call(op: str, made: Any, what: str) -> None:
        begin(f"{op} {what}")
        launch.forget()
        getattr(ops, op)(*made[0], **made[1])

    for N in ROWS:
        for T in (1, 2, 3, 5, 8):
            call("decode", forms.decode(N, T), f"{N} x {T}")
            call("step", forms.step(N, T, True), f"pooled {N} x {T}")
            if T > 1:
                call("verify", forms.verify(N, T), f"{N} x {T}")
                call("commit", forms.commit(N, T), f"{N} x {T}")
            call("causal_conv1d", forms.causal_conv1d(N, T, None), f"pooled {N} x {T}")
        for T in TOKENS:
            what = f"packed {N} x {T}"
            if N * T <= 1 << 18:
                call("causal_conv1d", forms.causal_conv1d(N, T, True), what)
                call("conv_qkv", forms.conv_qkv(N, T, True), what)
                call("conv_qkv", forms.conv_qkv(N, T, True, True), f"{what} beside z")
                call("prefill", forms.prefill(N, T, True), what)
        call("rms_norm_gated", forms.rms_norm_gated(N), str(N))
    for T in (1, 2, 3, 5, 8):
        call("step", forms.step(2, T, False), f"dense 2 x {T}")
    for T in TOKENS[6:-1]:  # fewer run as a step; with more, rows lie 2**31 elements apart
        call("conv_qkv", forms.conv_qkv(2, T, False), f"dense 2 x {T}")
        call("prefill", forms.prefill(2, T, False), f"dense 2 x {T}")


def serve_layer(forms: Forms, begin: Callable[[str], None] = lambda _: None) -> None:
    """A layer with a pool, with states of its own, and with a padded batch."""
    shape, on = forms.shape, {"device": forms.device}
    layer = GatedDeltaNet(shape, dtype=forms.kinds.dtype, **on)
    windows, states = layer.zero_states(5)
    pool = {"conv_state": windows, "state": states, "slots": torch.tensor([3, 1, 4], **on)}
    own = {"conv_state": windows[:3], "state": states[:3]}
    x = torch.zeros(300, shape.hidden, dtype=forms.kinds.dtype, **on)
    new = torch.tensor([True, False, True], **on)
    with torch.no_grad():
        for T in (1, 2, 5, 8, 9, 100):
            begin(f"layer 3 x {T}")
            batch = x[: 3 * T].view(3, T, -1)
            layer(batch, **own)
            layer(batch, **own, attention_mask=torch.ones(3, T, dtype=torch.int64, **on))
            if T <= 8:
                layer(batch, **pool)
            bounds = torch.arange(0, 3 * T + 1, T, dtype=torch.int32, **on)
            layer(batch.view(1, 3 * T, -1), **pool, cu_seqlens=bounds, has_state=new)
