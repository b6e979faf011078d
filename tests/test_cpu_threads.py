"""Where the CPU kernels get their threads from, and how many they use beside a busy neighbour."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import sluice
from sluice import calls, torch_private
from sluice.contract import values
from sluice.testing import cases

pytest.importorskip("numba")
threads = pytest.importorskip("sluice.backends.cpu.threads")
launch = pytest.importorskip("sluice.backends.cpu.launch")


@pytest.fixture
def bound_anew(two_threads, monkeypatch):
    """Calls are bound with what a test puts in place of threads, and again after it."""
    calls.forget()
    monkeypatch.setattr(launch, "SHORT", 0)  # the cases are short
    before = list(threads.CROWD)
    threads.CROWD[:] = [0, 0, 0, threads.CREDIT]
    yield
    threads.CROWD[:] = before
    calls.forget()


def test_the_runtime_is_found_where_the_process_shows_none():
    """Wheels of torch for ARM load it for their own libraries only."""
    found = threads._runtime("no-such-library.so", "libm.so.6", torch_private.extension_file())
    assert threads._address(found.GOMP_parallel) == threads.parallel


def test_a_library_without_threads_is_none():
    assert threads._runtime("no-such-library.so", "libm.so.6") is None


def _first_case(op):
    case, dtype = next(iter(cases.pairs(op)))
    return lambda: case.run(sluice, case.inputs(dtype, "cpu"), backend="cpu")


def _assert_same_bits(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", ["decode", "prefill", "causal_conv1d", "rms_norm_gated"])
def test_python_threads_give_the_same_bits(op, bound_anew, monkeypatch):
    run = _first_case(op)
    expected = run()
    counts = []
    python_threads = threads.python_threads

    def counted(function, where, count):
        counts.append(count)
        python_threads(function, where, count)

    calls.forget()
    threads.CROWD[0] = 0
    monkeypatch.setattr(threads, "python_threads", counted)
    for name in ("parallel", "identify"):
        monkeypatch.setattr(threads, name, 0)
    found = run()
    assert 2 in counts
    _assert_same_bits(found, expected)


PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
CLOCK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64))
LIMIT, UNTIL, PAUSE, SAVED = range(4)
MICROSECONDS = 1_000


class Team:
    """Stands in for ``GOMP_parallel`` and the clock, in a time of its own.

    All tasks run in the calling thread. They take ``work``; the team comes back after ``wait``.
    """

    def __init__(self):
        self.now, self.work, self.wait, self.counts = 10**12, 0, 0, []
        self.functions = PARALLEL(self.run), CLOCK(self.read)

    def run(self, worker, block, count, flags):
        self.counts.append(count)
        self.now += self.work
        WORKER(worker)(block)
        self.now += self.wait

    def read(self, clock, timespec):
        self.now += MICROSECONDS
        timespec[0], timespec[1] = divmod(self.now, 10**9)
        return 0


@pytest.fixture
def team(bound_anew, monkeypatch):
    team = Team()
    for name, function in zip(("parallel", "clock"), team.functions, strict=True):
        monkeypatch.setattr(threads, name, threads._address(function))
    return team


def test_a_late_team_is_spared_for_a_pause_and_then_tried_again(team):
    run = _first_case("decode")
    expected = run()
    assert team.counts == [2]
    assert threads.CROWD[LIMIT] == 0

    team.wait = 10_000 * MICROSECONDS
    _assert_same_bits(run(), expected)
    assert threads.CROWD[LIMIT] == 1
    pause = threads.CROWD[PAUSE]
    assert pause > (threads.PAUSE_PER_LOSS - 1) * team.wait
    team.now = threads.CROWD[UNTIL] - pause // 2
    _assert_same_bits(run(), expected)
    assert team.counts == [2, 2]  # the calling thread was alone

    team.now = threads.CROWD[UNTIL]
    _assert_same_bits(run(), expected)
    assert team.counts == [2, 2, 2]  # more are tried, but it does not go well
    assert threads.CROWD[LIMIT] == 1
    assert threads.CROWD[PAUSE] == 2 * pause

    team.wait, team.now = 0, threads.CROWD[UNTIL]
    run()
    assert threads.CROWD[LIMIT] == 0  # now it does
    run()
    assert len(team.counts) == 5


def test_pauses_have_an_end(team):
    run = _first_case("decode")
    run()
    team.wait = 100_000 * MICROSECONDS
    for _ in range(4):
        run()
        assert threads.CROWD[PAUSE] == threads.LONGEST_PAUSE
        team.now = threads.CROWD[UNTIL]


def test_a_wait_that_teams_have_paid_for_is_no_reason(team):
    """Two threads that take 1 ms each save as much, up to a bound."""
    run = _first_case("decode")
    team.work = 1_000 * MICROSECONDS
    for calls_made in range(1, 100):
        run()
        saved = threads.CROWD[SAVED]
        expected = threads.CREDIT + calls_made * team.work
        assert saved == pytest.approx(min(expected, threads.MOST_SAVED), rel=0.1)
    team.wait = saved // 3
    for late in range(1, 5):
        run()
        assert threads.CROWD[LIMIT] == int(late > 3)


def test_a_short_delay_is_no_loss(team):
    run = _first_case("decode")
    team.wait = threads.LONG_DELAY // 2
    for _ in range(10):
        run()
    assert threads.CROWD[LIMIT] == 0
    assert len(team.counts) == 10


def test_long_work_keeps_the_whole_team(team):
    run, other = _first_case("prefill"), _first_case("decode")
    team.work = threads.LONG_WORK
    run()
    team.work, team.wait = 0, 10_000 * MICROSECONDS
    other()
    other()  # it is spared from now on
    assert threads.CROWD[LIMIT] == 1
    assert team.counts == [2, 2]
    run()
    assert team.counts == [2, 2, 2]


@pytest.mark.parametrize("op", ["causal_conv1d", "conv_qkv", "rms_norm_gated"])
def test_a_short_call_has_no_team(op, team, monkeypatch):
    run = _first_case(op)
    expected = run()
    assert team.counts == [2]
    monkeypatch.setattr(launch, "SHORT", 1 << 60)
    calls.forget()
    _assert_same_bits(run(), expected)
    assert team.counts == [2]


def test_the_number_of_threads_is_torchs_at_once(team):
    run = _first_case("decode")
    for count in (2, 1, 2):
        torch.set_num_threads(count)
        run()
    assert team.counts == [2, 2]


def test_teams_are_halved_by_each_loss_and_doubled_after_each_pause(team):
    torch.set_num_threads(8)
    x, state = torch.randn(8, 1, 8, 16), torch.zeros(8, 8, 16, 16)
    for team.wait in (0, *[10_000 * MICROSECONDS] * 4, 0, 0, 0, 0):
        if not team.wait:
            team.now = max(team.now, threads.CROWD[UNTIL])
        sluice.decode(x, x, x, state=state, backend="cpu")
    assert team.counts == [8, 8, 4, 2, 2, 4, 8, 8]  # and one between


def test_python_threads_that_call_at_once_keep_their_calls_apart(bound_anew):
    """They share a bound launch, and what it prepares for a call."""
    torch.manual_seed(0)
    x, v, g = torch.randn(1, 1, 2, 32), torch.randn(1, 1, 4, 32), -torch.rand(1, 1, 4)

    def steps(state):
        for _ in range(100):
            o, _ = sluice.decode(x, x, v, g, g.exp(), state=state, normalize_qk=True, backend="cpu")
        return o

    states = [torch.randn(1, 4, 32, 32) for _ in range(4)]
    expected = [state.clone() for state in states]
    outputs = [steps(state) for state in expected]
    with ThreadPoolExecutor(len(states)) as pool:
        found = list(pool.map(steps, states))
    for got, want in zip([*states, *found], [*expected, *outputs], strict=True):
        assert torch.equal(got, want)


def test_a_call_inside_of_another_has_a_block_of_its_own(bound_anew, monkeypatch):
    """Values that look suspicious are checked by Python, which may call anything in between."""
    x, g, beta = torch.randn(2, 1, 2, 16), torch.zeros(2, 1, 2), torch.ones(2, 1, 2)
    slots = torch.tensor([0, -1])
    g[1] = torch.nan  # in a padded row

    def call(state):
        return sluice.decode(x, x, x, g, beta, state=state, slots=slots, backend="cpu")[0]

    check, pools, inner = values.delta, torch.randn(2, 1, 2, 16, 16), []

    def check_and_call(spec, tensors):
        if inner:
            call(inner.pop())
        check(spec, tensors)

    expected = [pool.clone() for pool in pools]
    for pool in expected:
        call(pool)
    calls.forget()
    monkeypatch.setattr(values, "delta", check_and_call)
    call(torch.zeros(1, 2, 16, 16))  # leaves a block, which the outer call takes
    inner.append(pools[1])
    call(pools[0])
    assert not inner
    assert all(map(torch.equal, pools, expected))


def test_sixteen_threads_all_have_a_task_of_one_sequence_with_16_heads():
    from sluice.backends.cpu.conv import blocks_of, share_units
    from sluice.backends.cpu.norm import share_vectors
    from sluice.backends.cpu.tokens import share_heads

    x, g = torch.zeros(1, 1, 16, 128), torch.zeros(1, 1, 16)
    with calls.check_only() as found:
        sluice.decode(x, x, x, g, g, state=torch.zeros(1, 16, 128, 128), backend="cpu")
        sluice.causal_conv1d(
            torch.zeros(1, 1, 8192), torch.zeros(8192, 4), state=torch.zeros(1, 8192, 3)
        )
    (decode, _), (conv, _) = found
    assert share_heads(decode)(16)["tasks"] == 16
    assert share_units(conv, blocks_of(conv.D))(16)["tasks"] == 16
    assert share_vectors(16)(16) == {"tasks": 16, "unit_t": 1}


NO_MORE_THREADS = """
import os, time, torch, sluice
from sluice.testing import cases

def threads():
    return len(os.listdir("/proc/self/task"))

def seconds_of_idling():
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.25)
    return time.process_time() - before

torch.set_num_threads(2)
x = torch.randn(512, 512)
for _ in range(3):
    x.mul(2).sum()
mine = threads()
for op in cases.OPS:
    case, dtype = next(iter(cases.pairs(op)))
    case.run(sluice, case.inputs(dtype, "cpu"), backend="cpu")
idling = seconds_of_idling()
print(mine, threads(), idling)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux does")
def test_calls_start_no_threads_beside_torchs_and_leave_none_spinning():
    """torch's own spin for a few milliseconds after a call, and then sleep."""
    command = [sys.executable, "-c", NO_MORE_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after, idling = done.stdout.split()
    assert before == after
    assert float(idling) < 0.05


class Steps(torch.utils.data.Dataset):
    """Outputs of decode steps, each made where a loader asks for it."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x, v = (torch.randn(1, 1, n, 32, generator=generator) for n in (2, 4))
        state, g = torch.randn(1, 4, 32, 32, generator=generator), -torch.ones(1, 1, 4)
        return sluice.decode(x, x, v, g, g.exp(), state=state, backend="cpu")[0]


def test_workers_of_a_loader_compute_the_same_bits(two_threads):
    """They are forks of a process whose threads have run already."""
    steps = Steps()
    expected = [steps[i] for i in range(len(steps))]
    loader = DataLoader(
        steps, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    for found, want in zip(loader, expected, strict=True):
        assert torch.equal(found, want)
