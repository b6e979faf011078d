"""Which backend serves a call, and why the others do not.

Each backend declares what it serves and refuses the rest with a reason. The first in ``ORDER`` that
takes the problem is chosen, unless the program names one (``backend=`` or ``use_backend``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from sluice.contract.errors import BackendError, SlowPathWarning
from sluice.contract.problem import Problem

ORDER: tuple[str, ...] = ("hopper", "triton", "cpu", "chunked", "reference")
"""Backends from the fastest to the one that serves everything."""

Kernel = Callable[[Any, Any], None]

_forced: ContextVar[str | None] = ContextVar("sluice_backend", default=None)
_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Explanation:
    """The outcome of a choice: the backend, and each other one's reason."""

    op: str
    chosen: str | None
    refusals: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.chosen or 'no backend serves this call'}"]
        return "\n".join(lines + [f"  {name}: {reason}" for name, reason in self.refusals])

    __repr__ = __str__


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Run the calls in this scope on one backend, or fail with its reason for refusing them.

    >>> import sluice, torch
    >>> x = torch.ones(2, 4)
    >>> with sluice.use_backend("reference"):
    ...     y = sluice.rms_norm_gated(x, x, torch.ones(4))
    """
    _known(name)
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def select(problem: Problem, backend: str | None = None) -> Kernel:
    """The function that serves ``problem``; warns once when a faster backend refused it."""
    kernel, warning = _select(problem, _forced.get() if backend is None else backend)
    if warning is not None and (problem.op, warning) not in _warned:
        _warned.add((problem.op, warning))
        warnings.warn(warning, SlowPathWarning, stacklevel=_depth())
    return kernel


def explain_problem(problem: Problem, backend: str | None = None) -> Explanation:
    """Which backend serves ``problem`` and why each one before it does not."""
    return _explain(problem, _forced.get() if backend is None else backend)


@functools.lru_cache(maxsize=4096)
def _explain(problem: Problem, backend: str | None) -> Explanation:
    _known(backend)
    chosen, refusals = None, []
    for name in ORDER:
        reason = refusal(name, problem)
        if backend is not None and name != backend:
            reason = f"not asked for (backend={backend!r})"
        if reason is not None:
            refusals.append((name, reason))
        elif chosen is None:
            chosen = name
        else:
            refusals.append((name, f"serves this too; {chosen} comes first"))
    return Explanation(problem.op, chosen, tuple(refusals))


@functools.lru_cache(maxsize=4096)
def _select(problem: Problem, backend: str | None) -> tuple[Kernel, str | None]:
    explanation = _explain(problem, backend)
    if explanation.chosen is None:
        raise BackendError(str(explanation))
    kernel = _module(explanation.chosen).kernel(problem.op)
    if backend is not None:
        return kernel, None
    before = ORDER[: ORDER.index(explanation.chosen)]
    slower = [
        f"{name}: {reason}"
        for name, reason in explanation.refusals
        if name in before and _meant_for(name, problem)
    ]
    if not slower:
        return kernel, None
    text = f"{problem.op} runs on the slower backend {explanation.chosen!r}; " + "; ".join(slower)
    return kernel, text


def refusal(name: str, problem: Problem) -> str | None:
    """Why the backend does not serve ``problem``; None if it does."""
    missing = unavailable(name)
    if missing is not None:
        return missing
    module = _module(name)
    if problem.op not in module.OPS:
        return f"has no {problem.op}"
    if problem.device.type not in module.DEVICES:
        return f"runs on {', '.join(module.DEVICES)}, not on {problem.device.type}"
    reason: str | None = module.refuse(problem)
    return reason


def unavailable(name: str) -> str | None:
    """Why the backend cannot run here at all (a missing package or device); None if it can."""
    try:
        reason: str | None = _module(name).unavailable()
    except Exception as error:  # a broken install raises anything: OSError, RuntimeError, ...
        return f"cannot be imported: {error}"
    return reason


def served(name: str) -> tuple[str, ...]:
    """The operators a backend has."""
    return tuple(_module(name).OPS)


def devices(name: str) -> tuple[str, ...]:
    """The device types a backend runs on."""
    return tuple(_module(name).DEVICES)


@contextlib.contextmanager
def compiling(
    device: str, calls: Iterable[Callable[[], Any]], share: tuple[int, int] = (0, 1)
) -> Iterator[None]:
    """A scope before which the backends of a device type begin to compile.

    Kernels that do not depend on shapes are compiled at once. Those of ``calls`` are compiled on
    all cores, where a backend can; a call within the scope waits for its own alone. ``share``
    (i, n): process i of n, each of which compiles a part of them.
    """
    with contextlib.ExitStack() as scopes:
        for name in ORDER:
            if unavailable(name) is None and device in _module(name).DEVICES:
                getattr(_module(name), "warmup", lambda: None)()
                if hasattr(_module(name), "compiling"):
                    scopes.enter_context(_module(name).compiling(calls, share))
        yield


def _meant_for(name: str, problem: Problem) -> bool:
    """Whether a refusal is worth a warning: the backend has this operator for this device.

    What cannot even be imported is always worth one.
    """
    try:
        module = _module(name)
    except Exception:
        return True
    return problem.op in module.OPS and problem.device.type in module.DEVICES


def _depth() -> int:
    """How far up the program's own line is: a warning points there, not into this package."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("sluice."):
        depth, frame = depth + 1, frame.f_back
    return depth


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"sluice.backends.{name}")


def _known(name: str | None) -> None:
    if name is not None and name not in ORDER:
        raise BackendError(f"backend: expected one of {list(ORDER)}, got {name!r}")
