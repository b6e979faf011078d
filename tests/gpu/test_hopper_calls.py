"""What Hopper's prefill refuses, and calls whose addresses TMA cannot reach: never in silence."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import sluice
from sluice import calls, dispatch
from sluice.backends import hopper
from sluice.backends import triton as portable
from sluice.testing import compare
from tests.gpu import fake_driver
from tests.gpu.cross import gpu_like, specs_of

HK, HV, B, T = 1, 2, 2, 70
HALF = torch.float16


def inputs(
    B: int = B, T: int = T, device: str = "cpu", dtype: torch.dtype = HALF
) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(0)

    def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=gen).to(device, dtype)

    return {
        "q": randn(B, T, HK, 128),
        "k": randn(B, T, HK, 128),
        "v": randn(B, T, HV, 128),
        "g": -randn(B, T, HV, dtype=torch.float32).abs(),
        "beta": randn(B, T, HV, dtype=torch.float32).sigmoid(),
        "state": randn(B, HV, 128, 128, dtype=torch.float32),
        "normalize_qk": True,
        "out": torch.zeros(B, T, HV, 128, device=device, dtype=dtype),
    }


def later(x: Tensor, elements: int = 1) -> Tensor:
    """The same, some elements into other memory."""
    memory = torch.empty(x.numel() + elements, dtype=x.dtype, device=x.device)
    return memory[elements:].view(x.shape).copy_(x)


# --------------------------------------------------------------------------------------- refusals


def wide(x: Tensor, columns: int) -> Tensor:
    """Tokens so many elements further apart."""
    B, T, H, D = x.shape
    memory = torch.zeros(B, T, H * D + columns, dtype=x.dtype)
    return memory[..., : H * D].unflatten(-1, (H, D)).copy_(x)


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def longer(x: Tensor) -> Tensor:
    """Rows of a batch with more tokens."""
    return torch.cat([x, x], 1)[:, : x.shape[1]]


REFUSED: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "tokens 258 bytes apart": ("q", lambda x: wide(x, 1), "tokens of q a multiple of 16 bytes"),
    "tokens 264 bytes apart": ("k", lambda x: wide(x, 4), "tokens of k a multiple of 16 bytes"),
    "out 520 bytes apart": ("out", lambda x: wide(x, 4), "not 520 bytes"),
    "heads first": ("v", heads_first, "a token's heads of v next to each other"),
    "out heads first": ("out", heads_first, "a token's heads of out next to each other"),
    "longer rows": ("q", longer, "batch rows of q next to each other"),
    "longer rows of v": ("v", longer, "batch rows of v next to each other"),
}


def refusal(given: dict[str, Any], device: str = "sm_90") -> str | None:
    with gpu_like(device) as where:
        return hopper.refuse(specs_of(lambda: sluice.prefill(**given), where)[0])


@pytest.mark.parametrize("name", REFUSED)
def test_strides_that_tma_cannot_reach_are_refused(name):
    tensor, change, reason = REFUSED[name]
    given = inputs()
    assert refusal(given) is None
    found = refusal({**given, tensor: change(given[tensor])})
    assert found is not None
    assert found.startswith("needs ")
    assert reason in found


def test_one_token_of_longer_rows_is_refused():
    """Its rows lie further apart than the stride of its tokens says."""
    given = inputs(T=4)
    for name in ("q", "k", "v", "g", "beta", "out"):
        given[name] = given[name][:, :1]
    assert "batch rows of q next to each other" in refusal(given)
    assert refusal(inputs(T=1)) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda x: wide(x, 8),
        lambda x: wide(x, 256),
        lambda x: longer(x[:1]) if len(x) == 1 else x,
    ],
    ids=["16 bytes further apart", "beside another tensor", "one row"],
)
def test_strides_that_tma_reaches_are_served(change):
    for batch in (1, 2):
        given = inputs(B=batch)
        for name in ("q", "k", "v", "out"):
            assert refusal({**given, name: change(given[name])}) is None


@pytest.mark.parametrize("change", ["no tokens", "no sequences", "sm_80", "sm_100", "float32"])
def test_calls_that_are_not_for_these_kernels_are_refused(change):
    given, device = inputs(), "sm_90"
    if change == "no tokens":
        given, reason = inputs(T=0), "at least one token"
    elif change == "no sequences":
        given, reason = inputs(B=1), "at least one token"
        bounds = torch.zeros(1, dtype=torch.int32)
        given |= {"cu_seqlens": bounds, "slots": torch.empty(0, dtype=torch.int64)}
    elif change == "float32":
        given, reason = inputs(dtype=torch.float32), "bfloat16 or float16, not torch.float32"
    else:
        device, reason = change, "compute capability 9.0"
    assert reason in refusal(given, device)


# -------------------------------------------------------------------- addresses, without a GPU


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_driver.Driver]:
    """Both GPU backends, on tensors of the CPU."""
    found = fake_driver.install(monkeypatch)
    monkeypatch.setattr(dispatch, "_warned", set())
    if portable.interpreted():
        pytest.skip("kernels have no signature there")
    yield found
    calls.forget()


def slow_path(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if w.category is sluice.SlowPathWarning]


def kernels(driver: fake_driver.Driver) -> set[str]:
    found = {launched.kernel.split("_")[0] for launched in driver.launched}
    driver.launched.clear()
    return found


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_an_address_that_tma_cannot_reach_goes_to_triton_and_warns_once(driver, name):
    given = inputs()
    assert slow_path(lambda: sluice.prefill(**given)) == []
    assert kernels(driver) == {"hopper"}
    moved = {**given, name: later(given[name])}
    (text,) = slow_path(lambda: [sluice.prefill(**moved) for _ in range(3)])
    reason = f"needs {name} to begin at a multiple of 16 bytes"
    assert text == f"prefill runs on the slower backend 'triton'; hopper: {reason}"
    assert kernels(driver) == {"prefill"}
    explanation = sluice.explain("prefill", **moved)
    assert explanation.chosen == "triton"
    assert dict(explanation.refusals)["hopper"] == reason
    assert sluice.explain("prefill", **given).chosen == "hopper"
    assert slow_path(lambda: sluice.prefill(**given)) == []
    assert kernels(driver) == {"hopper"}


def test_eight_elements_into_other_memory_is_reached(driver):
    given = inputs()
    moved = {name: later(given[name], 8) for name in ("q", "k", "v", "out")}
    assert slow_path(lambda: sluice.prefill(**{**given, **moved})) == []
    assert kernels(driver) == {"hopper"}


def test_hopper_asked_for_by_name_fails_and_says_which_tensor(driver):
    given = inputs()
    given["out"].fill_(3.0)
    moved = {**given, "v": later(given["v"])}
    with pytest.raises(sluice.BackendError, match="hopper: needs v to begin at a multiple of 16"):
        sluice.prefill(**moved, backend="hopper")
    with sluice.use_backend("hopper"), pytest.raises(sluice.BackendError, match="needs v to begin"):
        sluice.prefill(**moved)
    assert driver.launched == []
    assert bool((given["out"] == 3.0).all())
    assert slow_path(lambda: sluice.prefill(**moved, backend="triton")) == []


def test_other_tensors_may_begin_anywhere_and_bind_nothing_anew(driver, monkeypatch):
    given = {**inputs(), "slots": torch.tensor([1, 0])}
    free = {name: later(given[name]) for name in ("g", "beta", "slots")}
    assert slow_path(lambda: sluice.prefill(**{**given, **free})) == []
    assert kernels(driver) == {"hopper"}
    moved = {**given, "q": later(given["q"])}
    slow_path(lambda: sluice.prefill(**moved))
    bound: list[Any] = []
    bind = portable.bind
    monkeypatch.setattr(portable, "bind", lambda spec: bound.append(spec) or bind(spec))
    for name, x in free.items():
        assert slow_path(lambda name=name, x=x: sluice.prefill(**{**moved, name: x})) == []
    assert bound == []


def test_explain_judges_addresses_only_of_tensors_that_have_one(driver):
    given = inputs()
    meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in given.items()}
    assert sluice.explain("prefill", **meta, device="cpu").chosen == "hopper"


def test_descriptors_follow_the_tensors_of_each_call(driver):
    """They are encoded when a call is first made, and only moved after that."""
    for given in (inputs(), inputs(), inputs()):
        driver.launched.clear()
        sluice.prefill(**given)
        chunks, *_, states = (launched.arguments for launched in driver.launched)
        assert chunks["k_desc"][0] == given["k"].data_ptr()
        for name in ("q", "k", "v"):
            address, rows, columns, stride, last = states[f"{name}_desc"]
            assert address == given[name].data_ptr()
            assert (rows, columns) == (B * T, given[name].shape[2] * 128)
            assert (stride, last) == (given[name].stride(1), 1)
        assert states["o_desc"][0] == given["out"].data_ptr() == states["o_ptr"]
        assert states["ag_desc"][0] == chunks["ag_ptr"], "what one kernel writes, the other reads"
    assert len(driver.encoded) == 6, "six descriptors, whatever the number of calls"
    assert driver.moved
    for address, described in driver.encoded:
        assert address % 16 == 0
        assert described[1] == 2


# -------------------------------------------------------------------------------------- on a GPU


on_hopper = pytest.mark.skipif(
    dispatch.unavailable("hopper") is not None, reason=str(dispatch.unavailable("hopper"))
)


@on_hopper
@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_call_that_tma_cannot_reach_has_the_bits_of_triton(name, monkeypatch):
    monkeypatch.setattr(dispatch, "_warned", set())
    given = inputs(device="cuda", dtype=torch.bfloat16)
    given[name] = later(given[name])
    state = given.pop("state")
    found = []
    for backend in (None, "triton"):
        pool = state.clone()
        told = slow_path(
            lambda pool=pool, backend=backend: found.append(
                [x.clone() for x in sluice.prefill(**given, state=pool, backend=backend)]
            )
        )
        assert len(told) == (1 if backend is None else 0)
    for i, (x, y) in enumerate(zip(*found, strict=True)):
        compare.assert_same_bits(x, y, f"output {i}")
    assert sluice.explain("prefill", **given, state=state).chosen == "triton"


@on_hopper
@pytest.mark.gpu
@pytest.mark.hopper
def test_one_token_of_longer_rows_matches_the_reference():
    given = inputs(T=4, device="cuda", dtype=torch.bfloat16)
    state, options = given.pop("state"), {"normalize_qk": given.pop("normalize_qk")}
    one = {name: x[:, :1] for name, x in given.items() if name != "out"}
    found = [
        sluice.prefill(**one, **options, state=state.clone(), backend=backend)[0]
        for backend in (None, "reference")
    ]
    tolerance = compare.tolerance(torch.bfloat16, device="cuda")
    compare.assert_within(found[0], found[1].double(), 2 * tolerance, name="o")
