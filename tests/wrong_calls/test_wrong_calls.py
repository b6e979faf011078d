"""2,000 wrong calls in the suite, what such calls have found, and that a wrong answer is seen.

``make wrong-calls CALLS=50000`` makes more of them; docs/reliability.md has the counts.
"""

from __future__ import annotations

import tracemalloc

import pytest
import torch

import sluice
from sluice.contract.errors import BackendError, ContractError
from sluice.state_pool import PoolExhaustedError, PoolGeometry, StatePool
from tests.suite import DEVICE
from tests.wrong_calls import judge, run

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="calls are made on a CPU")
PARTS, CALLS = 4, 2_000


@pytest.mark.parametrize("part", range(PARTS))
def test_a_wrong_call_has_a_clear_error_or_a_right_result(part):
    each = CALLS // PARTS
    for seed in range(1 + part * each, 1 + (part + 1) * each):
        try:
            run.one(seed)
        except judge.WrongAnswerError as error:
            pytest.fail(run.describe(seed, error), pytrace=False)


# --------------------------------------------------------------------------- what they have found


def _tokens(n=3, T=2):
    gen = torch.Generator().manual_seed(1)
    q, k = (torch.randn(n, T, 1, 8, generator=gen) for _ in range(2))
    return {"q": q, "k": k, "v": torch.randn(n, T, 2, 8, generator=gen)}


def _state(rows=6):
    return torch.zeros(rows, 2, 8, 8)


@pytest.mark.parametrize("option", ["normalize_qk", "neg_eigval", "batch_invariant"])
@pytest.mark.parametrize("value", ["no", 2, 1j, torch.tensor(1.0)])
def test_a_flag_is_true_or_false(option, value):
    with pytest.raises(ContractError, match=f"prefill: {option}: expected True or False"):
        sluice.prefill(**_tokens(), **{option: value})


@pytest.mark.parametrize("value", [0.0, False, torch.zeros(0), "0"])
def test_a_padding_slot_is_an_int(value):
    given = {"state": _state(), "slots": torch.tensor([1, 2, 3])}
    with pytest.raises(ContractError, match="decode: pad_slot: expected"):
        sluice.decode(**_tokens(), **given, pad_slot=value)


def test_an_interval_of_checkpoints_is_an_int():
    slots = torch.tensor([[3], [4], [5]])
    for every in (float("inf"), "2", True, 10**30):
        kept = sluice.Checkpoints(slots, every=every)
        with pytest.raises(ContractError, match=r"checkpoints\.every: expected an int"):
            sluice.prefill(**_tokens(), state=_state(), checkpoints=kept)


@pytest.mark.parametrize("op", ["causal_conv1d", "decode", "step"])
def test_no_slot_of_a_pool_without_rows_is_read(op):
    """The CPU's look at slots took no rows for no pool, and the kernel read beside it."""
    slots = torch.tensor([5, 1, 4])
    if op == "decode":
        call = {**_tokens(), "state": _state(0)}
    elif op == "causal_conv1d":
        call = {"x": torch.zeros(3, 2, 4), "weight": torch.zeros(4, 4)}
        call |= {"state": torch.zeros(0, 4, 3), "freeze": True}
    else:
        call = {"qkvz": torch.zeros(3, 48), "ba": torch.zeros(3, 4), "A_log": torch.zeros(2)}
        call |= {"dt_bias": torch.zeros(2), "conv_weight": torch.zeros(32, 4)}
        call |= {"norm_weight": torch.zeros(8), "conv_state": torch.zeros(0, 32, 3)}
        call |= {"state": _state(0)}
    with pytest.raises(ContractError, match=r"slots\[0\]: expected a slot below 0, got 5"):
        getattr(sluice, op)(**call, slots=slots)


def test_slots_that_are_a_slice_are_checked_like_others():
    """The check of values read a dense copy with the strides of the slice."""
    state, tokens = torch.randn(6, 2, 8, 8), _tokens()
    slots = torch.tensor([2, 9, 2, 9, 3, 9])[::2]
    with pytest.raises(ContractError, match="slots: expected no slot twice"):
        sluice.decode(**tokens, state=state, slots=slots)
    _, draft = sluice.verify(**tokens, state=state, slots=torch.tensor([2, 1, 3]))
    with pytest.raises(ContractError, match="write_slots"):
        sluice.commit(draft, torch.tensor([1, 1, 1]), write_slots=slots)
    nan = torch.full((3, 2, 2), float("nan"))
    nan[:2] = 0.0  # the gates of padding may be anything
    padded = torch.tensor([2, 9, 1, 9, -1, 9])[::2]
    o, _ = sluice.decode(**tokens, g=nan, state=state, slots=padded)
    assert bool(o.isfinite().all())


def test_a_draft_that_was_changed_is_refused():
    _, draft = sluice.verify(**_tokens(), state=_state())
    count = torch.tensor([1, 1, 1])
    for change in (
        {"k": draft.k.to(torch.int16)},
        {"d": draft.d[:, :1]},
        {"g": torch.zeros(())},
        {"mark": "open"},
        {"state": None},
        {"buffered": torch.zeros(0)},
        {"state_layout": "VK"},
    ):
        with pytest.raises(ContractError, match="commit"):
            sluice.commit(draft._replace(**change), count)
    sluice.commit(draft, count)


@pytest.mark.parametrize("name", ["conv_state", "state"])
def test_a_step_has_both_states(name):
    call = {"qkvz": torch.zeros(3, 48), "ba": torch.zeros(3, 4), "A_log": torch.zeros(2)}
    call |= {"dt_bias": torch.zeros(2), "conv_weight": torch.zeros(32, 4)}
    call |= {"norm_weight": torch.zeros(8), "conv_state": torch.zeros(3, 32, 3)}
    call |= {"state": _state(3), name: None}
    with pytest.raises(ContractError, match=f"step: {name}: expected a tensor"):
        sluice.step(**call)
    call |= {"conv_state": torch.zeros(3, 32, 3), "state": _state(3)[..., :0]}
    with pytest.raises(ContractError, match="step: state: expected at least one head and width"):
        sluice.step(**call)


@pytest.mark.parametrize(("name", "value"), [("z", 3), ("weight", "w"), ("x", ())])
def test_what_is_no_tensor_is_named_where_gradients_may_be_asked_for(name, value):
    call = {"x": torch.ones(2, 4), "z": torch.ones(2, 4), "weight": torch.ones(4)}
    with pytest.raises(ContractError, match=f"rms_norm_gated: {name}: expected a tensor"):
        sluice.rms_norm_gated(**{**call, name: value})


def test_a_sparse_tensor_is_named():
    beta = torch.ones(3, 2, 2).to_sparse()
    with pytest.raises(ContractError, match="decode: beta: expected a dense tensor"):
        sluice.decode(**_tokens(), beta=beta, state=_state(3))
    initial = _state(3).to_sparse()
    with pytest.raises(ContractError, match="prefill: initial_state: expected a dense tensor"):
        sluice.prefill(**_tokens(), initial_state=initial)


def test_an_output_whose_rows_overlap_is_refused():
    """Rows one element short of their length, not only those of stride 0."""
    out = torch.zeros(200).as_strided((3, 2, 2, 8), (32, 15, 8, 1))
    with pytest.raises(ContractError, match="decode: out: expected a buffer without overlap"):
        sluice.decode(**_tokens(), state=_state(3), out=out)


def test_borders_and_flags_are_looked_at_before_they_are_used():
    x, weight, windows = torch.zeros(1, 3, 4), torch.zeros(4, 4), torch.zeros(1, 4, 3)
    with pytest.raises(ContractError, match="causal_conv1d: cu_seqlens: expected"):
        sluice.causal_conv1d(x, weight, initial_state=windows, cu_seqlens=3)
    with pytest.raises(ContractError, match="causal_conv1d: freeze: expected"):
        sluice.causal_conv1d(x, weight, freeze=torch.zeros(0))


@pytest.mark.parametrize("backend", [3, [], {}, torch.zeros(0)])
def test_a_backend_is_named_by_a_string(backend):
    with pytest.raises(BackendError, match="backend: expected one of"):
        sluice.rms_norm_gated(torch.ones(1, 4), torch.ones(1, 4), torch.ones(4), backend=backend)


@pytest.mark.parametrize("name", ["num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"])
def test_heads_are_ints(name):
    sizes = {"num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 8, "head_v_dim": 8}
    for value in (1j, "1", True, torch.tensor(1)):
        with pytest.raises(ContractError, match=f"conv_qkv: {name}: expected an int"):
            sluice.conv_qkv(torch.zeros(1, 2, 32), torch.zeros(32, 4), **sizes | {name: value})


def _pool():
    geometry = PoolGeometry(layers=1, num_v_heads=1, conv_channels=3)
    pool = StatePool(geometry, 3)
    pool.allocate(1)
    return pool


def test_a_fork_of_more_than_the_pool_has_does_not_begin():
    """It made a list of all parents before it counted the free slots."""
    pool = _pool()
    tracemalloc.start()
    try:
        with pytest.raises(PoolExhaustedError, match="fork: expected 1048576 free slots, got 2"):
            pool.fork([0], copies=2**20)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("method", "given", "name"),
    [
        ("free", {"slots": None}, "slots"),
        ("free", {"slots": torch.tensor([0], device="meta")}, "slots"),
        ("indices", {"slots": [0], "pad_to": "4"}, "pad_to"),
        ("indices", {"slots": [0], "dtype": torch.float32}, "dtype"),
        ("fork", {"slots": [0], "copies": "2"}, "copies"),
        ("snapshot", {"slots": [0], "device": 3.5}, "device"),
        ("layer", {"index": "0"}, "index"),
        ("draft_buffers", {"tokens": 1, "dtype": "bfloat16"}, "dtype"),
    ],
)
def test_a_method_of_a_pool_names_the_argument(method, given, name):
    with pytest.raises(ContractError, match=f"{method}: {name}: expected"):
        getattr(_pool(), method)(**given)


def test_what_is_no_operator_names_the_argument_too():
    conv, state = torch.zeros(1, 3, 3, 3), torch.zeros(1, 3, 1, 4, 4)
    for call, name in (
        (lambda: StatePool(3, 3), "geometry"),
        (lambda: StatePool(_pool().geometry, True), "slots"),
        (lambda: StatePool(_pool().geometry, 3, device=3), "device"),
        (lambda: StatePool.from_tensors(conv, 3), "recurrent"),
        (lambda: StatePool.from_tensors(3, state), "conv"),
        (lambda: StatePool.for_model("qwen3.5-4b", 1, tp=None), "tp"),
        (lambda: StatePool.for_model("qwen3.5-4b", 1, conv_columns="3"), "conv_columns"),
        (lambda: sluice.StateSnapshot(3, conv, state), "geometry"),
        (lambda: sluice.StateSnapshot.load(3), "path"),
        (lambda: sluice.explain("prefil"), "op"),
        (lambda: sluice.doctor("tpu"), "device"),
        (lambda: sluice.GatedDeltaNet(3), "shape"),
    ):
        with pytest.raises(ContractError, match=f": {name}: expected"):
            call()


# ----------------------------------------------------------------------------------- it can fail


def test_a_wrong_answer_is_seen(monkeypatch):
    """Operators that take any option, or raise what is not theirs, or write before they refuse."""
    monkeypatch.setattr("sluice.calls.require.options", lambda *given: None)
    seen = set()
    for seed in range(600):
        try:
            judge.operator(seed)
        except judge.WrongAnswerError as error:
            seen.add(str(error).partition(":")[0])
    assert len(seen) >= 3
