"""Where the CPU kernels get their threads from, and how many they use beside a busy neighbour."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch

import sluice
from sluice import calls, torch_private
from sluice.testing import cases

pytest.importorskip("numba")
threads = pytest.importorskip("sluice.backends.cpu.threads")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bound_anew(two_threads):
    """Calls are bound with what a test puts in place of threads, and again after it."""
    calls.forget()
    threads.CROWD[:] = [0, 0, 0]
    yield
    threads.CROWD[:] = [0, 0, 0]
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
    threads.CROWD[:] = [0, 0, 0]
    monkeypatch.setattr(threads, "python_threads", counted)
    for name in ("parallel", "identify"):
        monkeypatch.setattr(threads, name, 0)
    found = run()
    assert 2 in counts
    _assert_same_bits(found, expected)


PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
LONG = 0.02


class Team:
    """Stands in for ``GOMP_parallel``: all tasks run here, slowly; or quickly, and it is late."""

    def __init__(self):
        self.late, self.counts = False, []
        self.function = PARALLEL(self.run)

    def run(self, worker, block, count, flags):
        self.counts.append(count)
        if not self.late:
            time.sleep(LONG)
        WORKER(worker)(block)
        if self.late:
            time.sleep(LONG)


@pytest.fixture
def team(bound_anew, monkeypatch):
    team = Team()
    monkeypatch.setattr(threads, "parallel", threads._address(team.function))
    return team


def _end_pause():
    threads.CROWD[1] = time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def test_a_late_team_is_spared_for_a_pause_and_then_tried_again(team):
    run = _first_case("decode")
    expected = run()
    assert team.counts == [2]
    assert list(threads.CROWD) == [0, 0, 0]

    team.late = True
    _assert_same_bits(run(), expected)
    assert threads.CROWD[0] == 1
    pause = threads.CROWD[2]
    assert pause >= min(threads.PAUSE_PER_WAIT * LONG * 1e9, threads.LONGEST_PAUSE)
    _assert_same_bits(run(), expected)
    assert team.counts == [2, 2]  # the calling thread was alone

    _end_pause()
    _assert_same_bits(run(), expected)
    assert team.counts == [2, 2, 2]  # more are tried, but it does not go well
    assert threads.CROWD[0] == 1
    assert threads.CROWD[2] >= min(2 * pause, threads.LONGEST_PAUSE)

    team.late = False
    _end_pause()
    run()
    assert threads.CROWD[0] == 0  # now it does
    run()
    assert len(team.counts) == 5


def test_a_team_that_takes_long_over_its_tasks_is_kept(team):
    for _ in range(3):
        _first_case("prefill")()
    assert threads.CROWD[0] == 0
    assert len(team.counts) == 3


def test_the_number_of_threads_is_torchs_at_once(team):
    run = _first_case("decode")
    for count in (2, 1, 2):
        torch.set_num_threads(count)
        run()
    assert team.counts == [2, 2]


def test_threads_are_halved_by_each_wait_and_doubled_after_each_pause(team):
    torch.set_num_threads(8)
    x, state = torch.randn(8, 1, 8, 16), torch.zeros(8, 8, 16, 16)
    for team.late in (True, True, True, True):
        sluice.decode(x, x, x, state=state, backend="cpu")
    assert team.counts == [8, 4, 2]  # then one
    for team.late in (False, False, False, False):
        _end_pause()
        sluice.decode(x, x, x, state=state, backend="cpu")
    assert team.counts[3:] == [2, 4, 8, 8]
