"""Reliability row 20: every option changes the result or raises, on every backend.

For each operator a table says what each option adds to a plain call. The tables are compared with
the signatures: an option without a row fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sluice
from sluice import calls, dispatch
from sluice.testing.compare import assert_within
from tests.suite import each_backend

N, T, H, DIM, W, P = 2, 8, 4, 8, 4, 9  # T = DIM and H = 4, so that other layouts fit too
D = 3 * H * DIM

Change = dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def _slots(*values: int) -> Tensor:
    return torch.tensor(values)


def _delta() -> dict[str, Any]:
    tokens = {name: _random(N, H, H, DIM, seed=i) for i, name in enumerate("qkv")}
    return {**tokens, "state": _random(P, H, DIM, DIM)}


def _conv() -> dict[str, Any]:
    return {"x": _random(N, T, D), "weight": _random(D, W), "state": _random(P, D, W - 1)}


def _plain(op: str) -> dict[str, Any]:
    """A call without optional arguments."""
    if op in ("prefill", "decode", "verify"):
        return _delta()
    if op == "causal_conv1d":
        return {"x": _random(N, T, T), "weight": _random(T, W), "state": _random(P, T, W - 1)}
    if op == "conv_qkv":
        return {**_conv(), "num_k_heads": H, "num_v_heads": H}
    if op == "rms_norm_gated":
        return {"x": _random(3, DIM), "z": _random(3, DIM, seed=1), "weight": _random(DIM)}
    return {
        "qkvz": _random(N, T, D + H * DIM),
        "ba": _random(N, T, 2 * H),
        "conv_weight": _random(D, W),
        "A_log": _random(H),
        "dt_bias": _random(H, seed=1),
        "norm_weight": _random(DIM),
        "conv_state": _random(P, D, W - 1),
        "state": _random(P, H, DIM, DIM),
    }


def _kept(*slots: int) -> dict[str, Any]:
    columns = torch.tensor(slots).unsqueeze(1)
    return {"checkpoints": sluice.Checkpoints(columns, positions=torch.ones(N, 1).long())}


def _packed(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """One packed row of all tokens; the option changes where its sequences end."""
    return lambda call: {name: call[name].flatten(0, 1).unsqueeze(0) for name in names}


RAW = {"A_log": _random(H), "g": _random(N, H, H), "beta": _random(N, H, H, seed=1)}
ROWS = {"slots": _slots(3, 1)}
BORDERS = {"cu_seqlens": _slots(0, 3, 8)}

# option: (what both calls add to the plain one, what only the second adds)
POOL: dict[str, tuple[Change, Change]] = {
    "slots": ({}, {"slots": _slots(3, 1)}),
    "write_slots": (ROWS, {"write_slots": _slots(5, 6)}),
    "has_state": ({}, {"has_state": torch.tensor([True, False])}),
    "pad_slot": ({"slots": _slots(3, 0)}, {"pad_slot": 0}),
}
DELTA: dict[str, tuple[Change, Change]] = {
    "g": ({}, {"g": -_random(N, H, H).abs()}),
    "beta": ({}, {"beta": _random(N, H, H).sigmoid()}),
    "scale": ({}, {"scale": 0.5}),
    "normalize_qk": ({}, {"normalize_qk": True}),
    "A_log": ({"g": RAW["g"]}, {"A_log": RAW["A_log"]}),
    "dt_bias": (RAW, {"dt_bias": _random(H, seed=2)}),
    "neg_eigval": (RAW, {"neg_eigval": True}),
    "state": ({"state": None}, {"state": _random(P, H, DIM, DIM)}),
    "state_layout": ({}, {"state_layout": "kv"}),
    "cu_seqlens": (_packed("q", "k", "v"), BORDERS),
    "layout": ({}, {"layout": "bhtd"}),
    **POOL,
}
CONV: dict[str, tuple[Change, Change]] = {
    "activation": ({}, {"activation": None}),
    "freeze": ({}, {"freeze": True}),
    "window_start": (
        lambda call: {"state": _random(*call["state"].shape[:2], W - 2 + T)},
        {"window_start": _slots(0, 2)},
    ),
    "checkpoints": ({}, _kept(5, 6)),
    "cu_seqlens": (_packed("x"), {"cu_seqlens": _slots(0, 3, 16)}),
    **POOL,
}
GATES = {"a": _random(N, T, H), "A_log": _random(H)}
OPTIONS: dict[str, dict[str, tuple[Change, Change]]] = {
    "prefill": {
        **DELTA,
        "checkpoints": ({}, _kept(5, 6)),
        "initial_state": ({"state": None}, {"initial_state": _random(N, H, DIM, DIM)}),
    },
    "decode": DELTA,
    "verify": {
        **DELTA,
        "state": ({}, {"state": _random(P, H, DIM, DIM, seed=3)}),
        "conv_inputs": ({}, {}),  # these two are tested below
        "conv_state": ({}, {}),
    },
    "causal_conv1d": {
        **CONV,
        "bias": ({}, {"bias": _random(T)}),
        "state": ({"state": None}, {"state": _random(P, T, W - 1)}),
        "initial_state": ({"state": None}, {"initial_state": _random(N, T, W - 1)}),
        "layout": ({}, {"layout": "bdt"}),
    },
    "conv_qkv": {
        **CONV,
        "bias": ({}, {"bias": _random(D)}),
        "state": ({"state": None}, {"state": _random(P, D, W - 1)}),
        "initial_state": ({"state": None}, {"initial_state": _random(N, D, W - 1)}),
        "num_k_heads": ({}, {"num_k_heads": 1, "head_v_dim": DIM}),
        "num_v_heads": ({}, {"num_v_heads": 2 * H, "head_k_dim": DIM}),
        "head_k_dim": ({}, {"head_k_dim": DIM // 2}),
        "head_v_dim": ({}, {"head_v_dim": DIM // 2}),
        "a": ({}, GATES),
        "b": ({}, {"b": _random(N, T, H)}),
        "A_log": (GATES, {"A_log": _random(H, seed=1)}),
        "dt_bias": (GATES, {"dt_bias": _random(H, seed=1)}),
        "neg_eigval": ({"b": _random(N, T, H)}, {"neg_eigval": True}),
        "normalize_qk": ({}, {"normalize_qk": False}),
    },
    "rms_norm_gated": {
        "eps": ({}, {"eps": 0.1}),
        "activation": ({}, {"activation": "sigmoid"}),
    },
    "step": {
        **POOL,
        "conv_bias": ({}, {"conv_bias": _random(D)}),
        "state_layout": ({}, {"state_layout": "kv"}),
        "order": ({}, {"order": "interleaved"}),
        "conv_activation": ({}, {"conv_activation": None}),
        "gate_activation": ({}, {"gate_activation": "sigmoid"}),
        "eps": ({}, {"eps": 0.1}),
        "scale": ({"eps": 0.1}, {"scale": 0.5}),  # a norm without eps would undo the scale
        "normalize_qk": ({}, {"normalize_qk": False}),
        "neg_eigval": ({}, {"neg_eigval": True}),
        "A_log": ({}, {"A_log": _random(H, seed=3)}),
        "dt_bias": ({}, {"dt_bias": _random(H, seed=3)}),
        "norm_weight": ({}, {"norm_weight": _random(DIM, seed=3)}),
        "conv_weight": ({}, {"conv_weight": _random(D, W, seed=3)}),
        "conv_state": ({}, {"conv_state": _random(P, D, W - 1, seed=3)}),
        "state": ({}, {"state": _random(P, H, DIM, DIM, seed=3)}),
    },
}

# tested below: these do not change what is computed, only by which backend, where to, and how
ELSEWHERE = {"backend", "out", "cu_seqlens_cpu", "batch_invariant"}
ELSEWHERE |= {"buffers", "draft_slots"}  # where drafts lie: test_drafts.py
INPUTS = {"q", "k", "v", "x", "z", "weight", "qkvz", "ba"}


def _apply(call: dict[str, Any], change: Change) -> dict[str, Any]:
    return {**call, **(change(call) if callable(change) else change)}


def _outcome(op: str, call: dict[str, Any], backend: str) -> list[Tensor | None]:
    """The outputs of a call, and its pools afterwards."""
    call = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}
    try:
        result = getattr(sluice, op)(**call, backend=backend)
    except sluice.BackendError as refusal:
        pytest.skip(str(refusal))
    if op == "verify":
        result = (result[0], sluice.commit(result[1], torch.full((_rows(call),), 2)))
    outputs = list(result) if isinstance(result, tuple) else [result]
    return [*outputs, call.get("state"), call.get("conv_state")]


def _rows(call: dict[str, Any]) -> int:
    bounds = call.get("cu_seqlens")
    return call["q"].shape[0] if bounds is None else len(bounds) - 1


def _differ(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    for x, y in zip(a, b, strict=True):
        if (x is None) != (y is None):
            return True
        if x is not None and y is not None and (x.shape != y.shape or not torch.equal(x, y)):
            return True
    return False


@pytest.mark.parametrize("op", OPTIONS)
def test_row_20_every_option_of_the_signature_is_listed(op):
    found = set(inspect.signature(getattr(sluice, op)).parameters)
    assert found - INPUTS - ELSEWHERE == set(OPTIONS[op])


ALL = [
    pytest.param(op.values[0], op.values[1], option, id=f"{op.id}-{option}")
    for op in each_backend(*OPTIONS)
    for option in OPTIONS[op.values[0]]
    if option not in ("conv_inputs", "conv_state") or op.values[0] != "verify"
]


@pytest.mark.parametrize(("op", "backend", "option"), ALL)
def test_row_20_the_option_changes_the_result(op, backend, option):
    common, added = OPTIONS[op][option]
    without = _apply(_plain(op), common)
    results = [_outcome(op, x, backend) for x in (without, _apply(without, added))]
    if option in ("state", "conv_state"):  # the two pools differ anyway, so compare the outputs
        results = [found[:1] for found in results]
    assert _differ(*results), f"{op} ignores {option}"


@pytest.mark.parametrize(("op", "backend"), each_backend("verify"))
def test_row_20_the_conv_window_of_a_draft_is_rolled(op, backend):
    """Only commit writes it: conv_inputs and conv_state are one option."""
    call = _plain(op)
    window, x = _random(P, D, W - 1), _random(N, H, D)
    before = window.clone()
    _, draft = sluice.verify(**call, conv_inputs=x, conv_state=window, backend=backend)
    assert torch.equal(window, before)
    sluice.commit(draft, torch.tensor([0, 3]), backend=backend)
    assert torch.equal(window[0], before[0])
    assert torch.equal(window[1], x[1, :3].T)


@pytest.mark.parametrize(("op", "backend"), each_backend("verify"))
def test_row_20_the_number_accepted_changes_the_state(op, backend):
    found = []
    for accepted in range(H + 1):
        call = _delta()
        _, draft = sluice.verify(**call, backend=backend)
        found.append(sluice.commit(draft, torch.full((N,), accepted), backend=backend))
    for i, state in enumerate(found):
        assert all(not torch.equal(state, other) for other in found[:i])


@pytest.mark.parametrize(("op", "backend"), each_backend(*OPTIONS))
def test_row_20_out_is_where_the_result_goes(op, backend):
    plain = _outcome(op, _plain(op), backend)
    call = _plain(op)
    made = [x for x in getattr(sluice, op)(**_plain(op)) if isinstance(x, Tensor)]
    if op == "conv_qkv":
        out: Any = (*(torch.full_like(x, 7.0) for x in made), None, None)
    else:
        out = torch.full_like(plain[0], 7.0)
    result = getattr(sluice, op)(**call, out=out, backend=backend)
    result = (
        result[:3] if op == "conv_qkv" else [result[0] if isinstance(result, tuple) else result]
    )
    buffers = out[:3] if op == "conv_qkv" else [out]
    for got, buffer, expected in zip(result, buffers, plain, strict=False):
        assert got.data_ptr() == buffer.data_ptr()
        assert torch.equal(buffer, expected)


@pytest.mark.parametrize("op", OPTIONS)
def test_row_20_backend_is_the_one_asked_for(op, monkeypatch):
    seen = []
    bind = dispatch._module("reference").bind

    def watched(spec: Any) -> Any:
        launch = bind(spec)
        return lambda tensors: (seen.append(spec.op), launch(tensors))

    monkeypatch.setattr(dispatch._module("reference"), "bind", watched)
    calls.forget()
    getattr(sluice, op)(**_plain(op), backend="reference")
    assert seen == [op]
    calls.forget()
    with pytest.raises(sluice.BackendError, match="got 'referenz'"):
        getattr(sluice, op)(**_plain(op), backend="referenz")


@pytest.mark.parametrize("op", ["prefill", "decode", "verify", "causal_conv1d", "conv_qkv"])
def test_row_20_lengths_on_the_host_are_held_to_the_device_s(op):
    names = "x" if "conv" in op else "qkv"
    call = _apply(_plain(op), _packed(*names))
    bounds = torch.tensor([0, 3, 8])
    getattr(sluice, op)(**call, cu_seqlens=bounds, cu_seqlens_cpu=bounds.clone())
    with pytest.raises(sluice.ContractError, match="cu_seqlens_cpu: expected cu_seqlens' values"):
        getattr(sluice, op)(**call, cu_seqlens=bounds, cu_seqlens_cpu=torch.tensor([0, 4, 8]))


def test_row_20_batch_invariant_reaches_the_backend(monkeypatch):
    seen = []
    bind = dispatch._module("reference").bind
    monkeypatch.setattr(
        dispatch._module("reference"), "bind", lambda spec: seen.append(spec) or bind(spec)
    )
    calls.forget()
    for wanted in (False, True):
        sluice.prefill(**_delta(), batch_invariant=wanted, backend="reference")
    assert [spec.batch_invariant for spec in seen] == [False, True]


# ------------------------------------------------------------------------ gates, said both ways


@pytest.mark.parametrize(("op", "backend"), each_backend("prefill", "decode"))
def test_row_20_g_is_the_natural_logarithm_of_the_decay(op, backend):
    """One token with a key of zeros only decays the state: by exp(g), not by g nor by 2**g."""
    zero, g = torch.zeros(1, 1, 1, DIM), torch.tensor([[[-0.7]]])
    state = _random(1, 1, DIM, DIM)
    expected = state.double() * g.double().exp()
    getattr(sluice, op)(zero, zero, zero, g, state=state, backend=backend)
    assert_within(state, expected, 1e-6, name="state")


@pytest.mark.parametrize(("op", "backend"), each_backend("prefill", "decode"))
def test_row_20_beta_is_linear(op, backend):
    """One unit key into an empty state writes beta · v: not sigmoid(beta) · v."""
    k, v, beta = torch.zeros(1, 1, 1, DIM), _random(1, 1, 1, DIM), torch.tensor([[[0.3]]])
    k[..., 2] = 1.0
    o, _ = getattr(sluice, op)(k, k, v, None, beta, scale=1.0, backend=backend)
    assert_within(o, 0.3 * v.double(), 1e-6, name="o")


@pytest.mark.parametrize(("op", "backend"), each_backend("prefill", "decode"))
def test_row_20_raw_gates_are_the_activated_ones(op, backend):
    call, dt_bias = _delta(), _random(H, seed=5)
    g = -RAW["A_log"].exp() * torch.nn.functional.softplus(RAW["g"] + dt_bias)
    raw = {**call, **RAW, "dt_bias": dt_bias, "neg_eigval": True, "normalize_qk": True}
    activated = {**call, "g": g, "beta": 2 * RAW["beta"].sigmoid(), "normalize_qk": True}
    found, expected = (_outcome(op, x, backend) for x in (raw, activated))
    for x, y, name in zip(found[:2], expected[:2], ("o", "state"), strict=True):
        assert_within(x, y.double(), 1e-5, name=name)
