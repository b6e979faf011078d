"""Padded, empty and new sequences, and missing stores: reliability rows 6, 14, 18 and 24."""

from __future__ import annotations

import pytest
import torch

from sluice.testing import compare
from sluice.testing import inputs as draw
from sluice.testing.case import whole_storage
from tests import calls, serving
from tests.calls import OPS, Call, Shape, make
from tests.serving import servers
from tests.suite import DEVICE

NAN = float("nan")
SHAPE = Shape(Hk=1, r=3, K=5, V=4)
POOLED = servers(*(op for op in OPS if op != "rms_norm_gated"))
PACKED = servers("prefill", "decode", "verify", "causal_conv1d", "conv_qkv")


def paged(call: Call, gap: int = 7) -> Call:
    """The call on pools whose rows lie apart, with NaN between them."""
    call.pools = {name: draw.padded_pool(pool, gap) for name, pool in call.pools.items()}
    return call


def assert_only_written(call: Call, before: Call, slots: list[int]) -> None:
    """Every byte outside ``slots`` is what it was; every row in it is not."""
    for name, pool in call.pools.items():
        rest = torch.ones_like(whole_storage(pool), dtype=torch.bool)
        rest.as_strided(pool.shape, pool.stride())[slots] = False
        now, then = whole_storage(pool)[rest], whole_storage(before.pools[name])[rest]
        compare.assert_same_bits(now, then, f"{name} outside slots {slots}")
        for slot in slots:
            assert not torch.equal(pool[slot], before.pools[name][slot]), f"{name}[{slot}] is old"


@pytest.mark.parametrize("pad_slot", [-1, 0])
@pytest.mark.parametrize("server", POOLED)
def test_row_06_padded_rows_give_zeros_and_touch_no_byte_of_the_pool(server, pad_slot):
    N, P = 4, 6
    for dead in ((0,), (1, 2), (3,), (0, 2, 3), (0, 1, 2, 3)):
        call = paged(make(server.op, SHAPE, N, 3, P=P))
        live = [i for i in range(N) if i not in dead]
        slots = [(-1 - i if i % 2 or pad_slot else 0) if i in dead else 5 - i for i in range(N)]
        for name, x in call.rows.items():
            if name not in ("g", "beta", "a", "b", "ba", "num_accepted"):
                x[list(dead)] = NAN
        if "num_accepted" in call.rows:
            call.rows["num_accepted"] = calls.index([3, 2, 1, 3])
        before = call.copy()
        outputs = server.run(call, slots=calls.index(slots), pad_slot=pad_slot)
        for name, x in outputs.items():
            compare.assert_same_bits(x[list(dead)], torch.zeros_like(x[list(dead)]), name)
            assert x[live].isfinite().all()
            assert all(x[i].any() for i in live)
        assert_only_written(call, before, [slots[i] for i in live])


@pytest.mark.parametrize("server", POOLED)
def test_row_06_a_row_with_a_padded_write_slot_is_computed_and_not_kept(server):
    call = paged(make(server.op, SHAPE, 3, 2, P=7))
    if "num_accepted" in call.rows:
        call.rows["num_accepted"] = calls.index([2, 1, 2])
    kept, before = call.copy(), call.copy()
    slots = {"slots": calls.index([1, 2, 3])}
    expected = server.run(kept, **slots)
    outputs = server.run(call, **slots, write_slots=calls.index([6, -1, -9]))
    for name, x in outputs.items():
        server.agree(x, expected[name], SHAPE, name)
    assert_only_written(call, before, [6])
    for name, pool in call.pools.items():
        server.agree(pool[6], kept.pools[name][1], SHAPE, name)


@pytest.mark.parametrize("lengths", [(0, 3, 5), (3, 0, 0, 5), (3, 5, 0), (0, 0), (), (1, 2, 1)])
@pytest.mark.parametrize("server", PACKED)
def test_row_14_empty_and_short_sequences_are_exact(server, lengths):
    """Shorter than the conv window too: W - 1 = 3."""
    lengths, N = list(lengths), len(lengths)
    call = make(server.op, SHAPE, 1, sum(lengths) + 2, P=2 * N + 1)
    if server.op == "verify":
        call.rows["num_accepted"] = calls.index([n // 2 for n in lengths])
    before = call.copy()
    slots, targets = list(range(N)), list(range(N, 2 * N))
    options = {"slots": calls.index(slots), "write_slots": calls.index(targets)}
    options |= calls.packing(lengths)
    expected = call.exact(**options)
    outputs = server.run(call, **options)
    serving.assert_exact(call, outputs, expected)
    for i, n in enumerate(lengths):
        for name, pool in call.pools.items():
            compare.assert_same_bits(pool[i], before.pools[name][i], f"{name}: row {i} was read")
            if n == 0:
                compare.assert_same_bits(pool[N + i], pool[i], f"{name}: empty row {i}")


@pytest.mark.parametrize("server", PACKED)
def test_row_14_an_empty_new_sequence_leaves_zeros(server):
    call = make(server.op, SHAPE, 1, 2, P=2)
    for pool in call.pools.values():
        pool.fill_(NAN)
    if server.op == "verify":
        call.rows["num_accepted"] = calls.index([0, 2])
    new = torch.tensor([False, False], device=DEVICE)
    server.run(call, slots=calls.index([1, 0]), has_state=new, **calls.packing([0, 2]))
    for name, pool in call.pools.items():
        compare.assert_same_bits(pool[1], torch.zeros_like(pool[1]), name)
        assert pool[0].isfinite().all()


@pytest.mark.parametrize(("N", "T"), [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("server", servers(*OPS))
def test_row_14_no_sequences_and_no_tokens_are_a_call_like_others(server, N, T):
    call = make(server.op, SHAPE, N, T, P=3)
    before = call.copy()
    outputs = server.run(call)
    for x in outputs.values():
        assert x.shape[:2] == (N, T)
    for name, pool in call.pools.items():
        compare.assert_same_bits(pool, before.pools[name], name)


@pytest.mark.parametrize("server", POOLED)
def test_row_18_a_recycled_row_full_of_nan_never_reaches_a_new_sequence(server):
    call = make(server.op, SHAPE, 3, 2, P=5)
    if "num_accepted" in call.rows:
        call.rows["num_accepted"] = calls.index([2, 1, 0])
    zeros = call.copy()
    for name, pool in call.pools.items():
        old = pool[1].clone()
        pool.fill_(NAN)
        pool[4] = float("inf")
        pool[1] = old  # the middle row goes on from its state
        zeros.pools[name][[0, 3, 4]] = 0
    slots = {"slots": calls.index([4, 1, 3])}
    has_state = torch.tensor([False, True, False], device=DEVICE)
    outputs = server.run(call, **slots, has_state=has_state)
    expected = server.run(zeros, **slots)
    for name, x in outputs.items():
        assert x.isfinite().all(), name
        server.agree(x, expected[name], SHAPE, name)
    for name, pool in call.pools.items():
        assert pool[[0, 2]].isnan().all(), f"{name}: a row of nobody was written"
        server.agree(pool[[4, 1, 3]], zeros.pools[name][[4, 1, 3]], SHAPE, name)


@pytest.mark.parametrize("server", POOLED)
def test_row_18_a_row_of_nan_that_is_read_is_seen(server):
    """The test of the test: without ``has_state`` the NaN does come out."""
    call = make(server.op, SHAPE, 2, 2, P=2)
    for pool in call.pools.values():
        pool[0] = NAN
    outputs = server.run(call)
    seen = any(bool(x[0].isnan().any()) for x in outputs.values())
    assert seen
    assert all(x[1].isfinite().all() for x in outputs.values())


def test_row_24_memory_that_tests_allocate_is_never_clean():
    """The fixture of tests/conftest.py, which every other test runs under."""
    for x in (torch.empty(3), torch.empty_like(torch.ones(2)), torch.ones(1).new_empty(4)):
        assert x.isnan().all()


@pytest.mark.parametrize("lengths", [None, (3, 0, 2)])
@pytest.mark.parametrize("server", servers(*OPS))
def test_row_24_every_element_of_every_output_is_stored(server, lengths):
    """Buffers of NaN, the caller's and the library's, come back without one."""
    packed = lengths is not None and server.op not in ("rms_norm_gated", "step")
    call = make(server.op, SHAPE, 1 if packed else 3, 8, P=4)
    options = calls.packing(list(lengths)) if packed else {}
    if packed and server.op == "verify":
        call.rows["num_accepted"] = calls.index([3, 0, 1])
    again = call.copy()
    outputs = server.run(call, **options)
    out = tuple(torch.full_like(x, NAN) for x in outputs.values())
    given = server.run(again, **options, out=out if server.op == "conv_qkv" else out[0])
    for (name, x), buffer in zip(outputs.items(), out, strict=True):
        assert x.isfinite().all(), name
        compare.assert_same_bits(buffer, x, f"out buffer of {name}")
        assert given[name].data_ptr() == buffer.data_ptr()
    for name, pool in call.pools.items():
        assert pool.isfinite().all(), name
        compare.assert_same_bits(pool, again.pools[name], name)
