"""Functions written down in LLVM's language, and modules made of them.

Several kernels call the same functions, so a function is kept as text of its own, with the texts of
what it calls beside it. One call of LLVM then reads all that a kernel needs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Set as AbstractSet
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

NOTES: dict[str, int] = {}
"""LLVM's metadata, to which the texts of all units refer by these numbers."""


@dataclasses.dataclass(eq=False)
class Unit:
    """Functions, and what they need."""

    head: str = ""
    """The machine that they are for."""
    functions: dict[str, str] = dataclasses.field(default_factory=dict)
    constants: dict[str, str] = dataclasses.field(default_factory=dict)
    declarations: dict[str, str] = dataclasses.field(default_factory=dict)
    modules: list[str] = dataclasses.field(default_factory=list)
    """Whole modules of functions that Numba compiled in its own way."""
    needs: list[Unit] = dataclasses.field(default_factory=list)
    """Units of what the functions call."""

    def add(self, module: ir.Module) -> None:
        """Write a module's functions down. Nobody but kernels calls them, so they may be dropped
        where they are inlined, and no constant is visible outside."""
        numbers: list[int] = []

        def renumber(text: str) -> str:
            return re.sub(r"!(\d+)", lambda found: f"!{numbers[int(found[1])]}", text)

        self.head = f'target triple = "{module.triple}"\ntarget datalayout = "{module.data_layout}"'
        for note in module.metadata:
            text = renumber(str(note).partition(" = ")[2])
            numbers.append(NOTES.setdefault(text, len(NOTES)))
        for name, value in module.globals.items():
            if isinstance(value, ir.GlobalVariable) and value.initializer is not None:
                value.linkage, kind = "internal", self.constants
            elif isinstance(value, ir.Function) and not value.is_declaration:
                value.linkage, kind = "linkonce_odr", self.functions
            else:
                kind = self.declarations
            text = str(value).encode().decode("latin1")  # as Numba does
            kind[name] = renumber(text) if kind is self.functions else text


def linked(unit: Unit, known: AbstractSet[str] = frozenset()) -> Any:
    """A unit and all that it needs as one LLVM module, without units whose functions are known."""
    parts = [unit]
    for part in parts:  # it grows
        for other in part.needs:
            if other not in parts and (other.modules or not other.functions.keys() <= known):
                parts.append(other)
    definitions: dict[str, str] = {}
    declarations: dict[str, str] = {}
    for part in parts:
        definitions |= part.constants | part.functions
        declarations |= part.declarations
    lines = [unit.head, *definitions.values()]
    lines += [text for name, text in declarations.items() if name not in definitions]
    lines += [f"!{number} = {text}" for text, number in NOTES.items()]
    module = llvm.parse_assembly("\n".join(lines))
    for text in dict.fromkeys(text for part in parts for text in part.modules):
        module.link_in(llvm.parse_assembly(text))
    return module
