"""What this backend uses of Numba that Numba does not promise, each with what happens without it.

Tried with Numba 0.60.0, 0.64.0 and 0.68.1: the bits of every case of the contract are the same.
``tests/test_cpu_numba_private.py`` fails if one of them is gone.

- ``load_or_compile``: the machine code of a C callback, from the disk cache or compiled. Numba's
  own ``cfunc`` decorator compiles at once, and with optimised copies of every function called.
  Without ``CFunc`` and its attributes (``missing``) the backend refuses every call and says why.
- ``_as_modules``: functions that kernels call are kept as unoptimised LLVM modules. Without one of
  the methods it replaces, kernels compile as they are, only slower.
- ``PIPELINE``: of Numba's passes, those that these kernels need. Without one of them, all run.
- ``AbstractTemplate``, ``AttributeTemplate``, ``infer_global``, ``signature``: how operators and
  attributes of the types in ``simd.py`` and ``struct_view.py`` are typed. Numba's public way
  (``overload``) compiles a function for each of them. Without them the import of this module fails,
  and the backend refuses every call.
- ``TARGET``: the name and the features of the machine that Numba compiles for. They decide how wide
  vectors are. Without it the import fails likewise.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from numba import njit, types
from numba.core import (
    codegen,
    compiler,
    compiler_machinery,
    config,
    registry,
    sigutils,
    typed_passes,
    untyped_passes,
)
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.typing.templates import (
    AbstractTemplate,
    AttributeTemplate,
    infer_global,
    signature,
)

__all__ = [
    "PIPELINE",
    "TARGET",
    "AbstractTemplate",
    "AttributeTemplate",
    "infer_global",
    "load_or_compile",
    "missing",
    "signature",
]

PASSES = (
    (untyped_passes, "TranslateByteCode"),
    (untyped_passes, "FixupArgs"),
    (untyped_passes, "IRProcessing"),
    (untyped_passes, "ReconstructSSA"),
    (typed_passes, "NopythonTypeInference"),
    (typed_passes, "PreLowerStripPhis"),
    (typed_passes, "IRLegalization"),
    (typed_passes, "AnnotateTypes"),
    (typed_passes, "NativeLowering"),
    (typed_passes, "NoPythonBackend"),
)
"""Functions of kernels have neither closures nor ``with``, arrays, literal unrolling nor overloads
to inline, which Numba's other passes are for: those look through every function in vain."""


class _Pipeline(compiler.CompilerBase):  # type: ignore[misc]  # numba has no types
    """``PASSES`` and no other."""

    def define_pipelines(self) -> list[Any]:
        manager = compiler_machinery.PassManager("sluice")
        for module, name in PASSES:
            manager.add_pass(getattr(module, name), name)
        manager.finalize()
        return [manager]


PIPELINE = (
    _Pipeline if all(hasattr(module, name) for module, name in PASSES) else compiler.Compiler
)
OPTIONS = {"error_model": "numpy"}


class Target(NamedTuple):
    """The machine that Numba compiles for."""

    triple: str
    features: frozenset[str]


def _target() -> Target:
    triple, _cpu, features = registry.cpu_target.target_context.codegen().magic_tuple()
    return Target(triple, frozenset(features.split(",")))


TARGET = _target()


def missing() -> list[str]:
    """What ``load_or_compile`` needs and this Numba does not have."""
    signature = sigutils.normalize_signature(types.void(types.voidptr))
    try:
        kernel: Any = CFunc(lambda block: None, signature, {}, OPTIONS)
    except TypeError as error:
        return [f"CFunc of four arguments ({error})"]
    wanted = ("_cache.load_overload", "_sig", "_targetdescr.target_context", "address", "compile")
    return [f"CFunc.{path}" for path in wanted if not _has(kernel, path)]


def _has(found: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def load_or_compile(
    function: Callable[[Any], Any], signature: Any, *, cached: bool
) -> tuple[int, object]:
    """The address of a C callback's machine code, and what keeps it there."""
    signature = sigutils.normalize_signature(signature)
    kernel = CFunc(function, signature, {}, OPTIONS, pipeline_class=PIPELINE)
    if cached:
        kernel.enable_caching()
    with global_compiler_lock:
        found = kernel._cache.load_overload(kernel._sig, kernel._targetdescr.target_context)
        if found is not None:
            address = found.library.get_pointer_to_function(found.fndesc.llvm_cfunc_wrapper_name)
            return address, found
        with _in_haste():
            with _as_modules():
                njit(pipeline_class=PIPELINE, **OPTIONS)(function).compile(signature[0])
            kernel.compile()
    return kernel.address, kernel


@contextlib.contextmanager
def _in_haste() -> Iterator[None]:
    """No search for garbage, of which compiling makes little, nor for loops that LLVM might turn
    into vectors: kernels say themselves what is a vector."""
    collecting, vectorize = gc.isenabled(), config.LOOP_VECTORIZE
    gc.disable()
    config.LOOP_VECTORIZE = 0
    try:
        yield
    finally:
        config.LOOP_VECTORIZE = vectorize
        if collecting:
            gc.enable()


def _finalized(library: Any) -> None:
    library._finalize_dynamic_globals()
    library._finalized = True


REPLACED: tuple[tuple[str, str, Callable[..., None]], ...] = (
    ("JITCodeLibrary", "_optimize_final_module", lambda library: None),
    ("JITCodeLibrary", "_finalize_final_module", _finalized),
    ("JITCPUCodegen", "set_env", lambda self, name, env: None),
)
"""Methods of classes in ``numba.core.codegen``, and what stands in for them."""


def replaceable() -> bool:
    """Whether Numba has every method that ``_as_modules`` replaces or calls."""
    library = getattr(codegen, "JITCodeLibrary", None)
    return hasattr(library, "_finalize_dynamic_globals") and all(
        hasattr(getattr(codegen, kind, None), name) for kind, name, _ in REPLACED
    )


@contextlib.contextmanager
def _as_modules() -> Iterator[None]:
    """In this scope compiled functions are kept as unoptimised LLVM modules.

    Numba optimises every function and emits it as machine code, with all that it calls, and again
    within each caller. What is compiled here first is optimised once, as a part of its kernel.
    """
    before = []
    if replaceable():
        for kind, name, function in REPLACED:
            owner = getattr(codegen, kind)
            before.append((owner, name, owner.__dict__.get(name)))
            setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in before:
            if function is None:  # it was inherited
                delattr(owner, name)
            else:
                setattr(owner, name, function)
