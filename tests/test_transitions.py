"""``prefill`` in two passes on every backend, against the float64 oracle.

A map is compared by what it does: the state from zero, and the state from any other (X1).
"""

from __future__ import annotations

import pytest
import torch

from sluice.contract.errors import BackendError, ContractError
from sluice.ops.transitions import Passes, resume, transitions
from sluice.testing import inputs, oracle
from sluice.testing.compare import assert_same_bits, assert_within, tolerance
from tests.suite import DEVICE, backends

HV, T = 2, 150
BACKENDS = backends("transitions")


def call(backend, *, B=1, K=16, V=24, gates="mild", per_key=False, kind="random", raw=False):
    """Arguments of both passes, in a dtype that the backend has kernels for."""
    half = backend in ("triton", "hopper")
    K, V = (128, 128) if backend == "hopper" else (K, V)
    gen = inputs.generator(3)
    decay = inputs.raw_decay(gen, B, T, HV, gates, K if per_key else None)
    b = inputs.raw_beta(gen, B, T, HV)
    q, k = inputs.keys(gen, B, T, 1, K), inputs.keys(gen, B, T, 1, K, kind)
    args = {"q": q, "k": k, "v": inputs.normal(gen, B, T, HV, V)}
    args = {n: x.to(torch.float16 if half else torch.float32) for n, x in args.items()}
    if raw:
        args |= {"g": decay["a"], "beta": b, "A_log": decay["A_log"], "dt_bias": decay["dt_bias"]}
    else:
        args |= {"g": inputs.decay(**decay), "beta": b.sigmoid()}
    args = {n: x.to(DEVICE) if n in "qkv" else x.float().to(DEVICE) for n, x in args.items()}
    args["out"] = torch.full_like(args["v"], float("nan"))
    return args, inputs.recurrent_state(gen, B, HV, V, K).float().to(DEVICE)


def check(backend, args, state, segment, **options):
    """The map on zero and on a large state; then, from that state, outputs and the final state."""
    both = Passes(
        **args, state=torch.empty_like(state), segment=segment, **options, backend=backend
    )
    try:
        made, kept = transitions(both)
    except BackendError as refusal:
        pytest.skip(str(refusal))
    S_zero, M = made.double().split([state.shape[2], state.shape[3]], dim=-1)
    limit = tolerance(args["v"].dtype, device=DEVICE)
    given = {name: x for name, x in args.items() if name != "out"}
    for before in (torch.zeros_like(state), 100 * state, state):
        o, exact = oracle.delta(**given, state=before, **options)
        got = M @ before.double().mT + S_zero
        assert_within(got.mT, exact, limit, name="state by the map", per=1)
    both.state.copy_(state)
    resume(both, kept)
    assert_within(args["out"], o, limit, name="o", per=2)
    assert_within(both.state, exact, limit, name="state", per=1)
    return made


@pytest.mark.parametrize("segment", [64, 128, 192])
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_passes_equal_the_oracle(backend, segment):
    """Whole segments, a last one of 22 tokens, and one for all, which needs no second pass."""
    args, state = call(backend)
    if segment > T:
        del args["out"]
        made, _ = transitions(Passes(**args, state=state, segment=segment, backend=backend))
        _, exact = oracle.delta(**args, state=state)
        S_zero, M = made.double().split([state.shape[2], state.shape[3]], dim=-1)
        limit = tolerance(args["v"].dtype, device=DEVICE)
        got = (M @ state.double().mT + S_zero).mT
        assert_within(got, exact, limit, name="state by the map", per=1)
    else:
        check(backend, args, state, segment)


@pytest.mark.parametrize("options", [{"gates": "strong"}, {"kind": "identical"}, {"B": 2}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_passes_of_rows_hard_keys_and_gates(backend, options):
    args, state = call(backend, **options)
    check(backend, args, state, 64)
    check(backend, {**args, "g": None}, state, 64)


@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_passes_with_raw_gates_and_norm(backend, per_key):
    args, state = call(backend, per_key=per_key, raw=True)
    args["k"], args["q"] = args["k"] * 3, args["q"] * 2
    check(backend, args, state, 64, normalize_qk=True, neg_eigval=True, scale=0.3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_has_the_same_map_beside_others(backend):
    args, state = call(backend, B=2)
    both = check(backend, args, state, 64)
    alone = check(backend, {n: x[1:] for n, x in args.items()}, state[1:], 64)
    if backend != "chunked":  # whose products may round differently beside other rows
        assert_same_bits(both[1:], alone, "map")


def test_bad_calls_are_refused_by_name():
    args, state = call("cpu")
    for change, named in (
        ({"segment": 100}, "segment: expected a multiple of 64 tokens"),
        ({"segment": 0}, "segment"),
        ({"beta": None}, "beta: expected a tensor"),
        ({"v": args["v"][:, :3]}, "v"),
    ):
        with pytest.raises(ContractError, match=rf"transitions: {named}"):
            transitions(Passes(**{"segment": 64, "state": state, **args, **change}))


@pytest.mark.skipif("triton" not in BACKENDS, reason="runs in Triton's interpreter")
def test_triton_takes_only_what_its_own_first_pass_kept():
    args, state = call("triton")
    both = Passes(**args, state=state, segment=64, backend="triton")
    with pytest.raises(ContractError, match=r"resume: kept: expected the .* bytes of the first"):
        resume(both, torch.empty(64, dtype=torch.uint8))
