"""Where the CPU kernels get their threads from: torch's OpenMP runtime, or Python without one."""

from __future__ import annotations

import ctypes

import pytest
import torch

import sluice
from sluice.testing import cases

pytest.importorskip("numba")
launch = pytest.importorskip("sluice.backends.cpu.launch")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_runtime_is_found_where_the_process_shows_none():
    """Wheels of torch for ARM load it for their own libraries only."""
    found = launch._runtime("no-such-library.so", "libm.so.6", torch._C.__file__)
    address = ctypes.cast(found.GOMP_parallel, ctypes.c_void_p).value
    assert address == launch._parallel


def test_a_library_without_threads_is_none():
    assert launch._runtime("no-such-library.so", "libm.so.6") is None


@pytest.mark.parametrize("op", ["decode", "prefill", "causal_conv1d", "rms_norm_gated"])
def test_python_threads_give_the_same_bits(op, two_threads, monkeypatch):
    case, dtype = next(iter(cases.pairs(op)))
    expected = case.run(sluice, case.inputs(dtype, "cpu"), backend="cpu")
    threads = []
    python_threads = launch._python_threads

    def counted(function, where, count):
        threads.append(count)
        python_threads(function, where, count)

    monkeypatch.setattr(launch, "_python_threads", counted)
    for name, value in (("_gomp_parallel", None), ("_identify", 0), ("_parallel", 0)):
        monkeypatch.setattr(launch, name, value)
    found = case.run(sluice, case.inputs(dtype, "cpu"), backend="cpu")
    assert 2 in threads
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True)
