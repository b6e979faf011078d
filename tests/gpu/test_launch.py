"""Compiling ahead: calls that launch nothing, and kernels that several threads compile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("triton", minversion="3.6")

import triton
from triton.runtime._async_compile import active_mode

from sluice.backends import triton as portable
from sluice.backends.triton import launch
from sluice.backends.triton.decode import decode_kernel
from sluice.backends.triton.verify import commit_kernel


class Kernel:
    """What ``launch.run`` sees of a kernel."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def warmup(self, **arguments: Any) -> None:
        self.seen.append(f"compiled {arguments}")

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda **arguments: self.seen.append(f"launched {grid} {arguments}")


def test_calls_ahead_compile_and_launch_nothing():
    kernel = Kernel()

    def call(programs: int) -> None:
        launch.run(kernel, programs, {"x": 1}, {"num_warps": 4})

    with launch.compiling([lambda: call(3)]):
        assert kernel.seen == ["compiled {'x': 1, 'num_warps': 4, 'grid': (3,)}"]
        call(5)
    call(7)
    wanted = [f"launched ({n},) {{'x': 1, 'num_warps': 4}}" for n in (5, 7)]
    assert kernel.seen[1:] == wanted


def test_a_call_that_fails_ahead_leaves_launching_on():
    kernel = Kernel()
    with pytest.raises(ZeroDivisionError), launch.compiling([lambda: 1 / 0]):
        pass
    launch.run(kernel, 1, {}, {})
    assert kernel.seen == ["launched (1,) {}"]


def test_kernels_are_compiled_beside_this_thread():
    """Triton asks the scope's mode, which hands a compilation to another thread."""
    where: list[threading.Thread] = []

    def call() -> None:
        active_mode.get().submit("key", lambda: where.append(threading.current_thread()), print)

    with launch.compiling([call]):
        pass
    assert where
    assert where[0] is not threading.current_thread()


def compile_aside(key: str, compilation: Callable[[], Any]) -> Any:
    """What Triton does with a kernel it has to compile while a scope is open."""
    return active_mode.get().submit(key, compilation, lambda kernel: None)


def test_a_scope_within_another_makes_no_calls_and_lets_the_outer_one_compile():
    """As in ``warmup``, whose calls open scopes of their own, ahead and within it."""
    kernel, modes = Kernel(), []

    def call() -> None:
        with launch.compiling([lambda: launch.run(kernel, 9, {}, {})]):
            modes.append(active_mode.get())
            launch.run(kernel, 1, {}, {})
        assert active_mode.get() is modes[0]

    with launch.compiling([call]):
        assert kernel.seen == ["compiled {'grid': (1,)}"]
        call()
    assert kernel.seen[1:] == ["launched (1,) {}"]
    assert modes[0] is modes[1] is not None
    assert active_mode.get() is None


def test_a_scope_of_tritons_own_keeps_compiling():
    """A caller who compiles aside already is not refused, and makes no calls twice."""
    kernel = Kernel()
    with ThreadPoolExecutor(1) as pool, triton.AsyncCompileMode(pool) as mode:
        with launch.compiling([lambda: launch.run(kernel, 9, {}, {})]):
            launch.run(kernel, 1, {}, {})
        assert active_mode.get() is mode
    assert kernel.seen == ["launched (1,) {}"]


def test_what_does_not_compile_raises_where_it_is_launched_and_ends_the_scope():
    def fails() -> None:
        raise SyntaxError("no such kernel")

    ahead = launch.compiling([lambda: compile_aside("key", fails)])
    with pytest.raises(SyntaxError, match="no such kernel"), ahead:
        compile_aside("key", fails).result()  # as a launch does
    assert active_mode.get() is None
    with launch.compiling([lambda: compile_aside("other", lambda: 7)]):
        assert compile_aside("other", fails).result() == 7


def test_an_exception_in_the_scope_is_the_one_that_is_raised():
    """Not that of a kernel which did not compile, and nothing stays open after it."""

    def fails() -> None:
        raise SyntaxError("no such kernel")

    def call() -> None:
        compile_aside("key", fails)

    with pytest.raises(ZeroDivisionError), launch.compiling([call]):
        raise ZeroDivisionError
    assert active_mode.get() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_scope_that_cannot_wait_for_its_kernels_is_closed(monkeypatch, error):
    """As when a person interrupts a first call: kernels of later calls compile again."""

    def interrupted(futures: Any) -> Any:
        raise error

    monkeypatch.setattr("triton.runtime._async_compile.as_completed", interrupted)
    with pytest.raises(error), launch.compiling([]):
        pass
    assert active_mode.get() is None


@pytest.mark.skipif(portable.interpreted(), reason="kernels have no signature there")
def test_processes_share_the_kernels_out():
    """Each is one process's; the same with another size, or other tensors, is the same kernel."""
    kernels = (decode_kernel, commit_kernel)
    calls = [(k, {"BLOCK_V": v, "N": n}) for k in kernels for v in (8, 16) for n in (1, 2)]
    shares = [launch.Share(i, 3) for i in range(3)]
    owners = [[i for i, share in enumerate(shares) if share.has(*call)] for call in calls]
    assert owners == [[0], [0], [1], [1], [2], [2], [0], [0]]
    assert all(launch.Share().has(*call) for call in calls)
