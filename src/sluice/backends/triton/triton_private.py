"""What sluice uses of Triton that Triton does not promise. Tried with Triton 3.5 to 3.9.

- ``knobs``: settings that change what a launch does (a debugger, an instrumentation, a profiler's
  hooks). Where the environment sets one, or a program one of any kind, Triton launches the kernels
  itself. Without the name, none is on.
- A kernel's ``params``: which are constants, and which the compiler must know nothing of. Without
  them nothing can be compiled ahead, and the backend says so (``unavailable``).
- ``ASTSource`` and ``GluonASTSource``: a kernel and its types, for ``triton.compile``.

``tests/test_private.py`` fails if one of them is gone.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.compiler import ASTSource

_knobs = getattr(triton, "knobs", None)
_runtime, _compilation = (getattr(_knobs, name, None) for name in ("runtime", "compilation"))
_set_runtime, _set_compilation = (getattr(x, "__dict__", {}) for x in (_runtime, _compilation))


_called = [
    chain.calls
    for name in ("launch_enter_hook", "launch_exit_hook")
    if hasattr(chain := getattr(_runtime, name, None), "calls")
]


def launches_itself(kernel: Any) -> bool:
    """Whether Triton must launch a kernel itself. Asked when a call is bound: it takes 5 µs."""
    return bool(
        getattr(_runtime, "debug", False)
        or getattr(_compilation, "instrumentation_mode", "")
        or getattr(_runtime, "add_stages_inspection_hook", None)
        or hooks_of(kernel)
        or changed()
    )


def hooks_of(kernel: Any) -> list[Any]:
    """A kernel's own hooks: the list itself, which a program may add to at any time."""
    hooks: list[Any] = getattr(kernel, "pre_run_hooks", [])
    return hooks


def changed() -> bool:
    """Whether a program has set a knob or a launch hook. Asked in every call: it takes 0.2 µs."""
    return bool(_set_runtime or _set_compilation or any(_called))


def source(kernel: Any, signature: dict[str, str], constants: Any, attributes: Any) -> Any:
    """A kernel with the types of its parameters, as ``triton.compile`` takes it."""
    make = ASTSource
    if getattr(kernel, "is_gluon", bool)():
        from triton.experimental.gluon._runtime import GluonASTSource

        make = GluonASTSource
    return make(kernel, signature, constants, attributes)
