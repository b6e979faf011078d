"""What this backend uses of Numba that Numba does not promise, each with what happens without it.

Every case of the contract passes with Numba 0.68.1 (``make test``) and with 0.60.0 (``make
test-oldest``). With 0.64.0 those of ``decode``, convolution, norm and ``step`` were tried: they
pass.
``tests/test_cpu_numba_private.py`` fails if one of them is gone.

- ``lower``: types a C callback and the functions that it calls, and writes them as LLVM IR. Numba
  itself would have LLVM optimise every function, and again inside each caller. It needs ``CFunc``'s
  way to compile, code libraries, and the place that says which kind of library is made
  (``replaceable``). Without them, kernels are compiled by Numba's public ``cfunc``: much slower,
  one after another.
- ``replaced``: what else is replaced while ``lower`` runs, so that nothing calls LLVM, Numba sends
  no event for each lock, and no type is inferred twice. What is missing is not replaced: compiling
  takes longer.
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
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm
import numba
from llvmlite import ir
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
from numba.core import ir as numba_ir
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.types.functions import BaseFunction
from numba.core.typing.templates import (
    AbstractTemplate,
    AttributeTemplate,
    infer_global,
    signature,
)

from sluice.backends.cpu.garbage import no_search_for_garbage
from sluice.backends.cpu.llvm_text import Unit, linked

__all__ = [
    "DESCRIPTION",
    "MACHINE",
    "OPTIONS",
    "PIPELINE",
    "TARGET",
    "AbstractTemplate",
    "AttributeTemplate",
    "cache_folder",
    "infer_global",
    "lower",
    "signature",
]

PASSES = (
    (untyped_passes, "TranslateByteCode"),
    (untyped_passes, "FixupArgs"),
    (untyped_passes, "IRProcessing"),
    (untyped_passes, "ReconstructSSA"),
    (typed_passes, "NopythonTypeInference"),
    (typed_passes, "PreLowerStripPhis"),
    (typed_passes, "AnnotateTypes"),
    (typed_passes, "NativeLowering"),
    (typed_passes, "NoPythonBackend"),
)
"""Functions of kernels have neither closures nor ``with``, arrays, literal unrolling nor overloads
to inline, nor references to give back (``IRLegalization``), which Numba's other passes are for:
those look through every function in vain."""


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


class Machine(NamedTuple):
    """The same in the words of LLVM."""

    triple: str
    cpu: str
    features: str


def _codegen() -> Any:
    return registry.cpu_target.target_context.codegen()


MACHINE = Machine(*_codegen().magic_tuple())
TARGET = Target(MACHINE.triple, frozenset(MACHINE.features.split(",")))
DESCRIPTION = " ".join([numba.__version__, llvmlite.__version__, *MACHINE])
"""The compiler's versions and the machine: code made with one serves no other."""


def cache_folder() -> str:
    """The folder that ``NUMBA_CACHE_DIR`` names, or nothing."""
    return str(getattr(config, "CACHE_DIR", "") or "")


def lower(function: Callable[[Any], Any], signature: Any) -> tuple[str, Unit]:
    """Type a C callback and write its LLVM IR: its name, and the unit that defines it."""
    if not replaceable():
        kernel = numba.cfunc(signature, **OPTIONS)(function)
        return kernel.native_name, Unit(modules=[kernel.inspect_llvm()])
    signature = sigutils.normalize_signature(signature)
    kernel = CFunc(function, signature, {}, OPTIONS, pipeline_class=PIPELINE)
    with global_compiler_lock, no_search_for_garbage(), _as_text():
        compiled = kernel._compile_uncached()
        return compiled.fndesc.llvm_cfunc_wrapper_name, compiled.library.unit


class _Library(getattr(codegen, "JITCodeLibrary", object)):  # type: ignore[misc]
    """What Numba keeps of a compiled function: here a ``Unit``, which LLVM has not seen yet."""

    def __init__(self, owner: Any, name: str) -> None:
        codegen.CodeLibrary.__init__(self, owner, name)
        self.unit = Unit()
        self._shared_module: Any = None

    def add_ir_module(self, module: Any) -> None:
        self.unit.add(module)

    def add_linking_library(self, library: Any) -> None:
        unit = library.unit if isinstance(library, _Library) else _unit_of(library)
        if unit not in self.unit.needs:
            self.unit.needs.append(unit)

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0  # there is no machine code yet

    def _get_module_for_linking(self) -> Any:
        """For functions outside sluice that call one of Numba's that a kernel called first."""
        if self._shared_module is None:
            self._shared_module = linked(self.unit)
        return self._shared_module


@functools.cache
def _unit_of(library: Any) -> Unit:
    """What Numba compiled in its own way: for itself, or before a kernel called it."""
    return Unit(modules=[str(library._get_module_for_linking())])


def replaceable() -> bool:
    """Whether Numba has what ``lower`` cannot do without."""
    return (
        hasattr(CFunc, "_compile_uncached")
        and hasattr(codegen, "JITCodeLibrary")
        and hasattr(_codegen(), "_library_class")
    )


@contextlib.contextmanager
def _as_text() -> Iterator[None]:
    """In this scope functions are typed and written as LLVM IR, and LLVM itself is not called.

    So LLVM can work on one kernel while Numba, in another thread, works on the next: llvmlite lets
    one thread at a time call LLVM.
    """
    registry.cpu_target.target_context.refresh()  # what Numba compiles for itself, it does here
    with contextlib.ExitStack() as stack:
        for place, name, stand_in in replaced():
            if not hasattr(place, name):
                continue
            before = vars(place).get(name)
            setattr(place, name, stand_in)
            if before is None:  # it was inherited
                stack.callback(delattr, place, name)
            else:
                stack.callback(setattr, place, name, before)
        yield


@functools.cache
def replaced() -> list[tuple[Any, str, Any]]:
    """Attributes of Numba's, and what stands in for them while it writes functions down."""
    owner, context = _codegen(), registry.cpu_target.target_context
    managers = getattr(llvm, "newpassmanagers", None) or llvm.passmanagers
    layout, counts = str(context.target_data), managers.dump_refprune_stats()
    return [
        (owner, "_library_class", _Library),
        (owner, "set_env", lambda name, env: None),
        (owner, "_create_empty_module", functools.partial(_empty_module, layout)),
        (type(context), "get_abi_sizeof", _size_of),
        (managers, "dump_refprune_stats", lambda: counts),
        (event, "broadcast", lambda happened: None),
        (BaseFunction, "get_call_type", _call_type),
        (numba_ir.Inst, "_rec_list_vars", _variables),
    ]


def _empty_module(layout: str, name: str) -> ir.Module:
    module = ir.Module(name)
    module.triple, module.data_layout = MACHINE.triple, layout
    return module


def _size_of(context: Any, kind: Any) -> int:
    """Bytes of a variable, which Numba asks LLVM for to tell debuggers; nobody debugs here."""
    return 0


_call_types: dict[Any, Any] = {}
_get_call_type = BaseFunction.get_call_type


def _call_type(function: Any, context: Any, args: Any, options: Any) -> Any:
    """The types of a call, which Numba finds out anew for every ``a + b`` that it meets."""
    key = function, args, tuple(options.items())
    if key not in _call_types:
        _call_types[key] = _get_call_type(function, context, args, options)
    return _call_types[key]


def _variables(inst: Any, value: Any) -> list[Any]:
    """Variables that a value mentions: Numba's own way takes three times as long."""
    kind = type(value)
    if kind is numba_ir.Var:
        return [value]
    if kind is dict:
        value = value.values()
    elif kind is not list and kind is not tuple:
        return list(value.list_vars()) if isinstance(value, numba_ir.Inst) else []
    found: list[Any] = []
    for one in value:
        if type(one) is numba_ir.Var:
            found.append(one)
        elif type(one) not in _PLAIN:
            found += _variables(inst, one)
    return found


_PLAIN = {str, int, bool, type(None), numba_ir.Loc}
"""Types of values that mention none."""
