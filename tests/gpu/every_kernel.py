"""Run every kernel once on the GPU, as a serving process does, for compute-sanitizer.

    compute-sanitizer --tool memcheck python -m tests.gpu.every_kernel [decode step conv ...]

Arguments select calls by the beginning of their names; without arguments, all run.
"""
# ruff: noqa: T201

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import sluice
from sluice import dispatch
from tests.gpu.calls import prepared, production

Call = Callable[[], Any]


def prefills() -> Iterator[tuple[str, Call]]:
    """Packed sequences of 0, 1 and many tokens from pool rows, on each backend that serves them.

    The last sequence ends with a whole chunk and at the end of its tensors, so reading ahead would
    leave them.
    """
    HK, HV, T = 2, 4, 257
    bf16 = torch.bfloat16

    def randn(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device="cuda")

    def call(backend: str) -> Any:
        bounds = torch.tensor([0, 0, 1, 129, T], dtype=torch.int32)
        return sluice.prefill(
            randn(T, HK, 128),
            randn(T, HK, 128),
            randn(T, HV, 128),
            randn(T, HV),
            randn(T, HV),
            A_log=randn(HV, dtype=torch.float32),
            dt_bias=randn(HV, dtype=torch.float32),
            normalize_qk=True,
            state=randn(6, HV, 128, 128, dtype=torch.float32),
            slots=torch.tensor([3, 0, -1, 5], dtype=torch.int32, device="cuda"),
            has_state=torch.tensor([True, False, True, True], device="cuda"),
            cu_seqlens=bounds.cuda(),
            cu_seqlens_cpu=bounds,
            backend=backend,
        )

    for name in ("triton", "hopper"):
        if dispatch.unavailable(name) is None:
            yield f"prefill, {name}", lambda name=name: call(name)


def main() -> None:
    calls = [*((call.name, prepared(call, 1)) for call in production("cuda")), *prefills()]
    chosen = tuple(sys.argv[1:]) or ("",)
    for name, call in calls:
        if name.startswith(chosen):
            call()
            torch.cuda.synchronize()
            print("ran", name, flush=True)


if __name__ == "__main__":
    main()
