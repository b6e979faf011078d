"""Prefill with decay per key on Triton in both its ways, against the oracle.

A GPU has one way (``configs.KEY_WHOLE``), and so has the interpreter. tests/test_contract.py runs
its cases of decay per key with that one; here they run with the other, and more options with both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sluice import calls
from sluice.testing import cases
from tests.suite import DEVICE, backends, run_or_skip

pytest.importorskip("triton")

from sluice.backends.triton import configs, gpu

pytestmark = pytest.mark.skipif("triton" not in backends("prefill"), reason="no Triton here")
WAYS = ("whole", "pieces")
MAJOR = gpu.capability(torch.device(DEVICE))[0]
USUAL = "whole" if MAJOR in configs.KEY_WHOLE else "pieces"
MORE = {
    "everything_at_once": {"lengths": (17, 0, 9, 40, 2)},
    "checkpoints_positions": {"tokens": 37, "positions": ((0, 1, 16, 37), (17, -1, 36, 3))},
    "checkpoints_slot0_kv": {"lengths": (20, 33), "positions": ((16, 20), (0, -1))},
    "grouped_queries": {"tokens": 37},
    "unit_keys_given": {"tokens": 37},
    "K33_V17": {"tokens": 37, "rule": "gated"},
    "K256_V64": {"tokens": 17},
    "T0": {},
}
"""Cases of the contract, here with decay per key, and shorter: a chunk has 16 tokens."""


def both() -> Iterator[Any]:
    """(case, dtype, way) for ``parametrize``."""
    found = {case.name.split("/")[-1]: case for case in cases.select("prefill")}
    for case, dtype in cases.pairs("prefill"):
        if case.per_key and dtype != torch.bfloat16:
            for way in WAYS:
                if way != USUAL:
                    yield pytest.param(case, dtype, way, id=f"{way}-{cases.label(case, dtype)}")
    for name, changes in MORE.items():
        case = found[name].with_(per_key=True, **changes)
        for way in WAYS:
            yield pytest.param(case, torch.float32, way, id=f"{way}-{name}")


@pytest.fixture
def the_way(monkeypatch) -> Iterator[Any]:
    """A function that chooses the way of every call until the test ends."""

    def choose(way: str) -> None:
        monkeypatch.setattr(configs, "KEY_WHOLE", (MAJOR,) if way == "whole" else ())
        calls.forget()

    yield choose
    calls.forget()


@pytest.mark.parametrize(("case", "dtype", "way"), list(both()))
def test_each_way_of_triton_matches_the_oracle(case, dtype, way, the_way):
    the_way(way)
    inputs = case.inputs(dtype, DEVICE)
    expected = case.expected(inputs)
    case.check(run_or_skip(case, inputs, "triton"), expected)


@pytest.mark.parametrize("way", WAYS)
def test_the_way_of_triton_is_the_one_chosen(way, the_way):
    """Else both tests above might run one way."""
    from sluice.backends.triton import prefill
    from tests.gpu.cross import specs_of
    from tests.gpu.prefill_kernels import CALLS

    the_way(way)
    (spec,) = specs_of(CALLS["per key"][1], torch.device(DEVICE))
    names = [call.kernel.name.removesuffix("_kernel") for call in prefill.launches(spec).calls]
    pieces = ["prefill_key_chunks", "prefill_key_states"]
    assert names == (["prefill_key"] if way == "whole" else pieces)
