"""Triton's backward of convolutions and norm: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import sluice
from sluice import dispatch
from sluice.testing import gradients as exact
from sluice.testing.compare import assert_within
from tests.suite import DEVICE, backends
from tests.training.calls import FLOAT32, HALF

pytestmark = pytest.mark.skipif(
    "triton" not in backends("rms_norm_gated_backward"), reason="no Triton here"
)
DTYPES = [torch.float32, torch.float16 if DEVICE == "cpu" else torch.bfloat16]


@pytest.fixture(autouse=True)
def _only_triton(monkeypatch):
    monkeypatch.setattr(dispatch, "ORDER", ("triton",))


def drawn(*shape, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(*shape, generator=gen, dtype=torch.float64)
    return x.to(DEVICE, dtype).requires_grad_()


def compare(ours, theirs, leaves, dtype, end=None):
    x = list(leaves.values())
    found, wanted = exact.gradients(ours, x), exact.gradients(theirs, x)
    for name, a, b in zip(leaves, found, wanted, strict=True):
        if end is not None and name in ("x", "a", "b"):
            assert not a[:, end:].any(), f"d{name} behind the last border"
            a, b = a[:, :end], b[:, :end]
        limit = FLOAT32 if dtype == torch.float32 else HALF.get(name, 6e-3)
        assert_within(a, b, limit, name=f"d{name}")


def bounds_of(packed):
    return torch.tensor([0, 1, 1, 5, 71], device=DEVICE) if packed else None


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("W", "L"), [(2, 3), (4, 5)])
def test_the_convolution(W, L, dtype, packed):
    B, T, N = (1, 74, 4) if packed else (2, 66, 2)
    D = 40
    leaves = {
        "x": drawn(B, T, D, dtype=dtype),
        "weight": drawn(D, W, dtype=dtype),
        "bias": drawn(D, dtype=dtype),
        "initial_state": drawn(N, D, L, dtype=dtype),
    }
    options = {"activation": "silu" if W == 4 else None, "cu_seqlens": bounds_of(packed)}
    ours = sluice.causal_conv1d(**leaves, **options, backend="triton")
    theirs = exact.conv(**leaves, **options)
    compare(ours, theirs, leaves, dtype, 71 if packed else None)


def test_a_convolution_of_a_view_without_window_and_bias():
    whole = drawn(2, 20, 50)
    leaves = {"x": whole, "weight": drawn(33, 4)}
    view = whole[:, :, 7:40]
    ours = sluice.causal_conv1d(view, leaves["weight"], backend="triton")
    theirs = exact.conv(view, leaves["weight"])
    compare(ours[:1], theirs[:1], leaves, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "packed", "norm"),
    [(DTYPES[0], True, True), (DTYPES[1], False, True), (DTYPES[0], False, False)],
    ids=["packed", "16 bits", "no norm"],
)
def test_convolution_split_norm_and_gates(dtype, packed, norm):
    HK, HV, K, V = 2, 4, 8, 12
    D = 2 * HK * K + HV * V
    B, T, N = (1, 74, 4) if packed else (2, 66, 2)
    leaves = {
        "x": drawn(B, T, D, dtype=dtype),
        "weight": drawn(D, 4, dtype=dtype),
        "bias": drawn(D, dtype=dtype),
        "initial_state": drawn(N, D, 3, dtype=dtype),
        "a": drawn(B, T, HV, dtype=dtype, seed=1),
        "b": drawn(B, T, HV, dtype=dtype, seed=2),
        "A_log": drawn(HV, seed=3),
        "dt_bias": drawn(HV, seed=4),
    }
    bounds = bounds_of(packed)
    ours = sluice.conv_qkv(
        **leaves,
        num_k_heads=HK,
        num_v_heads=HV,
        head_k_dim=K,
        normalize_qk=norm,
        cu_seqlens=bounds,
        neg_eigval=True,
        backend="triton",
    )
    y, _ = exact.conv(
        *(leaves[x] for x in ("x", "weight", "bias")),
        initial_state=leaves["initial_state"],
        cu_seqlens=bounds,
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
    leaves = {
        "x": drawn(2, 9, 3, 40, dtype=dtype),
        "z": drawn(2, 9, 3, 40, dtype=dtype, seed=1),
        "weight": drawn(40, seed=2),
    }
    options = {"eps": 1e-6, "activation": activation}
    ours = sluice.rms_norm_gated(**leaves, **options, backend="triton")
    compare([ours], [exact.norm(**leaves, **options)], leaves, dtype)


def test_the_gated_norm_of_views_of_one_projection():
    fused = drawn(2, 7, 2, 3, 80)
    leaves = {"fused": fused, "weight": drawn(40)}
    x, z = fused.split(40, dim=-1)
    x, z = x.transpose(1, 2), z.transpose(1, 2)
    ours = sluice.rms_norm_gated(x, z, leaves["weight"], backend="triton")
    theirs = exact.norm(x, z, leaves["weight"], eps=1e-6, activation="silu")
    compare([ours], [theirs], leaves, torch.float32)
