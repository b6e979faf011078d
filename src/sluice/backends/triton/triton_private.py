"""What sluice uses of Triton that Triton does not promise. Tried with Triton 3.5 to 3.9.

- ``knobs``: settings that change what a launch does (a debugger, an instrumentation, a profiler's
  hooks). Where the environment sets one, or a program one of any kind, Triton launches the kernels
  itself. Without the name, none is on.
- A kernel's ``params``: which are constants, and which the compiler must know nothing of. Without
  them nothing can be compiled ahead, and the backend says so (``unavailable``).
- ``ASTSource`` and ``GluonASTSource``: a kernel and its types, for ``triton.compile``; how a TMA
  descriptor's type is spelt. Their ``hash`` and ``make_ir`` read the kernel's text, one thread at a
  time (``_one_at_a_time``).
- ``target_info.current_target``: which GPU a kernel asks about while it is compiled. Replaced while
  one is compiled for a GPU that is absent.
- ``get_ptxas_version``: which ptxas assembles for a GPU. Without it, any may.
- ``InterpreterBuilder``: where kernels are interpreted, masks are made boolean (``_mend_masks``).

The kernels themselves use public names that are the same in these releases. One default changes:
``enable_fp_fusion`` is on up to 3.9, which warns where it is not given, and off from 3.10. Every
launch gives it (``arguments.kernel_call``).

``tests/test_private.py`` fails if one of them is gone.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.compiler import ASTSource
from triton.language import target_info

PARAMETER = ("name", "is_constexpr", "do_not_specialize", "do_not_specialize_on_alignment")
"""What a kernel says of each of its ``params``."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_knobs = getattr(triton, "knobs", None)
_runtime, _compilation = (getattr(_knobs, name, None) for name in ("runtime", "compilation"))
_set_runtime, _set_compilation = (getattr(x, "__dict__", {}) for x in (_runtime, _compilation))


_called = [
    chain.calls
    for name in ("launch_enter_hook", "launch_exit_hook")
    if hasattr(chain := getattr(_runtime, name, None), "calls")
]


@triton.jit
def _kernel(x_ptr):
    """One of whose parameters is looked at."""


def missing() -> str | None:
    """What kernels of this Triton do not say of their parameters; None if they say all."""
    params = getattr(_kernel, "params", ())
    lacking = [name for name in PARAMETER if not params or not hasattr(params[0], name)]
    if not lacking:
        return None
    return f"Triton {triton.__version__} does not say {', '.join(lacking)} of a kernel's parameters"


@functools.cache
def assembler(arch: int) -> tuple[int, int] | None:
    """The release of the ptxas that assembles for a GPU, (13, 4); None if Triton does not say."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas_version

        found = re.search(r"release (\d+)\.(\d+)", get_ptxas_version(arch))
    except Exception:  # no such name, other parameters, or no ptxas: compiling says what is wrong
        return None
    return found and (int(found[1]), int(found[2]))


def launches_itself(kernel: Any | None) -> bool:
    """Whether Triton must launch a kernel itself. Asked when a call is bound: it takes 5 µs.

    None: a kernel that was not imported, and so has no hooks.
    """
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


def kind(told: str) -> str:
    """A parameter's type as Triton spells it; ``told`` as in ``variants.Parameter``."""
    if not told.startswith("tiles "):
        return told
    _, dtype, rows, columns = told.split()
    block = int(rows), int(columns)
    return f"tensordesc<{dtype}{list(block)},{tile_layout(_DTYPES[dtype], block)!r}>"


def tile_layout(dtype: torch.dtype, block: tuple[int, int]) -> Any:
    """Gluon's layout of a tile in shared memory."""
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


def _mend_masks() -> None:
    """Let the interpreter take every mask that the compiler takes.

    To the interpreter, the result of a comparison has the type of what was compared. A scalar one
    that is broadcast becomes an array of integers, which 3.9 refuses as a mask.
    """
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    load, store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask: Any) -> Any:
        return handle(mask.data.astype(bool), triton.language.int1)

    def masked_load(self: Any, ptrs: Any, mask: Any, *more: Any, **named: Any) -> Any:
        return load(self, ptrs, boolean(mask), *more, **named)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *more: Any, **named: Any) -> Any:
        return store(self, ptrs, value, boolean(mask), *more, **named)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store


if getattr(_runtime, "interpret", False):
    _mend_masks()


_reading = threading.RLock()


@functools.cache
def _one_at_a_time(base: Any) -> Any:
    """A subclass of ``base``, a kind of source: only one thread at a time reads the kernel's text.

    Python 3.11 before 3.11.8 and 3.12 before 3.12.2 count the depth of syntax trees for all threads
    together, and raise SystemError when two threads parse at once. LLVM and ptxas come later, take
    most of the time, and still run side by side.
    """

    class Source(base):  # type: ignore[misc]
        def hash(self) -> Any:
            with _reading:
                return super().hash()

        def make_ir(self, *args: Any, **named: Any) -> Any:
            with _reading:
                return super().make_ir(*args, **named)

    return Source


def source(kernel: Any, signature: dict[str, str], constants: Any, attributes: Any) -> Any:
    """A kernel with the types of its parameters, as ``triton.compile`` takes it."""
    base = ASTSource
    if getattr(kernel, "is_gluon", bool)():
        from triton.experimental.gluon._runtime import GluonASTSource

        base = GluonASTSource
    return _one_at_a_time(base)(kernel, signature, constants, attributes)


@contextlib.contextmanager
def compiling_for(target: Any) -> Iterator[None]:
    """In this scope kernels are compiled for ``target``, which need not be here."""

    def current_target() -> Any:
        return target

    current_target.__triton_builtin__ = True  # type: ignore[attr-defined]  # it runs in Python
    saved = target_info.current_target
    target_info.current_target = current_target
    try:
        yield
    finally:
        target_info.current_target = saved
