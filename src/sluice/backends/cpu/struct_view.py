"""Structures in memory for Numba code: an address whose fields have names and types.

Parameters of a call and a thread's scratch memory are each passed as one such address. That keeps
calls between functions, and so their compilation, small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_getattr_generic,
    lower_setattr_generic,
    models,
    register_model,
)

from sluice.backends.cpu.llvm import F32, byte_pointer, i64
from sluice.backends.cpu.numba_private import AttributeTemplate
from sluice.backends.cpu.simd import Ptr

FIELD_BYTES = 8


class StructView(types.Type):
    """The address of fields of 8 bytes."""

    def __init__(self, name: str, fields: dict[str, types.Type]) -> None:
        self.fields = fields
        self.offsets = {field: FIELD_BYTES * i for i, field in enumerate(fields)}
        super().__init__(name=f"StructView({name})")


@register_model(StructView)
class _StructModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, byte_pointer)


@infer_getattr
class _Fields(AttributeTemplate):
    key = StructView

    def generic_resolve(self, view, attribute):
        return view.fields.get(attribute)


def _field(context, builder, view, value, attribute):
    where = builder.gep(value, [i64(view.offsets[attribute])])
    kind = context.get_value_type(view.fields[attribute])
    return builder.bitcast(where, kind.as_pointer())


@lower_getattr_generic(StructView)
def _get(context, builder, view, value, attribute):
    return builder.load(_field(context, builder, view, value, attribute))


@lower_setattr_generic(StructView)
def _set(context, builder, sig, args, attribute):
    address, value = args
    builder.store(value, _field(context, builder, sig.args[0], address, attribute))


def struct_view(
    name: str, ints: str = "", floats: str = "", pointers: str = ""
) -> Callable[..., Any]:
    """A function of Numba code that sees an address as a structure with these fields, in order."""
    fields = dict.fromkeys(ints.split(), types.int64)
    fields |= dict.fromkeys(floats.split(), types.float64)
    fields |= dict.fromkeys(pointers.split(), Ptr(F32))
    kind = StructView(name, fields)

    @intrinsic
    def view(typingctx, address):
        def codegen(context, builder, sig, args):
            if isinstance(args[0].type, ir.PointerType):
                return args[0]
            return builder.inttoptr(args[0], byte_pointer)

        return kind(address), codegen

    return view
