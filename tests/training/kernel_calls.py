"""Calls of a backend's backward of prefill, and what they are compared with."""

from __future__ import annotations

import torch

from sluice import calls
from sluice.ops.delta import FUNCTIONAL
from sluice.testing import gradients as exact
from sluice.testing.compare import assert_within
from tests.suite import DEVICE
from tests.training.calls import FLOAT32, HALF

ARGUMENTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def backward_of(leaves, options, do, dfinal, backend="triton"):
    """The gradients by a backend's kernels, by name."""
    given = [leaves[n].detach().to(DEVICE) if n in leaves else None for n in ARGUMENTS]
    bounds = options.get("cu_seqlens")
    given += [None if x is None else x.to(DEVICE) for x in (bounds, None, do, dfinal)]
    kept = tuple(options[n] for n in ("scale", "normalize_qk", "neg_eigval", "state_layout"))
    made = calls.run(FUNCTIONAL.backward, [*given, *[None] * len(ARGUMENTS)], kept, None, backend)
    made = zip(ARGUMENTS, made[len(given) :], strict=True)
    return {n: x.cpu() for n, x in made if n in leaves}


def drawn(call, dtype):
    """A call's leaves and options, and gradients of its outputs: of the final state only where an
    initial one is given. NaN where none may be read."""
    leaves, options = call.make(dtype)
    o, final = exact.delta(**leaves, **options)
    gen = torch.Generator().manual_seed(1)
    tokens = leaves["v"].shape[1]
    do = torch.randn(o.shape[0], tokens, *o.shape[2:], generator=gen).to(dtype)
    dfinal = torch.randn(final.shape, generator=gen) if call.state else None
    return leaves, options, (o, final), do, dfinal


def check(call, dtype, backend="triton"):
    """Every gradient against float64 autograd through the recurrence."""
    leaves, options, (o, final), do, dfinal = drawn(call, dtype)
    end = None if call.lengths is None else sum(call.lengths)
    by = [do[:, : o.shape[1]].double(), *([] if dfinal is None else [dfinal.double()])]
    if end is not None:
        by[0] = by[0].clone()
        by[0][:, end:] = 0
        do[:, end:] = float("nan")
    wanted = torch.autograd.grad([o, final][: len(by)], list(leaves.values()), by)
    found = backward_of(leaves, options, do, dfinal, backend)
    for (name, a), b in zip(found.items(), wanted, strict=True):
        limit = FLOAT32 if dtype == torch.float32 else HALF.get(name, 6e-3)
        if end is not None and name in ("q", "k", "v", "g", "beta"):
            assert not a[:, end:].any(), f"d{name} after the last border"
            a, b = a[:, :end], b[:, :end]
        assert_within(a, b, limit, name=f"{call}: d{name}")
