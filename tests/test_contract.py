"""Every case of the contract, on every backend, against the float64 token-by-token oracle.

On a GPU, its backends run every case in bfloat16 too, and ``hopper``, which has no other sizes,
runs cases with K = V = 128.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sluice import dispatch, settings
from sluice.testing import cases
from tests.suite import DEVICE, backends, run_or_skip


def calls() -> Iterator[Any]:
    """(case, dtype, backend) for ``parametrize``."""
    for case in cases.select():
        for backend in backends(case.op):
            own, dtypes = case, dict.fromkeys(case.dtypes)
            if DEVICE == "cuda" and backend in ("triton", "hopper"):
                dtypes |= {torch.bfloat16: None}
            if backend == "hopper":
                own = case.with_(K=128, V=128)
                dtypes.pop(torch.float32, None)
            for dtype in dtypes:
                label = f"{backend}-{cases.label(own, dtype)}"
                yield pytest.param(own, dtype, backend, id=label)


@pytest.mark.parametrize(("case", "dtype", "backend"), list(calls()))
def test_matches_the_oracle(case, dtype, backend):
    inputs = case.inputs(dtype, DEVICE)
    expected = case.expected(inputs)
    case.check(run_or_skip(case, inputs, backend), expected)


def test_triton_runs_where_its_interpreter_is_asked_for():
    """Else the cases above would be missing, and nobody would notice."""
    if settings.triton_interprets():
        assert dispatch.unavailable("triton") is None
        assert "triton" in backends("decode")
