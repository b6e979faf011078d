"""Values that the CPU kernels check: refused before anything is written, or accepted."""

from __future__ import annotations

import pytest
import torch

import sluice
from sluice.contract.errors import ContractError

pytest.importorskip("numba")


def decode(N=3, **options):
    """A small decode on the CPU backend, and the pool it works on."""
    torch.manual_seed(0)
    x, v, pool = torch.randn(N, 1, 1, 16), torch.randn(N, 1, 2, 16), torch.randn(N + 1, 2, 16, 16)
    gates = {"g": torch.zeros(N, 1, 2), "beta": torch.ones(N, 1, 2), **options}
    return lambda: sluice.decode(x, x, v, state=pool, backend="cpu", **gates)[0], pool


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"slots": torch.tensor([0, 1, 4])}, "slots"),
        ({"slots": torch.tensor([0, 1, 1])}, "decode: slots: expected no slot twice"),
        (
            {"slots": torch.tensor([0, 1, 2]), "write_slots": torch.tensor([1, 3, -1])},
            "write_slots",
        ),
        ({"g": torch.tensor([0.0, -torch.inf]).expand(3, 1, 2)}, "g"),
        ({"beta": torch.full((3, 1, 2), torch.nan, dtype=torch.bfloat16)}, "beta"),
        ({"A_log": torch.tensor([0.0, torch.nan])}, "A_log"),
    ],
)
def test_a_wrong_value_is_named_and_nothing_is_written(options, argument):
    run, pool = decode(**options)
    before = pool.clone()
    with pytest.raises(ContractError, match=argument):
        run()
    assert torch.equal(pool, before)


def test_a_slot_twice_among_many_rows_is_refused():
    run, _ = decode(200, slots=torch.arange(200) % 199)
    with pytest.raises(ContractError, match="0 in rows 0, 199"):
        run()


@pytest.mark.parametrize("strided", [False, True])
def test_what_only_looks_suspicious_runs(strided):
    """NaN in a padded row, and finite gates whose sum is not."""
    slots = torch.tensor([2, -1, 0])
    beta = torch.full((3, 1, 4), 3e38)[:, :, ::2] if strided else torch.full((3, 1, 2), 3e38)
    g = torch.zeros(3, 1, 2)
    g[1] = torch.nan
    run, pool = decode(slots=slots, g=g, beta=beta)
    before = pool.clone()
    assert bool((run()[1] == 0).all())
    changed = (pool != before).flatten(1).any(1)
    assert changed.tolist() == [True, False, True, False]


def test_after_a_call_that_only_looked_suspicious_values_are_looked_at_again():
    slots, g = torch.tensor([2, -1, 0]), torch.zeros(3, 1, 2)
    g[1] = torch.nan
    run, pool = decode(slots=slots, g=g)
    run()
    before = pool.clone()
    slots[1] = 1  # the same tensors; the row of NaN is no longer padded
    with pytest.raises(ContractError, match="g: expected"):
        run()
    assert torch.equal(pool, before)
