"""The calls a Qwen model's layers make: what ``doctor`` explains and ``warmup`` compiles.

Tensors are on the "meta" device unless another is asked for: a call is described, not made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice import calls, ops
from sluice.contract.names import StateLayout
from sluice.layers.qwen import QwenShape


class Kinds(NamedTuple):
    """What a model's tensors are."""

    dtype: torch.dtype = torch.bfloat16
    gate_dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    state_layout: StateLayout = "vk"
    slots_dtype: torch.dtype = torch.int64


class ModelCall(NamedTuple):
    """One way in which an operator is called."""

    name: str
    op: str
    make: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]

    def run(self) -> Any:
        """Make the call."""
        arguments, options = self.make()
        return getattr(ops, self.op)(*arguments, **options)

    def spec(self, device: torch.device) -> Any:
        """The call's spec, on a device."""
        arguments, options = self.make()
        with calls.check_only() as found:
            getattr(ops, self.op)(*arguments, **options)
        return found[0].spec.on(device)


FORMS = {
    "decode_each": "decode",
    "conv_qkv_start": "conv_qkv",
    "conv_qkv_kept": "conv_qkv",
    "prefill_kept": "prefill",
    "verify_buffered": "verify",
}
"""Further ways of calling an operator."""


class ModelCalls:
    """The calls of one model's layers. Rows with slots are padding."""

    SLOTS = 64

    def __init__(
        self, shape: QwenShape, kinds: Kinds | None = None, device: torch.device | str = "meta"
    ) -> None:
        self.shape, self.kinds = shape, kinds or Kinds()
        self.device = torch.device(device)

    def call(self, op: str, what: str, *sizes: Any) -> ModelCall:
        """The call ``op`` makes with these sizes, by name. Some operators have several forms."""
        make = functools.partial(getattr(self, op), *sizes)
        function = FORMS.get(op, op)
        return ModelCall(f"{self.shape.name} {op} {what}".rstrip(), function, make)

    def each_operator(self) -> Iterator[ModelCall]:
        """One call per operator: a batch of 8, one prompt of 2,048 tokens."""
        yield self.call("prefill", "2048", 1, 2048, True)
        yield self.call("decode", "8", 8, 1)
        yield self.call("verify", "8 x 4", 8, 4)
        yield self.call("commit", "8 x 4", 8, 4)
        yield self.call("causal_conv1d", "2048", 1, 2048, True)
        yield self.call("conv_qkv", "2048", 1, 2048, True)
        yield self.call("rms_norm_gated", "2048", 2048)
        yield self.call("step", "8", 8, 1, True)

    @functools.cached_property
    def state(self) -> dict[str, Any]:
        s, layout = self.shape, self.kinds.state_layout
        tail = (s.head_v_dim, s.head_k_dim)
        tail = tail if layout == "vk" else tail[::-1]
        pool = self.zeros(self.SLOTS, s.num_v_heads, *tail, dtype=self.kinds.state_dtype)
        return {"state": pool, "state_layout": layout}

    @functools.cached_property
    def window(self) -> Tensor:
        return self.zeros(self.SLOTS, self.shape.conv_channels, self.shape.conv_width - 1)

    @functools.cached_property
    def weights(self) -> dict[str, Tensor]:
        s, gates = self.shape, self.kinds.gate_dtype
        return {
            "conv_weight": self.zeros(s.conv_channels, s.conv_width),
            "A_log": self.zeros(s.num_v_heads, dtype=gates),
            "dt_bias": self.zeros(s.num_v_heads, dtype=gates),
            "norm_weight": self.zeros(s.head_v_dim),
        }

    def zeros(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(*size, dtype=dtype or self.kinds.dtype, device=self.device)

    def rows(self, N: int) -> dict[str, Any]:
        """Slots of N padded rows."""
        return {"slots": torch.full((N,), -1, dtype=self.kinds.slots_dtype, device=self.device)}

    def packed(self, N: int, T: int) -> dict[str, Any]:
        """N packed sequences of T tokens that begin anew, in padded rows."""
        bounds = torch.arange(0, N * T + 1, T, dtype=torch.int32)
        known = torch.zeros(N, dtype=torch.bool, device=self.device)
        cu_seqlens = {"cu_seqlens": bounds.to(self.device), "cu_seqlens_cpu": bounds}
        return {**self.rows(N), **cu_seqlens, "has_state": known}

    def tokens(self, B: int, T: int) -> tuple[Tensor, ...]:
        s = self.shape
        q, k = (self.zeros(B, T, s.num_k_heads, s.head_k_dim) for _ in "qk")
        v = self.zeros(B, T, s.num_v_heads, s.head_v_dim)
        g, beta = (self.zeros(B, T, s.num_v_heads, dtype=torch.float32) for _ in "gb")
        return q, k, v, g, beta

    def decode(self, N: int, T: int) -> tuple[Any, dict[str, Any]]:
        return self.tokens(N, T), {**self.state, **self.rows(N)}

    def step(self, N: int, T: int, pooled: bool) -> tuple[Any, dict[str, Any]]:
        s = self.shape
        qkvz = self.zeros(N, T, s.conv_channels + s.value_dim)
        options = {
            **self.weights,
            **self.state,
            "conv_state": self.window,
            "order": s.order,
            "gate_activation": s.gate_activation,
            **(self.rows(N) if pooled else {}),
        }
        return (qkvz, self.zeros(N, T, 2 * s.num_v_heads)), options

    def verify(self, N: int, T: int) -> tuple[Any, dict[str, Any]]:
        tokens, options = self.decode(N, T)
        inputs = self.zeros(N, T, self.shape.conv_channels)
        return tokens, {**options, "conv_inputs": inputs, "conv_state": self.window}

    def commit(self, N: int, T: int) -> tuple[Any, dict[str, Any]]:
        tokens, options = self.verify(N, T)
        if self.device.type == "meta":
            with calls.check_only():
                draft = ops.verify(*tokens, **options)[1]
        else:
            draft = ops.verify(*tokens, **options)[1]
        return (draft, torch.zeros(N, dtype=torch.int64, device=self.device)), {}

    def decode_each(self, N: int, T: int) -> tuple[Any, dict[str, Any]]:
        """``decode`` with a write slot for each token, all of them padding."""
        tokens, options = self.decode(N, T)
        slots = torch.full((N, T), -1, dtype=self.kinds.slots_dtype, device=self.device)
        return tokens, {**options, "write_slots": slots}

    def conv_qkv_start(self, N: int, T: int) -> tuple[Any, dict[str, Any]]:
        """``conv_qkv`` of draft tokens with a left-aligned window."""
        arguments, options = self.conv_qkv(N, T, False)
        columns = self.shape.conv_width - 2 + T
        start = torch.zeros(N, dtype=self.kinds.slots_dtype, device=self.device)
        state = self.zeros(self.SLOTS, self.shape.conv_channels, columns)
        return arguments, {**options, **self.rows(N), "state": state, "window_start": start}

    def buffers(self, layers: int, T: int) -> ops.DraftBuffers:
        s = self.shape
        lead, wide = (layers, self.SLOTS, T), torch.float32
        return ops.DraftBuffers(
            self.zeros(*lead, s.num_k_heads, s.head_k_dim, dtype=wide),
            self.zeros(*lead, s.num_v_heads, s.head_v_dim, dtype=wide),
            self.zeros(*lead, s.num_v_heads, dtype=wide),
            self.zeros(*lead, s.conv_channels),
        )

    def verify_buffered(self, N: int, T: int) -> tuple[Any, dict[str, Any]]:
        """``verify`` into buffers."""
        tokens, options = self.verify(N, T)
        return tokens, {**options, "buffers": self.buffers(1, T).layer(0)}

    def commit_layers(self, N: int, T: int, layers: int = 2) -> tuple[Any, dict[str, Any]]:
        counts = torch.zeros(N, dtype=self.kinds.slots_dtype, device=self.device)
        pools = {"state": self.state["state"], "conv_state": self.window}
        stacked = {n: torch.zeros_like(x.expand(layers, *x.shape)) for n, x in pools.items()}
        options = {**self.state, **stacked, **self.rows(N)}
        return (self.buffers(layers, T), counts), options

    def prefill(self, N: int, T: int, packed: bool) -> tuple[Any, dict[str, Any]]:
        if packed:
            return self.tokens(1, N * T), {**self.state, **self.packed(N, T)}
        return self.tokens(N, T), self.state

    def kept(self, N: int, every: int | None) -> dict[str, Any]:
        """One checkpoint in each of N padded rows; ``every`` None: by its position."""
        slots = torch.full((N, 1), -1, dtype=self.kinds.slots_dtype, device=self.device)
        if every is not None:
            return {"checkpoints": ops.Checkpoints(slots, every=every)}
        positions = torch.zeros(N, 1, dtype=torch.int32, device=self.device)
        return {"checkpoints": ops.Checkpoints(slots, positions=positions)}

    def prefill_kept(self, N: int, T: int, every: int | None) -> tuple[Any, dict[str, Any]]:
        """Packed ``prefill`` that keeps states for a prefix cache."""
        arguments, options = self.prefill(N, T, True)
        return arguments, {**options, **self.kept(N, every)}

    def conv_qkv_kept(
        self, N: int, T: int, every: int | None, beside: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """Packed ``conv_qkv`` that keeps windows for a prefix cache."""
        arguments, options = self.conv_qkv(N, T, True, beside)
        return arguments, {**options, **self.kept(N, every)}

    def causal_conv1d(
        self, N: int, T: int, packed: bool | None, beside: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """``packed`` None: dense, with slots. ``beside``: x is a part of one projection with z."""
        D = self.shape.conv_channels
        rows = self.packed(N, T) if packed else self.rows(N) if packed is None else {}
        x = self.zeros(*((1, N * T) if packed else (N, T)), D + beside * self.shape.value_dim)
        return (x[..., :D], self.weights["conv_weight"]), {"state": self.window, **rows}

    def conv_qkv(
        self, N: int, T: int, packed: bool, beside: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        s = self.shape
        (x, weight), options = self.causal_conv1d(N, T, packed, beside)
        raw = self.zeros(*x.shape[:2], s.num_v_heads)
        heads = {"num_k_heads": s.num_k_heads, "num_v_heads": s.num_v_heads}
        widths = {"head_k_dim": s.head_k_dim, "head_v_dim": s.head_v_dim}
        gates = {"a": raw, "b": raw, **{n: self.weights[n] for n in ("A_log", "dt_bias")}}
        return (x, weight), {**heads, **widths, **gates, **options}

    def rms_norm_gated(self, T: int) -> tuple[Any, dict[str, Any]]:
        x = self.zeros(T, self.shape.num_v_heads, self.shape.head_v_dim)
        options = {"activation": self.shape.gate_activation}
        return (x, x, self.weights["norm_weight"]), options
