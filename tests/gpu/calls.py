"""Production-sized calls of the memory-bound operators, as a Qwen layer makes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sluice import ops
from sluice.layers.qwen import QwenShape
from sluice.model_calls import Kinds, ModelCall, ModelCalls

BF16, FP32 = torch.bfloat16, torch.float32


class Serving(ModelCalls):
    """Rows with states, views of one projection, raw gates; nothing of a call waits for a GPU."""

    SLOTS = 3

    @classmethod
    def of(
        cls,
        HK: int = 16,
        HV: int = 32,
        K: int = 128,
        V: int = 128,
        state: torch.dtype = FP32,
        layout: str = "vk",
        device: str = "meta",
        order: Any = "split",
    ) -> Serving:
        """A model with these heads, small in everything else."""
        shape = QwenShape("", 64, HK, HV, 4, (0, 1, 2), K, V, order=order)
        return cls(shape, Kinds(BF16, FP32, state, layout, torch.int32), device)

    def rows(self, N: int) -> dict[str, Any]:
        return {"slots": torch.arange(N, dtype=self.kinds.slots_dtype, device=self.device)}

    def known(self, N: int) -> dict[str, Any]:
        return {"has_state": torch.ones(N, dtype=torch.bool, device=self.device)}

    def packed(self, N: int, T: int) -> dict[str, Any]:
        return {**super().packed(N, T), **self.known(N)}

    def decode(self, N: int, T: int) -> tuple[Any, dict[str, Any]]:
        s = self.shape
        keys, values = s.num_k_heads * s.head_k_dim, s.value_dim
        qkvz, ba = self.zeros(N, T, s.conv_channels + values), self.zeros(N, T, 2 * s.num_v_heads)
        q, k, v, _ = qkvz.split([keys, keys, values, values], dim=-1)
        b, a = ba.split([s.num_v_heads] * 2, dim=-1)
        heads = (q, s.num_k_heads), (k, s.num_k_heads), (v, s.num_v_heads)
        rates = {name: self.weights[name] for name in ("A_log", "dt_bias")}
        options = {**self.state, **self.rows(N), **rates, "normalize_qk": True}
        return (*(x.unflatten(-1, (H, -1)) for x, H in heads), a, b), options

    def decode_each(self, N: int, T: int) -> tuple[Any, dict[str, Any]]:
        tokens, options = super().decode_each(N, T)
        for i in range(N):  # the row's own slot after token i; SLOTS leave no more
            if self.device.type != "meta":
                options["write_slots"][i, i % T] = i
        return tokens, options

    def commit_layers(self, N: int, T: int, layers: int = 2) -> tuple[Any, dict[str, Any]]:
        (buffers, accepted), options = super().commit_layers(N, T, layers)
        return (buffers, torch.full_like(accepted, T)), options

    def commit(self, N: int, T: int) -> tuple[Any, dict[str, Any]]:
        (draft, accepted), options = super().commit(N, T)
        return (draft, torch.full_like(accepted, T, dtype=self.kinds.slots_dtype)), options

    def conv_of_known_rows(self, N: int, T: int) -> tuple[Any, dict[str, Any]]:
        arguments, options = self.causal_conv1d(N, T, None)
        return arguments, {**options, **self.known(N)}

    def rms_norm_gated(self, T: int) -> tuple[Any, dict[str, Any]]:
        (x, _, weight), options = super().rms_norm_gated(T)
        x = torch.cat((x, x), -1)[..., : x.shape[-1]]
        return (x, x, weight), options


def production(device: str = "meta") -> Iterator[ModelCall]:
    """Calls of every kernel as a serving process makes them; names begin with the kernel's."""

    def named(model: Serving, what: str, op: str, *sizes: Any) -> ModelCall:
        return model.call(op, "", *sizes)._replace(name=what)

    for state, short in ((FP32, "fp32"), (BF16, "bf16")):
        model = Serving.of(state=state, device=device)
        yield named(model, f"decode, {short} state", "decode", 2, 1)
        yield named(model, f"decode of 4 tokens, {short} state", "decode", 2, 4)
        yield named(model, f"verify, {short} state", "verify", 2, 4)
        yield named(model, f"commit, {short} state", "commit", 2, 4)
        yield named(model, f"decode with a state for each token, {short}", "decode_each", 2, 4)
        yield named(model, f"verify into buffers, {short} state", "verify_buffered", 2, 4)
        yield named(model, f"commit of layers, {short} state", "commit_layers", 2, 4)
        yield named(model, f"step, {short} state", "step", 2, 1, True)
        yield named(model, f"step of 4 tokens, {short} state", "step", 2, 4, True)
    for K in (64, 256):
        model = Serving.of(2, 4, K, K, device=device)
        yield named(model, f"decode, K = V = {K}", "decode", 2, 1)
        yield named(model, f"step, K = V = {K}", "step", 2, 1, True)
    for state, short in ((FP32, "fp32"), (BF16, "bf16")):
        model = Serving.of(layout="kv", state=state, device=device)
        yield named(model, f"decode, kv, {short} state", "decode", 2, 1)
        yield named(model, f"step, kv, {short} state", "step", 2, 1, True)
        yield named(model, f"step, kv, {short} state, dense", "step", 2, 1, False)
    one = Serving.of(1, 3, device=device)
    yield named(one, "step, one key head, r = 3", "step", 2, 1, True)
    one = Serving.of(1, 3, device=device, order="interleaved")
    yield named(one, "step of 4 tokens, interleaved", "step", 2, 4, True)
    model = Serving.of(device=device)
    yield named(model, "conv", "causal_conv1d", 2, 32, True)
    known = named(model, "conv of one token", "causal_conv1d", 2, 1, None)
    yield known._replace(make=lambda: model.conv_of_known_rows(2, 1))
    yield named(model, "conv of few tokens", "causal_conv1d", 2, 3, True)
    yield named(model, "conv_qkv", "conv_qkv", 2, 32, True)
    yield named(model, "conv_qkv, few tokens a sequence", "conv_qkv", 2, 3, True)
    yield named(model, "conv_qkv, many tokens", "conv_qkv", 2, 2100, True)
    yield named(model, "conv_qkv, one token a sequence", "conv_qkv", 2, 1, True)
    yield named(model, "conv_qkv, checkpoints", "conv_qkv_kept", 2, 2100, 64)
    yield named(model, "conv_qkv, window at a column", "conv_qkv_start", 2, 4)
    yield named(model, "norm", "rms_norm_gated", 2)


NAMES = [call.name for call in production()]
"""Of :func:`production`."""


def by_name(name: str, device: str = "meta") -> ModelCall:
    """One call of :func:`production`."""
    return next(call for call in production(device) if call.name == name)


def prepared(call: ModelCall, times: int) -> Any:
    """A function that makes the call so many times, with arguments that are there.

    A draft is committed once, so every ``commit`` has one of its own.
    """
    made = [call.make() for _ in range(times if call.op == "commit" else 1)]

    def run() -> Any:
        arguments, options = made.pop() if call.op == "commit" else made[0]
        return getattr(ops, call.op)(*arguments, **options)

    return run
