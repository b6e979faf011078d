"""Calls in a process that cannot import Triton: ``python -m tests.gpu.without_triton``.

With a driver that keeps what it is given, it prints what was loaded, who serves calls whose kernels
are not shipped, why Triton's backend does not, and whether Triton was imported.
"""
# ruff: noqa: T201

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

import pytest
import torch

import sluice


def decode(heads: int = 2) -> dict[str, Any]:
    """The arguments of a small decode."""
    torch.manual_seed(0)
    q, k = (torch.randn(2, 1, heads // 2, 128, dtype=torch.float16) for _ in "qk")
    v = torch.randn(2, 1, heads, 128, dtype=torch.float16)
    g, beta = -torch.rand(2, 1, heads), torch.rand(2, 1, heads)
    state = torch.zeros(4, heads, 128, 128)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state, "slots": torch.arange(2)}


def main() -> None:
    """Take Triton away, and call."""
    sys.modules["triton"] = None  # type: ignore[assignment]  # an import of it fails
    found = importlib.metadata.version

    def version(name: str) -> str:
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    importlib.metadata.version = version
    from tests.gpu import fake_driver

    driver = fake_driver.install(pytest.MonkeyPatch(), compiles=False)
    sluice.decode(**decode(), backend="triton")
    print(driver.loaded)
    sluice.decode(**decode(heads=4), backend="triton")  # head counts are no constants
    print(driver.loaded)
    for op, more in (("decode", {"state_layout": "kv"}), ("prefill", {})):
        other = sluice.explain(op, **decode(), **more)
        print(other.chosen, dict(other.refusals)["triton"])
    state = decode()["state"]
    shifted = torch.zeros(state.numel() + 1, dtype=state.dtype)[1:].view(state.shape)
    print(dict(sluice.explain("decode", **{**decode(), "state": shifted}).refusals)["triton"])
    print("triton.language" in sys.modules)


if __name__ == "__main__":
    main()
