"""SGLang's unified pools: one buffer, entries with every layer's states, and slots that move.

SGLang's own classes on a CPU. Pools whose strides the operators take are served; with others
SGLang's own kernels run, and one line says so.
"""
# ruff: noqa: E402

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.engines.no_torchvision import without_torchvision

without_torchvision()

from sglang.srt.mem_cache.unified_memory_pool import UnifiedHybridReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sluice.integrations.sglang import backend, private
from sluice.testing.compare import assert_same_bits, assert_within, tolerance
from tests.engines.sglang_server import Drafts, Server, cat, part

LAYERS, W, CHUNK = (0, 2, 5), 4, 64
TOLERANCE = 10 * tolerance(torch.float32, device="cpu")


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(private, "_said", set())
    monkeypatch.setattr(backend, "_compiled", set())  # of which the log tells
    servers = []

    def made(**options) -> Server:
        servers.append(Server(4, layers=LAYERS, W=W, **options))
        return servers[-1]

    yield made
    for server in servers:
        server.close()


@pytest.fixture
def lines(caplog):
    with caplog.at_level("INFO", logger="sglang.srt.plugins.sluice"):
        yield lambda: [line for line in caplog.messages if line.startswith("sluice: ")]


def test_a_unified_pool_is_served_also_after_its_slots_have_moved(start, lines):
    """Slots are virtual: SGLang frees one, moves the last entry into its place, and goes on."""
    server = start(unified=True)
    pool = server.runner.req_to_token_pool
    assert type(pool) is UnifiedHybridReqToTokenPool
    state = server.cache().temporal
    assert not state.is_contiguous()
    assert state.stride(0) > state[0].numel()
    first, one, two = pool.mamba_allocator.alloc(3).tolist()
    inputs = {layer: (server.inputs(40), server.inputs(90)) for layer in server.layers}
    want = {layer: [server.exact(*x, layer)[0] for x in xs] for layer, xs in inputs.items()}

    def step(mode, at, new) -> None:
        batch = server.batch(mode, [1, 2], [one, two], at, new)
        server.backend.init_forward_metadata(batch)
        for layer, xs in inputs.items():
            parts = [part(x, p, p + n) for x, p, n in zip(xs, at, new, strict=True)]
            got = server.forward(batch, *cat(*parts), layer)
            expected = [y[p : p + n] for y, p, n in zip(want[layer], at, new, strict=True)]
            assert_within(got[0].double(), torch.cat(expected), TOLERANCE, name=f"{mode} at {at}")

    step(ForwardMode.EXTEND, [0, 0], [30, 70])
    step(ForwardMode.DECODE, [30, 70], [1, 1])
    before = pool.translate_mamba_indices(torch.tensor([one, two]))
    pool.mamba_allocator.free(torch.tensor([first]))
    after = pool.translate_mamba_indices(torch.tensor([one, two]))
    assert before.tolist() != after.tolist()
    step(ForwardMode.DECODE, [31, 71], [1, 1])
    step(ForwardMode.EXTEND, [32, 72], [8, 18])
    (line,) = lines()
    assert line.startswith("sluice: serves decode and extend of gated delta layers: ")


def test_a_prefix_is_kept_in_a_unified_pool_and_not_in_a_slot_that_was_freed(start):
    """Reliability row 35. SGLang translates a freed slot to -1."""
    server = start(unified=True)
    pool = server.runner.req_to_token_pool
    slots = pool.mamba_allocator.alloc(6)
    one, two, kept, gone = slots[[1, 2, 5, 0]].tolist()
    pool.mamba_allocator.free(slots[:1])
    x, y = server.inputs(100), server.inputs(80)
    batch = server.batch(ForwardMode.EXTEND, [1, 2], [one, two], [0, 0], [100, 80])
    batch.mamba_track_mask = torch.tensor([True, True])
    batch.mamba_track_indices = torch.tensor([kept, gone])
    batch.mamba_track_seqlens = torch.tensor([100, 80], dtype=torch.int32)
    server.run(batch, *cat(x, y))
    cache = server.cache()
    at = pool.translate_mamba_indices(torch.tensor([one, two, kept]))
    _, window, state = server.exact(*part(x, 0, CHUNK))
    assert_within(cache.temporal[at[2]].double(), state, TOLERANCE, name="state")
    assert_same_bits(cache.conv[0][at[2]], window.float(), "window")
    rest = [i for i in range(len(cache.temporal)) if i not in at.tolist()]
    assert cache.temporal[rest].isnan().all()
    assert cache.conv[0][rest].isnan().all()


def test_drafts_in_a_unified_pool_are_sglangs_own(start, lines, monkeypatch):
    """Its slots may move between a verification and the commit."""
    server, asked = start(unified=True, drafts=Drafts(4)), []
    own = private.base()
    monkeypatch.setattr(own, "forward_extend", lambda self, *args, **kwargs: asked.append(args))
    slots = server.runner.req_to_token_pool.mamba_allocator.alloc(1).tolist()
    batch = server.batch(ForwardMode.TARGET_VERIFY, [1], slots, [0], [4])
    server.run(batch, *server.inputs(4))
    server.run(batch, *server.inputs(4))
    assert len(asked) == 2
    assert lines() == ["sluice: SGLang's own kernels serve draft tokens with unified memory"]


def _columns_first(cache):
    """The recurrent states' last two dimensions in the other order in memory."""
    turned = cache.temporal.transpose(-1, -2).contiguous().transpose(-1, -2)
    return dataclasses.replace(cache, temporal=turned)


def _windows_that_overlap(cache):
    """As SGLang stores the windows of drafts: each shares columns with the next."""
    conv = cache.conv[0]
    whole = torch.zeros(*conv.shape[:2], conv[0, 0].numel() + 1)
    shared = whole.as_strided(conv.shape, (conv.stride(0), 1, *conv.stride()[2:]))
    return dataclasses.replace(cache, conv=[shared])


def _states_of_float64(cache):
    return dataclasses.replace(cache, temporal=cache.temporal.double())


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (_columns_first, "recurrent states that are not contiguous"),
        (_windows_that_overlap, "conv_qkv: state: expected"),
        (_states_of_float64, "what sluice does not take"),
    ],
)
def test_pools_that_the_operators_do_not_take_are_sglangs_own(
    start, lines, monkeypatch, other, reason
):
    """Decode, also with the pair of projections, and extend: one line each, and never an error."""
    server, asked = start(unified=True), []
    pool = server.runner.req_to_token_pool
    pool.mamba_pool.mamba_cache = other(pool.mamba_pool.mamba_cache)
    for name in ("forward_decode", "forward_extend"):
        monkeypatch.setattr(
            private.base(), name, lambda self, *args, name=name, **more: asked.append((name, args))
        )
    slots = pool.mamba_allocator.alloc(1).tolist()
    for _ in range(2):
        qkv, a, b = server.inputs(5)
        batch = server.batch(ForwardMode.EXTEND, [1], slots, [0], [5])
        server.run(batch, qkv, a, b)
        qkv, a, b = server.inputs(1)
        batch = server.batch(ForwardMode.DECODE, [1], slots, [5], [1])
        pair = torch.cat([qkv, server.draw(1, 32)], dim=1), torch.cat([b, a], dim=1)
        server.run(batch, pair, None, None)
        server.run(batch, qkv, a, b)
    assert [name for name, _ in asked] == ["forward_extend", *["forward_decode"] * 2] * 2
    assert [type(args[2]) for _, args in asked][1:3] == [tuple, torch.Tensor]
    extend, decode = lines()
    assert extend.startswith("sluice: SGLang's own kernels serve extend with ")
    assert decode.startswith("sluice: SGLang's own kernels serve decode with ")
    assert all(reason in line for line in (extend, decode))
