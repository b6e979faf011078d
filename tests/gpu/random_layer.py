"""One layer with random numbers, for tests of bits: the same rows in any batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import sluice
from sluice.testing import compare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter truncates float32 to bfloat16, so tests on a CPU use float16
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


class Layer:
    """N rows of T tokens of one layer, their states in a pool of N + 2 rows."""

    def __init__(
        self,
        N: int,
        T: int = 1,
        HK: int = 2,
        HV: int = 4,
        K: int = 32,
        V: int = 32,
        state: torch.dtype = torch.float32,
        seed: int = 0,
        P: int | None = None,
    ) -> None:
        gen = torch.Generator().manual_seed(seed)

        def randn(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
            return torch.randn(*shape, generator=gen).to(DEVICE, dtype)

        self.N, self.T, self.HK, self.HV, self.K, self.V = N, T, HK, HV, K, V
        self.D, P = 2 * HK * K + HV * V, P or N + 2
        self.qkvz, self.ba = randn(N, T, self.D + HV * V), randn(N, T, 2 * HV)
        self.state = randn(P, HV, V, K, dtype=state)
        self.window = randn(P, self.D, 3)
        self.rates = {"A_log": randn(HV, dtype=torch.float32), "dt_bias": randn(HV)}
        self.weights = {"conv_weight": randn(self.D, 4), "norm_weight": randn(V)}
        self.slots = torch.randperm(P, generator=gen)[:N].to(DEVICE, torch.int32)

    def delta(self, rows: Any = slice(None), tokens: int | None = None) -> dict[str, Any]:
        qkvz, ba = self.qkvz[rows, :tokens], self.ba[rows, :tokens]
        keys, values = self.HK * self.K, self.HV * self.V
        q, k, v, _ = qkvz.split([keys, keys, values, values], dim=-1)
        b, a = ba.split([self.HV, self.HV], dim=-1)
        heads = {"q": (q, self.HK), "k": (k, self.HK), "v": (v, self.HV)}
        found: dict[str, Any] = {n: x.unflatten(-1, (H, -1)) for n, (x, H) in heads.items()}
        found |= {"g": a, "beta": b, **self.rates, "normalize_qk": True}
        return {**found, "slots": self.slots[rows]}

    def decode(self, state: Tensor, rows: Any = slice(None), tokens: int | None = None) -> Tensor:
        o, _ = sluice.decode(**self.delta(rows, tokens), state=state, backend="triton")
        return o

    def step(self, state: Tensor, window: Tensor, rows: Any = slice(None)) -> Tensor:
        return sluice.step(
            self.qkvz[rows],
            self.ba[rows],
            **self.rates,
            **self.weights,
            state=state,
            conv_state=window,
            slots=self.slots[rows],
            backend="triton",
        )

    def steps_alone_as_together(self) -> None:
        """Require each row alone to give the same bits as in the batch."""
        together, alone = ((self.state.clone(), self.window.clone()) for _ in range(2))
        y = self.step(*together)
        for i in range(self.N):
            one = self.step(*alone, slice(i, i + 1))
            compare.assert_same_bits(one, y[i : i + 1], f"y of row {i}")
        for name, one, all_rows in zip(("state", "window"), alone, together, strict=True):
            compare.assert_same_bits(one, all_rows, name)
