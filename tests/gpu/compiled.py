"""What this process has compiled."""

from __future__ import annotations

import importlib
from typing import Any

import triton

from sluice import dispatch
from sluice.backends.triton import compiler


def variants() -> dict[Any, int]:
    """Every variant of a kernel that sluice compiled, and how many Triton compiled by itself."""
    found: dict[Any, int] = dict.fromkeys(compiler._compiled, 1)
    for backend in ("hopper", "triton"):
        if dispatch.unavailable(backend) is not None:
            continue
        for op, module in dispatch._module(backend).OPS.items():
            names = vars(importlib.import_module(f"sluice.backends.{backend}.{module}"))
            for name, kernel in names.items():
                if isinstance(kernel, triton.runtime.JITFunction) and name.endswith("_kernel"):
                    caches = kernel.device_caches.values()
                    found[op, name] = sum(len(cache[0]) for cache in caches)
    return found
