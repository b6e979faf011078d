"""Which backend serves a call, and why the others do not.

Each backend declares what it serves and refuses the rest with a reason. The first in ``ORDER`` that
takes the spec is chosen, unless the program names one (``backend=`` or ``use_backend``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from sluice.contract.errors import BackendError, GaveUpError, SlowPathWarning
from sluice.contract.names import BackendName
from sluice.contract.spec import Spec

ORDER: tuple[str, ...] = ("hopper", "triton", "cpu", "chunked", "reference")
"""Backends from the fastest to the one that serves everything."""

EXTRAS = {"hopper": "gpu", "triton": "gpu", "cpu": "cpu"}
"""The extra of the distribution that installs what a backend needs."""
LIBRARIES = ("sluice", "torch", "transformers", "accelerate", "fla")
"""Code between a program and an operator, to which a warning does not point."""

Launch = Callable[[Sequence[Tensor | None]], None]
"""A bound call: takes the tensors of a spec, in order, and starts its kernels."""
CheckValues = Callable[[Any, Any], None]
Progress = Callable[[str, int, int], None]
"""Called with a kernel's name, how many are done, and how many there are."""

_forced: ContextVar[str | None] = ContextVar("sluice_backend", default=None)
_warned: set[tuple[str, str]] = set()
when_a_backend_gives_up: list[Callable[[], object]] = []
"""Functions that forget what was bound: ``explain`` no longer names that backend."""


@dataclass(frozen=True)
class Explanation:
    """The outcome of a choice: the backend, and each other one's reason."""

    op: str
    chosen: str | None
    refusals: tuple[tuple[str, str], ...]
    origin: str | None = None  # where its kernels come from, if it says so

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.chosen or 'no backend serves this call'}"]
        if self.origin is not None:
            lines[0] += f" ({self.origin})"
        return "\n".join(lines + [f"  {name}: {reason}" for name, reason in self.refusals])

    __repr__ = __str__


@contextlib.contextmanager
def use_backend(name: BackendName | None) -> Iterator[None]:
    """Run the calls in this scope on one backend, or fail with its reason for refusing them.

    >>> import sluice, torch
    >>> x = torch.ones(2, 4)
    >>> with sluice.use_backend("reference"):
    ...     y = sluice.rms_norm_gated(x, x, torch.ones(4))
    """
    known(name)
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> str | None:
    """The backend of the innermost ``use_backend`` scope."""
    return _forced.get()


class Choice:
    """The backend chosen for a spec, and the launch it bound.

    Most calls run ``launch`` at once. ``special`` says that something is checked first: values,
    addresses that the backend needs to be multiples of 16 bytes, or a warning.
    """

    __slots__ = (
        "_elsewhere",
        "aligned",
        "always_checks",
        "backend",
        "check_values",
        "explanation",
        "launch",
        "spec",
        "special",
        "warning",
        "watches",
    )

    def __init__(
        self,
        spec: Spec,
        explanation: Explanation,
        backend: str | None,
        check_values: CheckValues | None = None,
        misplaced: Sequence[str] = (),
    ) -> None:
        self.launch, self.explanation = _bound(spec, explanation, backend, misplaced)
        explanation = self.explanation
        assert explanation.chosen is not None
        self.spec, self.backend, module = spec, backend, _module(explanation.chosen)
        self.warning = None if backend is not None else _warning(spec, explanation)
        self.aligned = tuple(map(spec.TENSORS.index, _aligned(module, spec)))
        self.check_values = check_values
        sees_values = spec.device.type == "cpu" and not getattr(module, "CHECKS_VALUES", False)
        self.always_checks = sees_values and check_values is not None
        self.special = self.always_checks or bool(self.aligned) or self.warning is not None
        self._elsewhere: dict[tuple[str, ...], Choice] = {}
        self.watches = False

    def watch(self, check: Callable[[Sequence[int]], None]) -> None:
        """Let the launch check addresses that it gathers anyhow, if it can (``watches``)."""
        if getattr(self.launch, "watchful", False):
            self.launch.watch = check  # type: ignore[attr-defined]
            self.watches = True

    def ready(self, tensors: Sequence[Any], validating: bool) -> Choice:
        """This choice, after its checks; or another one, where addresses decide."""
        if self.check_values is not None and (self.always_checks or validating):
            self.check_values(self.spec, self.spec.views(tensors))
        chosen = self
        for i in self.aligned:
            if tensors[i].data_ptr() % 16:
                names = self.spec.TENSORS
                where = (names[j] for j in self.aligned if tensors[j].data_ptr() % 16)
                chosen = self._for_addresses(tuple(where))
                break
        if chosen.warning is not None:
            _warn_once(self.spec.op, chosen.warning)
        return chosen

    def _for_addresses(self, where: tuple[str, ...]) -> Choice:
        if where not in self._elsewhere:
            explanation = explain(self.spec, self.backend, where)
            choice = Choice(self.spec, explanation, self.backend, misplaced=where)
            self._elsewhere[where] = choice
        return self._elsewhere[where]


def choose(spec: Spec, backend: str | None, check_values: CheckValues | None = None) -> Choice:
    """Choose a backend for ``spec`` and let it bind."""
    return Choice(spec, explain(spec, backend, briefly=True), backend, check_values)


def _bound(
    spec: Spec, explanation: Explanation, backend: str | None, misplaced: Sequence[str]
) -> tuple[Launch, Explanation]:
    """A launch by the chosen backend, or by the next one if that gives up; and its name."""
    for _ in ORDER:
        if explanation.chosen is None:
            break
        try:
            return _module(explanation.chosen).bind(spec), explanation
        except GaveUpError:
            _gave_up()
            explanation = explain(spec, backend, misplaced, briefly=True)
    raise BackendError(str(explanation))


def try_out(spec: Spec) -> None:
    """Let the backend that would serve ``spec`` compile it, if it never ran such a call."""
    chosen = explain(spec, briefly=True).chosen
    if chosen is not None and untried(chosen) is not None:
        try:
            _module(chosen).bind(spec)
        except GaveUpError:
            _gave_up()


def misplaced(spec: Spec, tensors: Sequence[Tensor | None]) -> tuple[str, ...]:
    """Names of tensors with data that do not begin at a multiple of 16 bytes."""
    return tuple(
        name
        for name, x in zip(spec.TENSORS, tensors, strict=True)
        if x is not None and not x.is_meta and x.data_ptr() % 16
    )


def explain(
    spec: Spec, backend: str | None = None, misplaced: Sequence[str] = (), briefly: bool = False
) -> Explanation:
    """Which backend serves ``spec`` and why each one before it does not.

    ``misplaced`` are tensors that do not begin at a multiple of 16 bytes. ``briefly``: leave
    out the backends after the one that serves.
    """
    backend = _forced.get() if backend is None else backend
    known(backend)
    chosen, refusals = None, []
    for name in ORDER:
        if briefly and chosen is not None:
            break
        reason = refusal(name, spec, misplaced)
        if backend is not None and name != backend:
            reason = f"not asked for (backend={backend!r})"
        if reason is not None:
            refusals.append((name, reason))
        elif chosen is None:
            chosen = name
        else:
            refusals.append((name, f"serves this too; {chosen} comes first"))
    if briefly:
        return _brief(spec.op, chosen, tuple(refusals))
    say = None if chosen is None else getattr(_module(chosen), "origin", None)
    return Explanation(spec.op, chosen, tuple(refusals), None if say is None else say(spec))


_brief = functools.lru_cache(maxsize=256)(Explanation)
"""Thousands of bindings are kept, and most of their explanations are the same."""


def _warning(spec: Spec, explanation: Explanation) -> str | None:
    """What to say if a faster backend that is meant for this call refused it."""
    assert explanation.chosen is not None
    before = ORDER[: ORDER.index(explanation.chosen)]
    slower = [
        f"{name}: {reason}"
        for name, reason in explanation.refusals
        if name in before and _meant_for(name, spec)
    ]
    if not slower:
        torch_only = explanation.chosen in ("chunked", "reference") and spec.device.type != "cpu"
        if spec.op.endswith("_backward") and torch_only:  # serving has kernels, training may not
            return f"{spec.op} runs in plain torch: exact, but slower than a kernel"
        return None
    return f"{spec.op} runs on the slower backend {explanation.chosen!r}; " + "; ".join(slower)


def refusal(name: str, spec: Spec, misplaced: Sequence[str] = ()) -> str | None:
    """Why the backend does not serve ``spec``; None if it does."""
    missing = unavailable(name)
    if missing is not None:
        return missing
    module = _module(name)
    if spec.op not in module.OPS:
        return f"has no {spec.op}"
    if spec.device.type not in module.DEVICES:
        return f"runs on {', '.join(module.DEVICES)}, not on {spec.device.type}"
    reason: str | None = module.refuse(spec)
    if reason is None:
        for tensor in _aligned(module, spec) if misplaced else ():
            if tensor in misplaced:
                return f"needs {tensor} to begin at a multiple of 16 bytes"
    return reason


def _aligned(module: ModuleType, spec: Spec) -> Sequence[str]:
    """Tensors whose addresses a backend needs to be multiples of 16 bytes."""
    names: Sequence[str] = module.aligned(spec) if hasattr(module, "aligned") else ()
    return names


def unavailable(name: str) -> str | None:
    """Why the backend cannot run here at all (a missing package or device); None if it can."""
    try:
        reason: str | None = _module(name).unavailable()
    except Exception as error:  # a broken install raises anything: OSError, RuntimeError, ...
        return f"cannot be imported: {error}"
    if reason is not None and name in EXTRAS and reason.endswith("is not installed"):
        return f"{reason}: pip install 'sluice-gdn[{EXTRAS[name]}]'"
    return reason


def served(name: str) -> tuple[str, ...]:
    """The operators a backend has."""
    return tuple(_module(name).OPS)


def devices(name: str) -> tuple[str, ...]:
    """The device types a backend runs on."""
    return tuple(_module(name).DEVICES)


def notes(name: str) -> Sequence[str]:
    """What else a backend has to say of this machine, for ``doctor``."""
    try:
        say = getattr(_module(name), "notes", None)
    except Exception:  # ``unavailable`` says why
        return ()
    return () if say is None else say()


def compile(
    specs: Sequence[Spec], share: tuple[int, int] = (0, 1), progress: Progress | None = None
) -> None:
    """Compile every kernel that these calls, and such calls of any size, may need.

    ``share`` (i, n): process i of n, each of which compiles a part of them.
    """
    for name in ORDER:
        if unavailable(name) is None and hasattr(_module(name), "compile"):
            mine = [spec for spec in specs if explain(spec).chosen == name]
            try:
                if mine:
                    _module(name).compile(mine, share, progress)
            except GaveUpError:  # the next one compiles them
                _gave_up()
                if (warning := _warning(mine[0], explain(mine[0]))) is not None:
                    _warn_once(mine[0].op, warning)


def _gave_up() -> None:
    for forget in when_a_backend_gives_up:
        forget()


def untried(name: str) -> str | None:
    """What the backend has never run with, in words; None if nothing is known of that kind."""
    said: Callable[[], str | None] = getattr(_module(name), "untried", lambda: None)
    return said()


def _warn_once(op: str, text: str) -> None:
    if (op, text) not in _warned:
        _warned.add((op, text))
        warnings.warn(text, SlowPathWarning, stacklevel=_depth())


def _meant_for(name: str, spec: Spec) -> bool:
    """Whether a refusal is worth a warning: the backend has this operator for this device.

    What cannot even be imported is always worth one.
    """
    try:
        module = _module(name)
    except Exception:
        return True
    return spec.op in module.OPS and spec.device.type in module.DEVICES


def _depth() -> int:
    """How many frames up the program's own line is: a warning points there, not into a library.

    A model that transformers runs calls operators from deep inside; its user's line is meant.
    """
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] not in LIBRARIES:
            break
        depth, frame = depth + 1, frame.f_back
    return depth


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"sluice.backends.{name}")


def known(name: str | None) -> None:
    if name is not None and not (isinstance(name, str) and name in ORDER):
        raise BackendError(f"backend: expected one of {list(ORDER)}, got {name!r}")
