"""Triton's backward of convolutions and norm: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from sluice import dispatch
from sluice.testing import gradients as exact
from sluice.testing.compare import assert_within
from tests.suite import COMPILED, backends
from tests.training import layer_calls
from tests.training.calls import FLOAT32, HALF

pytestmark = pytest.mark.skipif(
    "triton" not in backends("rms_norm_gated_backward"), reason="no Triton here"
)
DTYPES = [torch.float32, torch.bfloat16 if COMPILED else torch.float16]


@pytest.fixture(autouse=True)
def _only_triton(monkeypatch):
    monkeypatch.setattr(dispatch, "ORDER", ("triton",))


def compare(ours, theirs, leaves, dtype, end=None):
    x = list(leaves.values())
    found, wanted = exact.gradients(ours, x), exact.gradients(theirs, x)
    for name, a, b in zip(leaves, found, wanted, strict=True):
        if end is not None and name in ("x", "a", "b"):
            assert not a[:, end:].any(), f"d{name} behind the last border"
            a, b = a[:, :end], b[:, :end]
        limit = FLOAT32 if dtype == torch.float32 else HALF.get(name, 6e-3)
        assert_within(a, b, limit, name=f"d{name}")


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("W", "L"), [(2, 3), (4, 5)])
def test_the_convolution(W, L, dtype, packed):
    leaves, options, ours = layer_calls.convolution(W, L, dtype, packed)
    compare(ours, exact.conv(**leaves, **options), leaves, dtype, 71 if packed else None)


def test_a_convolution_of_a_view_without_window_and_bias():
    leaves, view, ours = layer_calls.convolution_of_a_view()
    theirs = exact.conv(view, leaves["weight"])
    compare(ours[:1], theirs[:1], leaves, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "packed", "norm"),
    [(DTYPES[0], True, True), (DTYPES[1], False, True), (DTYPES[0], False, False)],
    ids=["packed", "16 bits", "no norm"],
)
def test_convolution_split_norm_and_gates(dtype, packed, norm):
    leaves, (HK, HV, K, V), ours = layer_calls.convolution_and_split(dtype, packed, norm)
    y, _ = exact.conv(
        *(leaves[x] for x in ("x", "weight", "bias")),
        initial_state=leaves["initial_state"],
        cu_seqlens=layer_calls.bounds_of(packed),
    )
    q, k, v = y.split([HK * K, HK * K, HV * V], dim=-1)
    q, k = (z.unflatten(-1, (HK, K)) for z in (q, k))
    if norm:
        q, k = (z * (z.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for z in (q, k))
    a, b, A_log, dt_bias = (leaves[x].double() for x in ("a", "b", "A_log", "dt_bias"))
    g = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    theirs = [q, k, v.unflatten(-1, (HV, V)), g, 2 * b.sigmoid()]
    if packed:
        theirs = [torch.cat([z[:, :71], 0 * z[:, 71:].detach()], dim=1) for z in theirs]
    compare(ours, theirs, leaves, dtype, 71 if packed else None)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gated_norm(dtype, activation):
    leaves, options, ours = layer_calls.norm(dtype, activation)
    compare([ours], [exact.norm(**leaves, **options)], leaves, dtype)


def test_the_gated_norm_without_eps():
    """54 rows fill no block: those that are not there have no length, and no part in a gradient."""
    leaves, options, ours = layer_calls.norm(torch.float32, "silu", eps=0.0)
    compare([ours], [exact.norm(**leaves, **options)], leaves, torch.float32)


def test_the_gated_norm_of_views_of_one_projection():
    leaves, (x, z), ours = layer_calls.norm_of_views()
    theirs = exact.norm(x, z, leaves["weight"], eps=1e-6, activation="silu")
    compare([ours], [theirs], leaves, torch.float32)
