"""Errors that only long runs or hard keys show: reliability rows 7, 8 and 25."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sluice.testing import compare
from sluice.testing.inputs import KEYS
from tests import serving
from tests.calls import Call, Shape, make
from tests.serving import servers
from tests.suite import DEVICE, backends

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
ROUNDOFF = {FLOAT32: 2.0**-24, FLOAT16: 2.0**-11, BFLOAT16: 2.0**-8}
WINDOW = 256


def decode_one_by_one(call: Call, backend: str) -> torch.Tensor:
    """The tokens of a prefill call, one decode call each, on the call's own pools."""
    tokens = replace(call, op="decode")
    T = call.rows["q"].shape[1]
    return torch.cat([tokens.span(t, t + 1).run(backend)["o"] for t in range(T)], dim=1)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=("fp32", "bf16"))
@pytest.mark.parametrize("backend", backends("decode"))
def test_row_07_4096_decode_steps_stay_with_float64_and_with_prefill(backend, dtype):
    """Raw gates in the model's dtype: beta is computed in float32 and never rounded.

    The float64 recurrence starts from the same bfloat16 numbers, so the float32 state errs by its
    arithmetic alone, whatever the inputs' dtype: 2e-7 is usual. A beta rounded to bfloat16 leaves
    2e-3. The bound is the contract's for float32.
    """
    shape = Shape(Hk=1, r=2, K=16, V=16, dtype=dtype)
    call = make("prefill", shape, 2, 4096)
    whole = call.copy()
    exact, pools = call.exact()
    o = decode_one_by_one(call, backend).cpu()
    single = compare.tolerance(FLOAT32, device=DEVICE)
    compare.assert_within(call.pools["state"].cpu(), pools["state"], single, name="state", per=1)
    limit = compare.tolerance(dtype, device=DEVICE) if dtype == FLOAT32 else compare.HALF_EXPECTED
    for start in range(0, 4096, 1024):  # the last steps as good as the first
        part = slice(start, start + 1024)
        compare.assert_within(o[:, part], exact["o"][:, part], limit, name=f"o from {start}")
    prefilled = whole.run(serving.beside(backend, "prefill"))["o"].cpu()
    compare.assert_within(o, prefilled.double(), 2 * limit, name="o of prefill")
    serving.close(call.pools["state"], whole.pools["state"], shape, "state")


@pytest.mark.parametrize("state_dtype", ROUNDOFF, ids=("fp32", "fp16", "bf16"))
@pytest.mark.parametrize("backend", backends("decode"))
def test_row_08_a_state_rounded_a_thousand_times_errs_within_its_bound(backend, state_dtype):
    """Nothing decays (A = 0), the worst case: each token forgets at most 1/K of the error.

    With unit roundoff u the error of outputs and state settles at u √K / 2 after some K steps:
    1.1e-2 for bfloat16 and 1.4e-3 for float16 at K = 32, twice that at K = 128. Asserted: twice
    the law, and no growth once settled. The contract's own bound holds for float32.
    """
    shape = Shape(Hk=1, r=2, K=32, V=16, gates="weak", state_dtype=state_dtype)
    call = make("prefill", shape, 2, 4 * WINDOW)
    exact, pools = call.exact()
    o = decode_one_by_one(call, backend).cpu()
    bound = compare.tolerance(FLOAT32, device=DEVICE)
    if state_dtype != FLOAT32:
        bound = ROUNDOFF[state_dtype] * shape.K**0.5
    compare.assert_within(call.pools["state"].cpu(), pools["state"], bound, name="state", per=1)
    errors = []
    for start in range(0, 4 * WINDOW, WINDOW):
        part = slice(start, start + WINDOW)
        compare.assert_within(o[:, part], exact["o"][:, part], bound, name=f"o from {start}")
        errors.append(compare.relative_error(o[:, part], exact["o"][:, part]))
    assert errors[-1] <= 1.5 * errors[1], f"still growing: {errors}"


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("server", servers("prefill"))
def test_row_25_keys_that_agree_or_repeat_are_exact_with_beta_one(server, keys):
    """Three chunks and three tokens, with the worst-conditioned triangular system."""
    shape = Shape(Hk=1, r=2, K=16, V=8, keys=keys, raw=False, gates="weak", normalize=False)
    call = make("prefill", shape, 1, 195)
    call.rows["beta"] = torch.ones_like(call.rows["beta"])
    expected = call.exact()
    serving.assert_exact(call, server.run(call), expected)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("server", servers("decode", "verify"))
def test_row_25_drafts_with_keys_that_agree_are_exact_with_beta_one(server, keys):
    shape = Shape(Hk=1, r=2, K=16, V=8, keys=keys, decay="none", normalize=False)
    call = make(server.op, shape, 3, 8)
    call.rows["beta"] = torch.ones_like(call.rows["beta"])
    expected = call.exact()
    serving.assert_exact(call, server.run(call), expected)
