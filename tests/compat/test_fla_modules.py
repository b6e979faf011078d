"""FLA's modules: the gated norm and the short convolution, against the oracle."""

from __future__ import annotations

import pytest
import torch

from sluice.compat.fla import FusedRMSNormGated, ShortConvolution, rms_norm_gated
from sluice.contract.errors import ContractError
from sluice.testing import oracle
from sluice.testing.compare import FLOAT32_CPU, assert_same_bits, assert_within


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert_within(a, b, FLOAT32_CPU, name="y or state")


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@pytest.mark.parametrize("grad", [False, True], ids=["no gradient", "gradient"])
def test_norm(activation, grad):
    norm = FusedRMSNormGated(8, activation=activation)
    assert list(norm.state_dict()) == ["weight"]
    torch.nn.init.normal_(norm.weight)
    x, g = drawn(2, 3, 4, 8), drawn(2, 3, 4, 8, seed=1)
    name = "sigmoid" if activation == "sigmoid" else "silu"
    with torch.set_grad_enabled(grad):
        y = norm(x, g)
    assert y.requires_grad == grad
    weight = norm.weight.detach()
    close([y.detach()], [oracle.rms_norm_gated(x, g, weight, eps=1e-5, activation=name)])
    if grad:
        y.sum().backward()
        double = [z.double().requires_grad_() for z in (x, g, weight)]
        exact = double[2] * double[0] * (double[0].square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        gate = torch.sigmoid(double[1])
        (exact * (gate if name == "sigmoid" else gate * double[1])).sum().backward()
        close([norm.weight.grad], [double[2].grad])


def test_norm_without_weight_and_after_a_residual():
    x, g, residual = drawn(5, 8), drawn(5, 8, seed=1), drawn(5, 8, seed=2)
    ones = torch.ones(8)
    norm = FusedRMSNormGated(8, elementwise_affine=False, eps=1e-3)
    assert not norm.state_dict()
    close([norm(x, g)], [oracle.rms_norm_gated(x, g, ones, eps=1e-3)])
    half = residual.to(torch.bfloat16)
    y, total = norm(x, g, half, prenorm=True)
    close([y], [oracle.rms_norm_gated(x + half, g, ones, eps=1e-3)])
    assert total.dtype == torch.bfloat16
    assert_same_bits(total, (x + half).to(torch.bfloat16), "sum")
    low = x.to(torch.bfloat16)
    y, kept = norm(low, g, prenorm=True, residual_in_fp32=True)
    assert (y.dtype, kept.dtype) == (torch.bfloat16, torch.float32)
    assert_same_bits(kept, low.float(), "x")
    assert norm(low, g, prenorm=True)[1] is low
    with pytest.raises(ContractError, match="rms_norm_gated: bias: expected None"):
        rms_norm_gated(x, g, ones, ones)
    with pytest.raises(ContractError, match="activation: expected one of"):
        FusedRMSNormGated(8, activation="relu")


def conv(bias=True, activation="silu", W=4):
    made = ShortConvolution(6, W, bias=bias, activation=activation)
    assert made.weight.shape == (6, 1, W)
    return made, made.weight.detach().squeeze(1), made.bias.detach() if bias else None


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("grad", [False, True], ids=["no gradient", "gradient"])
def test_convolution(bias, activation, grad):
    module, taps, offset = conv(bias, activation)
    x, cache, residual = drawn(2, 9, 6), drawn(2, 6, 4), drawn(2, 9, 6, seed=1)
    before, mask = cache.clone(), torch.ones(2, 9)
    mask[0, :3] = 0
    exact = oracle.conv(x * mask[..., None], taps, offset, activation=activation, state=cache)
    with torch.set_grad_enabled(grad):
        y, final = module(x, residual, mask, cache, output_final_state=True)
    assert y.requires_grad == grad
    close([y.detach(), final.detach()], [exact[0] + residual, exact[1]])
    assert_same_bits(cache, before, "the caller's cache")
    assert module(x)[1] is None


@pytest.mark.parametrize("packed", [False, True])
def test_one_token_a_sequence_updates_the_cache_in_place(packed):
    module, taps, offset = conv()
    x, cache = drawn(3, 1, 6), drawn(3, 6, 4)
    exact = oracle.conv(x, taps, offset, state=cache)
    borders = torch.arange(4) if packed else None
    given = x.view(1, 3, 6) if packed else x
    with torch.no_grad():
        y, final = module(given, cache=cache, output_final_state=True, cu_seqlens=borders)
    assert final is cache
    close([y.view(3, 1, 6), cache], exact[:2])
    with torch.no_grad():
        y, final = module(given, output_final_state=True, cu_seqlens=borders)
        assert module(given, cu_seqlens=borders)[1] is None
    exact = oracle.conv(x, taps, offset, state=torch.zeros(3, 6, 4))
    close([y.view(3, 1, 6), final], exact[:2])


def test_packed_sequences_of_more_tokens():
    module, taps, offset = conv()
    x, cache, borders = drawn(1, 9, 6), drawn(3, 6, 4), torch.tensor([0, 4, 4, 9])
    exact = oracle.conv(x, taps, offset, state=cache, cu_seqlens=borders)
    with torch.no_grad():
        y, final = module(x, cache=cache, output_final_state=True, cu_seqlens=borders)
    close([y, final], exact[:2])


def test_convolution_refuses_by_name():
    module, *_ = conv()
    x = drawn(1, 1, 6)
    for argument, options in (
        ("chunk_indices", {"chunk_indices": x}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 1]), "mask": torch.ones(1, 1)}),
        ("cp_context", {"cp_context": x}),
        ("anything", {"anything": 1}),
    ):
        with torch.no_grad(), pytest.raises(ContractError, match=f": {argument}: expected"):
            module(x, **options)
    for argument, options in (
        ("backend", {"backend": "cuda"}),
        ("activation", {"activation": "relu"}),
        ("use_fast_conv1d", {"use_fast_conv1d": True}),
    ):
        with pytest.raises(ContractError, match=f"ShortConvolution: {argument}: expected"):
            ShortConvolution(6, 4, **options)
