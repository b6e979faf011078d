"""Drafts as engines keep them: a state for each token, windows at a column, buffers by slot.

Every promise of docs/contract.md about them that one call of a case does not show.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sluice
from sluice.state_pool import PoolGeometry, StatePool
from sluice.testing.compare import assert_same_bits
from tests import draft_bits
from tests.suite import DEVICE, backends

HK, HV, K, V, W, N, T = 1, 2, 16, 8, 4, 2, 3
D = 2 * HK * K + HV * V
NAN = float("nan")
SERVED = backends("verify")


def random(*shape: int, seed: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=gen).to(DEVICE)


def index(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def tokens(T: int = T, seed: int = 0, N: int = N, K: int = K, V: int = V) -> dict[str, Any]:
    shapes = {"q": (HK, K), "k": (HK, K), "v": (HV, V)}
    found: dict[str, Any] = {
        name: random(N, T, *tail, seed=seed + i) for i, (name, tail) in enumerate(shapes.items())
    }
    gates = {"g": -random(N, T, HV, seed=seed).abs(), "beta": random(N, T, HV, seed=seed).sigmoid()}
    return {**found, **gates, "normalize_qk": True}


# ------------------------------------------------------------------------ a state for each token

FORMS = {
    "float32": {},
    "kv": {"state_layout": "kv"},
    "float16": {"state_dtype": torch.float16},
    "packed": {"packed": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", SERVED)
def test_each_state_has_the_bits_of_verify_and_commit(backend, form):
    options = dict(FORMS[form])
    dtype = options.pop("state_dtype", torch.float32)
    tail = (K, V) if options.get("state_layout") == "kv" else (V, K)
    pool = random(12, HV, *tail).to(dtype)
    call, lengths = {**tokens(), "slots": index(1, 2)}, [T] * N
    if options.pop("packed", False):
        names, lengths = ("q", "k", "v", "g", "beta"), [1, T]
        call |= {n: torch.cat([call[n][0, :1], call[n][1]]) for n in names}
        bounds = torch.tensor([0, 1, 1 + T])
        call |= {"cu_seqlens": bounds.to(DEVICE), "cu_seqlens_cpu": bounds}
    writes = torch.tensor([[1, 4, 5], [6, 7, 2]], device=DEVICE)
    after = pool.clone()
    o, _ = sluice.decode(**call, state=after, write_slots=writes, backend=backend, **options)
    for n in range(1, T + 1):
        want = pool.clone()
        o2, draft = sluice.verify(**call, state=want, backend=backend, **options)
        counts = index(*(min(n, most) for most in lengths))
        sluice.commit(draft, counts, write_slots=index(8, 9), backend=backend)
        assert_same_bits(o, o2, "o")
        for i in range(N):
            if n <= lengths[i]:
                assert_same_bits(after[writes[i, n - 1]], want[8 + i], f"state {n} of row {i}")


@pytest.mark.parametrize("backend", SERVED)
def test_a_token_that_is_not_a_number_spoils_no_state_before_it(backend):
    call = tokens(4)
    pool = random(12, HV, V, K)
    writes = torch.tensor([[4, 5, 6, 7], [8, 9, 10, 11]], device=DEVICE)
    want, got = pool.clone(), pool.clone()
    sluice.decode(**call, state=want, slots=index(1, 2), write_slots=writes, backend=backend)
    call["v"][0, 3] = NAN
    sluice.decode(**call, state=got, slots=index(1, 2), write_slots=writes, backend=backend)
    same = [4, 5, 6, 8, 9, 10, 11]
    assert_same_bits(got[same], want[same], "states")
    assert got[7].isnan().any()


@pytest.mark.parametrize("backend", SERVED)
def test_padding_of_a_captured_graph_writes_nothing(backend):
    """Rows of padding share slot 0; what else stands in their rows does not matter."""
    call, pad = tokens(N=4), {"slots": index(3, 0, 0, 2), "pad_slot": 0, "backend": backend}
    for name in ("q", "k", "v"):
        call[name][1:3] = NAN
    pool = random(20, HV, V, K)
    pool[0] = NAN
    before = pool.clone()
    writes = torch.tensor([[3, 0, 5], [10, 11, 12], [0] * 3, [7, 8, 9]], device=DEVICE)
    o, _ = sluice.decode(**call, state=pool, write_slots=writes, **pad)
    assert (o[1:3] == 0).all()
    assert not o.isnan().any()
    same = [i for i in range(20) if i not in (3, 5, 7, 8, 9)]
    assert_same_bits(pool[same], before[same], "other slots")
    alone = before.clone()
    few = {name: x[::3] if isinstance(x, Tensor) else x for name, x in call.items()}
    sluice.decode(
        **few, state=alone, slots=index(3, 2), write_slots=writes[::3].clone(), pad_slot=0,
        backend=backend,
    )  # fmt: skip
    assert_same_bits(pool, alone, "states")


# ------------------------------------------------------------------------- a window at a column


@pytest.mark.parametrize("op", ["causal_conv1d", "conv_qkv"])
@pytest.mark.parametrize("backend", SERVED)
def test_windows_at_a_column_go_on_as_rolled_windows_do(backend, op):
    """Steps of three tokens, of which one to three count: the states never differ."""
    weight, bias = random(D, W), random(D, seed=1)
    rolled, state = random(N + 1, D, W - 1), torch.full((N + 1, D, W + 1), NAN, device=DEVICE)
    state[:, :, 1:4] = rolled
    start, slots = index(1, 1), index(2, 0)
    heads = {"num_k_heads": HK, "num_v_heads": HV, "head_k_dim": K, "head_v_dim": V}
    options = {"slots": slots, "backend": backend, **(heads if op == "conv_qkv" else {})}
    function = getattr(sluice, op)
    for step, counts in enumerate(([3, 1], [2, 2], [1, 3])):
        x = random(N, 3, D, seed=step)
        out = function(x, weight, bias, state=state, window_start=start, **options)
        frozen = function(x, weight, bias, state=rolled, freeze=True, **options)
        for a, b in zip(out, frozen, strict=True):
            if a is not None and a is not state:
                assert_same_bits(a, b, f"output of step {step}")
        for i, n in enumerate(counts):
            one = {**options, "slots": slots[i : i + 1]}
            function(x[i : i + 1, :n], weight, bias, state=rolled, **one)
            columns = state[slots[i], :, n - 1 : n - 1 + W - 1]
            assert_same_bits(columns, rolled[slots[i]], f"window of row {i}, step {step}")
        start = index(*(n - 1 for n in counts))


# ------------------------------------------------------------- tokens at any address and stride


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("size", [(40, 33), (128, 8)], ids=str)
@pytest.mark.parametrize("backend", SERVED)
def test_bits_do_not_depend_on_how_tokens_lie(backend, size, n):
    draft_bits.check(backend, size, n)


@pytest.mark.parametrize("V", [32, 40])
@pytest.mark.parametrize("backend", SERVED)
def test_a_bfloat16_state_has_the_same_bits_after_any_number_of_tokens(backend, V):
    """Verify and commit, decode of so many, and decode with a slot for each, at the usual K."""
    rows, T, K = 4, 3, 128
    call = tokens(N=rows, T=T, K=K, V=V)
    slots, each = index(*range(rows)), torch.arange(rows * T, device=DEVICE).view(rows, T) + rows
    pool = random(rows + rows * T, HV, V, K).to(torch.bfloat16)
    states = pool.clone()
    o, _ = sluice.decode(**call, state=states, slots=slots, write_slots=each, backend=backend)
    for n in range(1, T + 1):
        want, got = pool.clone(), pool.clone()
        o2, draft = sluice.verify(**call, state=want, slots=slots, backend=backend)
        sluice.commit(draft, torch.full_like(slots, n), backend=backend)
        first = {k: x[:, :n] if isinstance(x, Tensor) else x for k, x in call.items()}
        o3, _ = sluice.decode(**first, state=got, slots=slots, backend=backend)
        assert_same_bits(got, want, f"states after {n} tokens")
        assert_same_bits(states[each[:, n - 1]], want[:rows], f"slots of token {n}")
        if backend != "reference":  # the contract promises it of states alone
            assert_same_bits(o2, o, "o")
            assert_same_bits(o3, o[:, :n], f"o of {n} tokens")


# --------------------------------------------------------------------- more than one commit


@pytest.mark.parametrize("backend", SERVED)
def test_a_draft_is_committed_again_with_other_counts(backend):
    pool, conv = random(8, HV, V, K), random(8, D, W - 1)
    x = random(N, T, D)
    call = {**tokens(), "slots": index(1, 2), "backend": backend}
    _, draft = sluice.verify(**call, state=pool, conv_inputs=x, conv_state=conv)
    start = {"state": pool.clone(), "conv_state": conv.clone()}
    for counts, writes in (([1, 2], [4, -1]), ([0, 3], [5, 6]), ([3, 1], None)):
        slots = None if writes is None else index(*writes)
        before = pool.clone(), conv.clone()
        assert sluice.commit(draft, index(*counts), write_slots=slots, backend=backend) is pool
        rows = [1, 2] if writes is None else writes
        others = [i for i in range(8) if i not in rows]
        assert_same_bits(pool[others], before[0][others], "what was committed before")
        assert_same_bits(conv[others], before[1][others], "windows committed before")
        want, window = start["state"].clone(), start["conv_state"].clone()
        _, alone = sluice.verify(**call, state=want, conv_inputs=x, conv_state=window)
        sluice.commit(alone, index(*counts), backend=backend)
        for i, row in enumerate(rows):
            if row >= 0:
                assert_same_bits(pool[row], want[1 + i], f"state of row {i}")
                assert_same_bits(conv[row], window[1 + i], f"window of row {i}")


# ------------------------------------------------------------------- buffers, and all layers


def _pool(layers: int, **options: Any) -> StatePool:
    geometry = PoolGeometry(
        layers=layers, num_v_heads=HV, conv_channels=D, head_k_dim=K, head_v_dim=V,
        conv_dtype=torch.float32,
    )  # fmt: skip
    pool = StatePool(geometry, 7, device=DEVICE, **options)
    pool.recurrent.copy_(random(*pool.recurrent.shape))
    pool.conv.copy_(random(*pool.conv.shape))
    return pool


POOLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kv": {"state_layout": "kv", "conv_order": "ld"},
    "rows": {"rows": 4, "draft_slots": (3, 0, 2)},
    "reserved": {"reserve_slot_0": True, "slots": (5, 0, 2)},
    "dropped": {"rows": 4, "draft_slots": (3, -1, 2)},
}


@pytest.mark.parametrize("form", POOLS)
@pytest.mark.parametrize("backend", SERVED)
def test_one_commit_for_all_layers_has_the_bits_of_a_commit_for_each(backend, form):
    options, layers, n = dict(POOLS[form]), 3, 3
    chosen, rows = options.pop("draft_slots", None), options.pop("rows", None)
    slots = index(*options.pop("slots", (5, 1, 2)))
    pool = _pool(layers, **options)
    drafts = None if chosen is None else index(*chosen)
    buffers = pool.draft_buffers(T + 1, rows=rows)
    for x in buffers:
        x.fill_(NAN)
    where = {"slots": slots, "pad_slot": pool.pad_slot, "backend": backend}
    kept = {"state_layout": pool.state_layout, **where}
    state, conv = pool.recurrent.clone(), pool.conv.clone()
    counts = index(2, 3, 0)
    dropped = torch.zeros(n, dtype=torch.bool) if chosen is None else torch.tensor(chosen) < 0
    for i in range(layers):
        call, x = tokens(N=n, seed=10 * i), random(n, T, D, seed=i)
        own = {"conv_inputs": x, **kept}
        o, draft = sluice.verify(**call, state=state[i], conv_state=conv[i], **own)
        real = torch.where(dropped.to(DEVICE), -1, slots)
        sluice.commit(draft._replace(slots=real), counts, backend=backend)
        before = pool.recurrent.clone(), pool.conv.clone()
        o2, _ = sluice.verify(
            **call, state=pool.recurrent[i], conv_state=pool.conv[i], buffers=buffers.layer(i),
            draft_slots=drafts, **own,
        )  # fmt: skip
        assert_same_bits(o, o2, f"o of layer {i}")
        assert_same_bits(pool.recurrent, before[0], "states after verify")
        assert_same_bits(pool.conv, before[1], "windows after verify")
    order = index(2, 0, 1)  # the engine's batch changed meanwhile
    sluice.commit_layers(
        buffers, counts[order], state=pool.recurrent, conv_state=pool.conv,
        slots=slots[order], draft_slots=None if drafts is None else drafts[order],
        state_layout=pool.state_layout, pad_slot=pool.pad_slot, backend=backend,
    )  # fmt: skip
    assert_same_bits(pool.recurrent, state, "states")
    assert_same_bits(pool.conv, conv, "windows")


@pytest.mark.parametrize("backend", SERVED)
def test_verify_writes_its_tokens_into_the_buffers_and_nothing_else(backend):
    pool = _pool(1)
    buffers = pool.draft_buffers(T + 2)
    for x in buffers:
        x.fill_(NAN)
    _, draft = sluice.verify(
        **tokens(), state=pool.recurrent[0], conv_state=pool.conv[0],
        conv_inputs=random(N, T, D), buffers=buffers.layer(0), slots=index(4, -1), backend=backend,
    )  # fmt: skip
    for name, x in buffers._asdict().items():
        written = x[0].flatten(2).isfinite().all(-1)
        untouched = x[0].flatten(2).isnan().all(-1)
        assert written[4, :T].all(), name
        written[4, :T] = untouched[4, :T] = True
        assert untouched.all(), name
    assert draft.k.data_ptr() == buffers.k.data_ptr()


def test_buffers_take_less_memory_than_states():
    """Of Qwen3-Next, for three drafts: a tenth of what one state for each of four tokens takes."""
    pool = StatePool.for_model("qwen3-next-80b-a3b", 1, device="meta")
    buffers = pool.draft_buffers(4)
    size = sum(x.numel() * x.element_size() for x in buffers)
    states = 4 * pool.recurrent.numel() * pool.recurrent.element_size()
    assert size < states / 10


# ------------------------------------------------------------------------------- bad calls


def _buffers(**changes: Any) -> sluice.DraftBuffers:
    found = {"k": (HK, K), "d": (HV, V), "g": (HV,), "x": (D,)}
    made = {name: torch.zeros(2, 6, T, *tail) for name, tail in found.items()}
    return sluice.DraftBuffers(**{**made, **changes})


def _cut(S: int, M: int) -> sluice.DraftBuffers:
    return sluice.DraftBuffers(*(x[0, :S, :M].clone() for x in _buffers()))


def _verify(**changes: Any) -> Any:
    call: dict[str, Any] = {
        **tokens(), "state": random(6, HV, V, K), "slots": index(1, 2),
        "conv_inputs": random(N, T, D), "conv_state": random(6, D, W - 1),
        "buffers": _buffers().layer(0),
    }  # fmt: skip
    return sluice.verify(**{**call, **changes})


def _commit_layers(**changes: Any) -> Any:
    call: dict[str, Any] = {
        "buffers": _buffers(), "num_accepted": index(1, 2), "slots": index(1, 2),
        "state": random(2, 6, HV, V, K), "conv_state": random(2, 6, D, W - 1),
    }  # fmt: skip
    return sluice.commit_layers(**{**call, **changes})


def _decode(**changes: Any) -> Any:
    call = {**tokens(), "state": random(12, HV, V, K), "slots": index(1, 2)}
    return sluice.decode(**{**call, **changes})


def _conv(**changes: Any) -> Any:
    call = {"x": random(N, T, D), "weight": random(D, W), "state": random(6, D, W + 1)}
    call |= {"slots": index(1, 2), "window_start": index(0, 2)}
    return sluice.causal_conv1d(**{**call, **changes})


EACH = [[3, 4, 5], [6, 7, 8]]
HALF = torch.zeros(2, 6, T, HK, K, dtype=torch.float16)
BAD: list[tuple[Any, dict[str, Any], str]] = [
    (_decode, {"write_slots": torch.tensor([[3, 4], [5, 6]])}, "write_slots: expected 3 columns"),
    (_decode, {"write_slots": torch.tensor([EACH])}, "write_slots: expected shape"),
    (_decode, {"write_slots": torch.tensor(EACH).float()}, "write_slots: expected dtype int32"),
    (_decode, {"write_slots": torch.tensor([[3, 4, 12], EACH[1]])}, r"write_slots\[0, 2\]: .*12$"),
    (_decode, {"write_slots": torch.tensor([[3, 4, 3], EACH[1]])}, "twice.* 3 in rows 0, 0"),
    (_decode, {"write_slots": torch.tensor([EACH[0], [6, 4, 8]])}, "twice.* 4 in rows 0, 1"),
    (_decode, {"write_slots": torch.tensor([[3, 2, 5], EACH[1]])}, "that another row reads"),
    (_conv, {"window_start": index(0)}, r"window_start: expected shape \[2\]"),
    (_conv, {"window_start": index(0, 3)}, r"window_start\[1\]: expected columns 0 to 2, got 3"),
    (_conv, {"window_start": index(-1, 0)}, r"window_start\[0\]: expected columns 0 to 2, got -1"),
    (_conv, {"x": random(N, 4, D)}, "state: expected at least 6 columns"),
    (_conv, {"state": None, "slots": None}, "window_start: expected state beside it"),
    (
        _conv,
        {"checkpoints": sluice.Checkpoints(torch.tensor([[4], [5]]), every=2)},
        "window_start: expected no checkpoints",
    ),
    (_verify, {"buffers": "b"}, "buffers: expected sluice.DraftBuffers"),
    (_verify, {"buffers": None, "draft_slots": index(1, 2)}, "draft_slots: expected buffers"),
    (_verify, {"buffers": _buffers(g=None).layer(0)}, "buffers.g: expected a tensor, since"),
    (_verify, {"buffers": _buffers(x=None).layer(0)}, "buffers.x: expected a tensor, since"),
    (_verify, {"conv_inputs": None, "conv_state": None}, "buffers.x: expected None, except"),
    (_verify, {"buffers": _buffers()}, r"buffers.k: expected shape \[any, any, 1, 16\]"),
    (_verify, {"buffers": _buffers(k=HALF).layer(0)}, "buffers.k: expected dtype float32"),
    (
        _verify,
        {"buffers": _buffers(d=torch.zeros(2, 6, T, V, HV).mT).layer(0)},
        "buffers.d: expected contiguous",
    ),
    (_verify, {"buffers": _cut(6, 2)}, "room for 3 tokens"),
    (_verify, {"buffers": _cut(5, T)}, "6 rows, one per slot"),
    (_verify, {"draft_slots": index(3, 6)}, r"draft_slots\[1\]: expected one of the 6 rows"),
    (_verify, {"draft_slots": index(3, 3)}, "draft_slots: expected no row of the buffers twice"),
    (_verify, {"draft_slots": index(3)}, r"draft_slots: expected shape \[2\]"),
    (_verify, {"write_slots": torch.tensor(EACH)}, r"write_slots: expected shape \[2\]"),
    (_commit_layers, {"buffers": _buffers().layer(0)}, r"buffers.k: expected shape \[layers"),
    (_commit_layers, {"buffers": None}, "buffers: expected sluice.DraftBuffers"),
    (_commit_layers, {"state": random(3, 6, HV, V, K)}, "state: expected 2 layers"),
    (_commit_layers, {"state": random(6, HV, V, K).expand(2, -1, -1, -1, -1)}, "without overlap"),
    (_commit_layers, {"conv_state": None}, "conv_state: expected a tensor: buffers.x and"),
    (_commit_layers, {"buffers": _buffers(x=None)}, "buffers.x: expected a tensor: buffers.x and"),
    (_commit_layers, {"conv_state": random(2, 5, D, 3)}, "conv_state: expected the 6 slots"),
    (_commit_layers, {"num_accepted": index(1, 4)}, r"num_accepted\[1\]: expected 0 to 3 tokens"),
    (_commit_layers, {"num_accepted": index(1)}, r"slots: expected shape \[1\]"),
    (_commit_layers, {"slots": index(1, 1)}, "no slot twice"),
    (_commit_layers, {"draft_slots": index(4, 4)}, "no row of the buffers twice"),
    (_commit_layers, {"write_slots": torch.tensor(EACH)}, r"write_slots: expected shape \[2\]"),
]  # fmt: skip


@pytest.mark.skipif(DEVICE != "cpu", reason="values are checked on a CPU")
@pytest.mark.parametrize(("call", "changes", "words"), BAD)
def test_a_bad_call_is_refused_in_words(call, changes, words):
    call(**({} if call is not _decode else {"write_slots": torch.tensor(EACH)}))  # valid without
    with pytest.raises(sluice.ContractError, match=words):
        call(**changes)


@pytest.mark.parametrize("op", ["prefill", "step", "causal_conv1d"])
def test_only_decode_takes_a_slot_for_each_token(op):
    writes = torch.tensor(EACH)
    if op == "prefill":
        call = {**tokens(), "state": random(12, HV, V, K)}
    elif op == "causal_conv1d":
        call = {"x": random(N, T, D), "weight": random(D, W), "state": random(12, D, W)}
    else:
        call = {
            "qkvz": random(N, T, D + HV * V), "ba": random(N, T, 2 * HV),
            "conv_weight": random(D, W), "A_log": random(HV), "dt_bias": random(HV),
            "norm_weight": random(V), "conv_state": random(12, D, W - 1),
            "state": random(12, HV, V, K),
        }  # fmt: skip
    with pytest.raises(sluice.ContractError, match=r"write_slots: expected shape \[2\]"):
        getattr(sluice, op)(**call, slots=index(1, 2), write_slots=writes)


# --------------------------------------------------------------------------------- explain


def test_explain_knows_the_commit_of_all_layers():
    kept = sluice.DraftBuffers(*(x.to("meta") for x in _buffers()[:3]))
    state = torch.zeros(2, N, HV, V, K, device="meta")
    counts = torch.zeros(N, dtype=torch.int64, device="meta")
    told = sluice.explain("commit_layers", kept, counts, state=state, device=DEVICE)
    assert told.op == "commit"
    assert told.chosen in SERVED
