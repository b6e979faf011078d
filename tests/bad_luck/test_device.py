"""A driver that refuses, a stream that fails, a device that is lost: an error each time.

Nothing is launched here (tests/gpu/fake_driver.py), except by the tests that need a GPU.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from sluice import calls, torch_private
from sluice.backends import cuda_driver

LOST, ILLEGAL, OUT_OF_MEMORY = 46, 700, 2  # CUDA_ERROR_DEVICE_UNAVAILABLE, _ILLEGAL_ADDRESS, ...
SOURCES = Path(__file__).parents[2] / "src"


def prompt(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, 70, heads, 128).half() for heads in (1, 1, 2))
    g, beta = -torch.rand(2, 70, 2), torch.rand(2, 70, 2)
    state, out = torch.zeros(2, 2, 128, 128), torch.zeros(2, 70, 2, 128).half()
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state, "out": out}


def one_token() -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(2, 1, 2, 16).half()
    gates = {"g": -torch.rand(2, 1, 2), "beta": torch.rand(2, 1, 2)}
    return {"q": x, "k": x, "v": x, **gates, "state": torch.zeros(2, 2, 16, 16)}


CALLS = {
    "hopper": lambda: sluice.prefill(**prompt(), backend="hopper"),
    "prefill": lambda: sluice.prefill(**prompt(), backend="triton"),
    "decode": lambda: sluice.decode(**one_token(), backend="triton"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("code", [LOST, ILLEGAL, OUT_OF_MEMORY])
def test_a_lost_device_is_an_error_in_every_call_and_nothing_waits(name, code, driver):
    CALLS[name]()
    driver.result = code
    for _ in range(3):
        with pytest.raises(cuda_driver.DriverError, match=rf"the fake refuses \(CUDA error {code}"):
            CALLS[name]()
    driver.result = 0
    driver.launched.clear()
    CALLS[name]()  # no lock is held, no launch is half prepared
    assert driver.launched


@pytest.mark.parametrize("name", CALLS)
def test_a_device_lost_before_the_first_call_is_an_error_and_the_call_may_come_again(name, driver):
    driver.result = LOST
    with pytest.raises(cuda_driver.DriverError):
        CALLS[name]()
    driver.result = 0
    CALLS[name]()
    assert driver.launched


@pytest.mark.parametrize("name", ["hopper", "prefill"])
def test_the_kernels_after_one_that_is_refused_do_not_start(name, driver, monkeypatch):
    CALLS[name]()
    number = len(driver.launched)
    assert number > 1
    launch_it = driver.cuLaunchKernelEx
    for allowed in range(number):
        left = [allowed]

        def limited(config, function, places, extra, left=left):
            if not left[0]:
                return ILLEGAL
            left[0] -= 1
            return launch_it(config, function, places, extra)

        calls.forget()
        monkeypatch.setattr(driver, "cuLaunchKernelEx", limited)
        driver.launched.clear()
        with pytest.raises(cuda_driver.DriverError, match="CUDA error 700"):
            CALLS[name]()
        assert len(driver.launched) == allowed


@pytest.mark.parametrize("allowed", range(4))
def test_a_descriptor_that_cannot_be_moved_is_made_anew(allowed, driver, monkeypatch):
    """TMA descriptors are moved one after another; here some move, and the next one fails."""
    first, second = prompt(0), prompt(1)
    move, moves = driver.cuTensorMapReplaceAddress, [100]

    def limited(where, address):
        moves[0] -= 1
        return ILLEGAL if moves[0] < 0 else move(where, address)

    monkeypatch.setattr(driver, "cuTensorMapReplaceAddress", limited)
    sluice.prefill(**first, backend="hopper")
    before = [_described(launched.arguments) for launched in driver.launched]
    moves[0] = allowed
    with pytest.raises(cuda_driver.DriverError):
        sluice.prefill(**second, backend="hopper")
    moves[0] = 100
    driver.launched.clear()
    sluice.prefill(**first, backend="hopper")  # the same addresses as at first
    assert [_described(launched.arguments) for launched in driver.launched] == before


def _described(arguments: dict[str, Any]) -> dict[str, int]:
    """Where the descriptors of a launch point, but for those into its workspace."""
    names = ("q_desc", "k_desc", "v_desc", "o_desc")
    return {name: arguments[name][0] for name in names if name in arguments}


def test_an_exception_from_a_stream_is_that_exception_and_nothing_starts(driver, monkeypatch):
    CALLS["decode"]()
    driver.launched.clear()

    def fails(index):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(torch_private, "current_stream", fails)
        for name in CALLS:
            with pytest.raises(RuntimeError, match="illegal memory access"):
                CALLS[name]()
    assert driver.launched == []
    CALLS["decode"]()
    assert len(driver.launched) == 1


def test_a_thread_that_meets_an_error_keeps_no_lock(driver):
    CALLS["prefill"]()
    driver.result, found = ILLEGAL, []

    def run():
        try:
            CALLS["prefill"]()
        except cuda_driver.DriverError as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 4
    driver.result = 0
    CALLS["prefill"]()


# ---- on a GPU: each in a process of its own, which cannot use its device afterwards --------------

BROKEN_STREAM = """
import torch, sluice
x = torch.randn(2, 1, 2, 64, device="cuda", dtype=torch.float16)
state = torch.zeros(2, 2, 64, 64, device="cuda")
sluice.decode(x, x, x, state=state)
torch.cuda.synchronize()
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    table = torch.zeros(4, device="cuda")
    table[torch.full((8,), 1 << 20, device="cuda")]   # an assertion on the device
for _ in range(100):
    try:
        sluice.decode(x, x, x, state=state)
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("clean:", type(error).__name__)
        break
"""
FORKED = """
import os, torch, sluice
x = torch.randn(2, 1, 2, 64, device="cuda", dtype=torch.float16)
state, out = torch.zeros(2, 2, 64, 64, device="cuda"), torch.empty_like(x)
sluice.decode(x, x, x, state=state, out=out)
torch.cuda.synchronize()
pid = os.fork()
if pid == 0:
    try:
        sluice.decode(x, x, x, state=state, out=out)
    except RuntimeError as error:
        print("clean:", type(error).__name__, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
sluice.decode(x, x, x, state=state, out=out)
torch.cuda.synchronize()
print("parent goes on")
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("program", [BROKEN_STREAM, FORKED], ids=["stream", "fork"])
def test_a_device_that_cannot_go_on_is_an_error_of_python(program):
    start = f"import sys; sys.path.insert(0, {str(SOURCES)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", start + program],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "clean: " in done.stdout, done.stderr
    if program is FORKED:
        assert "parent goes on" in done.stdout, done.stderr
