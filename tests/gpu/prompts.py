"""Prompts with random numbers, for tests of prefill on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import sluice
from sluice import dispatch

BACKENDS = [name for name in ("hopper", "triton") if dispatch.unavailable(name) is None]
BF16, FP32 = torch.bfloat16, torch.float32


class Prompts:
    """Packed sequences with random numbers; the pool has two more rows than sequences."""

    def __init__(self, lengths: list[int], HK: int = 2, HV: int = 8, seed: int = 0, T: int = 0):
        gen = torch.Generator("cuda").manual_seed(seed)
        total, self.N = T or sum(lengths), len(lengths)

        def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
            return torch.randn(*shape, generator=gen, device="cuda", dtype=dtype)

        self.tokens = {
            "q": randn(total, HK, 128),
            "k": randn(total, HK, 128),
            "v": randn(total, HV, 128),
            "g": randn(total, HV),
            "beta": randn(total, HV),
        }
        self.rates = {"A_log": randn(HV, dtype=FP32) - 3, "dt_bias": randn(HV, dtype=FP32)}
        self.pool = randn(self.N + 2, HV, 128, 128, dtype=FP32)
        self.slots = torch.arange(self.N, device="cuda") + 1
        self.set_lengths(lengths)

    def set_lengths(self, lengths: list[int]) -> None:
        """Write new lengths to the same buffer, so that a graph reads them."""
        bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        if hasattr(self, "bounds"):
            self.bounds.copy_(bounds)
        else:
            self.bounds = bounds.cuda()

    def run(self, pool: torch.Tensor, backend: str | None = None, **options: Any) -> torch.Tensor:
        o, _ = sluice.prefill(
            **self.tokens,
            **self.rates,
            normalize_qk=True,
            state=pool,
            slots=self.slots,
            cu_seqlens=self.bounds,
            backend=backend,
            **options,
        )
        return o

    def once(self, backend: str | None = None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.pool.clone()
        return self.run(pool, backend, **options), pool
