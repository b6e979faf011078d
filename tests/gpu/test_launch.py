"""Compiling ahead: calls that launch nothing, and kernels that several threads compile."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("triton")

from sluice.backends.triton import launch


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
    from triton.runtime._async_compile import active_mode

    where: list[threading.Thread] = []

    def call() -> None:
        active_mode.get().submit("key", lambda: where.append(threading.current_thread()), print)

    with launch.compiling([call]):
        pass
    assert where
    assert where[0] is not threading.current_thread()
