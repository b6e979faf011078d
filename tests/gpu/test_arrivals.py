"""The counters of ``step``: they stay where they are as long as the pool they count for.

A captured CUDA graph holds their address. Most of this runs anywhere; graphs need a GPU.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import sluice
from sluice import dispatch
from sluice.backends.triton import arrivals
from sluice.backends.triton.arrivals import arrivals_of
from sluice.testing import compare
from tests.gpu.random_layer import DEVICE, Layer

D, L, HK = 12, 3, 2


def pool(rows: int = 8) -> Tensor:
    return torch.zeros(rows, D, L, device=DEVICE)


def span(x: Tensor) -> range:
    """The addresses of a dense tensor."""
    return range(x.data_ptr(), x.data_ptr() + x.numel() * x.element_size())


def overlap(a: Tensor, b: Tensor) -> bool:
    return max(span(a).start, span(b).start) < min(span(a).stop, span(b).stop)


def test_a_wider_view_leaves_the_counters_of_a_narrower_one_in_place():
    """They were replaced and freed once, although a captured graph may still use them."""
    windows = pool()
    first = arrivals_of(windows[:4], HK)
    address, alive = first.data_ptr(), weakref.ref(first)
    del first
    wide = arrivals_of(windows, HK)
    gc.collect()
    assert alive() is not None
    assert alive().data_ptr() == address
    assert wide.data_ptr() == address
    assert wide.numel() >= 8 * HK
    assert arrivals_of(windows[:2], HK).data_ptr() == address


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:],
        lambda x: x[4:6],
        lambda x: x[::2],
        lambda x: x[1::3],
        lambda x: x.view(4, 2, D, L)[:, 0],
        lambda x: x.view(4, 2, D, L)[:, 1],
    ],
    ids=["from row 1", "rows 4, 5", "every second", "every third", "even halves", "odd halves"],
)
def test_views_that_begin_elsewhere_or_take_other_steps_have_counters_of_their_own(
    view: Callable[[Tensor], Tensor],
):
    """Row 1 of a view is another row of the pool: counts must not meet."""
    windows = pool()
    whole, part = arrivals_of(windows, HK), arrivals_of(view(windows), HK)
    same = view(windows).stride(0) == windows.stride(0) and not view(windows).storage_offset()
    assert not same
    assert not overlap(whole, part)
    assert part.numel() >= view(windows).shape[0] * HK
    assert arrivals_of(view(windows), HK).data_ptr() == part.data_ptr()
    assert arrivals_of(windows, HK).data_ptr() == whole.data_ptr()


def test_layers_with_other_heads_have_counters_of_their_own():
    windows = pool()
    assert not overlap(arrivals_of(windows, 2), arrivals_of(windows, 4))


def test_a_view_that_grows_to_the_end_of_the_storage_has_enough_counters():
    """A pool inside other memory, as serving engines cut it."""
    page = D * L + 20
    memory = torch.zeros(10 * page + 5, device=DEVICE)
    few, all_rows = (memory.as_strided((n, D, L), (page, L, 1), 5) for n in (2, 10))
    counters = arrivals_of(few, HK)
    assert arrivals_of(all_rows, HK).data_ptr() == counters.data_ptr()
    assert counters.numel() >= 10 * HK


def test_counters_begin_as_zeros_and_stay_the_same_tensor():
    windows = pool()
    counters = arrivals_of(windows, HK)
    assert counters.dtype == torch.int32
    assert not counters.any()
    counters[3] = 9
    gc.collect()
    again = arrivals_of(windows.detach(), HK)
    assert again.data_ptr() == counters.data_ptr()
    assert int(again[3]) == 9


def test_counters_live_as_long_as_the_storage_and_no_longer():
    before = len(arrivals._counters)
    windows = pool()
    kept = windows[2:3]
    alive = weakref.ref(arrivals_of(windows, HK))
    del windows
    gc.collect()
    assert alive() is not None, "a view keeps the storage"
    assert len(arrivals._counters) == before + 1
    del kept
    gc.collect()
    assert alive() is None
    assert len(arrivals._counters) == before


def test_a_new_pool_in_the_place_of_an_old_one_begins_with_zeros():
    for _ in range(20):
        windows = pool()
        counters = arrivals_of(windows, HK)
        assert not counters.any()
        counters.fill_(-5)
        del windows, counters


SIZE = {"HK": 4, "HV": 8, "K": 128, "V": 128}


@pytest.mark.gpu
@pytest.mark.skipif(
    DEVICE != "cuda" or dispatch.unavailable("triton") is not None, reason="a graph needs a GPU"
)
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_captured_step_on_a_view_survives_a_step_on_the_whole_pool(tokens):
    """The memory that a program frees in between is overwritten before the graph is replayed."""
    layer, others = Layer(2, tokens, P=8, **SIZE), Layer(6, tokens, P=8, seed=1, **SIZE)
    layer.slots.copy_(torch.tensor([1, 0]))
    others.slots.copy_(torch.arange(2, 8))
    state, window = layer.state.clone(), layer.window.clone()
    layer.step(state[:2], window[:2])  # makes the counters: a capture uses them
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.step(state[:2], window[:2])
    others.step(state, window)
    torch.cuda.synchronize()
    garbage = [
        torch.full((n,), -7, dtype=torch.int32, device="cuda")
        for n in (8, 32, 64, 128, 512, 4096)
        for _ in range(200)
    ]
    state.copy_(layer.state)
    window.copy_(layer.window)
    expected = layer.state[:2].clone(), layer.window[:2].clone()
    exact = layer.state[:2].clone(), layer.window[:2].clone()
    for _ in range(3):
        graph.replay()
        compare.assert_same_bits(y, layer.step(*expected), "y")
        compare.assert_same_bits(state[:2], expected[0], "state")
        compare.assert_same_bits(window[:2], expected[1], "window")
        reference = sluice.step(
            layer.qkvz,
            layer.ba,
            **layer.rates,
            **layer.weights,
            state=exact[0],
            conv_state=exact[1],
            slots=layer.slots,
            backend="reference",
        )
        tolerance = compare.tolerance(y.dtype, device="cuda")
        compare.assert_within(y, reference.double(), 2 * tolerance, name="y")
        compare.assert_same_bits(window[:2], exact[1], "window of the reference")
    assert len(garbage) == 1200
