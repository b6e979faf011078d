"""From LLVM's language to machine code: link, optimise, emit, load.

Numba writes functions down (``numba_private.py``). A kernel and all that it calls make one module
(``llvm_text.py``), which is optimised once and emitted as an object. Kernels share many functions:
those in the object of one kernel, the next kernel of this process calls there. A payload, which is
what ``kernel_cache.py`` keeps, brings all objects that its kernel needs.

Everything here is llvmlite's public interface.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import llvmlite.binding as llvm

from sluice.backends.cpu.llvm_text import Unit, linked
from sluice.backends.cpu.numba_private import MACHINE

_lock = threading.RLock()


@dataclasses.dataclass(frozen=True, eq=False)
class _Object:
    """An object's machine code, and the objects whose functions it calls."""

    code: bytes
    needs: tuple[_Object, ...]

    def all(self) -> Iterator[_Object]:
        """It and what it needs, each once, what is needed first."""
        seen: dict[_Object, None] = {}
        for other in self.needs:
            seen |= dict.fromkeys(other.all())
        yield from seen
        yield self


_emitted: dict[str, _Object] = {}
"""For each function that has machine code, where it is."""
_loaded: dict[bytes, Any] = {}
"""Objects in this process's memory, by their hash: two kernels may bring the same."""


def emit(name: str, unit: Unit) -> bytes:
    """The payload of the function ``name``, a C callback that ``unit`` defines."""
    with _lock:
        module = linked(unit, _emitted.keys())
        module.get_function(name).linkage = "external"  # all others are dropped where not called
        _optimise(module)
        text = str(module)
        assert "@numba.dynamic" not in text, "addresses of this process cannot be kept"
        called = (_emitted.get(found) for found in _names("declare", text))
        needs = dict.fromkeys(one for one in called if one is not None)
        made = _Object(_target_machine().emit_object(module), tuple(needs))
        for found in _names("define", text):
            _emitted.setdefault(found, made)
        parts = [part.code for part in made.all()]
        return json.dumps([name, [len(part) for part in parts]]).encode() + b"\n" + b"".join(parts)


def _names(word: str, text: str) -> list[str]:
    """Functions that a module declares or defines.

    Read from its text: with many small questions to LLVM, each of which gives Python to another
    thread for 5 ms, this thread would wait more than it works.
    """
    return re.findall(rf'^{word} [^@]*@"?([^"(]+)', text, re.MULTILINE)


def load(payload: bytes) -> int:
    """The address of a payload's function."""
    head, _, rest = payload.partition(b"\n")
    name, sizes = json.loads(head)
    with _lock:
        engine = _engine()
        for size in sizes:
            code, rest = rest[:size], rest[size:]
            digest = hashlib.sha256(code).digest()
            if digest not in _loaded:
                _loaded[digest] = llvm.ObjectFileRef.from_data(code)
                engine.add_object_file(_loaded[digest])
        engine.finalize_object()
        address: int = engine.get_function_address(name)
        return address


def _optimise(module: Any) -> None:
    """LLVM's usual passes, but none that looks for vectors: kernels say themselves what is one."""
    if hasattr(llvm, "create_pass_builder"):
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        options.loop_vectorization = options.slp_vectorization = False
        options.loop_interleaving = False
        builder = llvm.create_pass_builder(_target_machine(), options)
        builder.getModulePassManager().run(module, builder)
    else:  # llvmlite before 0.45
        builder = llvm.create_pass_manager_builder()
        builder.opt_level, builder.inlining_threshold = 3, 250
        manager = llvm.create_module_pass_manager()
        _target_machine().add_analysis_passes(manager)
        builder.populate(manager)
        manager.run(module)


@functools.cache
def _target_machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(MACHINE.triple)
    relocation = "static" if target.name.startswith("x86") else "default"
    return target.create_target_machine(
        MACHINE.cpu, MACHINE.features, opt=3, reloc=relocation, codemodel="jitdefault", jit=True
    )


@functools.cache
def _engine() -> Any:
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
