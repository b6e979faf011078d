"""Large pages are asked for under large results, and under nothing else."""

from __future__ import annotations

import mmap

import pytest
import torch

import sluice
from sluice import calls, large_pages

D, W = 2048, 4


@pytest.fixture
def asked(monkeypatch):
    found = []
    monkeypatch.setattr(large_pages, "_madvise", lambda *where: found.append(where))
    return found


def conv(T, **options):
    x, weight = torch.randn(1, T, D), torch.randn(D, W)
    return sluice.causal_conv1d(x, weight, None, backend="reference", **options)[0]


def test_a_large_result_gets_large_pages(asked):
    y = conv(large_pages.LEAST // (4 * D) + 1)
    ((begin, size),) = asked
    end = y.data_ptr() + y.numel() * 4
    assert begin % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
    assert y.data_ptr() <= begin < y.data_ptr() + mmap.PAGESIZE
    assert end - mmap.PAGESIZE < begin + size <= end


def test_small_results_and_the_callers_own_buffers_are_left_alone(asked):
    conv(16)
    T = large_pages.LEAST // (4 * D) + 1
    conv(T, out=torch.empty(1, T, D))
    assert asked == []


def test_machines_without_large_pages_do_without(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    monkeypatch.setattr(large_pages, "_madvise", large_pages._find())
    assert large_pages._madvise is None
    calls.forget()
    assert conv(large_pages.LEAST // (4 * D)).isfinite().all()
