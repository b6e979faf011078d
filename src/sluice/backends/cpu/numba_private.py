"""What this backend uses of Numba that Numba does not promise, each with what happens without it.

Tried with Numba 0.60.0, 0.64.0 and 0.68.1: the bits of every case of the contract are the same.
``tests/test_cpu_numba_private.py`` fails if one of them is gone.

- ``compile_callback``, ``load``: the machine code of a C callback, compiled, or from what it was
  written as. Numba's own ``cfunc`` decorator compiles at once, and with optimised copies of every
  function called; its disk cache loads damaged files. Without ``CFunc``, its attributes and the
  methods of code libraries (``missing``) the backend refuses every call and says why.
- ``_as_modules``: functions that kernels call are kept as unoptimised LLVM modules. Without one of
  the methods it replaces, kernels compile as they are, only slower.
- ``event.broadcast``: rests while kernels are compiled. Without it, listeners are told.
- ``OPTIONS``: ``_nrt`` leaves out the counting of references. Without it, loading fails.
- ``PIPELINE``: of Numba's passes, those that these kernels need. Without one of them, all run.
- ``AbstractTemplate``, ``AttributeTemplate``, ``infer_global``, ``signature``: how operators and
  attributes of the types in ``simd.py`` and ``struct_view.py`` are typed. Numba's public way
  (``overload``) compiles a function for each of them. Without them the import of this module fails,
  and the backend refuses every call.
- ``TARGET``, ``DESCRIPTION``: the name and the features of the machine that Numba compiles for.
  They decide how wide vectors are. Without them the import fails likewise.
- ``cache_folder``: what ``NUMBA_CACHE_DIR`` says. Without it, the usual folders serve.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import njit, types
from numba.core import (
    codegen,
    compiler,
    compiler_machinery,
    config,
    event,
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

from sluice.backends.cpu.garbage import no_search_for_garbage

__all__ = [
    "DESCRIPTION",
    "OPTIONS",
    "PIPELINE",
    "TARGET",
    "AbstractTemplate",
    "AttributeTemplate",
    "cache_folder",
    "compile_callback",
    "infer_global",
    "load",
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


PIPELINE = _Pipeline if all(hasattr(module, name) for module, name in PASSES) else compiler.Compiler
OPTIONS = {"error_model": "numpy", "_nrt": False}
"""Of every function: division by zero follows IEEE 754 instead of raising, and nothing counts
references, of which kernels have none: machine code from the disk needs no runtime of Numba's."""


class Target(NamedTuple):
    """The machine that Numba compiles for."""

    triple: str
    features: frozenset[str]


def _codegen() -> Any:
    return registry.cpu_target.target_context.codegen()


def _target() -> Target:
    triple, _cpu, features = _codegen().magic_tuple()
    return Target(triple, frozenset(features.split(",")))


TARGET = _target()
DESCRIPTION = " ".join([numba.__version__, llvmlite.__version__, *_codegen().magic_tuple()])
"""The compiler's versions and the machine: code made with one serves no other."""


def cache_folder() -> str:
    """The folder that ``NUMBA_CACHE_DIR`` names, or nothing."""
    return str(getattr(config, "CACHE_DIR", "") or "")


def missing() -> list[str]:
    """What ``compile_callback`` and ``load`` need and this Numba does not have."""
    signature = sigutils.normalize_signature(types.void(types.voidptr))
    try:
        kernel: Any = CFunc(lambda block: None, signature, {}, OPTIONS)
    except TypeError as error:
        return [f"CFunc of four arguments ({error})"]
    found = [] if hasattr(kernel, "_compile_uncached") else ["CFunc._compile_uncached"]
    library = getattr(codegen, "JITCodeLibrary", None)
    wanted = ("_get_compiled_object", "get_pointer_to_function", "has_dynamic_globals")
    found += [f"JITCodeLibrary.{name}" for name in wanted if not hasattr(library, name)]
    if not hasattr(_codegen(), "unserialize_library"):
        found.append("Codegen.unserialize_library")
    return found


def compile_callback(function: Callable[[Any], Any], signature: Any) -> tuple[int, object, bytes]:
    """A C callback's address, what keeps it there, and what ``load`` makes it from again."""
    signature = sigutils.normalize_signature(signature)
    kernel = CFunc(function, signature, {}, OPTIONS, pipeline_class=PIPELINE)
    with global_compiler_lock, _in_haste():
        with _as_modules():
            njit(pipeline_class=PIPELINE, **OPTIONS)(function).compile(signature[0])
        compiled = kernel._compile_uncached()
        library, name = compiled.library, compiled.fndesc.llvm_cfunc_wrapper_name
        assert not library.has_dynamic_globals, "addresses of this process cannot be kept"
        address = library.get_pointer_to_function(name)
        # Numba also keeps a module to link with others, of which this is all that `load` asks for
        symbols = llvm.parse_assembly(f'define void @"{name}"() {{\n  ret void\n}}').as_bitcode()
        code = library._get_compiled_object()
        names = json.dumps([name, library.name, len(code)]).encode()
        return address, compiled, names + b"\n" + code + symbols


def load(payload: bytes) -> tuple[int, object]:
    """The address of a callback's machine code, and what keeps it there."""
    names, _, parts = payload.partition(b"\n")
    name, library_name, size = json.loads(names)
    state = library_name, "object", (parts[:size], parts[size:])
    with global_compiler_lock:
        library = _codegen().unserialize_library(state)
        return library.get_pointer_to_function(name), library


@contextlib.contextmanager
def _in_haste() -> Iterator[None]:
    """No search for garbage, of which compiling makes little, nor for loops that LLVM might turn
    into vectors: kernels say themselves what is a vector. Nor does Numba tell its listeners of
    every lock that it takes, a tenth of a million times for all kernels."""
    vectorize, tell = config.LOOP_VECTORIZE, getattr(event, "broadcast", None)
    config.LOOP_VECTORIZE = 0
    if tell is not None:
        event.broadcast = lambda happened: None
    try:
        with no_search_for_garbage():
            yield
    finally:
        config.LOOP_VECTORIZE = vectorize
        if tell is not None:
            event.broadcast = tell


def _finalized(library: Any) -> None:
    library._finalize_dynamic_globals()
    library._finalized = True


REPLACED: tuple[tuple[str, str, Callable[..., None]], ...] = (
    ("JITCodeLibrary", "_optimize_final_module", lambda library: None),
    ("JITCodeLibrary", "_finalize_final_module", _finalized),
    ("JITCodeLibrary", "get_pointer_to_function", lambda library, name: 0),
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
