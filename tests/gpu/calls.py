"""Production-sized calls of the memory-bound operators, as a Qwen layer makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import sluice

BF16, FP32 = torch.bfloat16, torch.float32
Call = Callable[[], Any]


class Model:
    """The tensors of one layer of a Qwen model with these heads, small in everything else."""

    def __init__(
        self,
        HK: int = 16,
        HV: int = 32,
        K: int = 128,
        V: int = 128,
        state: torch.dtype = FP32,
        layout: str = "vk",
        device: str = "cpu",
    ) -> None:
        self.HK, self.HV, self.K, self.V, self.device = HK, HV, K, V, device
        self.D = 2 * HK * K + HV * V
        self.layout, self.state_dtype = layout, state
        tail = (V, K) if layout == "vk" else (K, V)
        self.state = torch.zeros(3, HV, *tail, dtype=state, device=device)
        self.window = self.zeros(3, self.D, 3)
        self.slots = torch.arange(2, dtype=torch.int32, device=device)
        self.rates = {"A_log": self.zeros(HV, dtype=FP32), "dt_bias": self.zeros(HV, dtype=FP32)}
        self.weight = self.zeros(self.D, 4)

    def zeros(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def delta(self, T: int) -> dict[str, Any]:
        """Strided views of one projection, raw gates, l2 norm inside, pooled state."""
        qkvz, ba = self.zeros(2, T, self.D + self.HV * self.V), self.zeros(2, T, 2 * self.HV)
        keys, values = self.HK * self.K, self.HV * self.V
        q, k, v, _ = qkvz.split([keys, keys, values, values], dim=-1)
        b, a = ba.split([self.HV, self.HV], dim=-1)
        heads = {"q": (q, self.HK), "k": (k, self.HK), "v": (v, self.HV)}
        tensors = {name: x.unflatten(-1, (H, -1)) for name, (x, H) in heads.items()}
        tensors |= {"g": a, "beta": b, "state": self.state, "slots": self.slots, **self.rates}
        return {**tensors, "normalize_qk": True, "state_layout": self.layout}

    def decode(self, T: int = 1) -> Any:
        return sluice.decode(**self.delta(T))

    def verify(self, T: int = 4) -> Any:
        x = self.zeros(2, T, self.D)
        _, draft = sluice.verify(**self.delta(T), conv_inputs=x, conv_state=self.window)
        return sluice.commit(draft, torch.full_like(self.slots, T))

    def step(self, T: int = 1, order: str = "split", pooled: bool = True) -> Any:
        rows = {"slots": self.slots} if pooled else {}
        return sluice.step(
            self.zeros(2, T, self.D + self.HV * self.V),
            self.zeros(2, T, 2 * self.HV),
            conv_weight=self.weight,
            norm_weight=self.zeros(self.V),
            conv_state=self.window if pooled else self.window[:2],
            state=self.state if pooled else self.state[:2],
            state_layout=self.layout,
            order=order,
            **rows,
            **self.rates,
        )

    def packed(self, T: int) -> dict[str, Any]:
        bounds = self.slots.new_zeros(3)  # torch.tensor(list) would wait for the device
        bounds[1:2].fill_(1)
        bounds[2:].fill_(T)
        known = torch.ones(2, dtype=torch.bool, device=self.device)
        rows = {"slots": self.slots, "has_state": known, "cu_seqlens": bounds}
        return {"x": self.zeros(T, self.D), "weight": self.weight, "state": self.window, **rows}

    def conv(self, T: int = 64) -> Any:
        return sluice.causal_conv1d(**self.packed(T))

    def conv_of_one_token(self) -> Any:
        known = torch.ones(2, dtype=torch.bool, device=self.device)
        rows = {"slots": self.slots, "has_state": known}
        x = self.zeros(2, 1, self.D)
        return sluice.causal_conv1d(x, self.weight, state=self.window, **rows)

    def conv_qkv(self, T: int = 64) -> Any:
        gates = {"a": self.zeros(T, self.HV), "b": self.zeros(T, self.HV), **self.rates}
        heads = {"num_k_heads": self.HK, "num_v_heads": self.HV}
        heads |= {"head_k_dim": self.K, "head_v_dim": self.V}
        return sluice.conv_qkv(**self.packed(T), **gates, **heads)

    def norm(self) -> Any:
        x = self.zeros(2, self.HV, 2 * self.V)[..., : self.V]
        return sluice.rms_norm_gated(x, x, self.zeros(self.V))


def production(device: str = "cpu") -> Iterator[tuple[str, Call]]:
    """By name, calls of every kernel as a serving process makes them."""
    for state, short in ((FP32, "fp32"), (BF16, "bf16")):
        model = Model(state=state, device=device)
        yield f"decode, {short} state", model.decode
        yield f"decode of 4 tokens, {short} state", lambda m=model: m.decode(4)
        yield f"verify and commit, {short} state", model.verify
        yield f"step, {short} state", model.step
        yield f"step of 4 tokens, {short} state", lambda m=model: m.step(4)
    for K in (64, 256):
        model = Model(HK=2, HV=4, K=K, V=K, device=device)
        yield f"decode, K = V = {K}", model.decode
        yield f"step, K = V = {K}", model.step
    for state, short in ((FP32, "fp32"), (BF16, "bf16")):
        model = Model(layout="kv", state=state, device=device)
        yield f"decode, kv, {short} state", model.decode
        yield f"step, kv, {short} state", model.step
        yield f"step, kv, {short} state, dense", lambda m=model: m.step(pooled=False)
    one = Model(HK=1, HV=3, device=device)
    yield "step, one key head, r = 3", one.step
    yield "step of 4 tokens, interleaved", lambda: one.step(4, "interleaved")
    model = Model(device=device)
    yield "conv", model.conv
    yield "conv of one token", model.conv_of_one_token
    yield "conv of few tokens", lambda: model.conv(6)
    yield "conv_qkv", model.conv_qkv
    yield "conv_qkv, few tokens a sequence", lambda: model.conv_qkv(6)
    yield "conv_qkv, many tokens", lambda: model.conv_qkv(4200)
    yield "conv_qkv, one token a sequence", lambda: model.conv_qkv(2)
    yield "norm", model.norm
