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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sluice.contract.meta import Meta
from sluice.contract.spec import DeltaSpec

Launch = Callable[[Sequence[Tensor | None]], None]


def module_of(package: str, ops: dict[str, str], op: str) -> Any:
    """The module of a backend package that holds an operator."""
    return importlib.import_module(f"{package}.{ops[op]}")


def torch_binder(package: str, ops: dict[str, str]) -> Callable[[Any], Launch]:
    """The ``bind`` of a backend in plain torch: ``<op>(spec, tensors)``, tensors canonical."""

    def bind(spec: Any) -> Launch:
        if spec.op == "transitions":
            return transitions_by(bind, spec)
        function = getattr(module_of(package, ops, spec.op), spec.op)

        def launch(tensors: Sequence[Tensor | None]) -> None:
            with torch.no_grad():
                function(spec, spec.views(tensors))

        return launch

    return bind


def transitions_by(bind: Callable[[DeltaSpec], Launch], p: DeltaSpec) -> Launch:
    """``transitions`` by a backend's own ``prefill``: S_zero from zero, M from the identity.

    The columns of a state do not meet, so these are two calls, the second without values. Segments
    run one after the other, each from the state that the one before it left.
    """
    each, (B, T, HV, V), K = p.checkpoint_every, p.v.shape, p.K
    spans = [(start, min(start + each, T)) for start in range(0, max(T, 1), each)]

    def cut(x: Any, start: int, stop: int) -> Any:
        """Some tokens of each of q, k, v, g and beta, tensors or their descriptions."""
        names = ("q", "k", "v", "g", "beta")
        given = {name: y for name in names if (y := getattr(x, name)) is not None}
        return {name: y.narrow(1, start, stop - start) for name, y in given.items()}

    def bound(v: Meta, tokens: int) -> Launch:
        width = v.shape[3]
        made = {
            "state": p.state.new_empty(B, HV, K, width),
            "out": v.new_empty(B, tokens, HV, width),
        }
        one = replace(p, op="prefill", v=v, checkpoint_every=0, **made)
        return bind(replace(one, **cut(one, 0, tokens)))

    lengths = {stop - start for start, stop in spans}
    without = p.v.new_empty(B, T, HV, K)
    zero, one = ({n: bound(v, n) for n in lengths} for v in (p.v, without))

    def launch(tensors: Sequence[Tensor | None]) -> None:
        t = p.views(tensors)
        S_zero, M = t.state.split([V, K], dim=-1)
        S = S_zero.new_zeros(B, HV, K, V)
        I = torch.eye(K, dtype=S.dtype, device=S.device).repeat(B, HV, 1, 1)
        for made, X, v, runs in ((S_zero, S, t.v, zero), (M, I, t.v.new_zeros(B, T, HV, K), one)):
            given = t._replace(v=v, state=X)
            for i, (start, stop) in enumerate(spans):
                out = v.new_empty(B, stop - start, HV, v.shape[3])
                runs[stop - start](given._replace(out=out, **cut(given, start, stop)))
                made[:, i] = X

    return launch
