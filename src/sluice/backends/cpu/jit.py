"""How functions that kernels call are compiled.

They are never called from Python, so they need no wrappers. ``jit_inline`` is for what must not be
a call: functions of vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from sluice.backends.cpu.numba_private import OPTIONS, PIPELINE

_OPTIONS = {
    **OPTIONS,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": PIPELINE,
}

jit = njit(**_OPTIONS)
jit_inline = njit(forceinline=True, **_OPTIONS)


def named(*name: object) -> Callable[[Callable[..., Any]], Any]:
    """Name a function made by another: its name must tell it from its siblings.

    Symbols of compiled functions are made of names and a number counted in each process. A kernel
    from the disk brings those of the process that compiled it, and the linker takes equal symbols
    for the same function.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        function.__name__ = function.__qualname__ = "_".join(map(str, name))
        return function

    return decorate


def jit_as(*name: object) -> Callable[[Callable[..., Any]], Any]:
    """``jit`` for a ``named`` function."""
    return lambda function: jit(named(*name)(function))
