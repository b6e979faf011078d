"""Structures in memory for Numba code: a record is an address whose fields have names and types.

Parameters of a call and a thread's scratch memory are both passed as one such address, which keeps
calls between device functions, and so their compilation, small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.core.imputils import lower_getattr_generic, lower_setattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, register_model

from sluice.backends.cpu.llvm import F32
from sluice.backends.cpu.simd import Ptr

FIELD_BYTES = 8


class Record(types.Type):
    """An address of 8-byte fields."""

    def __init__(self, name: str, fields: dict[str, types.Type]) -> None:
        self.fields = fields
        self.offsets = {field: FIELD_BYTES * i for i, field in enumerate(fields)}
        super().__init__(name=f"Record({name})")


@register_model(Record)
class _RecordModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.IntType(8).as_pointer())


@infer_getattr
class _Fields(AttributeTemplate):
    key = Record

    def generic_resolve(self, record, attribute):
        return record.fields.get(attribute)


def _field(context, builder, record, value, attribute):
    offset = ir.IntType(64)(record.offsets[attribute])
    where = builder.gep(value, [offset])
    kind = context.get_value_type(record.fields[attribute])
    return builder.bitcast(where, kind.as_pointer())


@lower_getattr_generic(Record)
def _get(context, builder, record, value, attribute):
    return builder.load(_field(context, builder, record, value, attribute))


@lower_setattr_generic(Record)
def _set(context, builder, sig, args, attribute):
    record, value = args
    builder.store(value, _field(context, builder, sig.args[0], record, attribute))


def record(name: str, ints: str = "", floats: str = "", pointers: str = "") -> Callable[..., Any]:
    """A function of Numba code that sees an address as a record with these fields, in order."""
    fields = dict.fromkeys(ints.split(), types.int64)
    fields |= dict.fromkeys(floats.split(), types.float64)
    fields |= dict.fromkeys(pointers.split(), Ptr(F32))
    kind = Record(name, fields)

    @intrinsic
    def view(typingctx, address):
        def codegen(context, builder, sig, args):
            if isinstance(args[0].type, ir.PointerType):
                return args[0]
            return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

        return kind(address), codegen

    view.record = kind
    return view
