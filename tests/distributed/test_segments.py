"""The mathematics of context-parallel prefill on one device: R shares one after the other.

test_ranks.py tests the messages between ranks.
"""

from __future__ import annotations

import pytest
import torch

import sluice
from sluice.contract.errors import ContractError, SluiceError
from sluice.distributed import Split, prefill_segments, transition
from sluice.distributed.prefill import _canonical
from sluice.distributed.transition import Piece, join
from sluice.testing import inputs, oracle
from sluice.testing.compare import (
    FLOAT32_CPU,
    FLOAT64,
    HALF_EXPECTED,
    assert_same_bits,
    assert_within,
)

RULES = ("gated delta", "delta", "gated", "linear")


def call(
    T=200, *, B=1, HQ=2, HK=2, HV=4, K=16, V=16, kind="random", gates="mild", per_key=False,
    rule="gated delta", raw=False, dtype=torch.float32, seed=0,
):  # fmt: skip
    """Arguments of a prefill, and a state for each of B rows."""
    gen = inputs.generator(seed)
    q, k = inputs.keys(gen, B, T, HQ, K), inputs.keys(gen, B, T, HK, K, kind)
    v = inputs.normal(gen, B, T, HV, V)
    decay = inputs.raw_decay(gen, B, T, HV, gates, K if per_key else None)
    b = inputs.raw_beta(gen, B, T, HV, ones=kind == "identical")
    args = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if raw:
        args |= {"g": decay["a"], "A_log": decay["A_log"], "dt_bias": decay["dt_bias"], "beta": b}
    else:
        args |= {"g": inputs.decay(**decay), "beta": b.sigmoid()}
    args = {name: x.to(wide) if name not in "qkv" else x for name, x in args.items()}
    if "delta" not in rule:
        del args["beta"]
    if "gated" not in rule:
        del args["g"]
    return args, inputs.recurrent_state(gen, B, HV, V, K).to(wide)


def piece_call(args):
    """The arguments as pieces take them."""
    names = ("q", "k", "v", "g", "beta")
    return _canonical(*[args.get(name) for name in names], None, None, "bthd")


@pytest.fixture
def many_processors(monkeypatch):
    """Pieces are cut into segments of 64 tokens, as a GPU with idle SMs would cut them."""
    monkeypatch.setattr(transition, "processors", lambda device: 1024)
    monkeypatch.setattr(transition, "SHORTEST", 64)


def assert_exact(got, args, tolerance=FLOAT32_CPU, **options):
    o, state = oracle.delta(**args, **options)
    assert_within(got[0], o, tolerance, name="o", per=got[0].dim() - 2)
    # 16-bit inputs are exact numbers; only outputs are rounded to 16 bits
    assert_within(got[1], state, FLOAT32_CPU, name="state", per=1)


@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_segments_equal_the_oracle(rule, per_key):
    args, state = call(rule=rule, per_key=per_key)
    got = prefill_segments(**args, state=state.clone(), split=Split((0, 64, 100, 101, 200)))
    assert_exact(got, args, state=state)


@pytest.mark.parametrize("backend", ["cpu", "chunked", "reference"])
def test_pieces_in_segments_equal_the_oracle(backend, many_processors):
    """Parts that begin, pass on and end a sequence, each in two passes over several segments."""
    args, state = call(T=600)
    args["k"], args["q"] = args["k"] * 2, args["q"] * 3
    split = Split((0, 200, 390, 600))
    pieces = [Piece(piece_call(args).span(*split.borders[i : i + 2])) for i in range(3)]
    assert [(piece.segment, piece.split) for piece in pieces] == [(128, True)] * 3
    got = prefill_segments(
        **args, state=state.clone(), split=split, normalize_qk=True, backend=backend
    )
    assert_exact(got, args, state=state, normalize_qk=True)


def test_packed_pieces_in_segments_equal_the_oracle(many_processors):
    """A tail in segments between whole sequences, a head in segments, and one that is padding."""
    args, _ = call(T=700)
    packed = {name: x[0] for name, x in args.items()}
    bounds = inputs.cu_seqlens((30, 250, 0, 300, 120))
    pool = inputs.recurrent_state(inputs.generator(5), 5, 4, 16, 16).float()
    split = Split((0, 200, 430, 700), bounds)
    slots = torch.tensor([0, 1, 2, -1, 4])
    got = prefill_segments(**packed, state=pool.clone(), slots=slots, split=split)
    o, exact = oracle.delta(**packed, state=pool, slots=slots, cu_seqlens=bounds)
    assert_within(got[0], o, FLOAT32_CPU, name="o")
    assert bool((got[0][280:580] == 0).all())
    assert_within(got[1], exact, FLOAT32_CPU, name="state", per=0)


def test_a_piece_is_cut_to_fill_the_device_and_never_short(monkeypatch):
    """As many segments as SMs per value head, of whole chunks; one on a CPU and if bits count."""
    args, _ = call(T=70, B=1)
    c = piece_call({name: x.expand(1, 70, *x.shape[2:]) for name, x in args.items()})
    long = c._replace(v=c.v.new_empty(1, 65536, 4, 16, device="meta"))
    assert transition.segment_tokens(c) == 128
    assert transition.segment_tokens(long) == 65536
    monkeypatch.setattr(transition, "processors", lambda device: 132)
    assert transition.segment_tokens(c) == 128
    assert transition.segment_tokens(long) == 2048, "33 segments of 1,985.9 tokens, in whole chunks"
    assert transition.segment_tokens(long._replace(v=long.v[:, :8192])) == 1024
    assert transition.segment_tokens(long._replace(options={"batch_invariant": True})) == 65536
    assert transition.segment_tokens(long._replace(beta=None)) == 65536


@pytest.mark.parametrize("gates", inputs.GATES)
@pytest.mark.parametrize("kind", inputs.KEYS)
def test_segments_hold_for_hard_keys_and_gates(kind, gates):
    args, state = call(kind=kind, gates=gates)
    got = prefill_segments(**args, state=state.clone(), split=Split.even(200, 3))
    assert_exact(got, args, state=state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_within_what_is_expected(dtype):
    args, state = call(T=300, kind="correlated", gates="mixed", dtype=dtype)
    got = prefill_segments(**args, state=state.clone(), split=Split.even(300, 4))
    assert got[0].dtype == dtype
    assert_exact(got, args, HALF_EXPECTED, state=state)


@pytest.mark.parametrize("rule", RULES)
def test_float64_is_exact_to_float64(rule):
    """With float64 inputs no step rounds to float32."""
    args, state = call(T=100, rule=rule, dtype=torch.float64)
    split = Split((0, 31, 70, 100))
    got = prefill_segments(**args, state=state.clone(), split=split, backend="chunked")
    o, exact = oracle.delta(**args, state=state)
    assert_within(got[0], o, FLOAT64, name="o")
    assert_within(got[1], exact, FLOAT64, name="state")


@pytest.mark.parametrize("rule", ["gated delta", "gated"])
@pytest.mark.parametrize(
    "heads",
    [
        {"HQ": 1, "HK": 1, "HV": 3},
        {"HQ": 3, "HK": 3, "HV": 3, "K": 8, "V": 24},
        {"HQ": 6, "HK": 2, "HV": 2, "K": 24, "V": 8},
        {"HQ": 1, "HK": 2, "HV": 6},
        {"HQ": 6, "HK": 3, "HV": 6},
    ],
    ids=lambda h: "-".join(f"{k}{v}" for k, v in h.items()),
)
def test_heads_of_any_grouping_and_width(heads, rule):
    args, state = call(T=90, rule=rule, **heads)
    got = prefill_segments(**args, state=state.clone(), split=Split.even(90, 2))
    assert_exact(got, args, state=state)


@pytest.mark.parametrize("rule", ["gated delta", "gated"])
@pytest.mark.parametrize("per_key", [False, True])
def test_raw_gates_and_options_reach_every_segment(per_key, rule):
    args, state = call(rule=rule, per_key=per_key, raw=True)
    options = {"scale": 0.3, "normalize_qk": True, "neg_eigval": "delta" in rule}
    args["q"], args["k"] = 3 * args["q"], 2 * args["k"]
    got = prefill_segments(**args, **options, state=state.clone(), split=Split.even(200, 3))
    assert_exact(got, args, state=state, **options)


@pytest.mark.parametrize("rule", ["gated_delta", "gated"])
@pytest.mark.parametrize(
    ("borders", "lengths"),
    [
        ((0, 40, 80, 120), (10, 100, 10)),  # one sequence over three ranks
        ((0, 40, 80, 120), (40, 40, 40)),  # no sequence crosses
        ((0, 1, 2, 3, 120), (3, 0, 117)),  # parts of one token
        ((0, 50, 50, 60, 120), (0, 20, 35, 0, 65, 0)),  # a rank without tokens, empty sequences
        ((0, 40, 80, 120), (30, 20)),  # a padded tail that begins on rank 1
        ((0, 60, 120), ()),  # nothing but padding
    ],
)
def test_packed_sequences_across_borders(borders, lengths, rule):
    args, _ = call(T=120, rule=rule)
    bounds = inputs.cu_seqlens(lengths)
    state = inputs.recurrent_state(inputs.generator(5), max(len(lengths), 1), 4, 16, 16).float()
    packed = {name: x[0] for name, x in args.items()}
    got = prefill_segments(**packed, state=state.clone(), split=Split(borders, bounds))
    o, exact = oracle.delta(**packed, state=state, cu_seqlens=bounds)
    assert_within(got[0], o, FLOAT32_CPU, name="o")
    assert_within(got[1], exact, FLOAT32_CPU, name="state", per=0)


@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_pools_slots_padding_and_new_sequences(layout):
    args, _ = call(T=120)
    bounds = inputs.cu_seqlens((20, 50, 10, 40))
    pool = inputs.recurrent_state(inputs.generator(5), 7, 4, 16, 16).float()
    pool[3] = float("nan")  # of a new sequence: never read
    pool = pool if layout == "vk" else pool.mT.contiguous()
    rows = {
        "slots": torch.tensor([4, 3, -1, 1]),
        "write_slots": torch.tensor([6, 3, 2, -1]),
        "has_state": torch.tensor([True, False, True, True]),
        "state_layout": layout,
    }
    packed = {name: x[0] for name, x in args.items()}
    before = pool.clone()
    split = Split((0, 30, 75, 120), bounds)
    got = prefill_segments(**packed, **rows, state=pool, split=split)
    clean = before.clone()
    clean[3] = 0.0
    o, exact = oracle.delta(**packed, **rows, state=clean, cu_seqlens=bounds)
    assert_within(got[0], o, FLOAT32_CPU, name="o")
    assert bool((got[0][70:80] == 0).all())
    for row in (6, 3):
        assert_within(got[1][row], exact[row], FLOAT32_CPU, name=f"row {row}")
    for row in (0, 1, 2, 4, 5):
        assert_same_bits(got[1][row], before[row], f"row {row}")


def test_a_narrow_pool_is_rounded_once():
    """The states between segments are float32, whatever the pool's dtype."""
    args, state = call(T=150)
    pool = state.bfloat16()
    _, wide = prefill_segments(**args, state=pool.float(), split=Split.even(150, 3))
    _, narrow = prefill_segments(**args, state=pool.clone(), split=Split.even(150, 3))
    assert_same_bits(narrow, wide.bfloat16(), "state")


def test_a_batch_is_cut_in_every_row():
    args, state = call(T=100, B=3)
    got = prefill_segments(**args, state=state.clone(), split=Split((0, 33, 70, 100)))
    assert_exact(got, args, state=state)
    other = {name: x.transpose(1, 2) for name, x in args.items()}
    o, _ = prefill_segments(
        **other, state=state.clone(), split=Split((0, 33, 70, 100)), layout="bhtd"
    )
    assert_same_bits(o.transpose(1, 2), got[0], "bhtd")


def test_without_a_state_a_fresh_one_is_returned():
    args, _ = call(T=100)
    got = prefill_segments(**args, split=Split.even(100, 2))
    assert_exact(got, args)


@pytest.mark.parametrize("rule", RULES)
def test_a_transition_takes_any_state_behind_its_piece(rule):
    """(X1) on a state a thousand times as large: the message alone predicts the operator."""
    args, state = call(T=70, rule=rule, gates="weak")
    state = 1000 * state
    _, behind = sluice.prefill(**args, state=state.clone())
    piece = Piece(piece_call(args))
    assert_within(piece.after(state), behind, FLOAT32_CPU, name="state")
    before = torch.cat([state, piece.map[:, :, 16:]], dim=2)  # its own transition is not used
    joined = join(torch.stack([before, piece.map]), (0, 1), 16, "delta" in rule)
    assert_within(joined, behind, FLOAT32_CPU, name="state")


def test_segments_with_one_rank_are_prefill_to_the_bit():
    args, state = call(T=130)
    got = prefill_segments(**args, state=state.clone(), split=Split((0, 130)))
    o, exact = sluice.prefill(**args, state=state.clone())
    assert_same_bits(got[0], o, "o")
    assert_same_bits(got[1], exact, "state")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"slots": [0]}, "slots"),
        ({"layout": "thd"}, "layout"),
        ({"state": torch.zeros(1, 4, 16, 17)}, "state"),
        ({"state": torch.zeros(1, 4, 16, 16), "slots": [1]}, "slots"),
        ({"state": torch.zeros(1, 4, 16, 16), "slots": [0, 0]}, "slots"),
        ({"state": torch.zeros(1, 4, 16, 16), "has_state": []}, "has_state"),
        ({"state": torch.zeros(1, 4, 16, 16), "pad_slot": 3}, "pad_slot"),
        ({"v": torch.zeros(1, 64, 3, 16)}, "v"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, named):
    args, _ = call(T=64)
    with pytest.raises(ContractError, match=rf"prefill: {named}"):
        prefill_segments(**{**args, **change}, split=Split.even(64, 2))


def test_a_slot_that_two_sequences_write_is_refused():
    args, _ = call(T=64)
    packed, bounds = {name: x[0] for name, x in args.items()}, inputs.cu_seqlens((20, 30, 14))
    pool = torch.zeros(4, 4, 16, 16)
    rows = {"slots": [1, 2, 3], "write_slots": [1, 0, 1], "state": pool}
    with pytest.raises(ContractError, match="write_slots: expected each slot written once"):
        prefill_segments(**packed, **rows, split=Split.even(64, 2, bounds))
    assert not pool.any()


def test_gradients_are_refused():
    args, _ = call(T=64)
    args["v"].requires_grad_()
    with pytest.raises(SluiceError, match="no gradient"):
        prefill_segments(**args, split=Split.even(64, 2))
