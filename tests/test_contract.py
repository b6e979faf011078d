"""Every case of the contract, on every backend, against the float64 token-by-token oracle."""

from __future__ import annotations

import pytest

from sluice.testing import cases
from tests.suite import DEVICE, backends, run_or_skip

CALLS = [
    pytest.param(case, dtype, backend, id=f"{backend}-{cases.label(case, dtype)}")
    for case, dtype in cases.pairs()
    for backend in backends(case.op)
]


@pytest.mark.parametrize(("case", "dtype", "backend"), CALLS)
def test_matches_the_oracle(case, dtype, backend):
    inputs = case.inputs(dtype, DEVICE)
    expected = case.expected(inputs)
    case.check(run_or_skip(case, inputs, backend), expected)
