"""Backends: each keeps the same contract and holds only what it does better.

A backend is a package that defines

- ``OPS``: for each operator it has, the module of this package that holds it (imported when first
  called); a module's function has the operator's name and takes ``(problem, tensors)``;
- ``DEVICES``: the device types it runs on;
- ``refuse(problem)``: None, or the reason for not serving the problem;
- ``unavailable()``: None, or what is missing on this machine;
- ``kernel(op)``: the function that serves an operator;

and may define

- ``warmup()``: compile every kernel, where kernels do not depend on shapes;
- ``compiling(calls, share)``: a scope before which the kernels of these calls, and of such calls of
  any size, begin to compile; of share (i, n) every n-th, from the i-th on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def loader(package: str, ops: dict[str, str]) -> Callable[[str], Callable[[Any, Any], None]]:
    """The ``kernel`` function of a backend package, from its ``OPS`` table."""

    def kernel(op: str) -> Callable[[Any, Any], None]:
        module = importlib.import_module(f"{package}.{ops[op]}")
        function: Callable[[Any, Any], None] = getattr(module, op)
        return function

    return kernel
