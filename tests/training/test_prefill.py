"""Gradients of ``prefill`` against autograd through the recurrence in float64."""

from __future__ import annotations

import importlib

import pytest
import torch

import sluice
from sluice.testing.compare import assert_same_bits
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
KEY = BASE.of(name="per key", decay="key")
KEY_KINDS = [
    KEY.of(name="per key, raw, gated", raw=True, delta=False),
    KEY.of(name="per key, raw, doubled", raw=True, neg_eigval=True),
    KEY.of(name="per key, many queries", HQ=8),
    KEY.of(name="per key, one query", HQ=1),
    KEY.of(name="per key, four per key", HK=1, HQ=1),
    KEY.of(name="per key, no state, no norm", state=False, normalize=False, scale=0.3),
    KEY.of(name="per key, kv", layout="kv", V=16, HK=4),
    KEY.of(name="per key, wide", K=256, V=256, T=65, HV=2, B=1),
    KEY.of(name="per key, odd", K=9, V=33, T=40),
]
KEY_HARD = [x.of(name=f"per key, {x}", decay="key") for x in HARD]
KEY_HARD += [KEY.of(name=f"per key, {T} tokens", T=T) for T in (8, 9, 31, 32, 33)]
LONG = BASE.of(name="4097 tokens", T=4097, B=1, HQ=1, HK=1, HV=2, V=16)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("call", KINDS, ids=str)
def test_gradients_in_float64(call, backend):
    check(call, torch.float64, backend)


@pytest.mark.parametrize("backend", ["cpu", "chunked"])
@pytest.mark.parametrize("call", [*KINDS, *HARD, LONG, *KEY_KINDS, *KEY_HARD], ids=str)
def test_gradients_in_float32(call, backend):
    check(call, torch.float32, backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "chunked"])
@pytest.mark.parametrize(
    "call",
    [KINDS[0], KINDS[4], KINDS[6], KINDS[8], *HARD, LONG, KINDS[9], *KEY_HARD],
    ids=str,
)
def test_gradients_in_16_bits(call, backend, dtype):
    check(call, dtype, backend)


@pytest.mark.parametrize("decay", ["head", "key"])
def test_views_of_one_tensor_and_other_layouts_have_the_same_gradients(decay):
    """Heads of a fused projection, [B, H, T, D], and packed tokens without a batch dimension."""
    HK, HV, K = 2, 4, 16
    width = 1 if decay == "head" else K
    gen = torch.Generator().manual_seed(0)
    fused = torch.randn(1, 70, (2 * HK + HV) * K, generator=gen).requires_grad_()
    gates = torch.rand(1, 70, HV, 1 + width, generator=gen).requires_grad_()
    weight = torch.randn(1, 70, HV, K, generator=gen)

    def run(kind):
        q, k, v = fused.split([HK * K, HK * K, HV * K], dim=-1)
        q, k, v = (x.unflatten(-1, (-1, K)) for x in (q, k, v))
        g, beta = (-gates)[..., 1:], gates[..., 0]
        g = g.squeeze(-1) if decay == "head" else g
        options = {"normalize_qk": True}
        if kind == "dense":
            q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        elif kind == "turned" and decay == "key":
            g = g.mT.contiguous().mT
        elif kind == "bhtd":
            q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
            options["layout"] = "bhtd"
        elif kind == "packed":
            q, k, v, g, beta = (x.squeeze(0) for x in (q, k, v, g, beta))
            options["cu_seqlens"] = torch.tensor([0, 70])
        o, _ = sluice.prefill(q, k, v, g, beta, **options)
        o = o.transpose(1, 2) if kind == "bhtd" else o.view(weight.shape)
        return torch.autograd.grad((o * weight).sum(), [fused, gates])

    exact = run("dense")
    for kind in ("views", "turned", "bhtd", "packed"):
        for a, b in zip(run(kind), exact, strict=True):
            assert_same_bits(a, b, kind)


@pytest.mark.parametrize("decay", ["head", "key"])
def test_no_bit_depends_on_the_number_of_threads(decay):
    leaves, options = BASE.of(decay=decay, lengths=(5, 0, 70, 33)).make(torch.float32)

    def run(threads):
        torch.set_num_threads(threads)
        o, final = sluice.prefill(**leaves, **options, backend="cpu")
        return torch.autograd.grad([o, final], list(leaves.values()), [o.detach(), final.detach()])

    before = torch.get_num_threads()
    try:
        alone, team = run(1), run(3)
    finally:
        torch.set_num_threads(before)
    for name, a, b in zip(leaves, alone, team, strict=True):
        assert_same_bits(a, b, f"d{name}")


def test_a_backend_without_a_backward_leaves_it_to_the_next(monkeypatch):
    cpu = importlib.import_module("sluice.backends.cpu")
    monkeypatch.setattr(cpu, "refuse", lambda spec: "no" if "backward" in spec.op else None)
    check(BASE.of(name="refused", T=11), torch.float32, "cpu")
