"""Backends: each keeps the same contract and holds only what it does better.

A backend is a package that defines

- ``OPS``: for each operator it has, the module of this package that holds it, imported when first
  needed;
- ``DEVICES``: the device types it runs on;
- ``unavailable()``: None, or what is missing on this machine;
- ``refuse(spec)``: None, or the reason for not serving the call;
- ``bind(spec)``: a launch for this call, a function of its tensors in the order of the spec. What
  does not depend on addresses is done here: configuration, grid, constants, workspace sizes. It
  may raise ``GaveUpError``: ``unavailable()`` has the reason from then on, and the next backend
  serves the call;

and may define

- ``aligned(spec)``: tensors whose addresses must be multiples of 16 bytes; a call with others goes
  to the next backend;
- ``origin(spec)``: where the kernels of a call come from, in words;
- ``notes()``: lines for ``doctor``;
- ``CHECKS_VALUES``: True if launches on a CPU check values themselves;
- ``compile(specs, share, progress)``: compile every kernel that these calls, and such calls of any
  size, may need; of share (i, n) every n-th, from the i-th on;
- ``untried()``: None, or what the backend has never run with (a release of a compiler). ``doctor``
  then binds a call, to see whether the kernels compile and load.

A launch may have an attribute ``watchful``. If that is True, it calls its attribute ``watch``,
where one is set, with the addresses of all tensors, before anything is written.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Launch = Callable[[Sequence[Tensor | None]], None]


def module_of(package: str, ops: dict[str, str], op: str) -> Any:
    """The module of a backend package that holds an operator."""
    return importlib.import_module(f"{package}.{ops[op]}")


def torch_binder(package: str, ops: dict[str, str]) -> Callable[[Any], Launch]:
    """The ``bind`` of a backend in plain torch: ``<op>(spec, tensors)``, tensors canonical."""

    def bind(spec: Any) -> Launch:
        function = getattr(module_of(package, ops, spec.op), spec.op)

        def launch(tensors: Sequence[Tensor | None]) -> None:
            with torch.no_grad():
                function(spec, spec.views(tensors))

        return launch

    return bind
