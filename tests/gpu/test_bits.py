"""The same bits whatever the configuration: rows of configs.py may change speed, never a number.

These run on a GPU, or on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import sluice
from sluice import dispatch
from sluice.backends.triton import configs
from sluice.testing import compare
from tests.gpu.random_layer import DEVICE, HALF, Layer

pytestmark = [
    pytest.mark.skipif(
        dispatch.unavailable("triton") is not None, reason=str(dispatch.unavailable("triton"))
    ),
    pytest.mark.gpu,
]
SIZE = {"HK": 4, "HV": 8, "K": 128, "V": 128} if DEVICE == "cuda" else {}


def smaller(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Let the tables change rows at ``limit`` states, so that small batches differ in theirs."""
    for key, rows in configs.DECODE.items():
        *first, last = rows
        changed = [row._replace(limit=limit) for row in first]
        monkeypatch.setitem(configs.DECODE, key, (*changed, last))
    monkeypatch.setattr(configs, "STEP_SPREAD", limit)


@pytest.mark.parametrize("state", [torch.float32, HALF], ids=("fp32", "half"))
@pytest.mark.parametrize("tokens", [1, 3])
def test_decode_of_a_row_does_not_depend_on_the_row_of_the_table(monkeypatch, state, tokens):
    layer = Layer(5, tokens, state=state, **SIZE)
    smaller(monkeypatch, 2 * layer.HV)
    together = layer.state.clone()
    o = layer.decode(together)
    alone = layer.state.clone()
    for i in range(layer.N):
        one = layer.decode(alone, slice(i, i + 1))
        compare.assert_same_bits(one, o[i : i + 1], f"o of row {i}")
    compare.assert_same_bits(alone, together, "state")


@pytest.mark.parametrize("state", [torch.float32, HALF], ids=("fp32", "half"))
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 3)], ids=str)
def test_step_has_the_same_bits_with_a_program_a_head_or_a_group(monkeypatch, state, tokens, heads):
    layer = Layer(3, tokens, state=state, **{**SIZE, "HK": heads[0], "HV": heads[1]})
    found = []
    for spread in (0, 2**30):
        monkeypatch.setattr(configs, "STEP_SPREAD", spread)
        pools = layer.state.clone(), layer.window.clone()
        found.append((layer.step(*pools), *pools))
    for name, grouped, spread_out in zip(("y", "state", "window"), *found, strict=True):
        compare.assert_same_bits(spread_out, grouped, name)


def test_step_leaves_its_counters_at_zero(monkeypatch):
    """What one call counted must not reach the next, nor rows that are padding."""
    from sluice.backends.triton.arrivals import arrivals_of

    monkeypatch.setattr(configs, "STEP_SPREAD", 2**30)
    layer = Layer(4, **SIZE)
    layer.slots[1] = -1
    pools = layer.state.clone(), layer.window.clone()
    for _ in range(3):
        layer.step(*pools)
    counters = arrivals_of(pools[1], layer.HK)
    assert counters is not None
    assert not counters.any()


@pytest.mark.parametrize("state", [torch.float32, HALF], ids=("fp32", "half"))
@pytest.mark.parametrize("accepted", range(5))
def test_verify_and_commit_leave_the_bits_of_decode(state, accepted):
    """Also of one token, which decode serves with another variant of the kernel."""
    layer = Layer(3, 4, state=state, **SIZE)
    decoded, committed = layer.state.clone(), layer.state.clone()
    if accepted:
        expected = layer.decode(decoded, tokens=accepted)
    o, draft = sluice.verify(**layer.delta(), state=committed, backend="triton")
    compare.assert_same_bits(committed, layer.state, "a state that verify leaves alone")
    count = torch.full((3,), accepted, dtype=torch.int32, device=DEVICE)
    sluice.commit(draft, count, backend="triton")
    compare.assert_same_bits(committed, decoded, "state")
    if accepted:
        compare.assert_same_bits(o[:, :accepted].contiguous(), expected, "o")
