"""Results that go to memory past the caches: the same bits, wherever they lie."""

from __future__ import annotations

import pytest
import torch

import sluice
from sluice import calls

pytest.importorskip("numba")
params = pytest.importorskip("sluice.backends.cpu.params")

T, HK, HV, WIDTH = 39, 2, 4, 128
D = (2 * HK + HV) * WIDTH


def _moved(shape, dtype, by):
    """An empty tensor, `by` elements after a multiple of 64 bytes."""
    size = torch.Size(shape).numel()
    flat = torch.empty(size + 128, dtype=dtype)
    start = -flat.data_ptr() % 64 // dtype.itemsize + by
    return flat[start : start + size].view(shape)


def _conv(x, weight, bias, by):
    out = _moved(x.shape, x.dtype, by)
    return [sluice.causal_conv1d(x, weight, bias, out=out, backend="cpu")[0]]


def _conv_qkv(x, weight, bias, by):
    gates = torch.linspace(-3, 3, T * HV).view(1, T, HV)
    shapes = ((1, T, HK, WIDTH), (1, T, HK, WIDTH), (1, T, HV, WIDTH))
    out = tuple(_moved(shape, x.dtype, by) for shape in shapes)
    out += tuple(torch.empty(1, T, HV) for _ in "gb")
    return list(
        sluice.conv_qkv(
            x, weight, bias, num_k_heads=HK, num_v_heads=HV, a=gates, b=gates,
            A_log=torch.zeros(HV), dt_bias=torch.zeros(HV), out=out, backend="cpu",
        )
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [_conv, _conv_qkv])
def test_large_results_have_the_bits_of_small_ones(run, dtype, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(1, T, D).to(dtype)
    weight, bias = torch.randn(D, 4), torch.randn(D)
    expected = run(x, weight, bias, 0)
    monkeypatch.setattr(params, "FAR_BYTES", 0)
    for by in (0, 1, 16):
        calls.forget()
        found = run(x, weight, bias, by)
        assert all(map(torch.equal, found, expected)), by
    calls.forget()
