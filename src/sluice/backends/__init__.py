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

from sluice.contract.meta import Meta
from sluice.contract.spec import DeltaSpec, PassSpec

Launch = Callable[[Sequence[Tensor | None]], None]


def module_of(package: str, ops: dict[str, str], op: str) -> Any:
    """The module of a backend package that holds an operator."""
    return importlib.import_module(f"{package}.{ops[op]}")


def torch_binder(package: str, ops: dict[str, str]) -> Callable[[Any], Launch]:
    """The ``bind`` of a backend in plain torch: ``<op>(spec, tensors)``, tensors canonical."""

    def bind(spec: Any) -> Launch:
        if isinstance(spec, PassSpec):
            return transitions_by(bind, spec)
        function = getattr(module_of(package, ops, spec.op), spec.op)

        def launch(tensors: Sequence[Tensor | None]) -> None:
            with torch.no_grad():
                function(spec, spec.views(tensors))

        return launch

    return bind


def transitions_by(bind: Callable[[DeltaSpec], Launch], p: PassSpec) -> Launch:
    """``transitions`` by a backend's own ``prefill``; nothing is kept for a second pass.

    S_zero is made from zero and M from the identity. The columns of a state do not meet, so these
    are two calls, the second without values.
    """
    zero, one = (bind(spec) for spec in prefills_of(p))

    def launch(tensors: Sequence[Tensor | None]) -> None:
        t = p.views(tensors)
        given = DeltaSpec.Tensors(*t[: len(DeltaSpec.TENSORS)])._replace(q=t.k)
        S_zero, M = (x.contiguous() for x in t.map.split([p.V, p.K], dim=-1))
        M.copy_(torch.eye(p.K, dtype=M.dtype, device=M.device))
        nothing = t.v.new_zeros(p.B, p.T, p.HV, p.K)
        zero(given._replace(state=S_zero.zero_(), out=t.v.new_empty(t.v.shape)))
        one(given._replace(v=nothing, state=M, out=torch.empty_like(nothing)))
        t.map.copy_(torch.cat([S_zero, M], dim=-1))

    return launch


def prefills_of(p: PassSpec) -> tuple[DeltaSpec, DeltaSpec]:
    """The calls of ``prefill`` that make S_zero and M."""
    assert p.map is not None

    def one(v: Meta, width: int) -> DeltaSpec:
        assert p.map is not None
        state, out = p.map.new_empty(p.B, p.HV, p.K, width), v.new_empty(p.B, p.T, p.HV, width)
        return p.prefill(q=p.k, v=v, state=state, out=out, state_layout="kv")

    return one(p.v, p.V), one(p.v.new_empty(p.B, p.T, p.HV, p.K), p.K)
