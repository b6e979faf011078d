"""What every operator promises on a GPU: no waiting, graphs, streams, large pools and grids."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import sluice
from sluice.testing import compare
from tests.gpu.calls import NAMES, by_name, prepared
from tests.gpu.compiled import variants
from tests.gpu.random_layer import Layer

pytestmark = pytest.mark.gpu
SIZE = {"HK": 4, "HV": 8, "K": 128, "V": 128}


@pytest.mark.parametrize("name", NAMES)
def test_row_31_no_operator_waits_for_the_device(name):
    """After a first call, which compiles and loads the kernels."""
    call = prepared(by_name(name, "cuda"), 2)
    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("op", ["decode", "step"])
@pytest.mark.parametrize("rows", [1, 40])
def test_row_1_a_thousand_repeats_give_the_same_bits(op, rows):
    layer = Layer(rows, **SIZE)

    def once() -> list[torch.Tensor]:
        pools = [layer.state.clone()] + ([layer.window.clone()] if op == "step" else [])
        return [getattr(layer, op)(*pools), *pools]

    first = once()
    for _ in range(1000):
        for x, y in zip(once(), first, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("op", ["decode", "step"])
def test_pools_of_one_shape_may_start_at_any_address(op):
    """A kernel for addresses at multiples of 16 bytes must not serve other addresses."""
    layer = Layer(3, **SIZE)

    def once(offset: int) -> list[torch.Tensor]:
        memory = torch.zeros(layer.state.numel() + 8, dtype=layer.state.dtype, device="cuda")
        pool = memory[offset:][: layer.state.numel()].view(layer.state.shape)
        pools = [pool.copy_(layer.state)] + ([layer.window.clone()] if op == "step" else [])
        return [getattr(layer, op)(*pools), *pools]

    first = once(0)
    for offset in (0, 1, 0, 4, 1):
        for x, y in zip(once(offset), first, strict=True):
            torch.testing.assert_close(
                x, y, rtol=1e-2 if x.dtype != torch.float32 else 1e-5, atol=1e-5
            )


@pytest.mark.parametrize("op", ["decode", "step"])
def test_row_3_a_graph_replays_with_other_slots_in_the_same_buffers(op):
    layer = Layer(6, **SIZE)
    state, window = layer.state.clone(), layer.window.clone()

    def call() -> torch.Tensor:
        return layer.decode(state) if op == "decode" else layer.step(state, window)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    for slots in ([0, 1, 2, 3, 4, 5], [7, -1, 3, 0, -1, 6], [5, 4, 7, 6, 1, 2]):
        layer.slots.copy_(torch.tensor(slots, dtype=torch.int32))
        state.copy_(layer.state)
        window.copy_(layer.window)
        graph.replay()
        got = y.clone(), state.clone(), window.clone()
        state.copy_(layer.state)
        window.copy_(layer.window)
        expected = call(), state, window
        for name, x, z in zip(("output", "state", "window"), got, expected, strict=True):
            compare.assert_same_bits(x, z, f"{name} with slots {slots}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_row_5_slots_past_two_to_the_31_elements(dtype):
    """A pool whose rows lie so far apart that the last begins beyond 2**31 elements."""
    layer = Layer(2, HK=1, HV=1, K=128, V=128, P=3, state=dtype)
    gap = 2**30 + 16
    storage = torch.zeros(2 * gap + 128 * 128, dtype=dtype, device="cuda")
    pool = storage.as_strided((3, 1, 128, 128), (gap, 128 * 128, 128, 1))
    pool.copy_(layer.state)
    layer.slots.copy_(torch.tensor([2, 0]))
    near = layer.state.clone()
    compare.assert_same_bits(layer.decode(pool), layer.decode(near), "o")
    compare.assert_same_bits(pool.contiguous(), near, "state")
    pool.copy_(layer.state)
    near, windows = layer.state.clone(), (layer.window.clone(), layer.window.clone())
    compare.assert_same_bits(layer.step(pool, windows[0]), layer.step(near, windows[1]), "y")
    compare.assert_same_bits(pool.contiguous(), near, "state after step")


def test_row_9_more_programs_than_a_grid_has_in_y_and_z():
    """70,000 rows equal 70 rows repeated a thousand times."""
    few = Layer(70, HK=1, HV=1, K=16, V=16, P=70)
    many = Layer(70, HK=1, HV=1, K=16, V=16, P=70)
    times = 1000
    many.qkvz, many.ba = (x.repeat(times, 1, 1) for x in (few.qkvz, few.ba))
    many.state = few.state.repeat(times, 1, 1, 1)
    many.window = few.window.repeat(times, 1, 1)
    many.slots = torch.arange(70 * times, dtype=torch.int32, device="cuda")
    few.slots = torch.arange(70, dtype=torch.int32, device="cuda")
    states, windows = [few.state.clone(), many.state], [few.window.clone(), many.window]
    o, o_many = few.decode(states[0]), many.decode(states[1])
    compare.assert_same_bits(o_many, o.repeat(times, 1, 1, 1), "o")
    y, y_many = (x.step(s, w) for x, s, w in zip((few, many), states, windows, strict=True))
    compare.assert_same_bits(y_many, y.repeat(times, 1, 1), "y")
    compare.assert_same_bits(states[1], states[0].repeat(times, 1, 1, 1), "state")
    compare.assert_same_bits(windows[1], windows[0].repeat(times, 1, 1), "window")


def test_row_10_other_batches_lengths_and_views_compile_nothing():
    """After one call of each kind, a serving process compiles nothing."""
    layer = Layer(40, 4, **SIZE)
    big = Layer(300, 4, **SIZE)
    for x, rows in ((layer, 1), (layer, 40), (big, 300)):
        for tokens in (1, 2):
            x.decode(x.state, slice(0, rows), tokens)
    before = variants()
    for x, rows in ((layer, slice(3, 5)), (layer, slice(7, 30)), (big, slice(1, 290))):
        for tokens in (1, 2, 3, 4):
            x.decode(x.state, rows, tokens)
    assert variants() == before


def test_row_22_two_streams_at_once_have_the_bits_of_one():
    layers = [Layer(4, seed=seed, **SIZE) for seed in (1, 2)]
    alone = []
    for layer in layers:
        pools = layer.state.clone(), layer.window.clone()
        alone.append((layer.step(*pools), *pools))
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    for _ in range(200):
        found = []
        for layer, stream in zip(layers, streams, strict=True):
            with torch.cuda.stream(stream):
                pools = layer.state.clone(), layer.window.clone()
                found.append((layer.step(*pools), *pools))
        torch.cuda.synchronize()
        for got, expected in zip(found, alone, strict=True):
            for x, y in zip(got, expected, strict=True):
                assert torch.equal(x, y)


def test_a_call_in_a_compiled_function_is_the_call():
    layer = Layer(3, **SIZE)
    plain, compiled = layer.state.clone(), layer.state.clone()
    expected = layer.decode(plain)
    got = torch.compile(lambda s: layer.decode(s), fullgraph=True)(compiled)
    compare.assert_same_bits(got, expected, "o")
    compare.assert_same_bits(compiled, plain, "state")


def test_explain_names_this_backend():
    layer = Layer(2, **SIZE)
    keywords = layer.delta() | {"state": layer.state}
    assert "decode: triton" in str(sluice.explain("decode", **keywords))


def first_calls(index: int) -> list[torch.Tensor]:
    """A prompt and its next token, on a device that need not be the current one."""
    random = torch.Generator().manual_seed(0)
    device = torch.device("cuda", index)

    def tokens(T: int) -> dict[str, torch.Tensor]:
        sizes = {"q": (2, 128), "k": (2, 128), "v": (4, 128), "a": (4,), "b": (4,)}
        drawn = {n: torch.randn(1, T, *size, generator=random) for n, size in sizes.items()}
        placed = {n: x.to(device, torch.bfloat16) for n, x in drawn.items()}
        return {"g" if n == "a" else "beta" if n == "b" else n: x for n, x in placed.items()}

    rates = {n: torch.zeros(4, device=device) for n in ("A_log", "dt_bias")}
    options = {"normalize_qk": True, **rates}
    state = torch.zeros(1, 4, 128, 128, device=device)
    o, state = sluice.prefill(**tokens(100), state=state, **options)
    y, state = sluice.decode(**tokens(1), state=state, **options)
    return [x.cpu() for x in (o, y, state)]


@pytest.mark.parametrize("index", [0, 1])
def test_row_32_the_first_calls_of_a_spawned_process(index):
    """Device properties in a process that has not read them, and of another device."""
    if index >= torch.cuda.device_count():
        pytest.skip("there is one GPU")
    expected = first_calls(0)
    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(first_calls, (index,))
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
        assert x.any()
