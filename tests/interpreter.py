"""Triton's interpreter at three times its speed: it computes the same, and asks less often.

- A kernel's start replaces Triton's functions by interpreted ones. So does every call of a function
  inside the kernel, where all of them are replaced already. Here that is done once a kernel.
- Every sum and product of int32 is computed again in int64, and compared with what int32 holds. The
  answer goes to ``device_assert``, which does nothing unless ``debug`` is on, and it is off.
- The table of NumPy's dtypes is made at every question.

A release of Triton without these private names keeps its own speed; test_bits.py says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

NAMES = ("_patch_lang", "_LangPatchScope", "_get_np_dtype", "interpreter_builder")
"""The private names of ``triton.runtime.interpreter`` that are needed."""
_own: dict[str, Any] = {}


def hasten() -> None:
    """Change the interpreter of this process. Triton must be there."""
    from triton.runtime import interpreter

    if _own or not all(hasattr(interpreter, name) for name in NAMES):
        return
    builder = interpreter.interpreter_builder
    _own["_patch_lang"], _own["_get_np_dtype"] = interpreter._patch_lang, interpreter._get_np_dtype
    _own["options"] = builder.options
    interpreter._patch_lang = _once_a_kernel(interpreter._patch_lang)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """In this scope the interpreter is as it came."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    quick = interpreter._patch_lang, interpreter._get_np_dtype, builder.options
    interpreter._patch_lang, interpreter._get_np_dtype, builder.options = _own.values()
    try:
        yield
    finally:
        interpreter._patch_lang, interpreter._get_np_dtype, builder.options = quick


def _once_a_kernel(replace: Any) -> Any:
    import triton.language as tl
    from triton.runtime import interpreter

    core, is_own = tl.core, tl.core.is_builtin

    @functools.wraps(replace)
    def once(fn: Any) -> Any:
        """A kernel's end restores ``tl``; ``tl.core`` stays replaced, as without this."""
        if is_own(tl.load):
            return replace(fn)
        if is_own(core.load) and any(x is core for x in fn.__globals__.values()):
            return replace(fn)
        return interpreter._LangPatchScope()  # nothing to restore

    return once


def _remembered(dtype_of: Any) -> Any:
    import triton.language as tl

    scalars = functools.lru_cache(dtype_of)

    @functools.wraps(dtype_of)
    def numpy_dtype(kind: Any) -> Any:
        return scalars(kind) if type(kind) is tl.dtype else dtype_of(kind)

    return numpy_dtype
