"""Flash Linear Attention's own checks: its naive references, its shapes, its tolerances.

The tolerances are those of FLA's tests/ops/test_gated_delta.py and test_kda.py (0.002 for the fused
recurrent kernel, 0.005 for the chunked one and for per-key decay, on o and on the final state) with
FLA's measure, RMS(reference - result) / (RMS(reference) + 1e-8). Batches are smaller than FLA's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import sluice
from tests.suite import DEVICE, each_backend

RECURRENT, CHUNK, PER_KEY = 0.002, 0.005, 0.005
FP32, FP16 = torch.float32, torch.float16


@cache
def _naive(operator: str) -> ModuleType:
    """FLA's plain torch reference, loaded as a file: only the package needs Triton."""
    try:
        files = importlib.metadata.files("fla-core") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fla-core is not installed")
    (path,) = (f for f in files if f.as_posix() == f"fla/ops/{operator}/naive.py")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{operator}", str(path.locate()))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _error_ratio(reference: Tensor, result: Tensor) -> float:
    reference, result = reference.double(), result.double()
    error, base = ((x.square().mean().sqrt()) for x in (reference - result, reference))
    return float(error / (base + 1e-8))


def _assert_close(name: str, reference: Tensor, result: Tensor, ratio: float) -> None:
    assert reference.shape == result.shape
    error = _error_ratio(reference, result)
    assert error < ratio, f"{name}: {error:.6f} is not below {ratio}"  # also fails for NaN


def _inputs(
    B: int,
    T: int,
    H: int,
    HV: int,
    D: int,
    dtype: torch.dtype,
    normalizer: float = 1.0,
    mask_p: float = 0.0,
    per_key: bool = False,
    N: int | None = None,
) -> dict[str, Tensor]:
    """FLA's inputs: gates are log-sigmoids over a normaliser, and some are set to 0."""
    gen = torch.Generator().manual_seed(42)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=gen)

    g = logsigmoid(randn(B, T, HV, D) if per_key else rand(B, T, HV)) / normalizer
    drawn = {
        "q": randn(B, T, H, D).to(dtype),
        "k": normalize(randn(B, T, H, D), p=2, dim=-1).to(dtype),
        "v": randn(B, T, HV, D).to(dtype),
        "beta": rand(B, T, HV).to(dtype).sigmoid(),
        "g": g * (rand(*g.shape) > mask_p),
        "h0": randn(N or B, HV, D, D),
    }
    return {name: x.to(DEVICE) for name, x in drawn.items()}


def _reference(form: str, x: dict[str, Tensor], scale: float, **options: Any) -> Any:
    """FLA's result: (o, final state [N, HV, K, V]). Its gated rule needs q and k per value head."""
    operator = "kda" if x["g"].dim() == 4 else "gated_delta_rule"
    call = {name: x[name] for name in ("q", "k", "v", "g", "beta")}
    if operator != "kda":
        r = x["v"].shape[2] // x["q"].shape[2]
        call |= {name: x[name].repeat_interleave(r, dim=2) for name in "qk"}
    function = getattr(_naive(operator), f"naive_{form}_{operator}")
    return function(
        **call, scale=scale, initial_state=x["h0"].clone(), output_final_state=True, **options
    )


def _pool(h0: Tensor, state_v_first: bool) -> dict[str, Any]:
    """FLA's [K, V] states, or transposed as its ``state_v_first`` (our default) keeps them."""
    if state_v_first:
        return {"state": h0.mT.contiguous(), "state_layout": "vk"}
    return {"state": h0.clone(), "state_layout": "kv"}


def _final(pool: dict[str, Any]) -> Tensor:
    return pool["state"].mT if pool["state_layout"] == "vk" else pool["state"]


def _ours(
    op: str, x: dict[str, Tensor], pool: dict[str, Any], backend: str, **options: Any
) -> Tensor:
    call = {name: x[name] for name in ("q", "k", "v", "g", "beta")}
    try:
        o, _ = getattr(sluice, op)(**call, **pool, backend=backend, **options)
    except sluice.BackendError as refusal:
        pytest.skip(str(refusal))
    return o


def _tokens(x: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {n: y if n == "h0" else y[:, start:stop] for n, y in x.items()}


@pytest.mark.parametrize("state_v_first", [False, True], ids=["kv", "vk"])
@pytest.mark.parametrize(
    ("T", "H", "HV", "D", "scale", "normalizer", "dtype"),
    [
        (1, 2, 4, 64, 1.0, 1.0, FP32),
        (15, 2, 4, 100, 1.0, 1.0, FP32),
        (63, 1, 1, 64, 1.0, 1.0, FP32),
        (63, 2, 8, 128, 1.0, 0.1, FP32),
        (100, 3, 3, 128, 1.0, 10.0, FP32),
        (100, 2, 4, 60, 0.1, 1.0, FP16),
    ],
)
@pytest.mark.parametrize(("op", "backend"), each_backend("decode"))
def test_decode_keeps_the_recurrent_tolerance(
    op, backend, T, H, HV, D, scale, normalizer, dtype, state_v_first
):
    """Steps of up to 8 tokens, one after another, from FLA's initial state."""
    x = _inputs(2, T, H, HV, D, dtype, normalizer)
    o_ref, ht_ref = _reference("recurrent", x, scale)
    pool = _pool(x["h0"], state_v_first)
    parts, start = [], 0
    while start < T:
        stop = min(start + 1 + start % 8, T)
        parts.append(_ours(op, _tokens(x, start, stop), pool, backend, scale=scale))
        start = stop
    _assert_close("o", o_ref, torch.cat(parts, dim=1), RECURRENT)
    _assert_close("ht", ht_ref, _final(pool), RECURRENT)


@pytest.mark.parametrize(
    ("T", "H", "HV", "D", "scale", "normalizer", "dtype"),
    [
        (63, 1, 1, 64, 1.0, 1.0, FP32),
        (500, 4, 4, 60, 1.0, 1.0, FP32),
        (300, 2, 8, 128, 1.0, 0.1, FP32),
        (300, 2, 4, 100, 0.1, 10.0, FP16),
    ],
)
@pytest.mark.parametrize(("op", "backend"), each_backend("prefill"))
def test_prefill_keeps_even_the_recurrent_tolerance(
    op, backend, T, H, HV, D, scale, normalizer, dtype
):
    x = _inputs(1, T, H, HV, D, dtype, normalizer)
    o_ref, ht_ref = _reference("recurrent", x, scale)
    pool = _pool(x["h0"], state_v_first=True)
    _assert_close("o", o_ref, _ours(op, x, pool, backend, scale=scale), RECURRENT)
    _assert_close("ht", ht_ref, _final(pool), RECURRENT)


@pytest.mark.parametrize("state_v_first", [False, True], ids=["kv", "vk"])
@pytest.mark.parametrize(
    ("T", "H", "HV", "D", "scale", "normalizer", "mask_p"),
    [
        (15, 2, 2, 64, 1.0, 1.0, 0.0),
        (63, 2, 4, 100, 1.0, 0.1, 0.0),
        (75, 4, 4, 64, 1.0, 0.01, 0.0),
        (300, 3, 3, 60, 0.1, 1.0, 0.5),
        (500, 1, 4, 128, 0.1, 10.0, 0.0),
    ],
)
@pytest.mark.parametrize(("op", "backend"), each_backend("prefill"))
def test_prefill_keeps_the_chunk_tolerance(
    op, backend, T, H, HV, D, scale, normalizer, mask_p, state_v_first
):
    """FLA's chunk test: float16 inputs, unit keys, unnormalised q, beta = 1."""
    x = _inputs(1, T, H, HV, D, FP16, normalizer, mask_p)
    x["beta"].fill_(1)
    o_ref, ht_ref = _reference("chunk", x, scale)
    pool = _pool(x["h0"], state_v_first)
    _assert_close("o", o_ref, _ours(op, x, pool, backend, scale=scale), CHUNK)
    _assert_close("ht", ht_ref, _final(pool), CHUNK)


@pytest.mark.parametrize("per_key", [False, True], ids=["per head", "per key"])
@pytest.mark.parametrize(
    ("H", "D", "mask_p", "cu_seqlens"),
    [
        (4, 60, 0.0, (0, 15)),
        (2, 64, 0.5, (0, 256, 500)),
        (2, 128, 0.5, (0, 122, 229, 400)),
        (2, 100, 0.0, (0, 15, 100, 300)),
    ],
)
@pytest.mark.parametrize(("op", "backend"), each_backend("prefill"))
def test_packed_prefill_keeps_the_chunk_tolerance(op, backend, H, D, mask_p, cu_seqlens, per_key):
    """Each sequence by itself, through FLA's reference, against all of them in one call."""
    N, T = len(cu_seqlens) - 1, cu_seqlens[-1]
    x = _inputs(1, T, H, H, D, FP16, mask_p=mask_p, per_key=per_key, N=N)
    found = [
        _reference("recurrent", {**_tokens(x, a, b), "h0": x["h0"][i : i + 1]}, 1.0)
        for i, (a, b) in enumerate(pairwise(cu_seqlens))
    ]
    o_ref, ht_ref = torch.cat([o for o, _ in found], 1), torch.cat([h for _, h in found])
    bounds = torch.tensor(cu_seqlens, device=DEVICE)
    pool = _pool(x["h0"], state_v_first=False)
    options = {"scale": 1.0, "cu_seqlens": bounds, "cu_seqlens_cpu": bounds.cpu()}
    _assert_close("o", o_ref, _ours(op, x, pool, backend, **options), CHUNK)
    _assert_close("ht", ht_ref, _final(pool), CHUNK)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize(
    ("T", "H", "HV", "D", "scale", "normalizer", "dtype"),
    [
        (64, 1, 1, 64, 1.0, 1.0, FP32),
        (256, 3, 3, 60, 1.0, 1.0, FP32),
        (128, 2, 4, 100, 0.1, 10.0, FP16),
    ],
)
@pytest.mark.parametrize(("op", "backend"), each_backend("prefill"))
def test_per_key_decay_keeps_the_tolerance_of_kda(
    op, backend, T, H, HV, D, scale, normalizer, dtype, form
):
    x = _inputs(1, T, H, HV, D, dtype, normalizer, per_key=True)
    # its chunked form loops over pairs of tokens: chunks of 16 keep exp(g - g) finite, and are fast
    options = {"chunk_size": 16} if form == "chunk" else {}
    o_ref, ht_ref = _reference(form, x, scale, **options)
    pool = _pool(x["h0"], state_v_first=False)
    _assert_close("o", o_ref, _ours(op, x, pool, backend, scale=scale), PER_KEY)
    _assert_close("ht", ht_ref, _final(pool), PER_KEY)


@pytest.mark.parametrize(("op", "backend"), each_backend("decode", "prefill"))
def test_normalising_inside_is_normalising_before(op, backend):
    """``use_qk_l2norm_in_kernel``: FLA normalises before its reference."""
    x = _inputs(2, 8, 2, 4, 64, FP32)
    x["q"], x["k"] = 3.0 * x["q"], 0.5 * x["k"]
    unit = {**x, **{name: normalize(x[name], p=2, dim=-1) for name in "qk"}}
    o_ref, ht_ref = _reference("recurrent", unit, 1.0)
    pool = _pool(x["h0"], state_v_first=True)
    _assert_close("o", o_ref, _ours(op, x, pool, backend, scale=1.0, normalize_qk=True), RECURRENT)
    _assert_close("ht", ht_ref, _final(pool), RECURRENT)


@pytest.mark.parametrize(
    "wrong", [lambda x: 0 * x, lambda x: 1.02 * x, lambda x: x.flip(-1), lambda x: x * float("nan")]
)
def test_the_measure_sees_a_wrong_result(wrong):
    reference = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(AssertionError):
        _assert_close("o", reference, wrong(reference), CHUNK)


def test_the_reference_is_fla_s_own():
    """The file is the one that fla-core installed, and both its forms agree."""
    for operator in ("gated_delta_rule", "kda"):
        path = _naive(operator).__spec__.origin
        assert path.replace("\\", "/").endswith(f"fla/ops/{operator}/naive.py")
    x = _inputs(1, 128, 2, 2, 32, FP32)
    for a, b in zip(_reference("recurrent", x, 1.0), _reference("chunk", x, 1.0), strict=True):
        _assert_close("o or ht", a, b, 1e-5)
