"""Every option has its effect, and the checks can fail: reliability rows 20 and 26."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sluice
from sluice.testing import compare
from tests import calls, serving
from tests.calls import OPS, Call, Shape, make
from tests.serving import servers
from tests.suite import DEVICE, backends, each_backend

SHAPE = Shape(Hk=2, r=2, K=8, V=8)


def flipped(name: str) -> Callable[[Call], dict[str, Any]]:
    return lambda call: {name: call.rows[name].flip(1)}


def scaled(name: str) -> Callable[[Call], dict[str, Any]]:
    return lambda call: {name: {**call.fixed, **call.pools}[name] * 1.1 + 0.1}


def given(name: str, value: Any) -> Callable[[Call], dict[str, Any]]:
    return lambda call: {name: value}


def indexed(name: str, *values: int) -> Callable[[Call], dict[str, Any]]:
    return lambda call: {name: calls.index(list(values))}


def checkpoints(call: Call) -> dict[str, Any]:
    slots = calls.index([4, -1, 5, -1]).view(2, 2)
    return {"checkpoints": sluice.Checkpoints(slots, every=2)}


CHANGES: dict[str, Callable[[Call], dict[str, Any]]] = {
    **{name: flipped(name) for name in ("q", "k", "v", "g", "beta", "x", "z", "a", "b")},
    **{name: flipped(name) for name in ("qkvz", "ba", "conv_inputs")},
    **{name: scaled(name) for name in ("A_log", "dt_bias", "state", "conv_state", "weight")},
    **{name: scaled(name) for name in ("bias", "conv_weight", "conv_bias", "norm_weight")},
    "scale": given("scale", 0.5),
    "normalize_qk": given("normalize_qk", False),
    "neg_eigval": given("neg_eigval", True),
    "state_layout": given("state_layout", "kv"),
    "slots": indexed("slots", 1, 0),
    "write_slots": indexed("write_slots", 0, 3),
    "has_state": lambda call: {"has_state": torch.tensor([True, False], device=DEVICE)},
    "pad_slot": given("pad_slot", 0),
    "freeze": given("freeze", True),
    "window_start": indexed("window_start", 0, 0),
    "checkpoints": checkpoints,
    "cu_seqlens": indexed("cu_seqlens", 0, 1, 4),
    "cu_seqlens_cpu": given("cu_seqlens_cpu", torch.tensor([0, 1, 4])),
    "layout": given("layout", "bhtd"),
    "activation": lambda call: {"activation": "sigmoid" if call.op == "rms_norm_gated" else None},
    "conv_activation": given("conv_activation", None),
    "gate_activation": given("gate_activation", "sigmoid"),
    "eps": given("eps", 0.1),
    "order": given("order", "interleaved"),
    "num_k_heads": given("num_k_heads", 1),
    "num_v_heads": given("num_v_heads", 2),
    "head_k_dim": given("head_k_dim", 4),
    "head_v_dim": given("head_v_dim", 4),
    "initial_state": lambda call: {"initial_state": call.pools["state"][:2].clone()},
}
SAME = ("out", "backend", "batch_invariant")  # their effects are tested below
SAME += ("buffers", "draft_slots")  # and of these in test_drafts.py
REFUSED = {  # two rows of four tokens cannot be read in this way; a pool has the states already
    *((op, "window_start") for op in ("causal_conv1d", "conv_qkv")),  # three columns are too few
    *((op, "initial_state") for op in ("prefill", "causal_conv1d", "conv_qkv")),
    *((op, name) for op in OPS for name in ("cu_seqlens", "cu_seqlens_cpu", "layout")),
    *(("conv_qkv", name) for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")),
}
OPTIONS = [
    (op, name)
    for op in OPS
    for name in inspect.signature(getattr(sluice, op)).parameters
    if name not in SAME
]


def results(op: str, backend: str, change: Callable[[Call], dict[str, Any]]) -> dict[str, Tensor]:
    """Outputs and pools of a call in slots 0 and 1, with one argument changed."""
    call = make(op, SHAPE, 2, 4, P=6)
    if call.pools:
        call.index["slots"] = calls.index([0, 1])
    if op == "verify":
        call.rows["num_accepted"] = calls.index([3, 4])
    options = change(call)
    call.pools |= {name: options[name] for name in options if name in call.pools}
    return {**call.run(backend, **options), **{f"pool {n}": x for n, x in call.pools.items()}}


@pytest.mark.parametrize(("op", "name"), OPTIONS, ids=lambda x: x)
def test_row_20_every_argument_changes_the_result_or_raises(op, name):
    """No option is ignored; a new argument must be added to the table."""
    for backend in backends(op):
        if (op, name) in REFUSED:
            with pytest.raises(sluice.ContractError):
                results(op, backend, CHANGES[name])
            continue
        plain = results(op, backend, lambda call: {})
        changed = results(op, backend, CHANGES[name])
        same = all(torch.equal(changed[n], x) for n, x in plain.items())
        assert not same, f"{name} of {op} makes no difference on {backend}"


@pytest.mark.parametrize(("op", "backend"), each_backend(*OPS))
def test_row_20_out_and_backend_are_obeyed(op, backend):
    expected = results(op, backend, lambda call: {})
    outputs = {name: x for name, x in expected.items() if not name.startswith("pool")}
    out = tuple(torch.full_like(x, float("nan")) for x in outputs.values())
    got = results(op, backend, given("out", out if op == "conv_qkv" else out[0]))
    for name, x in expected.items():
        compare.assert_same_bits(got[name], x, name)
    for name, buffer in zip(outputs, out, strict=True):
        assert got[name].data_ptr() == buffer.data_ptr(), f"{name} is not in its buffer"
    arguments = make(op, SHAPE, 2, 4).arguments()
    arguments.pop("num_accepted", None)
    with pytest.raises(sluice.BackendError, match="nobody"):
        getattr(sluice, op)(**arguments, backend="nobody")


@pytest.mark.parametrize("server", servers("prefill"))
def test_row_20_batch_invariant_changes_bits_at_most(server):
    call = make("prefill", SHAPE, 2, 70)
    expected = call.exact()
    serving.assert_exact(call, server.run(call), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"dt_bias": torch.zeros(4), "A_log": None, "neg_eigval": False},
        {"neg_eigval": True, "A_log": None, "dt_bias": None},
        {"A_log": torch.zeros(4), "g": None},
    ],
    ids=("dt_bias alone", "neg_eigval of given gates", "A_log without a"),
)
@pytest.mark.parametrize(("op", "backend"), each_backend("prefill", "decode", "verify"))
def test_row_20_gate_options_that_could_not_act_are_refused(op, backend, change):
    call = make(op, SHAPE, 2, 4)
    placed = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in change.items()}
    with pytest.raises(sluice.ContractError):
        call.run(backend, **placed)


@pytest.mark.parametrize("per_key", [False, True], ids=("per_head", "per_key"))
@pytest.mark.parametrize(("op", "backend"), each_backend("prefill", "decode", "verify"))
def test_row_20_gates_are_natural_logarithms_and_raw_gates_their_formula(op, backend, per_key):
    """A token that writes nothing halves the state with g = -ln 2, and with a = 0 and A = 1."""
    shape = Shape(Hk=1, r=2, K=8, V=8, decay="key" if per_key else "head", raw=False)
    call = make(op, shape, 2, 1)
    call.rows["v"], call.rows["beta"] = torch.zeros_like(call.rows["v"]), None
    if op == "verify":
        call.rows["num_accepted"] = calls.index([1, 1])
    raw, before = call.copy(), call.pools["state"].clone()
    g = call.rows["g"]
    call.rows = {**call.rows, "g": torch.full_like(g, -math.log(2.0))}
    raw.rows = {**call.rows, "g": torch.zeros_like(g)}
    raw.fixed = {**raw.fixed, "A_log": g.new_zeros(2)}
    for each in (call, raw):
        each.run(backend)
        torch.testing.assert_close(each.pools["state"], before / 2, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("op", "backend"), each_backend("prefill", "decode", "verify"))
def test_row_20_beta_is_the_write_strength_and_raw_beta_its_sigmoid(op, backend):
    """From a zero state and with unit keys, the output is beta · v."""
    shape = Shape(Hk=2, r=1, K=8, V=8, raw=False, normalize=False)
    call = make(op, shape, 2, 1)
    call.pools["state"].zero_()
    if op == "verify":
        call.rows["num_accepted"] = calls.index([1, 1])
    raw, beta = call.copy(), call.rows["beta"]
    raw.rows = {**raw.rows, "beta": (beta / (1 - beta)).log()}
    raw.fixed = {**raw.fixed, "A_log": beta.new_zeros(2)}
    doubled = raw.copy()
    doubled.fixed = {**raw.fixed, "neg_eigval": True}
    expected = beta.unsqueeze(-1) * call.rows["v"]
    for each, factor in ((call, 1), (raw, 1), (doubled, 2)):
        each.run(backend)
        answer = (each.pools["state"] * call.rows["k"][:, 0].unsqueeze(-2)).sum(-1)
        torch.testing.assert_close(answer, factor * expected[:, 0], rtol=1e-4, atol=1e-6)


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "two percent": lambda x: x * 1.02,
    "one row of another": lambda x: x.roll(1, 0),
    "another head": lambda x: x.roll(1, 2 if x.dim() == 4 else -1),
    "not a number": lambda x: x.index_fill(-1, calls.index([0]), float("nan")),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("server", servers(*OPS))
def test_row_26_the_checks_of_these_tests_refuse_wrong_results(server, wrong):
    call = make(server.op, SHAPE, 2, 4)
    expected = call.exact()
    outputs = server.run(call)
    serving.assert_exact(call, outputs, expected)
    for name, x in outputs.items():
        spoiled = {**outputs, name: WRONG[wrong](x)}
        with pytest.raises(AssertionError):
            serving.assert_exact(call, spoiled, expected)
        with pytest.raises(AssertionError):
            serving.close(spoiled[name], x, SHAPE, name)
        with pytest.raises(AssertionError):
            serving.same_bits(spoiled[name], x, SHAPE, name)
    for name, pool in list(call.pools.items()):
        call.pools[name] = WRONG[wrong](pool)
        with pytest.raises(AssertionError):
            serving.assert_exact(call, outputs, expected)
        call.pools[name] = pool
