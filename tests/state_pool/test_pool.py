"""StatePool against a dict of tensors, bit for bit; slots; errors that change nothing.

It covers the pool's part of reliability rows 2 (snapshot and restore) and 18 (recycled pages).
"""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import sluice
from sluice.contract.errors import ContractError, SluiceError
from sluice.state_pool import (
    DoubleFreeError,
    GeometryError,
    MissingDependencyError,
    PoolError,
    PoolExhaustedError,
    Slot,
    StatePool,
    UseAfterFreeError,
)
from tests.state_pool.pools import (
    SMALL,
    VARIANTS,
    P,
    bits,
    everything,
    other_snapshot,
    poison,
    read,
    same,
    unchanged,
    write,
)

# ---- random interleavings ------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Calls in any order, against a dict of row → bits. Free rows are overwritten at every step."""

    @initialize(variant=st.sampled_from(sorted(VARIANTS)))
    def start(self, variant):
        self.pool = VARIANTS[variant]()
        self.all = range(self.pool.pad_slot + 1, P)
        self.model, self.owned, self.stale, self.snapshots = {}, {}, [], []
        self.zero = tuple(torch.zeros_like(x) for x in read(self.pool, P - 1))

    def lowest(self, n):
        return [row for row in self.all if row not in self.model][:n]

    def take(self, slots, contents):
        for slot, content in zip(slots, contents, strict=True):
            assert slot not in self.model
            self.model[int(slot)], self.owned[int(slot)] = content, slot

    def some(self, data):
        rows = sorted(self.model)
        picked = data.draw(st.lists(st.sampled_from(rows), unique=True) if rows else st.just([]))
        return [self.owned[row] for row in picked]

    @rule(n=st.integers(0, 3))
    def allocate(self, n):
        expected = self.lowest(n)
        if len(expected) < n:
            with pytest.raises(PoolExhaustedError):
                self.pool.allocate(n)
            return
        slots = self.pool.allocate(n)
        assert slots == expected
        self.take(slots, [self.zero] * n)

    @rule(data=st.data(), seed=st.integers(0, 2**20))
    def write(self, data, seed):
        for slot in self.some(data):
            write(self.pool, slot, seed + slot)
            self.model[int(slot)] = read(self.pool, int(slot))

    @rule(seed=st.integers(0, 2**20))
    def scribble_on_free_rows(self, seed):
        for row in self.lowest(P):
            write(self.pool, row, seed + row)

    @rule(data=st.data())
    def free(self, data):
        slots = self.some(data)
        self.pool.free(slots)
        for slot in slots:
            del self.model[int(slot)], self.owned[int(slot)]
            self.stale.append(slot)

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def use_a_stale_slot(self, data):
        stale = data.draw(st.sampled_from(self.stale))
        slots = [slot for slot in self.some(data) if slot != stale]
        slots.insert(data.draw(st.integers(0, len(slots))), stale)
        with pytest.raises(DoubleFreeError):
            self.pool.free(slots)
        for method in (self.pool.fork, self.pool.snapshot, self.pool.indices):
            with pytest.raises(UseAfterFreeError):
                method(slots)

    @rule(data=st.data(), copies=st.integers(1, 2))
    def fork(self, data, copies):
        parents = [slot for slot in self.some(data) for _ in range(copies)]
        expected = self.lowest(len(parents))
        if len(expected) < len(parents):
            with pytest.raises(PoolExhaustedError):
                self.pool.fork(parents[::copies], copies)
            return
        children = self.pool.fork(parents[::copies], copies)
        assert children == expected
        self.take(children, [self.model[int(parent)] for parent in parents])

    @rule(data=st.data())
    def snapshot(self, data):
        slots = self.some(data)
        self.snapshots.append((self.pool.snapshot(slots), [self.model[int(s)] for s in slots]))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), fresh=st.booleans())
    def restore(self, data, fresh):
        snapshot, contents = data.draw(st.sampled_from(self.snapshots))
        if not fresh and len(self.model) >= len(contents):
            rows = data.draw(st.permutations(sorted(self.model)))[: len(contents)]
            assert self.pool.restore(snapshot, [self.owned[row] for row in rows]) == rows
            self.model.update(zip(rows, contents, strict=True))
            return
        expected = self.lowest(len(contents))
        if len(expected) < len(contents):
            with pytest.raises(PoolExhaustedError):
                self.pool.restore(snapshot)
            return
        slots = self.pool.restore(snapshot)
        assert slots == expected
        self.take(slots, contents)

    @rule(data=st.data())
    def claim(self, data):
        rows = self.lowest(P)
        rows = data.draw(st.lists(st.sampled_from(rows), unique=True) if rows else st.just([]))
        contents = [read(self.pool, row) for row in rows]
        self.take(self.pool.claim(rows), contents)

    @invariant()
    def every_owner_reads_its_own_bits(self):
        assert self.pool.allocated == sorted(self.model)
        assert self.pool.available == len(self.all) - len(self.model)
        for row, content in self.model.items():
            assert same(read(self.pool, row), content), f"row {row}"


PoolMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAnyOrderOfCallsAgreesWithADict = PoolMachine.TestCase


# ---- slots ---------------------------------------------------------------------------------------


def test_slots_are_handed_out_lowest_first(pool):
    first = pool.pad_slot + 1
    a = pool.allocate(4)
    assert a == [first, first + 1, first + 2, first + 3]
    pool.free([a[2], a[0]])
    assert pool.allocate(3) == [first, first + 2, first + 4]


def test_a_nan_of_the_previous_owner_is_never_visible(pool):
    """Reliability row 18, also when the NaN arrives after the slot was freed."""
    pool.free(pool.allocate(pool.available))
    poison(pool)
    for slot in pool.allocate(pool.available):
        assert not any(part.any() for part in read(pool, slot))


def test_a_reserved_slot_0_is_never_handed_out_nor_accepted():
    pool = StatePool(SMALL, 3, reserve_slot_0=True)
    assert pool.pad_slot == 0
    assert pool.allocate(2) == [1, 2]
    for method in (pool.free, pool.claim, pool.fork, pool.snapshot, pool.indices):
        with pytest.raises(ContractError, match=r"ints in 1\.\.2, got 0"):
            method([0])
    assert StatePool(SMALL, 3).pad_slot == -1


def test_a_slot_is_an_int_for_every_index_and_survives_copying(pool):
    (slot,) = pool.allocate()
    write(pool, slot, 1)
    recurrent = pool.layer(0)[1]
    assert torch.equal(bits(recurrent[slot]), bits(recurrent[int(slot)]))
    assert torch.tensor([slot]).tolist() == [int(slot)]
    for clone in (copy.deepcopy(slot), pickle.loads(pickle.dumps(slot))):
        assert (clone, clone.generation, clone.pool) == (slot, slot.generation, slot.pool)


def test_indices_are_what_an_operator_takes(pool):
    slots = pool.allocate(3)
    indices = pool.indices(slots, pad_to=5, dtype=torch.int32)
    assert indices.dtype == torch.int32
    assert indices.tolist() == [*slots, pool.pad_slot, pool.pad_slot]
    assert pool.indices(slots).dtype == torch.int64
    with pytest.raises(ContractError, match=r"pad_to.*at least 3"):
        pool.indices(slots, pad_to=2)


@pytest.mark.parametrize("form", [list, tuple, torch.tensor, lambda s: torch.tensor(s).int()])
def test_slots_may_be_a_list_a_tuple_or_a_tensor(form):
    pool = StatePool(SMALL, P)
    slots = pool.allocate(3)
    assert pool.indices(form(slots)).tolist() == slots
    pool.free(form(slots))
    assert pool.available == P


def test_a_plain_int_is_checked_for_being_allocated():
    pool = StatePool(SMALL, P)
    pool.allocate(2)
    pool.free(1)
    with pytest.raises(DoubleFreeError, match="slot 1, which is free"):
        pool.free(1)


def test_a_stale_slot_is_recognised_although_the_row_has_a_new_owner(pool):
    (old,) = pool.allocate()
    pool.free(old)
    (new,) = pool.allocate()
    assert old == new
    before = everything(pool)
    with pytest.raises(DoubleFreeError, match="new owner"):
        pool.free(old)
    for method in (pool.snapshot, pool.fork, pool.indices):
        with pytest.raises(UseAfterFreeError, match="new owner"):
            method(old)
    assert unchanged(pool, before)
    pool.free(new)


def test_a_slot_of_another_pool_is_refused():
    """Of an older pool and of a younger one."""
    older, younger = StatePool(SMALL, P), StatePool(SMALL, P)
    slots = {older: older.allocate(), younger: younger.allocate()}
    for ours, theirs in ((older, younger), (younger, older)):
        with pytest.raises(ContractError, match="slots of this pool, got 0 of another pool"):
            ours.free(slots[theirs])
        assert ours.available == P - 1


def test_copies_of_one_parent_come_together(pool):
    a, b = pool.allocate(2)
    write(pool, a, 1)
    write(pool, b, 2)
    children = pool.fork([b, a], copies=2 if pool.available >= 4 else 1)
    half = len(children) // 2
    assert all(same(read(pool, child), read(pool, b)) for child in children[:half])
    assert all(same(read(pool, child), read(pool, a)) for child in children[half:])


# ---- errors lose nothing -------------------------------------------------------------------------


# what, error, words it must have; two live slots `a`, `b`, one freed slot `gone`, three free rows
WRONG = {
    "too_many": (lambda p, a, b, gone: p.allocate(99), PoolExhaustedError, "99 free.*got"),
    "negative": (lambda p, a, b, gone: p.allocate(-1), ContractError, "n: .* at least 0, got -1"),
    "text": (lambda p, a, b, gone: p.allocate("2"), ContractError, "an int .*, got '2'"),
    "no_snapshot": (lambda p, a, b, gone: p.restore({}), ContractError, "StateSnapshot, got dict"),
    "save_nowhere": (
        lambda p, a, b, gone: p.save("/no/such/a"),
        PoolError,
        "directory that exists",
    ),
    "load_directory": (lambda p, a, b, gone: p.load("."), PoolError, "got a directory"),
    "copied": (lambda p, a, b, gone: copy.copy(p), PoolError, "snapshot and restore"),
    "copied_deeply": (lambda p, a, b, gone: copy.deepcopy([p]), PoolError, "snapshot and restore"),
    "pickled": (lambda p, a, b, gone: pickle.dumps(p), PoolError, "save and load"),
    "fork_too_many": (lambda p, a, b, gone: p.fork([a, b], 9), PoolExhaustedError, "18 free"),
    "fork_no_copies": (lambda p, a, b, gone: p.fork(a, 0), ContractError, "copies"),
    "double_free": (lambda p, a, b, gone: p.free([a, gone]), DoubleFreeError, "which is free"),
    "free_twice_at_once": (
        lambda p, a, b, gone: p.free([a, b, a]),
        ContractError,
        "each slot once",
    ),
    "fork_twice_at_once": (lambda p, a, b, gone: p.fork([a, a]), ContractError, "each slot once"),
    "fork_freed": (lambda p, a, b, gone: p.fork([a, gone]), UseAfterFreeError, "fork.*is free"),
    "snapshot_freed": (lambda p, a, b, gone: p.snapshot([a, gone]), UseAfterFreeError, "is free"),
    "out_of_range": (lambda p, a, b, gone: p.free([a, 6]), ContractError, "ints in .*got 6"),
    "padding": (lambda p, a, b, gone: p.free([a, -1]), ContractError, "ints in .*got -1"),
    "not_a_slot": (lambda p, a, b, gone: p.free([a, 1.0]), ContractError, "got 1.0"),
    "a_bool": (lambda p, a, b, gone: p.free([a, True]), ContractError, "got True"),
    "claim_taken": (lambda p, a, b, gone: p.claim([gone, a]), PoolError, "claim.*allocated"),
    "restore_into_freed": (
        lambda p, a, b, gone: p.restore(p.snapshot([a, b]), [b, gone]),
        UseAfterFreeError,
        "restore.*is free",
    ),
    "restore_other_count": (
        lambda p, a, b, gone: p.restore(p.snapshot([a, b]), [a]),
        ContractError,
        "expected 2 slots.*got 1",
    ),
    "restore_one_into_two": (
        lambda p, a, b, gone: p.restore(p.snapshot(a), [a, b]),
        ContractError,
        "expected 1 slots.*got 2",
    ),
    "restore_other_geometry": (
        lambda p, a, b, gone: p.restore(other_snapshot(num_v_heads=4), a),
        GeometryError,
        "num_v_heads: expected 2, got 4",
    ),
    "restore_other_geometry_anew": (
        lambda p, a, b, gone: p.restore(other_snapshot(num_v_heads=4)),
        GeometryError,
        "num_v_heads: expected 2, got 4",
    ),
    "no_such_file": (lambda p, a, b, gone: p.load("/nowhere/at/all"), FileNotFoundError, "nowhere"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_refused_call_leaves_the_pool_exactly_as_it_was(case, pool):
    call, error, words = WRONG[case]
    a, gone, b = pool.allocate(3)
    write(pool, a, 1)
    write(pool, b, 2)
    pool.free(gone)
    before = everything(pool)
    with pytest.raises(error, match=words):
        call(pool, a, b, gone)
    assert unchanged(pool, before)
    assert pool.allocate() == [gone]


def test_slots_taken_by_a_call_that_fails_midway_are_given_back(monkeypatch):
    pool = StatePool(SMALL, P)
    parent = pool.allocate()
    snapshot = pool.snapshot(parent)
    before = everything(pool)

    def out_of_memory(*args, **kwargs):
        raise MemoryError("simulated")

    for method, argument, name in (
        (pool.allocate, 2, "zero_"),
        (pool.fork, parent, "copy_"),
        (pool.restore, snapshot, "copy_"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, name, out_of_memory)
            with pytest.raises(MemoryError):
                method(argument)
        assert unchanged(pool, before)


def test_every_error_of_the_pool_has_a_name_in_the_library():
    for error in (DoubleFreeError, GeometryError, PoolError, PoolExhaustedError, UseAfterFreeError):
        assert getattr(sluice, error.__name__) is error
    assert sluice.Slot is Slot


def test_a_snapshot_shows_its_size_and_not_its_numbers(pool):
    text = repr(pool.snapshot(pool.allocate(2)))
    assert text.startswith("StateSnapshot(sequences=2, layers=")
    assert "tensor(" not in text
    assert len(text) < 200


def test_every_error_of_the_pool_is_an_error_of_the_library():
    for error in (PoolExhaustedError, DoubleFreeError, UseAfterFreeError, GeometryError):
        assert issubclass(error, PoolError)
    assert issubclass(PoolError, SluiceError)
    assert issubclass(GeometryError, ValueError)
    assert issubclass(MissingDependencyError, ImportError)


def test_a_parent_cannot_be_freed_while_it_is_copied(monkeypatch):
    pool = StatePool(SMALL, P)
    (parent,) = pool.allocate()
    copying, go_on, order = threading.Event(), threading.Event(), []
    copy_ = torch.Tensor.copy_

    def slow_copy(self, other):
        copying.set()
        assert go_on.wait(10)
        return copy_(self, other)

    def fork():
        pool.fork(parent)
        order.append("forked")

    def free():
        pool.free(parent)
        order.append("freed")

    monkeypatch.setattr(torch.Tensor, "copy_", slow_copy)
    threads = [threading.Thread(target=fork), threading.Thread(target=free)]
    threads[0].start()
    assert copying.wait(10)
    threads[1].start()
    threads[1].join(0.1)  # long enough to finish without the lock
    assert not order
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert sorted(order) == ["forked", "freed"]
    assert pool.allocated == [1]
