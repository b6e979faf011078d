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
from sluice.testing.compare import assert_same_bits
from tests.suite import COMPILED, DEVICE, backends
from tests.training.hopper_calls import OF_DTYPE
from tests.training.kernel_calls import backward_of, check, drawn
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
@pytest.mark.parametrize(("call", "dtype"), OF_DTYPE, ids=str)
def test_gradients_that_nearly_cancel(call, dtype):
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
