"""Fork and spawn after use, and thread counts that change while calls run."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import sluice
from sluice.state_pool import PoolGeometry, StatePool
from tests.bad_luck.luck import in_child

ROOT = Path(__file__).parents[2]


def step(state: torch.Tensor, backend: str | None = None) -> torch.Tensor:
    """One decode of 32 heads: work for several threads, and too little for torch to use any."""
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(4, 1, 8, 16, generator=gen)
    return sluice.decode(x, x, x, state=state, normalize_qk=True, backend=backend)[0]


FORK = """
import os, signal, sys, torch
sys.path[:0] = [{root!r}, {src!r}]
import sluice
from tests.bad_luck.test_processes import step
torch.set_num_threads(2)
state = torch.zeros(4, 8, 16, 16)
first = step(state, "cpu")
expected = state.clone()
output = step(expected, "cpu")
for generation in range(2):  # a child, and a child of the child
    lock = sluice.calls.BINDINGS._lock
    lock.acquire()  # as if another thread were keeping a binding
    pid = os.fork()
    if pid:
        lock.release()
        break
    signal.alarm(20)
if pid:
    done = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert done == 0, done
mine = state.clone()
for bound_anew in (False, False, True):
    if bound_anew:
        sluice.calls.forget()
    assert torch.equal(step(mine.copy_(state), "cpu"), output)
    assert torch.equal(mine, expected)
print("fine", flush=True)
os._exit(0)
"""


def test_a_forked_process_goes_on_with_the_same_bits():
    """OpenMP's threads stay with the parent: without care, the child waits for them for ever."""
    pytest.importorskip("numba")
    program = FORK.format(root=str(ROOT), src=str(ROOT / "src"))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["fine"] * 3


def test_a_pool_goes_on_in_a_forked_process_and_apart_from_its_parent():
    geometry = PoolGeometry(layers=1, num_v_heads=2, conv_channels=12, head_k_dim=2, head_v_dim=2)
    pool = StatePool(geometry, 4)
    mine = pool.allocate(2)
    pool.recurrent.fill_(1.0)

    def child():
        pool.free(mine[0])
        pool.recurrent[:, mine[1]] = 5.0
        assert pool.snapshot(mine[1]).recurrent.eq(5).all()
        assert pool.allocate() == [mine[0]]

    assert in_child(child) == 0
    assert pool.allocated == mine
    assert pool.snapshot(mine).recurrent.eq(1).all()


def _spawned(given: list, pipe) -> None:
    state = torch.tensor(given)
    pipe.send((step(state).tolist(), state.tolist()))


def test_a_spawned_process_starts_anew_with_the_same_bits():
    state = torch.zeros(4, 8, 16, 16)
    step(state)  # used before
    given = state.tolist()
    output = step(state)
    context = torch.multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_spawned, args=(given, there))
    process.start()
    try:
        assert here.poll(60)
        found, after = here.recv()
    finally:
        process.join(20)
    assert process.exitcode == 0
    assert torch.equal(torch.tensor(found), output)
    assert torch.equal(torch.tensor(after), state)


def test_the_number_of_threads_changes_while_calls_run(two_threads):
    """In this thread between calls, and in another while they run: the bits stay the same."""
    expected = torch.zeros(4, 8, 16, 16)
    outputs = [step(expected) for _ in range(30)]
    stop = threading.Event()

    def change():
        while not stop.is_set():
            for count in (1, 3, 2, 8):
                torch.set_num_threads(count)

    other = threading.Thread(target=change)
    other.start()
    try:
        state = torch.zeros(4, 8, 16, 16)
        for i, output in enumerate(outputs):
            torch.set_num_threads(1 + i % 5)
            assert torch.equal(step(state), output)
        assert torch.equal(state, expected)
    finally:
        stop.set()
        other.join(20)
