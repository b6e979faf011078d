"""The table of cases covers the contract, and its check notices wrong results."""

import pytest
import torch

from sluice.testing.case import OPS, RULES, Case, whole_storage
from sluice.testing.cases import ALL, BF16, CASES, FP16, FP32, label, pairs, register, select
from sluice.testing.compare import assert_same_bits

PAIRS = pairs()


@pytest.mark.parametrize(("case", "dtype"), PAIRS, ids=[label(*pair) for pair in PAIRS])
def test_a_correct_implementation_passes(case, dtype, plain_ops, in_float32):
    inputs = case.inputs(dtype)
    expected = case.expected(inputs)
    actual = in_float32(case.run, plain_ops(), inputs)
    case.check(actual, expected)
    assert case.bytes(dtype) >= 0
    assert case.flops() >= 0


# -------------------------------------------------------------------------------- what is covered


def values(field: str, *ops: str) -> set:
    return {getattr(case, field) for case in select(*ops)}


def test_every_operator_and_dtype_is_covered():
    for op in OPS:
        assert {dtype for _, dtype in pairs(op)} == set(ALL), op


def test_the_contracts_lengths_and_shapes_are_covered():
    dense = [case for case in select("prefill") if case.lengths is None and case.batch == 1]
    assert {case.tokens for case in dense} >= {1, 2, 63, 64, 65, 127, 4097}
    assert {case.Hv // case.Hk for case in select("prefill")} >= {1, 2, 3, 4, 8}
    assert {case.Hv // case.Hk for case in select("decode")} >= {1, 2, 3, 4, 8}
    assert values("Hk", "prefill") >= {1, 2, 3, 16}
    for field in ("K", "V"):
        assert values(field, "prefill") >= {64, 128, 256, 48, 80}
        assert values(field, "decode") >= {64, 128, 256}
    assert values("tokens", "decode") >= {1, 2, 8}
    assert any(case.Hq and case.Hq > case.Hv for case in select("prefill"))
    assert any(case.Hq and case.Hq < case.Hk for case in select("prefill"))


def test_every_rule_and_gate_is_covered():
    for op in ("prefill", "decode"):
        assert values("rule", op) == set(RULES)
        assert {(c.per_key, c.raw) for c in select(op) if c.has_g} >= {
            (False, False), (False, True), (True, False), (True, True),
        }  # fmt: skip
        assert any(case.neg_eigval for case in select(op))
    hard = {case.keys for case in select("prefill") if case.beta_one}
    assert hard == {"correlated", "repeated", "identical"}
    assert values("gates", "prefill") == {"mild", "weak", "strong", "mixed"}


def test_packing_and_pools_are_covered():
    packed = [c.lengths for c in select("prefill") if c.lengths is not None]
    assert () in packed
    assert any(n[:1] == (0,) and any(n) for n in packed)
    assert any(n[-1:] == (0,) and any(n) for n in packed)
    assert any(0 in n[1:-1] and any(n) for n in packed)
    for op in ("prefill", "decode", "verify", "causal_conv1d", "conv_qkv", "step"):
        rows = select(op)
        assert {c.pad_slot for c in rows if c.padded} == {-1, 0}, op
        assert any(c.moved for c in rows), op
        assert any(c.new for c in rows), op
        assert any(c.strided for c in rows), op
        assert any(c.state == "rows" for c in rows), op
    for op in ("prefill", "decode"):
        assert values("state_dtype", op) == {FP32, BF16, FP16}
        assert values("state_layout", op) == {"vk", "kv"}
        assert values("layout", op) == {None, "bhtd"}
        assert any(c.gap for c in select(op))
    for op in ("prefill", "causal_conv1d"):
        assert any(c.every for c in select(op))
        assert any(c.positions for c in select(op))
    counted = {n for c in select("verify") for n in c.accepted}
    assert {0, 1, 2, 3, 4, 8} <= counted


def test_convolutions_and_layers_are_covered():
    conv = select("causal_conv1d")
    assert {c.W for c in conv} == {2, 3, 4}
    assert {c.bias for c in conv} == {True, False}
    assert {c.activation for c in conv} == {"silu", None}
    assert {c.conv_order for c in conv} == {"dl", "ld"}
    assert {c.layout for c in conv} == {None, "bdt"}
    assert any(c.window > c.W - 1 for c in conv)
    assert any(c.freeze for c in conv)
    assert values("order", "step") == {"split", "interleaved"}
    assert values("pairs", "step") == {True, False}
    assert values("gate_activation", "rms_norm_gated") == {"silu", "sigmoid"}


def test_three_chunks_from_a_state_are_the_default_of_prefill():
    case = CASES["prefill/gated_delta"]
    assert case.tokens > 3 * 64
    inputs = case.inputs()
    assert (inputs["state"][inputs["slots"].long()] != 0).all()


# ------------------------------------------------------------------------------- what is noticed


def outcome(case, ops, dtype=FP32, spoil=None):
    inputs = case.inputs(dtype)
    expected = case.expected(inputs)
    actual = case.run(ops, inputs)
    if spoil is not None:
        spoil(inputs, actual)
    case.check(actual, expected)


def zero(name):
    return lambda n, x: torch.zeros_like(x) if n == name else x


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("prefill/r3", "o"), ("prefill/moved", "state"), ("prefill/state_none", "state"),
        ("decode/strided", "o"), ("verify/conv", "conv_state"), ("verify/uneven", "state"),
        ("causal_conv1d/plain", "y"), ("causal_conv1d/columns4", "state"),
        ("conv_qkv/plain", "beta"), ("conv_qkv/plain", "q"), ("conv_qkv/moved_new", "state"),
        ("rms_norm_gated/silu", "y"), ("step/interleaved", "y"), ("step/split", "conv_state"),
        ("step/split", "state"),
    ],
)  # fmt: skip
def test_zeros_are_noticed(name, what, plain_ops):
    with pytest.raises(AssertionError, match=f"{name}: {what}"):
        outcome(CASES[name], plain_ops(zero(what)))


def test_beta_rounded_to_bf16_is_noticed(plain_ops):
    def rounded(name, x):
        return x.to(BF16).double() if name == "beta" else x

    with pytest.raises(AssertionError, match="beta"):
        outcome(CASES["conv_qkv/plain"], plain_ops(rounded), BF16)


def test_a_write_outside_the_rows_of_a_call_is_noticed(plain_ops):
    """Reliability row 6."""
    case = CASES["decode/padded_rows_slot0"]
    outcome(case, plain_ops())

    def slot_zero(inputs, actual):
        inputs["state"][0] = 0.0

    with pytest.raises(AssertionError, match="state outside written rows"):
        outcome(case, plain_ops(), spoil=slot_zero)

    def gap(inputs, actual):
        whole_storage(inputs["state"])[-1] = 0.0

    with pytest.raises(AssertionError, match="state outside written rows"):
        outcome(CASES["decode/padded_stride"], plain_ops(), spoil=gap)


def test_a_lost_update_is_noticed(plain_ops):
    case = CASES["decode/moved"]

    class Lost(plain_ops):
        def decode(self, **kwargs):
            copy = kwargs["state"].clone()
            o, _ = super().decode(**{**kwargs, "state": copy})
            return o, kwargs["state"]

    with pytest.raises(AssertionError, match="decode/moved: state"):
        outcome(case, Lost())

    class Copied(plain_ops):
        def decode(self, **kwargs):
            o, state = super().decode(**kwargs)
            return o, state.clone()

    with pytest.raises(AssertionError, match="not the one passed"):
        outcome(case, Copied())


def test_a_changed_input_or_dtype_is_noticed(plain_ops):
    case = CASES["prefill/r3"]

    def key(inputs, actual):
        inputs["k"][0, 0, 0, 0] += 1.0

    with pytest.raises(AssertionError, match="input k"):
        outcome(case, plain_ops(), spoil=key)

    def double(inputs, actual):
        actual["o"] = actual["o"].double()

    with pytest.raises(AssertionError, match=r"o: torch.float64, not torch.float32"):
        outcome(case, plain_ops(), spoil=double)


def test_a_verify_that_writes_is_noticed(plain_ops):
    class Eager(plain_ops):
        def verify(self, **kwargs):
            kwargs["state"][0] += 1.0
            return super().verify(**kwargs)

    with pytest.raises(AssertionError, match="state after verify, before commit"):
        outcome(CASES["verify/uneven"].with_(state="rows"), Eager())


def test_a_result_may_be_no_worse_than_twice_plain_pytorch(plain_ops, in_float32):
    case = CASES["prefill/r3"]
    inputs, again = case.inputs(), case.inputs()
    expected = case.expected(inputs)
    actual = in_float32(case.run, plain_ops(), inputs)
    plain = in_float32(case.run, plain_ops(), again)
    case.check(actual, expected, same_dtype=plain)
    worse = {**actual, "o": actual["o"] * (1 + 5e-6)}
    case.check(worse, expected)
    with pytest.raises(AssertionError, match="o: relative error"):
        case.check(worse, expected, same_dtype=plain)
    with pytest.raises(AssertionError, match="o: relative error"):
        case.check(worse, expected, limits={"o": 1e-6})


# ------------------------------------------------------------------------- inputs and the counts


def test_inputs_follow_from_the_seed_alone():
    case = CASES["prefill/everything_at_once"]
    a, b, c = case.inputs(BF16, seed=1), case.inputs(BF16, seed=1), case.inputs(BF16, seed=2)
    for name, x in a.items():
        if isinstance(x, torch.Tensor):
            assert_same_bits(x, b[name], name)
    assert not torch.equal(a["k"], c["k"])
    assert not torch.equal(a["slots"], c["slots"])


def test_float64_inputs_have_float64_states():
    inputs = CASES["decode/batch"].inputs(torch.float64)
    assert inputs["state"].dtype == inputs["g"].dtype == inputs["q"].dtype == torch.float64


def test_what_is_not_read_holds_nan():
    """Reliability rows 3 and 18."""
    case = CASES["prefill/everything_at_once"]
    inputs = case.inputs()
    slots = inputs["slots"].tolist()
    used = [s for i, s in enumerate(slots) if i not in (*case.padded, *case.new)]
    rest = [i for i in range(len(inputs["state"])) if i not in used]
    assert torch.isfinite(inputs["state"][used]).all()
    assert torch.isnan(inputs["state"][rest]).all()
    start, end = sum(case.lengths[:2]), sum(case.lengths[:3])
    assert torch.isnan(inputs["v"][:, start:end]).all()
    assert torch.isnan(inputs["v"][:, sum(case.lengths) :]).all()
    assert torch.isfinite(inputs["g"]).all()


def test_strided_inputs_are_views_of_one_projection():
    inputs = CASES["decode/strided"].inputs()
    assert inputs["q"].data_ptr() != inputs["k"].data_ptr()
    assert inputs["q"]._base is inputs["v"]._base
    assert not inputs["q"].is_contiguous()


def test_bytes_and_operations_by_hand():
    case = Case("count", "decode", Hk=2, Hv=4, K=8, V=16, batch=3, padded=(1,), new=(2,), raw=True)
    # two rows: q, k, v and the two gates; three rows of o; one state read and two written
    tokens = 2 * (2 * 8 + 2 * 8 + 4 * 16 + 4 + 4) * 2 + 3 * 4 * 16 * 2
    assert case.bytes(BF16) == tokens + 3 * 4 * 8 * 16 * 4
    assert case.bytes(torch.float64) == 4 * tokens + 3 * 4 * 8 * 16 * 8
    assert case.flops() == 2 * 4 * 8 * 16 * (1 + 2 + 2 + 2)
    assert case.with_(rule="linear").flops() == 2 * 4 * 8 * 16 * (2 + 2)
    norm = Case("count", "rms_norm_gated", Hv=4, V=16, batch=2, tokens=5, state="none")
    assert norm.bytes(BF16) == (3 * 2 * 5 * 4 * 16 + 16) * 2
    conv = Case("count", "causal_conv1d", D=10, W=4, batch=2, tokens=5, bias=False)
    assert conv.flops() == 2 * 4 * 10 * 2 * 5
    assert conv.bytes(FP32) == (2 * 2 * 5 * 10 + 10 * 4 + 2 * 2 * 10 * 3) * 4
    packed = Case("count", "prefill", lengths=(100, 0, 28), every=50, K=8, V=16)
    rows = 3 + 3 + 2
    pool = rows * 4 * 8 * 16 * 4
    assert packed.bytes(BF16) == pool + 128 * ((2 * 16 + 64 + 64) * 2 + 8 * 4)


def test_names_are_given_once_and_fields_are_checked():
    with pytest.raises(ValueError, match="two cases"):
        register(CASES["decode/one"])
    with pytest.raises(ValueError, match="op must be"):
        Case("x", "other")
    with pytest.raises(ValueError, match="rule must be"):
        Case("x", "prefill", rule="other")
    with pytest.raises(ValueError, match="ops must be"):
        select("other")
    assert label(CASES["decode/one"], BF16) == "decode/one-bf16"
