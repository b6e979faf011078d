"""flash-linear-attention served by sluice: ``install()``, through FLA's own backend registry.

FLA asks its registry before each call of ``chunk_gated_delta_rule`` (prefill) and ``chunk_kda``.
Once installed, calls that sluice serves go to ``sluice.compat.fla``, also on a CPU, where FLA's own
kernels cannot run; FLA runs the others. FLA does not ask its registry for decoding
(``fused_recurrent_*``): call ``sluice.compat.fla`` for it.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch

from sluice import gradients
from sluice.compat import fla as compat
from sluice.contract.errors import SluiceError
from sluice.integrations import fla_private

_PREFERENCE = 1  # before FLA's other choices (3 and 5), after those that a device requires (0)
_KEYWORDS = {"A_log", "chunk_size", "dt_bias", "transpose_state_layout", "use_gate_in_kernel"}


def install() -> None:
    """Register sluice in FLA's registry, for prefill. Installing twice has no further effect.

    Calls with gradients are served, too. FLA runs calls with an option that ``sluice.compat.fla``
    refuses.

    Raises:
        SluiceError: FLA 0.6 is not installed, or its registry is switched off
            (``FLA_DISABLE_BACKEND_DISPATCH=1``).
    """
    backends = _registry()
    for entry, function in _entries():
        backends.register(entry)(_backend(backends.BaseBackend, function))


def uninstall() -> None:
    """Undo ``install``."""
    backends = _registry()
    for entry, _ in _entries():
        fla_private.unregister(backends, entry, "sluice")


def _entries() -> list[tuple[Any, str]]:
    """The keys of FLA's registry (a name or a function), and the function that serves each."""
    kda = importlib.import_module("fla.ops.kda")
    return [("gated_delta_rule", "chunk_gated_delta_rule"), (kda.chunk_kda, "chunk_kda")]


def _registry() -> Any:
    """``fla.backends``, after importing FLA's operators."""
    try:
        backends = importlib.import_module("fla.backends")
        for operation in ("gated_delta_rule", "kda"):
            importlib.import_module(f"fla.ops.{operation}")
    except Exception as missing:  # a broken install raises anything
        text = f"install: flash-linear-attention 0.6 is needed: {missing!r}"
        raise SluiceError(text) from missing
    fla_private.check(backends)
    if fla_private.switched_off(backends):
        raise SluiceError("install: FLA's registry is off (FLA_DISABLE_BACKEND_DISPATCH=1)")
    return backends


def _backend(base: type, function: str) -> type:
    """A backend class for FLA's registry that serves one function."""
    served = getattr(compat, function)

    def verifier(self: Any, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        reason = _why_not(served, args, kwargs)
        return reason is None, reason

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return served(*args, **kwargs)

    body = {
        "__doc__": f"sluice's {function}.",
        "backend_type": "sluice",
        "priority": _PREFERENCE,
        f"{function}_verifier": verifier,
        function: run,
    }
    return type("SluiceBackend", (base,), body)


def _why_not(served: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why FLA runs a call, from its options alone; None if sluice serves it. Nothing runs."""
    given = inspect.signature(served).bind(*args, **kwargs).arguments
    more = given.pop("kwargs", {})
    if given.get("cp_context") is not None:
        return "cp_context: sluice has no context parallelism behind this interface"
    if unknown := set(more) - _KEYWORDS:
        return f"{', '.join(sorted(unknown))}: not known to sluice"
    on = more.get("use_gate_in_kernel", given.get("use_gate_in_kernel", False))
    if not on and any(more.get(name) is not None for name in ("A_log", "dt_bias")):
        return "A_log or dt_bias without use_gate_in_kernel"
    tensors = [x for x in (*given.values(), *more.values()) if isinstance(x, torch.Tensor)]
    if given.get("use_graph") and gradients.wanted(*tensors):
        return "use_graph with gradients: sluice reads borders back"
    return None
