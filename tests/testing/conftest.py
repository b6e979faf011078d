"""A stand-in for the library, so that its testing helpers can be tested by themselves."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sluice.testing import inputs as draw
from sluice.testing import oracle


class Checkpoints(SimpleNamespace):
    pass


class DraftBuffers(NamedTuple):
    k: Any
    d: Any
    g: Any
    x: Any


class Plain:
    """The public functions, made from the oracle: rounded to the contract's dtypes, in place.

    ``wrong(name, tensor)`` may change a result before it is rounded, to test that a check notices.
    """

    Checkpoints, DraftBuffers = Checkpoints, DraftBuffers

    def __init__(self, wrong=None):
        self.wrong = wrong or (lambda name, x: x)

    def prefill(self, **kwargs: Any):
        return self._delta(kwargs)

    def decode(self, **kwargs: Any):
        return self._delta(kwargs)

    def verify(self, **kwargs: Any):
        for where in ("buffers", "draft_slots"):  # where a draft lies changes no number
            kwargs.pop(where, None)
        drafts = {n: kwargs.pop(n) for n in ("conv_inputs", "conv_state") if n in kwargs}
        o, _ = oracle.delta(**kwargs)
        return self._round("o", o, kwargs["v"].dtype), {**kwargs, **drafts}

    def commit(self, draft: dict[str, Any], num_accepted: Tensor):
        _, state, conv_state = oracle.verify_commit(**draft, num_accepted=num_accepted)
        if conv_state is not None:
            self._store("conv_state", draft["conv_state"], conv_state)
        return self._store("state", draft["state"], state)

    def causal_conv1d(self, **kwargs: Any):
        y, state = oracle.conv(**kwargs)
        return self._round("y", y, kwargs["x"].dtype), self._store(
            "state", kwargs.get("state"), state
        )

    def conv_qkv(self, **kwargs: Any):
        dtype = kwargs["x"].dtype
        (q, k, v, g, beta), state = oracle.conv_qkv(**kwargs)
        self._store("state", kwargs.get("state"), state)
        named = (("q", q, dtype), ("k", k, dtype), ("v", v, dtype))
        gates = (("g", g, _wide(dtype)), ("beta", beta, _wide(dtype)))
        return tuple(None if x is None else self._round(n, x, d) for n, x, d in (*named, *gates))

    def rms_norm_gated(self, **kwargs: Any):
        return self._round("y", oracle.rms_norm_gated(**kwargs), kwargs["x"].dtype)

    def step(self, **kwargs: Any):
        y, conv_state, state = oracle.step(**kwargs)
        self._store("conv_state", kwargs["conv_state"], conv_state)
        self._store("state", kwargs["state"], state)
        return self._round("y", y, kwargs["conv_weight"].dtype)

    def _delta(self, kwargs: dict[str, Any]):
        o, state = oracle.delta(**kwargs)
        dtype = kwargs["v"].dtype
        if kwargs.get("state") is None:
            return self._round("o", o, dtype), self._round("state", state, _wide(dtype))
        return self._round("o", o, dtype), self._store("state", kwargs["state"], state)

    def _store(self, name: str, pool: Tensor | None, after: Tensor):
        if pool is None:
            return after
        # a NaN stays the same NaN, so elements that the call leaves alone keep their bits
        new = self.wrong(name, after).to(pool.dtype)
        pool.copy_(torch.where(new.isnan() & pool.isnan(), pool, new))
        return pool

    def _round(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.wrong(name, x).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@pytest.fixture
def plain_ops() -> type[Plain]:
    return Plain


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Call a function with the oracle's arithmetic in float32: correct, with roundings."""

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(oracle, "EXACT", torch.float32)
            return function(*args, **kwargs)

    return call


@pytest.fixture
def delta_inputs() -> Callable[..., dict[str, Tensor]]:
    """A function that draws small float64 arguments for the recurrence."""

    def make(B=2, T=7, Hq=2, Hk=2, Hv=4, K=5, V=3, per_key=False, P=None) -> dict[str, Tensor]:
        gen = draw.generator(3)
        raw = draw.raw_decay(gen, B, T, Hv, "mixed", K if per_key else None)
        return {
            "q": draw.keys(gen, B, T, Hq, K),
            "k": draw.keys(gen, B, T, Hk, K),
            "v": draw.normal(gen, B, T, Hv, V),
            "g": draw.decay(**raw),
            "beta": draw.uniform(gen, B, T, Hv),
            "state": draw.normal(gen, P or B, Hv, V, K),
        }

    return make
