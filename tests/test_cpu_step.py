"""``step`` on the CPU: a projection in parts and as a whole, in both orders."""

from __future__ import annotations

import pytest
import torch

import sluice

pytest.importorskip("numba")

HK, HV, K, V, N = 2, 4, 16, 24, 3
KEYS, VALUES = HK * K, HV * V
D = 2 * KEYS + VALUES


@pytest.fixture
def layer():
    """Weights and states; a function so that each call begins with the same states."""
    torch.manual_seed(0)
    weights = {
        "conv_weight": torch.randn(D, 4),
        "A_log": torch.randn(HV),
        "dt_bias": torch.randn(HV),
        "norm_weight": torch.randn(V),
    }
    conv_state, state = torch.randn(N, D, 3), torch.randn(N, HV, V, K)
    return lambda: weights | {"conv_state": conv_state.clone(), "state": state.clone()}


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("strided", [False, True])
def test_parts_of_a_projection_give_the_bits_of_the_whole(layer, T, strided):
    qkvz = torch.randn(N, T, D + VALUES)
    ba = torch.randn(N, T, 4 * HV)[..., ::2] if strided else torch.randn(N, T, 2 * HV)
    qkv_z, b_a = qkvz.split([D, VALUES], -1), ba.split([HV, HV], -1)
    found = []
    for first in (qkvz, qkv_z):
        for second in (ba, b_a):
            given = layer()
            y = sluice.step(first, second, **given, backend="cpu")
            found.append((y, given["state"], given["conv_state"]))
    for got in found[1:]:
        assert all(map(torch.equal, got, found[0]))
    want = sluice.step(qkvz, ba, **layer(), backend="reference")
    torch.testing.assert_close(found[0][0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [1, 3])
def test_an_interleaved_projection_is_the_same_numbers_elsewhere(layer, T):
    q, k = torch.randn(2, N, T, HK, K)
    v, z = torch.randn(2, N, T, HK, HV // HK * V)
    b, a = torch.randn(2, N, T, HK, HV // HK)
    pairs = (
        (torch.cat([x.flatten(2) for x in (q, k, v)], -1), z.flatten(2)),
        (
            b.flatten(2),
            a.flatten(2),
        ),
    )
    whole = torch.cat([q, k, v, z], -1).flatten(2), torch.cat([b, a], -1).flatten(2)
    split, interleaved = layer(), layer()
    y = sluice.step(*pairs, **split, backend="cpu")
    assert torch.equal(y, sluice.step(*whole, **interleaved, order="interleaved", backend="cpu"))
    for name in ("state", "conv_state"):
        assert torch.equal(split[name], interleaved[name])


@pytest.mark.parametrize("element", [1, HV + 2])
@pytest.mark.parametrize("order", ["split", "interleaved"])
def test_a_gate_that_is_no_number_is_found_in_a_whole_projection(layer, order, element):
    ba = torch.randn(N, 2 * HV)
    ba[1, element] = torch.nan
    given = layer()
    before = given["state"].clone()
    with pytest.raises(sluice.ContractError, match="finite"):
        sluice.step(torch.randn(N, D + VALUES), ba, **given, order=order, backend="cpu")
    assert torch.equal(given["state"], before)
