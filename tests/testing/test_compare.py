"""The comparison is tested on wrong results, each of which must fail (reliability row 26)."""

import pytest
import torch

from sluice.testing import oracle
from sluice.testing.case import Case
from sluice.testing.compare import (
    assert_matches,
    assert_same_bits,
    assert_within,
    largest_error,
    relative_error,
    tolerance,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASE = Case("three_chunks", "prefill", Hk=2, Hv=6, K=32, V=32, tokens=195, normalize=True)


@pytest.fixture(scope="module", params=DTYPES, ids=["fp32", "bf16", "fp16"])
def results(request):
    """(dtype, inputs, exact o, exact state) of a non-zero start and a little over three chunks."""
    inputs = CASE.inputs(request.param)
    o, state = oracle.delta(**inputs)
    return request.param, inputs, o, state[inputs["slots"].long()]


def zeros(inputs, o, state):
    return torch.zeros_like(o), torch.zeros_like(state)


def two_percent_larger(inputs, o, state):
    return 1.02 * o, 1.02 * state


def two_percent_noise(inputs, o, state):
    gen = torch.Generator().manual_seed(1)

    def spoil(x):
        return x * (1 + 0.02 * torch.randn(x.shape, generator=gen, dtype=x.dtype))

    return spoil(o), spoil(state)


def transposed_state(inputs, o, state):
    inputs = {**inputs, "state": inputs["state"].transpose(2, 3).contiguous()}
    return oracle.delta(**inputs)[0], state.transpose(2, 3)


def wrong_head_mapping(inputs, o, state):
    """h % Hk in place of h // r: the same heads in another order."""
    turn = torch.arange(CASE.Hv) % CASE.Hk
    inputs = {**inputs, "q": inputs["q"][:, :, turn], "k": inputs["k"][:, :, turn]}
    o, pool = oracle.delta(**inputs)
    return o, pool[inputs["slots"].long()]


def gates_off_by_one(inputs, o, state):
    inputs = {**inputs, "g": inputs["g"].roll(1, dims=1)}
    o, pool = oracle.delta(**inputs)
    return o, pool[inputs["slots"].long()]


def tokens_off_by_one(inputs, o, state):
    return o.roll(1, dims=1), state.roll(1, dims=1)


def one_element_wrong(inputs, o, state):
    o, state = o.clone(), state.clone()
    for x in (o, state):
        flat = x.view(-1)
        i = flat.abs().argmax()
        flat[i] = -flat[i]
    return o, state


def not_a_number(inputs, o, state):
    o, state = o.clone(), state.clone()
    o.view(-1)[7] = float("nan")
    state.view(-1)[-1] = float("nan")
    return o, state


def infinite(inputs, o, state):
    o, state = o.clone(), state.clone()
    o.view(-1)[7] = float("inf")
    state.view(-1)[-1] = -float("inf")
    return o, state


def one_token_short(inputs, o, state):
    return o[:, 1:], state[:, 1:]


def batch_of_one_dropped(inputs, o, state):
    return o[0], state[0]


WRONG = [
    zeros,
    two_percent_larger,
    two_percent_noise,
    transposed_state,
    wrong_head_mapping,
    gates_off_by_one,
    tokens_off_by_one,
    one_element_wrong,
    not_a_number,
    infinite,
    one_token_short,
    batch_of_one_dropped,
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_both_comparisons_refuse_a_wrong_result(results, wrong):
    dtype, inputs, o, state = results
    wrong_o, wrong_state = wrong(inputs, o, state)
    limit = tolerance(dtype)
    with pytest.raises(AssertionError, match=r"^o:"):
        assert_within(wrong_o.to(dtype), o, limit, name="o")
    with pytest.raises(AssertionError, match=r"^o:"):
        assert_matches(wrong_o.to(dtype), o, name="o")
    with pytest.raises(AssertionError, match=r"^state:"):
        assert_within(wrong_state.float(), state, limit, name="state")
    with pytest.raises(AssertionError, match=r"^state:"):
        assert_matches(wrong_state.float(), state, name="state")


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_state_two_percent_off_is_refused(results, state_dtype):
    dtype, _, _, state = results
    limit = tolerance(dtype, state_dtype)
    assert_within(state.to(state_dtype), state, limit, name="state")
    with pytest.raises(AssertionError, match=r"^state:"):
        assert_within((1.02 * state).to(state_dtype), state, limit, name="state")


def test_a_rounded_result_passes(results, in_float32):
    dtype, inputs, o, state = results
    plain_o, pool = in_float32(oracle.delta, **inputs)
    plain_state = pool[inputs["slots"].long()]
    for got, exact in ((plain_o.to(dtype), o), (plain_state, state)):
        assert_within(got, exact, tolerance(dtype), name="plain", per=1)
        assert_matches(got, exact, name="plain", per=1)
        assert_matches(got, exact, got, name="itself", floor=0.0)


def test_a_wrong_head_of_small_values_is_refused_by_heads(results):
    dtype, _, o, _ = results
    quiet = o.clone()
    quiet[:, :, 3] *= 1e-4
    missing = quiet.clone()
    missing[:, :, 3] = 0
    limit = max(tolerance(dtype), 1e-3)
    assert_within(missing, quiet, limit, name="o")
    with pytest.raises(AssertionError, match="slice 3 of dimension 2"):
        assert_within(missing, quiet, limit, name="o", per=2)
    with pytest.raises(AssertionError, match="slice 3 of dimension 2"):
        assert_matches(missing, quiet, name="o", per=2, floor=limit)


def decode_steps(rounded: torch.dtype | None, dtype: torch.dtype):
    """4,096 decode steps with beta rounded at each step, as in other code."""
    case = Case("steps", "decode", dtypes=(dtype,), Hk=1, Hv=2, K=64, V=64, tokens=4096, raw=True,
                normalize=True)  # fmt: skip
    inputs = case.inputs(dtype)
    if rounded is not None:
        g, beta = oracle.raw_gates(
            inputs["g"], inputs["beta"], inputs.pop("A_log"), inputs.pop("dt_bias")
        )
        inputs |= {"g": g, "beta": beta.to(rounded)}
    o, pool = oracle.delta(**inputs)
    return o, pool[inputs["slots"].long()]


def test_beta_rounded_to_bf16_fails_over_4096_steps(in_float32):
    """Reliability row 7."""
    limit = tolerance(torch.float32)
    o, state = decode_steps(None, torch.float32)
    wrong_o, wrong_state = decode_steps(torch.bfloat16, torch.float32)
    with pytest.raises(AssertionError, match=r"^o: relative error"):
        assert_within(wrong_o, o, limit, name="o")
    with pytest.raises(AssertionError, match=r"^state: relative error"):
        assert_within(wrong_state, state, limit, name="state")
    right_o, right_state = in_float32(decode_steps, torch.float32, torch.float32)
    assert_within(right_o, o, limit, name="o")
    assert_within(right_state, state, limit, name="state")


def test_beta_rounded_to_bf16_fails_for_bf16_inputs_beside_plain_pytorch(in_float32):
    """The contract's 1e-2 would accept it; the comparison with plain PyTorch does not."""
    _, state = decode_steps(None, torch.bfloat16)
    _, wrong = decode_steps(torch.bfloat16, torch.bfloat16)
    _, plain = in_float32(decode_steps, None, torch.bfloat16)
    assert_matches(plain, state, plain, name="state")
    with pytest.raises(AssertionError, match=r"^state: relative error"):
        assert_matches(wrong, state, plain, name="state")


def test_the_comparison_with_plain_pytorch_allows_twice_its_error():
    gen = torch.Generator().manual_seed(0)
    exact = torch.randn(1000, generator=gen, dtype=torch.float64)
    noise = torch.randn(1000, generator=gen, dtype=torch.float64)
    assert_matches(exact + 1.9e-3 * noise, exact, exact + 1e-3 * noise, name="x", floor=0.0)
    with pytest.raises(AssertionError, match="relative error"):
        assert_matches(exact + 2.1e-3 * noise, exact, exact + 1e-3 * noise, name="x", floor=0.0)
    with pytest.raises(AssertionError, match="largest error"):
        assert_matches(exact + noise * 1e-3, exact, exact + 1e-3 * noise, name="x", limit=1e-3)


def test_a_baseline_that_is_not_finite_softens_nothing():
    exact = torch.ones(4, dtype=torch.float64)
    with pytest.raises(AssertionError, match="plain PyTorch"):
        assert_matches(exact, exact, exact * float("inf"), name="x")
    with pytest.raises(AssertionError, match="oracle itself"):
        assert_within(exact, exact * float("nan"), 1.0, name="x")


def test_zeros_and_nothing_compare():
    zero = torch.zeros(3, dtype=torch.float64)
    assert relative_error(zero, zero) == largest_error(zero, zero) == 0.0
    assert relative_error(zero + 1e-9, zero) == largest_error(zero + 1e-9, zero) == float("inf")
    empty = torch.zeros(0, 4)
    assert relative_error(empty, empty) == largest_error(empty, empty) == 0.0
    assert_within(empty, empty, 0.0, name="empty")
    assert_same_bits(empty, empty, "empty")


def test_tolerance_is_the_contracts_table():
    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    assert tolerance(fp32) == 1e-5
    assert tolerance(fp32, fp32, "cuda:1") == 1e-4
    assert tolerance(bf16) == tolerance(fp16) == tolerance(bf16, fp32, "cuda") == 1e-2
    assert tolerance(bf16, bf16) == pytest.approx(1.4e-2)
    assert tolerance(fp32, bf16) == pytest.approx(4e-3, rel=1e-2)
    assert tolerance(fp32, fp16) < 1e-3
    assert tolerance(torch.float64) < 1e-10


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.int32, torch.bool])
def test_same_bits_counts_and_locates_differences(dtype):
    a = torch.zeros(3, 4).to(dtype)
    b = a.clone()
    assert_same_bits(a, b, "x")
    b[1, 2] = b[2, 3] = 1
    with pytest.raises(AssertionError, match=r"x: 2 of 12 elements differ, first at \[\(1, 2\)"):
        assert_same_bits(a, b, "x")


def test_same_bits_takes_nan_for_itself_and_zero_for_its_sign():
    nan = torch.tensor([float("nan"), 1.0])
    assert_same_bits(nan, nan.clone(), "x")
    with pytest.raises(AssertionError, match="1 of 1"):
        assert_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]), "x")
    with pytest.raises(AssertionError, match="dtype"):
        assert_same_bits(nan, nan.double(), "x")
    with pytest.raises(AssertionError, match="shape"):
        assert_same_bits(nan, nan[:1], "x")
    assert_same_bits(
        torch.arange(6.0).view(2, 3).T, torch.arange(6.0).view(2, 3).T.contiguous(), "x"
    )


def test_one_wrong_element_among_many_fails():
    """Its share of the relative error is small; the largest single error has a limit of its own."""
    exact = torch.ones(1_000_000, dtype=torch.float64)
    actual = exact.clone()
    actual[7] += 0.05
    with pytest.raises(AssertionError, match=r"largest error 5\.00e-02 > 3\.20e-02"):
        assert_within(actual, exact, 1e-3, name="x")
    actual[7] = 1.03
    assert_within(actual, exact, 1e-3, name="x")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_counted_and_not_compared(value):
    exact = torch.ones(4, dtype=torch.float64)
    actual = exact.clone()
    actual[1] = value
    with pytest.raises(AssertionError, match="x: 1 of 4 elements are not finite"):
        assert_within(actual, exact, 1e9, name="x")
