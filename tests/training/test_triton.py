"""Triton's backward kernels: on a GPU, or in Triton's interpreter.

FLA's backward is wrong on Hopper with Triton 3.4 to 3.7.0, by tens of percent in dk, dbeta and dg,
for chunks of 64 tokens and keys of 64: a product whose left operand is the transpose of what
another product made. Every gradient here is compared with float64, at 64 and 128, so a compiler
that does the same to these kernels fails these tests.
"""

from __future__ import annotations

import pytest
import torch

import sluice
from sluice import calls
from sluice.backends.triton import prefill_backward
from sluice.ops.delta import FUNCTIONAL
from sluice.testing import gradients as exact
from sluice.testing.compare import assert_same_bits, assert_within
from tests.suite import COMPILED, DEVICE, backends
from tests.training.calls import FLOAT32, HALF
from tests.training.triton_calls import (
    HARD,
    HARD_KEYS,
    KEYS,
    KINDS,
    SMALL,
    SPLIT,
    WIDE,
    WIDE_KEYS,
    WIDE_SPLIT,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::sluice.SlowPathWarning"),
    pytest.mark.skipif("triton" not in backends("prefill_backward"), reason="no Triton here"),
]
ARGUMENTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def backward_of(leaves, options, do, dfinal):
    """The gradients by Triton's kernels, by name."""
    given = [leaves[n].detach().to(DEVICE) if n in leaves else None for n in ARGUMENTS]
    bounds = options.get("cu_seqlens")
    given += [None if bounds is None else bounds.to(DEVICE), None, do.to(DEVICE), dfinal.to(DEVICE)]
    kept = tuple(options[n] for n in ("scale", "normalize_qk", "neg_eigval", "state_layout"))
    made = calls.run(FUNCTIONAL.backward, [*given, *[None] * len(ARGUMENTS)], kept, None, "triton")
    made = zip(ARGUMENTS, made[len(given) :], strict=True)
    return {n: x.cpu() for n, x in made if n in leaves}


def drawn(call, dtype):
    """A call's leaves and options, and gradients of its outputs: NaN where none may be read."""
    leaves, options = call.make(dtype)
    o, final = exact.delta(**leaves, **options)
    gen = torch.Generator().manual_seed(1)
    tokens = leaves["v"].shape[1]
    do = torch.randn(o.shape[0], tokens, *o.shape[2:], generator=gen).to(dtype)
    dfinal = torch.randn(final.shape, generator=gen)
    return leaves, options, (o, final), do, dfinal


def check(call, dtype):
    leaves, options, (o, final), do, dfinal = drawn(call, dtype)
    end = None if call.lengths is None else sum(call.lengths)
    by = [do[:, : o.shape[1]].double(), dfinal.double()]
    if end is not None:
        by[0] = by[0].clone()
        by[0][:, end:] = 0
        do[:, end:] = float("nan")
    wanted = torch.autograd.grad([o, final], list(leaves.values()), by, allow_unused=True)
    found = backward_of(leaves, options, do, dfinal)
    for (name, a), b in zip(found.items(), wanted, strict=True):
        limit = FLOAT32 if dtype == torch.float32 else HALF.get(name, 6e-3)
        if end is not None and name in ("q", "k", "v", "g", "beta"):
            assert not a[:, end:].any(), f"d{name} behind the last border"
            a, b = a[:, :end], b[:, :end]
        assert_within(a, b, limit, name=f"{call}: d{name}")


needs_gpu = pytest.mark.skipif(not COMPILED, reason="too slow in Triton's interpreter")


def half():
    return torch.bfloat16 if COMPILED else torch.float16


@pytest.mark.parametrize("call", [*KINDS, *HARD], ids=str)
def test_gradients_in_float32(call):
    check(call, torch.float32)


@pytest.mark.parametrize("call", [KINDS[0], KINDS[4], KINDS[5], *HARD], ids=str)
def test_gradients_in_16_bits(call):
    check(call, half())


@pytest.mark.parametrize("call", [*KEYS, *HARD_KEYS], ids=str)
def test_gradients_with_decay_per_key(call):
    check(call, torch.float32)


@pytest.mark.parametrize("call", [*KEYS[:2], *HARD_KEYS], ids=str)
def test_gradients_with_decay_per_key_in_16_bits(call):
    check(call, half())


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("call", [*WIDE, *WIDE_KEYS], ids=str)
def test_gradients_of_wide_heads(call, dtype):
    check(call, dtype)


@needs_gpu
@pytest.mark.parametrize("call", [*WIDE[:3], *WIDE_KEYS], ids=str)
def test_gradients_of_wide_float32_heads(call):
    check(call, torch.float32)


@pytest.fixture
def split(monkeypatch):
    """Split sequences of more than so many tokens, whatever the plan says."""
    whole = prefill_backward.plan_of

    def by(segment):
        monkeypatch.setattr(
            prefill_backward, "plan_of", lambda p: whole(p)._replace(segment=segment)
        )
        calls.forget()

    yield by
    calls.forget()


@pytest.mark.parametrize("dtype", [torch.float32, half()], ids=str)
@pytest.mark.parametrize("call", SPLIT, ids=str)
def test_gradients_of_split_sequences(call, dtype, split):
    split(64)
    check(call, dtype)


@needs_gpu
@pytest.mark.parametrize("call", WIDE_SPLIT, ids=str)
def test_gradients_of_split_sequences_of_wide_heads(call, split):
    split(128)
    check(call, half())


@pytest.mark.parametrize("call", [SMALL.of(T=130), KEYS[1]], ids=str)
def test_the_same_bits_each_time(call):
    leaves, options, _, do, dfinal = drawn(call, half())
    first = backward_of(leaves, options, do, dfinal)
    again = backward_of(leaves, options, do, dfinal)
    for name, x in first.items():
        assert_same_bits(again[name], x, name)


def test_decays_per_key_may_have_gaps():
    """Kernels read the decays of a token as a row; a view of another layout is no row."""
    leaves, options = KEYS[0].make(torch.float32)
    given = {name: x.detach().to(DEVICE) for name, x in leaves.items()}
    g = given.pop("g")
    made = []
    for x in (g, g.transpose(2, 3).contiguous().transpose(2, 3)):
        x = x.detach().requires_grad_()
        o, final = sluice.prefill(g=x, **given, **options, backend="triton")
        made.append([o, *torch.autograd.grad(o.sum() + final.sum(), x)])
    for plain, gaps in zip(*made, strict=True):
        assert_same_bits(gaps, plain, "of g with gaps")
