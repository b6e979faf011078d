"""Compiling ahead: once per variant of a kernel, on several threads, in several processes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from sluice import calls, dispatch
from sluice.backends import triton as portable
from sluice.backends.triton import compiler, launch, triton_private, variants
from sluice.layers import QwenShape
from sluice.model_calls import ModelCalls
from tests.gpu import cross, fake_driver
from tests.gpu.cross import bound, gpu_like

pytestmark = pytest.mark.skipif(portable.interpreted(), reason="kernels have no signature there")

DEVICE = torch.device("cuda", 0)
MODEL = ModelCalls(QwenShape("", 64, 2, 4, 4, (0,)))


@contextlib.contextmanager
def anywhere(_: object) -> Iterator[None]:
    yield


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_driver.Driver]:
    with gpu_like("sm_90"):
        found = fake_driver.install(monkeypatch)
        monkeypatch.setattr(torch.cuda, "device", anywhere)
        yield found
    calls.forget()


@pytest.fixture
def compiled(driver: Any, monkeypatch: pytest.MonkeyPatch) -> list[variants.Variant]:
    """Every variant that has been compiled, as often as it has been."""
    found: list[variants.Variant] = []

    def watched(needed: variants.Variant, target: Any) -> Any:
        found.append(needed)
        return fake_driver.compile_nothing(needed, target)

    monkeypatch.setattr(compiler, "compile_variant", watched)
    return found


def specs(*rows: int) -> list[Any]:
    """Of decode, one token and four, and step, for so many rows."""
    made = [
        call
        for N in rows
        for call in (
            MODEL.call("decode", "", N, 1),
            MODEL.call("decode", "", N, 4),
            MODEL.call("step", "", N, 1, True),
        )
    ]
    return [call.spec(DEVICE) for call in made]


def test_calls_ahead_compile_once_and_launch_nothing(driver, compiled):
    portable.compile(specs(1, 2, 3))
    assert driver.launched == []
    assert len(compiled) == len(set(compiled)) == 3
    assert sorted(driver.loaded) == ["decode_kernel", "decode_kernel", "step_kernel"]
    portable.compile(specs(1, 2, 3, 5))
    for spec in specs(7):
        bound(spec).bound()
    assert len(compiled) == 3
    assert len(driver.loaded) == 3


def test_prefill_compiles_the_kernels_of_every_plan(compiled):
    spec = MODEL.call("prefill", "", 2, 2048, True).spec(DEVICE)
    portable.compile([spec])
    needed = {variants.variant(call) for call in bound(spec).calls}
    assert needed < set(compiled)
    assert len(compiled) == len(set(compiled))


def test_kernels_are_compiled_beside_each_other(driver, monkeypatch):
    """Two threads are needed to pass the barrier."""
    meeting, where = threading.Barrier(2, timeout=30), []

    def together(needed: variants.Variant, target: Any) -> Any:
        where.append(threading.current_thread())
        if needed.kernel.name == "decode_kernel":
            meeting.wait()
        return fake_driver.compile_nothing(needed, target)

    monkeypatch.setattr(compiler.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(compiler, "compile_variant", together)
    portable.compile(specs(1))
    assert len(where) == 3
    assert threading.main_thread() not in where


def test_the_kernels_of_one_call_are_compiled_beside_each_other(driver, monkeypatch):
    """As in a process's first prefill."""
    spec = MODEL.call("prefill", "", 2, 2048, True).spec(DEVICE)
    needed = {variants.variant(call) for call in bound(spec).calls}
    assert len(needed) > 2
    meeting = threading.Barrier(len(needed), timeout=30)

    def together(needed: variants.Variant, target: Any) -> Any:
        meeting.wait()
        return fake_driver.compile_nothing(needed, target)

    monkeypatch.setattr(compiler.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(compiler, "compile_variant", together)
    bound(spec).bound()
    assert len(driver.loaded) == len(needed)


@pytest.mark.parametrize("error", [SyntaxError, KeyboardInterrupt])
def test_what_does_not_compile_raises_and_compiles_when_it_can(driver, monkeypatch, error):
    """Ahead and in a call; nothing is remembered of it, and nothing is launched."""
    broken = True

    def fails(needed: variants.Variant, target: Any) -> Any:
        if broken and needed.kernel.name == "step_kernel":
            raise error("no such kernel")
        return fake_driver.compile_nothing(needed, target)

    monkeypatch.setattr(compiler, "compile_variant", fails)
    (step,) = (spec for spec in specs(1) if spec.op == "step")
    for _ in range(2):
        with pytest.raises(error, match="no such kernel"):
            portable.compile(specs(1))
        with pytest.raises(error, match="no such kernel"):
            bound(step).bound()
    decode = next(spec for spec in specs(1) if spec.op == "decode")
    bound(decode).bound()
    broken = False
    portable.compile(specs(1))
    bound(step).bound()
    assert sorted(driver.loaded) == ["decode_kernel", "decode_kernel", "step_kernel"]
    assert driver.launched == []


def test_processes_share_the_kernels_out(driver, compiled, monkeypatch):
    """Each is one process's, the same one every time, and together they are all of them."""
    portable.compile(specs(1, 2), share=(0, 1))
    everything, shares = list(compiled), []
    for i in range(3):
        monkeypatch.setattr(compiler, "_compiled", {})
        monkeypatch.setattr(launch, "_codes", {})
        driver.loaded.clear()
        compiled.clear()
        portable.compile(specs(1, 2), share=(i, 3))
        shares.append(list(compiled))
        assert driver.loaded == [], "another process compiles for this one, which will load"
    assert [len(share) for share in shares] == [1, 1, 1]
    assert {v for share in shares for v in share} == set(everything)


def test_progress_is_told_of_each_kernel(compiled):
    told: list[tuple[str, int, int]] = []
    portable.compile(specs(1), progress=lambda *what: told.append(what))
    assert [(done, of) for _, done, of in told] == [(1, 3), (2, 3), (3, 3)]
    assert {name for name, *_ in told} == {"decode_kernel", "step_kernel"}
    told.clear()
    portable.compile(specs(1), progress=lambda *what: told.append(what))
    assert told == []


def test_dispatch_hands_each_call_to_the_backend_that_serves_it(monkeypatch):
    heard: dict[str, list[str]] = {}

    class Backend:
        DEVICES = ("cuda",)

        def __init__(self, name: str, ops: tuple[str, ...]) -> None:
            self.name, self.OPS = name, dict.fromkeys(ops, "module")

        def unavailable(self) -> None:
            return None

        def refuse(self, spec: Any) -> None:
            return None

        def compile(self, specs: Any, share: Any, progress: Any) -> None:
            assert share == (1, 2)
            progress(self.name, len(specs), 0)
            heard[self.name] = [spec.op for spec in specs]

    backends = {"fast": Backend("fast", ("step",)), "slow": Backend("slow", ("step", "decode"))}
    monkeypatch.setattr(dispatch, "ORDER", tuple(backends))
    monkeypatch.setattr(dispatch, "_module", backends.__getitem__)
    told: list[str] = []
    dispatch.compile(specs(1), (1, 2), lambda name, *_: told.append(name))
    assert heard == {"fast": ["step"], "slow": ["decode", "decode"]}
    assert told == ["fast", "slow"]


@triton.jit
def store_one(x_ptr):
    """A kernel that takes no time to compile."""
    tl.store(x_ptr, 1)


def test_one_thread_at_a_time_reads_the_text_of_kernels(monkeypatch):
    """Some releases of Python raise SystemError when two threads parse at once."""
    parse, inside, most = type(store_one).parse, [], []

    def watched(self: Any) -> Any:
        inside.append(self)
        most.append(len(inside))
        time.sleep(0.02)  # meanwhile another thread would get here, if none stopped it
        try:
            return parse(self)
        finally:
            inside.pop()

    def compile_for(kind: str) -> None:
        source = triton_private.source(store_one, {"x_ptr": kind}, {}, {})
        triton.compile(source, target=cross.TARGETS["sm_80"])

    monkeypatch.setattr(type(store_one), "parse", watched)
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_for, ("*fp32", "*i32", "*i64", "*fp64")))
    assert len(most) >= 4
    assert max(most) == 1
