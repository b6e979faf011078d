"""Vectors, register tiles and typed pointers for Numba, lowered straight to LLVM vector operations.

Numba vectorises loops when it can; these types say what is wanted instead. ``Vec`` is one vector of
float32 lanes, ``Tile`` is R of them (R x C vectors are a Tile of R * C, row major), ``Ptr`` is an
address whose storage type (float32, bfloat16, float16 or float64) is part of its type: a function
written once is compiled for each storage type and always computes in float32. Nothing names an
instruction set: LLVM splits a vector wider than the machine's.

Every operation is explicit, a product and sum is one ``fmuladd``, and no fast-math flag is set
anywhere: the bits of a result depend on the formula alone, and NaN and infinity behave as in
IEEE 754.
"""

from __future__ import annotations

import operator

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, lower_builtin, models, register_model

from sluice.backends.cpu.llvm import (
    LANES,
    STORAGE,
    call_llvm,
    constant,
    element_at,
    f32,
    i32,
    like,
    load_at,
    rows_of,
    splat_of,
    store_at,
    tile_of,
    vector_type,
)
from sluice.backends.cpu.numba_private import AbstractTemplate, infer_global, signature


class Vec(types.Type):
    """`lanes` float32 values in one LLVM vector."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"Vec({lanes})")


class Tile(types.Type):
    """`rows` vectors of LANES float32 values, meant to stay in registers."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        super().__init__(name=f"Tile({rows})")


class Ptr(types.Type):
    """The address of elements stored as F32, BF16 or F16."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(name=f"Ptr({code})")


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, vector_type(fe_type.lanes))


@register_model(Tile)
class _TileModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.ArrayType(vector_type(LANES), fe_type.rows))


@register_model(Ptr)
class _PtrModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, STORAGE[fe_type.code].as_pointer())


# -- pointers -----------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def pointer(typingctx, address, code):
    """An integer address seen as elements of the (constant) storage type `code`."""
    if not isinstance(code, types.IntegerLiteral):
        return None

    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], STORAGE[code.literal_value].as_pointer())

    return Ptr(code.literal_value)(types.int64, code), codegen


@infer_global(operator.add)
class _PtrAdd(AbstractTemplate):
    def generic(self, args, kws):
        if len(args) == 2 and isinstance(args[0], Ptr) and isinstance(args[1], types.Integer):
            return signature(args[0], args[0], types.int64)
        return None


@lower_builtin(operator.add, Ptr, types.Integer)
def _ptr_add(context, builder, sig, args):
    return element_at(builder, args[0], args[1])


@intrinsic
def get(typingctx, ptr, index):
    """Element `index` as a float32."""

    def codegen(context, builder, sig, args):
        return load_at(builder, ptr.code, args[0], args[1])

    return types.float32(ptr, types.int64), codegen


@intrinsic
def put(typingctx, ptr, index, value):
    """Store a float32 as element `index`."""

    def codegen(context, builder, sig, args):
        store_at(builder, ptr.code, *args)
        return context.get_dummy_value()

    return types.void(ptr, types.int64, types.float32), codegen


@intrinsic
def load(typingctx, ptr, index):
    """LANES consecutive elements from `index`; any alignment."""

    def codegen(context, builder, sig, args):
        return load_at(builder, ptr.code, args[0], args[1], LANES)

    return Vec(LANES)(ptr, types.int64), codegen


@intrinsic
def store(typingctx, ptr, index, vector):
    """Store a vector to consecutive elements from `index`; any alignment."""

    def codegen(context, builder, sig, args):
        store_at(builder, ptr.code, *args)
        return context.get_dummy_value()

    return types.void(ptr, types.int64, vector), codegen


# -- vectors ------------------------------------------------------------------------------------


def _vec_args(args):
    """The type of a binary operation where a scalar operand is spread over the lanes."""
    if len(args) == 2 and any(isinstance(a, (Vec, Tile)) for a in args):
        vec = next(a for a in args if isinstance(a, (Vec, Tile)))
        return signature(vec, *(a if isinstance(a, (Vec, Tile)) else types.float32 for a in args))
    return None


def _by_rows(builder, emit, *args):
    """`emit` of vectors, or of each row of tiles; scalars are spread over the lanes.

    Each operation is emitted for all rows before the next one: while a row waits for its last
    result, the machine works on the other rows.
    """
    tile = next((a.type for a in args if isinstance(a.type, ir.ArrayType)), None)
    vec = next((a.type for a in args if isinstance(a.type, ir.VectorType)), None)
    lanes = vec.count if tile is None else LANES
    wide = [splat_of(builder, a, lanes) if a.type == f32 else a for a in args]
    if tile is None:
        return emit(*wide)
    columns = [
        rows_of(builder, a) if isinstance(a.type, ir.ArrayType) else [a] * tile.count for a in wide
    ]
    return tile_of(builder, [emit(*row) for row in zip(*columns, strict=True)])


def _binary(op, method):
    @infer_global(op)
    class _Typing(AbstractTemplate):
        def generic(self, args, kws):
            return _vec_args(args)

    def lower(context, builder, sig, args):
        return _by_rows(builder, getattr(builder, method), *args)

    for kind in (Vec, Tile):
        for left, right in ((kind, kind), (kind, types.Float), (types.Float, kind)):
            lower_builtin(op, left, right)(lower)


for _op, _method in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _binary(_op, _method)


@intrinsic
def splat(typingctx, value):
    """One float32 in every lane."""

    def codegen(context, builder, sig, args):
        return splat_of(builder, args[0])

    return Vec(LANES)(types.float32), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c, fused where the machine can; scalars are spread over the lanes."""
    vec = next((t for t in (a, b, c) if isinstance(t, (Vec, Tile))), None)
    want = [t if isinstance(t, (Vec, Tile)) else types.float32 for t in (a, b, c)]

    def codegen(context, builder, sig, args):
        def emit(*abc):
            return call_llvm(builder, "fmuladd", abc[0].type, *abc)

        return emit(*args) if vec is None else _by_rows(builder, emit, *args)

    return (vec or types.float32)(*want), codegen


def _unary(name):
    @intrinsic
    def op(typingctx, x):
        def codegen(context, builder, sig, args):
            return call_llvm(builder, name, args[0].type, args[0])

        return x(x), codegen

    return op


def _minmax(sense):
    @intrinsic
    def op(typingctx, x, bound):
        """Where x is a NaN, the bound: as in x86's own instruction, which this becomes there."""

        def codegen(context, builder, sig, args):
            def emit(value, bound):
                return builder.select(builder.fcmp_ordered(sense, value, bound), value, bound)

            return _by_rows(builder, emit, *args)

        return x(x, types.float32), codegen

    return op


vabs, vround, vsqrt = _unary("fabs"), _unary("rint"), _unary("sqrt")
vmin, vmax = _minmax("<"), _minmax(">")


@intrinsic
def keep_nan(typingctx, value, x):
    """`value`, or x in the lanes where x is a NaN."""

    def codegen(context, builder, sig, args):
        def emit(value, x):
            return builder.select(builder.fcmp_unordered("uno", x, x), x, value)

        return _by_rows(builder, emit, *args)

    return value(value, x), codegen


@intrinsic
def plain_nan(typingctx, x):
    """x, with one NaN, whose lower 16 bits are zeros, in place of every NaN."""

    def codegen(context, builder, sig, args):
        usual = constant(args[0].type, float("nan"))
        return builder.select(builder.fcmp_unordered("uno", args[0], args[0]), usual, args[0])

    return x(x), codegen


@intrinsic
def all_finite(typingctx, x):
    """Whether no lane is infinite or a NaN."""

    def codegen(context, builder, sig, args):
        rest = builder.fsub(args[0], args[0])
        lanes = builder.fcmp_unordered("uno", rest, rest)
        found = builder.bitcast(lanes, ir.IntType(x.lanes))
        return builder.icmp_unsigned("==", found, ir.Constant(found.type, 0))

    return types.boolean(x), codegen


@intrinsic
def pow2(typingctx, x):
    """2 ** x for whole numbers x in [-126, 127]."""

    def codegen(context, builder, sig, args):
        ints = builder.fptosi(args[0], like(args[0].type, i32))
        bits = builder.shl(builder.add(ints, constant(ints.type, 127)), constant(ints.type, 23))
        return builder.bitcast(bits, args[0].type)

    return x(x), codegen


@intrinsic
def times_pow2(typingctx, x, n):
    """x * 2 ** n, where n is a whole number plus 1.5 * 2 ** 23; x and the result are normal."""

    def codegen(context, builder, sig, args):
        def emit(value, exponent):
            bits, shift = (builder.bitcast(a, like(a.type, i32)) for a in (value, exponent))
            shift = builder.shl(shift, constant(shift.type, 23))
            return builder.bitcast(builder.add(bits, shift), value.type)

        return _by_rows(builder, emit, *args)

    return x(x, n), codegen
