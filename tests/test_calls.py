"""Bindings: found by what tensors look like, as many as there is room for, no tensor kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sluice
from sluice import calls
from sluice.contract.meta import Meta
from sluice.testing.case import Case
from sluice.testing.compare import assert_same_bits

COMMON = {"Hk": 2, "Hv": 4, "K": 8, "V": 6, "raw": True, "normalize": True}
CASES = {
    "prefill": Case("calls/prefill", "prefill", batch=2, tokens=5, **COMMON),
    "decode": Case("calls/decode", "decode", batch=3, tokens=2, **COMMON),
    "verify": Case("calls/verify", "verify", batch=2, tokens=3, with_conv=True, **COMMON),
    "causal_conv1d": Case("calls/conv", "causal_conv1d", batch=2, tokens=5, **COMMON),
    "conv_qkv": Case("calls/conv_qkv", "conv_qkv", batch=2, tokens=5, **COMMON),
    "rms_norm_gated": Case("calls/norm", "rms_norm_gated", batch=2, tokens=3, **COMMON),
    "step": Case("calls/step", "step", batch=2, **COMMON),
}


def inputs(op: str) -> dict[str, Any]:
    made = CASES[op].inputs(torch.float32)
    made.pop("num_accepted", None)
    return made


@pytest.fixture(autouse=True)
def bound_anew() -> Iterator[None]:
    calls.forget()
    yield
    calls.forget()


def spec_of(op: str, given: dict[str, Any]) -> Any:
    with calls.check_only() as found:
        getattr(sluice, op)(**given)
    return found[0].spec


def floats(given: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors whose strides a call may have otherwise: the last one stays 1."""
    found = {n: x for n, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return {n: x for n, x in found.items() if x.dim() > 1}


def widened(x: Tensor) -> Tensor:
    """The same numbers with other strides: rows lie further apart."""
    return torch.cat([x, torch.full_like(x[:, :1], 7.0)], 1)[:, : x.shape[1]]


# ------------------------------------------------------------------------------ what makes them two


@pytest.mark.parametrize("op", CASES)
def test_specs_that_differ_in_strides_alone_are_two_and_bind_apart(op):
    """One binding for both would read and write the wrong memory."""
    given = inputs(op)
    plain = spec_of(op, given)
    assert spec_of(op, inputs(op)) == plain
    assert hash(spec_of(op, inputs(op))) == hash(plain)
    for name, x in floats(given).items():
        other = {**inputs(op), name: widened(x)}
        assert other[name].shape == x.shape
        assert other[name].stride() != x.stride()
        assert spec_of(op, other) != plain, name
    getattr(sluice, op)(**inputs(op))
    before = calls.BINDINGS.made
    getattr(sluice, op)(**inputs(op))
    assert calls.BINDINGS.made == before
    for done, (name, x) in enumerate(floats(given).items(), 1):
        getattr(sluice, op)(**{**inputs(op), name: widened(x)})
        assert calls.BINDINGS.made == before + done, name


@pytest.mark.parametrize("op", ["prefill", "decode", "causal_conv1d", "rms_norm_gated", "step"])
def test_strides_are_those_of_the_call_whatever_came_before(op):
    """The results of a strided call after a dense one, and the other way round."""
    expected = [x.clone() for x in _results(op, inputs(op))]
    for name, x in floats(inputs(op)).items():
        for given in ({**inputs(op), name: widened(x)}, inputs(op)):
            for i, (got, wanted) in enumerate(zip(_results(op, given), expected, strict=True)):
                assert_same_bits(got.contiguous(), wanted, f"output {i}, {name}")


def _results(op: str, given: dict[str, Any]) -> list[Tensor]:
    found = getattr(sluice, op)(**given)
    return [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, Tensor)]


def test_every_field_makes_another_spec():
    """Shape, strides, dtype and device of every tensor, and every option."""
    for op in CASES:
        spec = spec_of(op, inputs(op))
        for name in spec.TENSORS:
            meta = getattr(spec, name)
            if meta is None:
                assert replace(spec, **{name: Meta((3,), (1,), torch.int64, spec.device)}) != spec
                continue
            for change in (
                {"shape": (*meta.shape[:-1], 99)},
                {"strides": (*meta.strides[:-1], 99)},
                {"dtype": torch.int8},
                {"device": torch.device("cuda", 1)},
            ):
                assert replace(spec, **{name: meta._replace(**change)}) != spec, (op, name, change)
            assert replace(spec, **{name: None}) != spec
        for name in spec.OPTIONS:
            assert replace(spec, **{name: "another"}) != spec, (op, name)


def test_the_device_is_a_part_of_the_spec():
    spec = spec_of("decode", inputs("decode"))
    there, other = (spec.on(torch.device("cuda", index)) for index in (0, 1))
    assert len({spec, there, other}) == 3
    assert there == spec.on(torch.device("cuda", 0))


# --------------------------------------------------------------------------------- what is kept


def norm(width: int) -> None:
    x = torch.ones(1, width)
    sluice.rms_norm_gated(x, x, torch.ones(width), backend="reference")


def test_bindings_have_a_bound_and_no_call_pushes_out_all_of_them(monkeypatch):
    """Not all of them at once: no call waits because another shape came."""
    most = calls.BINDINGS.most
    assert 1024 <= most <= 65536, "a serving process has some hundred combinations of shapes"
    monkeypatch.setattr(calls.BINDINGS, "most", 64)
    for width in range(1, 65):
        norm(width)
    before = calls.BINDINGS.made
    for width in range(1, 65):
        norm(width)
    assert calls.BINDINGS.made == before
    for width in range(65, 265):
        norm(width)
    assert len(calls.BINDINGS) == 64
    before = calls.BINDINGS.made
    for width in range(1, 65):
        norm(width)
    assert 8 < calls.BINDINGS.made - before < 40, "200 new ones take the places of about 21"


def test_a_call_that_is_refused_leaves_no_binding():
    x = torch.ones(2, 4)
    for _ in range(2):
        with pytest.raises(sluice.ContractError):
            sluice.rms_norm_gated(x, x, torch.ones(3))
        with pytest.raises(sluice.BackendError):
            sluice.rms_norm_gated(x, x, torch.ones(4), backend="chunked")
    assert len(calls.BINDINGS) == 0


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("op", CASES)
def test_nothing_that_is_kept_refers_to_a_tensor(op, backend):
    """A pool that a program deletes is gone, whatever has been called with it."""

    def call_and_watch() -> list[weakref.ref[Tensor]]:
        given = inputs(op)
        result = getattr(sluice, op)(**given, backend=backend)
        if op == "verify":
            sluice.commit(result[1], torch.tensor([0, 2]), backend=backend)
        kept = [x for x in given.values() if isinstance(x, Tensor)]
        return [weakref.ref(x) for x in (*kept, *_results_of(result))]

    watched = call_and_watch()
    gc.collect()
    assert len(watched) > 3
    assert len(calls.BINDINGS) > 0
    assert [ref() for ref in watched] == [None] * len(watched)


def _results_of(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple):
        for part in result:
            yield from _results_of(part)
