"""Gradients of the convolutions, the gated norm and the layer, against float64."""

from __future__ import annotations

import pytest
import torch

import sluice
from sluice.layers import GatedDeltaNet, QwenShape
from sluice.testing import gradients as exact
from sluice.testing.compare import assert_same_bits, assert_within
from tests.training.calls import FLOAT32, FLOAT64, HALF

pytestmark = pytest.mark.filterwarnings("ignore::sluice.SlowPathWarning")
LIMITS = {torch.float64: FLOAT64, torch.float32: FLOAT32, torch.bfloat16: 6e-3}
BACKENDS = [(torch.float64, "reference"), (torch.float32, "reference")]
BACKENDS += [(torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.bfloat16, "reference")]


def drawn(*shape, dtype=torch.float64, seed=0):
    gen = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype).requires_grad_()


def compare(ours, theirs, leaves, dtype, end=None):
    names, x = list(leaves), list(leaves.values())
    for name, a, b in zip(names, exact.gradients(ours, x), exact.gradients(theirs, x), strict=True):
        if end is not None and name in ("x", "a", "b"):
            assert not a[:, end:].any(), f"d{name} behind the last border"
            a, b = a[:, :end], b[:, :end]
        limit = LIMITS[dtype]
        if dtype == torch.bfloat16 and name in HALF:
            limit = HALF[name]
        assert_within(a, b, limit, name=f"d{name}")


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize(("dtype", "backend"), BACKENDS, ids=str)
@pytest.mark.parametrize("W", [2, 4])
def test_the_convolution(W, dtype, backend, packed):
    B, T, D, N = (1, 21, 40, 4) if packed else (2, 19, 40, 2)
    leaves = {
        "x": drawn(B, T, D, dtype=dtype),
        "weight": drawn(D, W, dtype=dtype),
        "bias": drawn(D, dtype=dtype),
        "initial_state": drawn(N, D, W + 1, dtype=dtype),
    }
    options = {"activation": "silu" if W == 4 else None}
    end = None
    if packed:
        options["cu_seqlens"], end = torch.tensor([0, 1, 1, 7, 18]), 18
        with torch.no_grad():
            leaves["x"][:, end:] = float("nan")
    ours = sluice.causal_conv1d(**leaves, **options, backend=backend)
    with torch.no_grad():
        clean = {**leaves, "x": leaves["x"].nan_to_num(0.0)}
    clean = {name: y.detach().requires_grad_() for name, y in clean.items()}
    theirs = exact.conv(**clean, **options)
    found = exact.gradients(ours, list(leaves.values()))
    wanted = exact.gradients(theirs, list(clean.values()))
    for name, a, b in zip(leaves, found, wanted, strict=True):
        if end is not None and name == "x":
            assert not a[:, end:].any()
        assert_within(a, b, LIMITS[dtype], name=f"d{name}")


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize(("dtype", "backend"), BACKENDS, ids=str)
def test_convolution_split_norm_and_gates(dtype, backend, packed):
    HK, HV, K, V = 2, 4, 8, 12
    B, T, D, N = (1, 21, 2 * HK * K + HV * V, 4) if packed else (2, 19, 2 * HK * K + HV * V, 2)
    leaves = {
        "x": drawn(B, T, D, dtype=dtype),
        "weight": drawn(D, 4, dtype=dtype),
        "bias": drawn(D, dtype=dtype),
        "initial_state": drawn(N, D, 3, dtype=dtype),
        "a": drawn(B, T, HV, dtype=dtype, seed=1),
        "b": drawn(B, T, HV, dtype=dtype, seed=2),
        "A_log": drawn(HV, seed=3).detach().float().requires_grad_(),
        "dt_bias": drawn(HV, seed=4).detach().float().requires_grad_(),
    }
    bounds = torch.tensor([0, 1, 1, 7, 18]) if packed else None
    ours = sluice.conv_qkv(
        **leaves,
        num_k_heads=HK,
        num_v_heads=HV,
        head_k_dim=K,
        cu_seqlens=bounds,
        neg_eigval=True,
        backend=backend,
    )
    y, _ = exact.conv(
        *(leaves[x] for x in ("x", "weight", "bias")),
        initial_state=leaves["initial_state"],
        cu_seqlens=bounds,
    )
    q, k, v = y.split([HK * K, HK * K, HV * V], dim=-1)
    q, k = (z.unflatten(-1, (HK, K)) for z in (q, k))
    q, k = (z * (z.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for z in (q, k))
    a, b, A_log, dt_bias = (leaves[x].double() for x in ("a", "b", "A_log", "dt_bias"))
    g = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    theirs = [q, k, v.unflatten(-1, (HV, V)), g, 2 * b.sigmoid()]
    if packed:
        theirs = [torch.cat([z[:, :18], 0 * z[:, 18:].detach()], dim=1) for z in theirs]
    compare(ours, theirs, leaves, dtype, 18 if packed else None)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize(("dtype", "backend"), BACKENDS, ids=str)
def test_the_gated_norm(dtype, backend, activation):
    leaves = {
        "x": drawn(2, 9, 3, 40, dtype=dtype),
        "z": drawn(2, 9, 3, 40, dtype=dtype, seed=1),
        "weight": drawn(40, seed=2).detach().float().requires_grad_(),
    }
    options = {"eps": 1e-6, "activation": activation}
    ours = sluice.rms_norm_gated(**leaves, **options, backend=backend)
    compare([ours], [exact.norm(**leaves, **options)], leaves, dtype)


SHAPE = QwenShape("small", 32, 2, 4, 1, (0,), head_k_dim=8, head_v_dim=16)


def a_layer(dtype=torch.float64):
    torch.manual_seed(0)
    return GatedDeltaNet(SHAPE).to(dtype)


def gradients_of(layer, x, weight, **options):
    x = x.detach().clone().requires_grad_()
    y = layer(x, **options)
    (y * weight).sum().backward()
    found = {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    for p in layer.parameters():
        p.grad = None
    return y.detach(), found


def test_packed_sequences_have_the_gradients_of_each_alone():
    layer, lengths = a_layer(), (5, 0, 70, 1)
    x, weight = drawn(1, 76, 32).detach(), drawn(1, 76, 32, seed=1).detach()
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    y, found = gradients_of(layer, x, weight, cu_seqlens=bounds)
    total = None
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if start == stop:
            continue
        at = slice(start, stop)
        alone, part = gradients_of(layer, x[:, at], weight[:, at])
        assert_within(y[:, at], alone, FLOAT64, name="output")
        assert_within(found["x"][:, at], part.pop("x"), FLOAT64, name="dx")
        total = part if total is None else {n: total[n] + part[n] for n in part}
    for name, exact_one in total.items():
        assert_within(found[name], exact_one, FLOAT64, name=name)


def test_padding_has_no_gradient_and_no_effect():
    layer = a_layer()
    mask = torch.ones(3, 12)
    mask[0, :5], mask[1, 9:], mask[2] = 0, 0, 0
    x, weight = drawn(3, 12, 32).detach(), drawn(3, 12, 32, seed=1).detach()
    y, found = gradients_of(layer, x, weight, attention_mask=mask)
    assert not y[mask == 0].any()
    assert not found["x"][mask == 0].any()
    one, first = gradients_of(layer, x[:1, 5:], weight[:1, 5:])
    _, second = gradients_of(layer, x[1:2, :9], weight[1:2, :9])
    assert_within(y[0, 5:], one[0], FLOAT64, name="output")
    assert_within(found["x"][1, :9], second.pop("x")[0], FLOAT64, name="dx")
    assert_within(found.pop("x")[0, 5:], first.pop("x")[0], FLOAT64, name="dx")
    for name, exact_one in found.items():
        assert_within(exact_one, first[name] + second[name], FLOAT64, name=name)


def test_the_layer_in_float32_is_exact():
    layer = a_layer()
    x, weight = drawn(2, 70, 32).detach(), drawn(2, 70, 32, seed=1).detach()
    _, wanted = gradients_of(layer, x, weight)
    _, found = gradients_of(a_layer(torch.float32), x.float(), weight.float())
    for name in wanted:
        assert_within(found[name].double(), wanted[name], FLOAT32, name=name)


class Stack(torch.nn.Module):
    """Four layers, each beside what it reads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(GatedDeltaNet(SHAPE) for _ in range(4))

    def forward(self, x, **options):
        for layer in self.layers:
            x = x + layer(torch.nn.functional.rms_norm(x, x.shape[-1:]), **options)
        return x


def test_four_layers_in_float32_are_exact():
    x, weight = drawn(1, 130, 32).detach(), drawn(1, 130, 32, seed=1).detach()
    bounds = torch.tensor([0, 65, 65, 130])
    _, wanted = gradients_of(Stack().double(), x, weight, cu_seqlens=bounds)
    _, found = gradients_of(Stack(), x.float(), weight.float(), cu_seqlens=bounds)
    for name in wanted:
        assert_within(found[name].double(), wanted[name], FLOAT32, name=name)


def test_the_same_bits_each_time():
    x, weight = drawn(2, 70, 32).detach().float(), drawn(2, 70, 32, seed=1).detach().float()
    layer = a_layer(torch.float32)
    runs = [gradients_of(layer, x, weight)[1] for _ in range(3)]
    for name, first in runs[0].items():
        for other in runs[1:]:
            assert_same_bits(other[name], first, name)
