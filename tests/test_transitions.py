"""``transitions`` on every backend: the maps of segments against the float64 oracle.

A map is compared by what it does: the state from zero, and the state from any other (X1).
"""

from __future__ import annotations

import pytest
import torch

from sluice.contract.errors import BackendError, ContractError
from sluice.ops.transitions import transitions
from sluice.testing import inputs, oracle
from sluice.testing.compare import assert_same_bits, assert_within, tolerance
from tests.suite import DEVICE, backends

HV, T = 2, 150
BACKENDS = backends("transitions")


def call(backend, *, B=1, K=16, V=24, T=T, gates="mild", per_key=False, kind="random", raw=False):
    """Arguments in the widest dtype that is fast on the backend."""
    half = backend in ("triton", "hopper")
    K, V = (128, 128) if backend == "hopper" else (K, V)
    gen = inputs.generator(3)
    decay = inputs.raw_decay(gen, B, T, HV, gates, K if per_key else None)
    b = inputs.raw_beta(gen, B, T, HV)
    dtype = torch.float16 if half else torch.float32
    k, v = inputs.keys(gen, B, T, 1, K, kind), inputs.normal(gen, B, T, HV, V)
    args = {"k": k.to(dtype), "v": v.to(dtype)}
    if raw:
        args |= {"g": decay["a"], "beta": b, "A_log": decay["A_log"], "dt_bias": decay["dt_bias"]}
    else:
        args |= {"g": inputs.decay(**decay), "beta": b.sigmoid()}
    args = {n: x.to(DEVICE) if n in "kv" else x.float().to(DEVICE) for n, x in args.items()}
    return args, inputs.recurrent_state(gen, B, HV, K, V).float().to(DEVICE)


def check(maps, args, state, segment, **options):
    """Every map of every row, on zero and on a large state."""
    V, tokens = args["v"].shape[3], args["v"].shape[1]
    S_zero, M = maps.double().split([V, maps.shape[-1] - V], dim=-1)
    limit = tolerance(args["v"].dtype, device=DEVICE)
    ends = [min(end, tokens) for end in range(segment, tokens + segment, segment)]
    assert maps.shape[1] == len(ends)
    for i, end in enumerate(ends):
        cut = {n: x[:, :end] if n not in ("A_log", "dt_bias") else x for n, x in args.items()}
        for before in (torch.zeros_like(state), 100 * state):
            _, exact = oracle.delta(
                cut["k"], **cut, state=before, state_layout="kv", scale=1.0, **options
            )
            got = M[:, i] @ before.double() + S_zero[:, i]
            assert_within(got, exact, limit, name=f"after {end} tokens", per=1)


def run(backend, args, **options):
    try:
        return transitions(**args, **options, backend=backend)
    except BackendError as refusal:
        pytest.skip(str(refusal))


@pytest.mark.parametrize("segment", [64, 128, 192])
@pytest.mark.parametrize("backend", BACKENDS)
def test_maps_equal_the_oracle(backend, segment):
    """Whole segments, a last one of 22 tokens, and one for all."""
    args, state = call(backend)
    check(run(backend, args, segment=segment), args, state, segment)


@pytest.mark.parametrize("options", [{}, {"gates": "strong"}, {"kind": "identical"}, {"B": 2}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_maps_of_rows_hard_keys_and_gates(backend, options):
    args, state = call(backend, **options)
    del args["g"]
    check(run(backend, {**args, "g": None}, segment=64), args, state, 64)
    args, state = call(backend, **options)
    check(run(backend, args, segment=64), args, state, 64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_maps_with_decay_per_key_raw_gates_and_norm(backend):
    for per_key in (False, True):
        args, state = call(backend, per_key=per_key, raw=True)
        args["k"] = args["k"] * 3
        options = {"normalize_qk": True, "neg_eigval": True}
        check(run(backend, args, segment=64, **options), args, state, 64, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_has_the_same_map_beside_others(backend):
    args, _ = call(backend, B=2)
    both = run(backend, args, segment=64, batch_invariant=True)
    alone = run(backend, {n: x[1:] for n, x in args.items()}, segment=64, batch_invariant=True)
    assert_same_bits(both[1:], alone, "maps")


def test_bad_calls_are_refused_by_name():
    args, _ = call("cpu")
    for change, named in (
        ({"segment": 100}, "segment: expected a multiple of 64 tokens"),
        ({"segment": 0}, "segment"),
        ({"beta": None}, "beta: expected a tensor"),
        ({"v": args["v"][:, :3]}, "v"),
    ):
        with pytest.raises(ContractError, match=rf"transitions: {named}"):
            transitions(**{"segment": 64, **args, **change})
