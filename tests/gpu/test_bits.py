"""The same bits in every configuration: rows of configs.py may change speed, never a result.

The tests run on a GPU, or on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

import sluice
from sluice import calls, dispatch
from sluice.backends.triton import configs, conv_qkv
from sluice.backends.triton.arrivals import arrivals_of
from sluice.testing import cases, compare
from tests import interpreter
from tests.gpu.random_layer import DEVICE, HALF, Layer

pytestmark = [
    pytest.mark.skipif(
        dispatch.unavailable("triton") is not None, reason=str(dispatch.unavailable("triton"))
    ),
    pytest.mark.gpu,
]
SIZE = {"HK": 4, "HV": 8, "K": 128, "V": 128} if DEVICE == "cuda" else {}


@pytest.fixture(autouse=True)
def bound_anew() -> Iterator[None]:
    """No launch is remembered from a test that changed a table."""
    yield
    calls.forget()


def smaller(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Move the tables' limits to ``limit`` states, so that small batches use different rows."""
    for table in (configs.DECODE, configs.DRAFT):
        for key, (*first, last) in table.items():
            changed = [row._replace(limit=limit) for row in first]
            monkeypatch.setitem(table, key, (*changed, last))
    calls.forget()


@pytest.mark.parametrize("state", [torch.float32, HALF], ids=("fp32", "half"))
@pytest.mark.parametrize("tokens", [1, 3])
def test_decode_of_a_row_does_not_depend_on_the_row_of_the_table(monkeypatch, state, tokens):
    layer = Layer(5, tokens, state=state, **SIZE)
    smaller(monkeypatch, 2 * layer.HV)
    together = layer.state.clone()
    o = layer.decode(together)
    alone = layer.state.clone()
    for i in range(layer.N):
        one = layer.decode(alone, slice(i, i + 1))
        compare.assert_same_bits(one, o[i : i + 1], f"o of row {i}")
    compare.assert_same_bits(alone, together, "state")


@pytest.mark.parametrize("state", [torch.float32, HALF], ids=("fp32", "half"))
def test_every_row_of_the_table_leaves_the_same_bits(monkeypatch, state):
    """Also for rows between the first and the last, which the batches above do not use."""
    layer = Layer(2, state=state, **SIZE)
    key = "vk", state.itemsize
    rows = configs.DECODE[key]
    assert len(rows) > 1
    found = []
    for row in rows:
        monkeypatch.setitem(configs.DECODE, key, (configs.Row(configs.ANY, row.config),))
        calls.forget()
        pool = layer.state.clone()
        found.append((layer.decode(pool), pool))
    for o, pool in found[1:]:
        compare.assert_same_bits(o, found[0][0], "o")
        compare.assert_same_bits(pool, found[0][1], "state")


@pytest.mark.parametrize("state", [torch.float32, HALF], ids=("fp32", "half"))
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 3)], ids=str)
def test_step_of_a_row_does_not_depend_on_the_batch(state, tokens, heads):
    """The programs of a key head share its windows, and any of them may be the last."""
    layer = Layer(3, tokens, state=state, **{**SIZE, "HK": heads[0], "HV": heads[1]})
    layer.steps_alone_as_together()


@pytest.mark.parametrize("tokens", [1, 2])
def test_the_last_program_of_a_key_head_writes_its_windows_and_no_other(tokens):
    """With a counter that starts one lower, no program is the last of its key head."""
    layer = Layer(2, tokens, **{**SIZE, "HK": 1, "HV": 3})
    pools = layer.state.clone(), layer.window.clone()
    layer.step(*pools)
    keys, rows = 2 * layer.K, layer.slots.long()
    after = pools[1][rows, :keys, 3 - tokens :]
    expected = layer.qkvz[:, :, :keys].transpose(1, 2)
    compare.assert_same_bits(after.contiguous(), expected.contiguous(), "new columns of q and k")
    counters = arrivals_of(pools[1], layer.HK)
    counters[layer.slots[0].long()] = -1  # so that no program is the last
    before = pools[1].clone()
    layer.step(*pools)
    assert torch.equal(pools[1][rows[0], :keys], before[rows[0], :keys])
    assert not torch.equal(pools[1][rows[0], keys:], before[rows[0], keys:])
    assert not torch.equal(pools[1][rows[1], :keys], before[rows[1], :keys])
    counters.zero_()


@pytest.mark.parametrize("tokens", [1, 2])
def test_step_leaves_its_counters_at_zero(tokens):
    """One call's count must not affect the next call, nor padded rows."""
    layer = Layer(4, tokens, **SIZE)
    layer.slots[1] = -1
    pools = layer.state.clone(), layer.window.clone()
    for _ in range(3):
        layer.step(*pools)
    assert not arrivals_of(pools[1], layer.HK).any()


@pytest.mark.skipif(DEVICE != "cuda", reason="a graph needs a GPU")
@pytest.mark.parametrize("tokens", [1, 2])
def test_step_can_be_captured_before_any_other_call(tokens):
    """For a pool without counters: the graph's counters are zero at every replay."""
    warm, layer = (Layer(3, tokens, seed=seed, **SIZE) for seed in (0, 1))
    warm.step(warm.state, warm.window)  # compiles, with another pool
    pools, expected = ([layer.state.clone(), layer.window.clone()] for _ in range(2))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.step(*pools)
    for _ in range(3):
        graph.replay()
        compare.assert_same_bits(y, layer.step(*expected), "y")
        for name, got, pool in zip(("state", "window"), pools, expected, strict=True):
            compare.assert_same_bits(got, pool, name)


@pytest.mark.parametrize("state", [torch.float32, HALF], ids=("fp32", "half"))
@pytest.mark.parametrize("accepted", range(5))
@pytest.mark.parametrize("many", [False, True], ids=("few", "many"))
def test_verify_and_commit_leave_the_bits_of_decode(monkeypatch, state, accepted, many):
    """Also for one token, which decode runs by another variant of the kernel."""
    if many:
        smaller(monkeypatch, 0)
        monkeypatch.setattr(configs, "COMMIT_FROM", 1)
    layer = Layer(3, 4, state=state, **SIZE)
    decoded, committed = layer.state.clone(), layer.state.clone()
    if accepted:
        expected = layer.decode(decoded, tokens=accepted)
    o, draft = sluice.verify(**layer.delta(), state=committed, backend="triton")
    compare.assert_same_bits(committed, layer.state, "a state that verify leaves alone")
    count = torch.full((3,), accepted, dtype=torch.int32, device=DEVICE)
    sluice.commit(draft, count, backend="triton")
    compare.assert_same_bits(committed, decoded, "state")
    if accepted:
        compare.assert_same_bits(o[:, :accepted].contiguous(), expected, "o")


@pytest.mark.parametrize("kept", [False, True], ids=("", "checkpoints"))
@pytest.mark.parametrize("lengths", [(1, 37, 0, 20), (16,), (33,)], ids=str)
def test_conv_qkv_has_the_same_bits_with_whole_chunks_apart_or_not(monkeypatch, lengths, kept):
    """A chunk inside a sequence has its own code path; its neighbours take the general one."""
    HK, HV, K, N, T = 2, 4, SIZE.get("K", 32), len(lengths), sum(lengths) + 3
    D = (2 * HK + HV) * K
    gen = torch.Generator().manual_seed(T)
    x, weight, bias, a, b, pool = (
        torch.randn(*shape, generator=gen).to(DEVICE, HALF)
        for shape in ((T, D), (D, 4), (D,), (T, HV), (T, HV), (3 * N, D, 3))
    )
    rates = {name: torch.zeros(HV, device=DEVICE) for name in ("A_log", "dt_bias")}
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows = {"cu_seqlens": bounds.to(DEVICE), "slots": torch.arange(N, device=DEVICE)}
    heads = {"num_k_heads": HK, "num_v_heads": HV, "head_k_dim": K, "head_v_dim": K}
    if kept:
        slots = N + torch.arange(2 * N, device=DEVICE).view(N, 2)
        rows["checkpoints"] = sluice.Checkpoints(slots, every=16)
    found = []
    general = {"STEP_X": 0, "STEP_QK": 0, "STEP_V": 0}
    for steps in (conv_qkv.constant_steps, lambda *_: general):
        monkeypatch.setattr(conv_qkv, "constant_steps", steps)
        calls.forget()
        state = pool.clone()
        outputs = sluice.conv_qkv(
            x, weight, bias, a=a, b=b, **rates, **heads, **rows, state=state, backend="triton"
        )
        found.append((*outputs, state))
    names = ("q", "k", "v", "g", "beta", "state")
    for name, apart, together in zip(names, *found, strict=True):
        compare.assert_same_bits(apart, together, name)
    if kept and lengths[0] > 16:
        at_32 = x[29:32].T.contiguous().to(HALF)
        compare.assert_same_bits(found[0][-1][N + 1], at_32, "the window after 32 tokens")


@pytest.mark.parametrize("beside", [(), (1,), (37, 20)], ids=str)
def test_conv_qkv_of_one_token_has_the_same_bits_dense_and_beside_prompts(beside):
    """An engine makes a decode step alone, and beside chunks of prompts."""
    HK, HV, K, lengths = 2, 4, SIZE.get("K", 32), (1, 1, *beside)
    D, T = (2 * HK + HV) * K, sum(lengths)
    gen = torch.Generator().manual_seed(T)
    x, weight, a, b, pool = (
        torch.randn(*shape, generator=gen).to(DEVICE, HALF)
        for shape in ((T, D), (D, 4), (T, HV), (T, HV), (len(lengths), D, 3))
    )
    rates = {name: torch.zeros(HV, device=DEVICE) for name in ("A_log", "dt_bias")}
    heads = {"num_k_heads": HK, "num_v_heads": HV, "head_k_dim": K, "head_v_dim": K}
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed = {"cu_seqlens": bounds.to(DEVICE), "slots": torch.arange(len(lengths), device=DEVICE)}
    dense = {"slots": torch.arange(2, device=DEVICE)}
    found = []
    for n, rows in ((T, packed), (2, dense)):
        state = pool.clone()
        one = [y[:n].unsqueeze(1) if rows is dense else y for y in (x, a, b)]
        options = {**rates, **heads, **rows, "state": state, "backend": "triton"}
        outputs = sluice.conv_qkv(one[0], weight, a=one[1], b=one[2], **options)
        flat = (y.flatten(0, 1) if rows is dense else y for y in outputs)
        found.append((*(y[:2].contiguous() for y in flat), state[:2]))
    for name, both, alone in zip(("q", "k", "v", "g", "beta", "state"), *found, strict=True):
        compare.assert_same_bits(alone, both, name)


@pytest.mark.skipif(DEVICE == "cuda", reason="nothing is interpreted")
@pytest.mark.parametrize("name", ["decode/K33_V17", "prefill/packed_tail", "verify/one_token"])
def test_the_interpreter_is_faster_and_leaves_the_same_bits(name):
    """A failure of the first line names a private name that this Triton does not have."""
    from triton.runtime import interpreter as its

    assert [name for name in interpreter.NAMES if not hasattr(its, name)] == []
    assert its._patch_lang.__wrapped__ is not None
    case = cases.CASES[name]
    found, taken = [], []
    for scope in (contextlib.nullcontext, interpreter.unchanged):
        inputs, began = case.inputs(torch.float16, "cpu"), time.process_time()
        with scope():
            found.append(case.run(sluice, inputs, backend="triton"))
        taken.append(time.process_time() - began)
    for output, quick in found[0].items():
        compare.assert_same_bits(quick, found[1][output], output)
    assert taken[0] < taken[1]


@pytest.mark.skipif(DEVICE == "cuda", reason="test_promises.py has it: row 5")
@pytest.mark.parametrize("op", ["decode", "prefill", "verify", "causal_conv1d"])
def test_a_slot_past_two_to_the_31_elements_has_the_bits_of_a_near_one_row_5(op):
    """Memory that is not touched is not there: the pool takes a few pages."""
    step, far = 1 << 20, 4094
    lazily = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, named from 3.13 on
    memory = mmap.mmap(-1, 2 * step * (far + 2), flags=lazily)
    whole = torch.frombuffer(memory, dtype=torch.float16)
    x = torch.randn(2, 3, 1, 16, generator=torch.Generator().manual_seed(0))
    tail = (12, 4) if op == "causal_conv1d" else (1, 16, 16)
    pool = whole.as_strided((far + 2, *tail), (step, *torch.empty(tail).stride()))
    near = torch.randn(2, *tail, generator=torch.Generator().manual_seed(1)).half()
    slots = torch.tensor([far, 3])
    pool[slots] = near
    outputs = []
    for state, rows in ((near, torch.tensor([0, 1])), (pool, slots)):
        where = {"state": state, "slots": rows, "backend": "triton"}
        if op == "causal_conv1d":
            outputs.append(
                sluice.causal_conv1d(x[..., 0, :12], x[0, 0, 0, :12, None].expand(-1, 4), **where)[
                    0
                ]
            )
            continue
        o, draft = getattr(sluice, op)(x, x, x, normalize_qk=True, **where)
        if op == "verify":
            sluice.commit(draft, torch.tensor([2, 3]), backend="triton")
        outputs.append(o)
    compare.assert_same_bits(*outputs, "outputs")
    compare.assert_same_bits(pool[slots], near, "states")
