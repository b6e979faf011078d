"""Gradients of ``prefill`` against autograd through the recurrence in float64."""

from __future__ import annotations

import pytest
import torch

from tests.training.calls import Call, check

pytestmark = pytest.mark.filterwarnings("ignore::sluice.SlowPathWarning")
BASE = Call("base")
KINDS = [
    BASE,
    BASE.of(name="linear", decay=None, delta=False),
    BASE.of(name="gated", delta=False),
    BASE.of(name="delta", decay=None),
    BASE.of(name="per key", decay="key"),
    BASE.of(name="per key, gated", decay="key", delta=False),
    BASE.of(name="raw", raw=True, neg_eigval=True),
    BASE.of(name="raw, per key", raw=True, decay="key"),
    BASE.of(name="packed", lengths=(5, 0, 64, 1, 70)),
    BASE.of(name="packed, per key", lengths=(5, 0, 64, 1), decay="key", raw=True),
    BASE.of(name="many queries", HQ=8),
    BASE.of(name="one query", HQ=1),
    BASE.of(name="four per key", HK=1, HQ=1),
    BASE.of(name="no state, no norm", state=False, normalize=False, scale=0.3),
    BASE.of(name="kv", layout="kv", V=16, HK=4),
    BASE.of(name="wide", K=256, V=200, T=65, HV=2, B=1),
]
HARD = [
    BASE.of(name=f"{keys}, decay {rate}, beta {beta}", keys=keys, rate=rate, beta=beta, T=130, B=1)
    for keys, rate, beta in (
        ("random", 20.0, "random"),
        ("correlated", 0.001, "one"),
        ("repeated", 0.0, "one"),
        ("identical", 0.0, "one"),
        ("identical", 1.0, "random"),
        ("random", 0.1, "zero"),
        ("correlated", 0.1, "small"),
    )
] + [BASE.of(name=f"{T} tokens", T=T) for T in (1, 63, 64, 65)]


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("call", KINDS, ids=str)
def test_gradients_in_float64(call, backend):
    check(call, torch.float64, backend)


@pytest.mark.parametrize("backend", ["cpu", "chunked"])
@pytest.mark.parametrize("call", KINDS + HARD, ids=str)
def test_gradients_in_float32(call, backend):
    check(call, torch.float32, backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "chunked"])
@pytest.mark.parametrize("call", [KINDS[0], KINDS[4], KINDS[6], KINDS[8], *HARD[:4]], ids=str)
def test_gradients_in_16_bits(call, backend, dtype):
    check(call, dtype, backend)
