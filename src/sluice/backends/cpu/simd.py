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
from numba.core import cgutils, registry
from numba.core.datamodel import models
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, register_model

F32, BF16, F16, F64 = 0, 1, 2, 3
ELEMENT_BYTES = (4, 2, 2, 8)

_features = set(registry.cpu_target.target_context.codegen().magic_tuple()[2].split(","))
_triple = registry.cpu_target.target_context.codegen().magic_tuple()[0]
LANES = 16 if "+avx512f" in _features else 8 if "+avx" in _features else 4
# Vector registers decide how large a tile of accumulators may be before it spills.
REGISTERS = 32 if "+avx512f" in _features or _triple.startswith(("aarch64", "arm64")) else 16

_f32, _i16, _i32, _i64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_element = {F32: _f32, BF16: _i16, F16: ir.HalfType(), F64: ir.DoubleType()}


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
        super().__init__(dmm, fe_type, _vector(fe_type.lanes))


@register_model(Tile)
class _TileModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.ArrayType(_vector(LANES), fe_type.rows))


@register_model(Ptr)
class _PtrModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _element[fe_type.code].as_pointer())


def _vector(lanes, element=_f32):
    return ir.VectorType(element, lanes)


def _const(typ, value):
    """A scalar constant, or a vector with that value in every lane."""
    if isinstance(typ, ir.VectorType):
        return ir.Constant(typ, [value] * typ.count)
    return ir.Constant(typ, value)


def _like(typ, element):
    return _vector(typ.count, element) if isinstance(typ, ir.VectorType) else element


def _call(builder, name, result, *args):
    """Call an overloaded LLVM intrinsic: `llvm.<name>.<suffix of the result's type>`."""
    suffix = f"v{result.count}f32" if isinstance(result, ir.VectorType) else "f32"
    fnty = ir.FunctionType(result, [a.type for a in args])
    fn = cgutils.get_or_insert_function(builder.module, fnty, f"llvm.{name}.{suffix}")
    return builder.call(fn, args)


def _shuffle(builder, a, b, mask):
    return builder.shuffle_vector(a, b, ir.Constant(_vector(len(mask), _i32), mask))


def _splat(builder, value, lanes=LANES):
    one = builder.insert_element(ir.Constant(_vector(lanes), ir.Undefined), value, _i32(0))
    return _shuffle(builder, one, one, [0] * lanes)


def _rows(builder, tile):
    return [builder.extract_value(tile, i) for i in range(tile.type.count)]


def _tile(builder, vectors):
    out = ir.Constant(ir.ArrayType(vectors[0].type, len(vectors)), ir.Undefined)
    for i, vector in enumerate(vectors):
        out = builder.insert_value(out, vector, i)
    return out


def _at(builder, ptr, index):
    return builder.gep(ptr, [index], source_etype=ptr.type.pointee)


def _widen(builder, code, raw):
    """Storage bits to float32, a scalar or a vector."""
    if code == F32:
        return raw
    if code == F16:
        return builder.fpext(raw, _like(raw.type, _f32))
    if code == F64:
        return builder.fptrunc(raw, _like(raw.type, _f32))
    wide = builder.zext(raw, _like(raw.type, _i32))
    return builder.bitcast(builder.shl(wide, _const(wide.type, 16)), _like(raw.type, _f32))


def _narrow(builder, code, value):
    """float32 to storage bits, rounding to nearest even; a NaN stays a NaN."""
    if code == F32:
        return value
    if code == F16:
        return builder.fptrunc(value, _like(value.type, ir.HalfType()))
    if code == F64:
        return builder.fpext(value, _like(value.type, ir.DoubleType()))
    bits = builder.bitcast(value, _like(value.type, _i32))
    odd = builder.and_(builder.lshr(bits, _const(bits.type, 16)), _const(bits.type, 1))
    bits = builder.add(builder.add(bits, _const(bits.type, 0x7FFF)), odd)
    bits = builder.lshr(bits, _const(bits.type, 16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    bits = builder.select(is_nan, _const(bits.type, 0x7FC0), bits)
    return builder.trunc(bits, _like(value.type, _i16))


def _load(builder, code, ptr, index, lanes=None):
    where = _at(builder, ptr, index)
    if lanes is None:
        return _widen(builder, code, builder.load(where))
    vector = _vector(lanes, _element[code])
    raw = builder.load(builder.bitcast(where, vector.as_pointer()), align=ELEMENT_BYTES[code])
    return _widen(builder, code, raw)


def _store(builder, code, ptr, index, value):
    raw = _narrow(builder, code, value)
    where = builder.bitcast(_at(builder, ptr, index), raw.type.as_pointer())
    builder.store(raw, where, align=ELEMENT_BYTES[code])


def _prefetch(builder, address, level):
    """To be read, and soon written."""
    where = builder.inttoptr(address, ir.IntType(8).as_pointer())
    fnty = ir.FunctionType(ir.VoidType(), [where.type, _i32, _i32, _i32])
    fn = cgutils.get_or_insert_function(builder.module, fnty, "llvm.prefetch.p0")
    builder.call(fn, [where, _i32(0), _i32(4 - level), _i32(1)])


# -- pointers -----------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def pointer(typingctx, address, code):
    """An integer address seen as elements of the (constant) storage type `code`."""
    if not isinstance(code, types.IntegerLiteral):
        return None

    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], _element[code.literal_value].as_pointer())

    return Ptr(code.literal_value)(types.int64, code), codegen


@infer_global(operator.add)
class _PtrAdd(AbstractTemplate):
    def generic(self, args, kws):
        if len(args) == 2 and isinstance(args[0], Ptr) and isinstance(args[1], types.Integer):
            return signature(args[0], args[0], types.int64)
        return None


@lower_builtin(operator.add, Ptr, types.Integer)
def _ptr_add(context, builder, sig, args):
    return _at(builder, args[0], args[1])


@intrinsic
def get(typingctx, ptr, index):
    """Element `index` as a float32."""

    def codegen(context, builder, sig, args):
        return _load(builder, ptr.code, args[0], args[1])

    return types.float32(ptr, types.int64), codegen


@intrinsic
def put(typingctx, ptr, index, value):
    """Store a float32 as element `index`."""

    def codegen(context, builder, sig, args):
        _store(builder, ptr.code, *args)
        return context.get_dummy_value()

    return types.void(ptr, types.int64, types.float32), codegen


@intrinsic
def load(typingctx, ptr, index):
    """LANES consecutive elements from `index`; any alignment."""

    def codegen(context, builder, sig, args):
        return _load(builder, ptr.code, args[0], args[1], LANES)

    return Vec(LANES)(ptr, types.int64), codegen


@intrinsic
def store(typingctx, ptr, index, vector):
    """Store a vector to consecutive elements from `index`; any alignment."""

    def codegen(context, builder, sig, args):
        _store(builder, ptr.code, *args)
        return context.get_dummy_value()

    return types.void(ptr, types.int64, vector), codegen


# -- vectors ------------------------------------------------------------------------------------


def _vec_args(args):
    """The vector type of a binary operation where a scalar operand is spread over the lanes."""
    if len(args) == 2 and any(isinstance(a, Vec) for a in args):
        vec = next(a for a in args if isinstance(a, Vec))
        return signature(vec, *(a if isinstance(a, Vec) else types.float32 for a in args))
    return None


def _binary(op, method):
    @infer_global(op)
    class _Typing(AbstractTemplate):
        def generic(self, args, kws):
            return _vec_args(args)

    def lower(context, builder, sig, args):
        lanes = sig.return_type.lanes
        spread = [
            a if isinstance(t, Vec) else _splat(builder, a, lanes)
            for a, t in zip(args, sig.args, strict=True)
        ]
        return getattr(builder, method)(*spread)

    for left, right in ((Vec, Vec), (Vec, types.Float), (types.Float, Vec)):
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
        return _splat(builder, args[0])

    return Vec(LANES)(types.float32), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c, fused where the machine can; scalars are spread over the lanes."""
    vec = next((t for t in (a, b, c) if isinstance(t, Vec)), None)
    want = [t if isinstance(t, Vec) else types.float32 for t in (a, b, c)]

    def codegen(context, builder, sig, args):
        if vec is not None:
            args = [
                x if isinstance(t, Vec) else _splat(builder, x, vec.lanes)
                for x, t in zip(args, want, strict=True)
            ]
        return _call(builder, "fmuladd", args[0].type, *args)

    return (vec or types.float32)(*want), codegen


def _unary(name):
    @intrinsic
    def op(typingctx, x):
        def codegen(context, builder, sig, args):
            return _call(builder, name, args[0].type, args[0])

        return x(x), codegen

    return op


def _minmax(name):
    @intrinsic
    def op(typingctx, x, bound):
        """The bound replaces a NaN."""

        def codegen(context, builder, sig, args):
            bound = _splat(builder, args[1], x.lanes)
            return _call(builder, name, args[0].type, args[0], bound)

        return x(x, types.float32), codegen

    return op


vabs, vround, vsqrt = _unary("fabs"), _unary("rint"), _unary("sqrt")
vmin, vmax = _minmax("minnum"), _minmax("maxnum")


@intrinsic
def keep_nan(typingctx, value, x):
    """`value`, or x in the lanes where x is a NaN."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.fcmp_unordered("uno", args[1], args[1]), args[1], args[0])

    return value(value, x), codegen


@intrinsic
def pow2(typingctx, x):
    """2 ** x for whole numbers x in [-126, 127]."""

    def codegen(context, builder, sig, args):
        ints = builder.fptosi(args[0], _like(args[0].type, _i32))
        bits = builder.shl(builder.add(ints, _const(ints.type, 127)), _const(ints.type, 23))
        return builder.bitcast(bits, args[0].type)

    return x(x), codegen


# -- memory and threads -------------------------------------------------------------------------


@intrinsic
def allocate(typingctx, nbytes):
    """The address of fresh memory, aligned to 16 bytes at least."""

    def codegen(context, builder, sig, args):
        return builder.ptrtoint(context.nrt.allocate(builder, args[0]), _i64)

    return types.int64(types.int64), codegen


@intrinsic
def release(typingctx, address):
    """Give back what `allocate` returned."""

    def codegen(context, builder, sig, args):
        context.nrt.free(builder, builder.inttoptr(args[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def fetch_add(typingctx, address):
    """Add one to an int64 in memory shared by threads; returns the value before."""

    def codegen(context, builder, sig, args):
        where = builder.inttoptr(args[0], _i64.as_pointer())
        return builder.atomic_rmw("add", where, _i64(1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def call_int(typingctx, address):
    """Call a C function without arguments that returns an int."""

    def codegen(context, builder, sig, args):
        function = ir.FunctionType(_i32, [])
        result = builder.call(builder.inttoptr(args[0], function.as_pointer()), [])
        return builder.sext(result, _i64)

    return types.int64(types.int64), codegen


@intrinsic
def address_of(typingctx, ptr):
    """The address a pointer holds."""

    def codegen(context, builder, sig, args):
        return builder.ptrtoint(args[0], _i64)

    return types.int64(ptr), codegen


@intrinsic(prefer_literal=True)
def read_int(typingctx, address, index, nbytes):
    """Element `index` of an array of signed integers of a constant size, as int64."""
    if not isinstance(nbytes, types.IntegerLiteral):
        return None
    kind = ir.IntType(8 * nbytes.literal_value)

    def codegen(context, builder, sig, args):
        base = builder.inttoptr(args[0], kind.as_pointer())
        value = builder.load(_at(builder, base, args[1]))
        return value if kind == _i64 else builder.sext(value, _i64)

    return types.int64(types.int64, types.int64, nbytes), codegen
