"""LLVM IR that the vector types are made of: storage types, vectors, memory.

Functions here are called while a kernel is compiled; they emit instructions and return values.
"""

from __future__ import annotations

from llvmlite import ir

from sluice.backends.cpu.numba_private import TARGET

F32, BF16, F16, F64 = 0, 1, 2, 3
ELEMENT_BYTES = (4, 2, 2, 8)

LINE = 64  # bytes of a cache line

_arm = TARGET.triple.startswith(("aarch64", "arm64"))
LANES = 16 if "+avx512f" in TARGET.features else 8 if "+avx" in TARGET.features else 4
# Vector registers decide how large a tile of accumulators may be before it spills.
REGISTERS = 32 if "+avx512f" in TARGET.features or _arm else 16
WORDS = "+avx512bw" in TARGET.features  # 16-bit lanes of two vectors meet in one instruction
NATIVE_HALF = "+f16c" in TARGET.features or _arm

f32, i16, i32, i64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
byte_pointer = ir.IntType(8).as_pointer()
_half = ir.HalfType() if NATIVE_HALF else i16
STORAGE = {F32: f32, BF16: i16, F16: _half, F64: ir.DoubleType()}


def vector_type(lanes, element=f32):
    return ir.VectorType(element, lanes)


def constant(typ, value):
    """A scalar constant, or a vector with that value in every lane."""
    if isinstance(typ, ir.VectorType):
        return ir.Constant(typ, [value] * typ.count)
    return ir.Constant(typ, value)


def like(typ, element):
    return vector_type(typ.count, element) if isinstance(typ, ir.VectorType) else element


def c_function(builder, name, result, arguments):
    """A function of C's library or an LLVM intrinsic, declared once in a module."""
    known = builder.module.globals.get(name)
    if known is not None:
        return known
    return ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def call_llvm(builder, name, result, *args):
    """Call an overloaded LLVM intrinsic: `llvm.<name>.<suffix of the result's type>`."""
    suffix = f"v{result.count}f32" if isinstance(result, ir.VectorType) else "f32"
    fn = c_function(builder, f"llvm.{name}.{suffix}", result, [a.type for a in args])
    return builder.call(fn, args)


def shuffle(builder, a, b, mask):
    return builder.shuffle_vector(a, b, ir.Constant(vector_type(len(mask), i32), mask))


def splat_of(builder, value, lanes=LANES):
    one = builder.insert_element(ir.Constant(vector_type(lanes), ir.Undefined), value, i32(0))
    return shuffle(builder, one, one, [0] * lanes)


def rows_of(builder, tile):
    return [builder.extract_value(tile, i) for i in range(tile.type.count)]


def tile_of(builder, vectors):
    out = ir.Constant(ir.ArrayType(vectors[0].type, len(vectors)), ir.Undefined)
    for i, vector in enumerate(vectors):
        out = builder.insert_value(out, vector, i)
    return out


def element_at(builder, ptr, index):
    return builder.gep(ptr, [index])


def _widen(builder, code, raw):
    """Storage bits to float32, a scalar or a vector."""
    if code == F32:
        return raw
    if code == F16 and NATIVE_HALF:
        return builder.fpext(raw, like(raw.type, f32))
    if code == F16:
        return _widen_half(builder, builder.zext(raw, like(raw.type, i32)))
    if code == F64:
        return builder.fptrunc(raw, like(raw.type, f32))
    wide = builder.zext(raw, like(raw.type, i32))
    return builder.bitcast(builder.shl(wide, constant(wide.type, 16)), like(raw.type, f32))


def _narrow(builder, code, value):
    """float32 to storage bits, rounding to nearest even; a NaN stays a NaN."""
    if code == F32:
        return value
    if code == F16 and NATIVE_HALF:
        return builder.fptrunc(value, like(value.type, ir.HalfType()))
    if code == F16:
        return builder.trunc(_narrow_half(builder, value), like(value.type, i16))
    if code == F64:
        return builder.fpext(value, like(value.type, ir.DoubleType()))
    bits = _keep_nan(builder, _rounded(builder, value), value)
    bits = builder.lshr(bits, constant(bits.type, 16))
    return builder.trunc(bits, like(value.type, i16))


def _keep_nan(builder, bits, value):
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, constant(bits.type, 0x7FC00000), bits)


def _rounded(builder, value):
    """Bits whose upper half is the nearest bfloat16, ties to even. Not for a NaN.

    No machine's own instruction does this: AVX-512's sets subnormal numbers to zero.
    """
    bits = builder.bitcast(value, like(value.type, i32))
    odd = builder.and_(builder.lshr(bits, constant(bits.type, 16)), constant(bits.type, 1))
    return builder.add(builder.add(bits, constant(bits.type, 0x7FFF)), odd)


def _rounded_pair(builder, even, odd, no_nan):
    """Two dealt vectors as bfloat16 in the order of addresses."""
    bits = [_rounded(builder, x) for x in (even, odd)]
    if not no_nan:
        bits = [_keep_nan(builder, *x) for x in zip(bits, (even, odd), strict=True)]
    low = builder.lshr(bits[0], constant(bits[0].type, 16))
    return builder.or_(low, builder.and_(bits[1], constant(low.type, 0xFFFF0000)))


def _rounded_words(builder, even, odd):
    """The same on 16-bit lanes, with two operations less per vector. Not for a NaN.

    Upper halves lie in one vector, lower halves in another. A lower half above 0x8000 rounds up,
    and 0x8000 itself where the upper half is odd.
    """
    words = vector_type(2 * LANES, i16)
    a, b = (builder.bitcast(x, words) for x in (even, odd))
    lower = [x for i in range(0, 2 * LANES, 2) for x in (i, 2 * LANES + i)]
    low, high = shuffle(builder, a, b, lower), shuffle(builder, a, b, [x + 1 for x in lower])
    even = builder.and_(builder.not_(high), constant(words, 1))
    fn = c_function(builder, f"llvm.usub.sat.v{2 * LANES}i16", words, [words, words])
    up = builder.lshr(builder.call(fn, [low, even]), constant(words, 15))
    return builder.add(high, up)


def _widen_half(builder, bits):
    """float16 bits (in 32) to float32, where the machine has no such instruction."""

    def const(value):
        return constant(bits.type, value)

    kind = like(bits.type, f32)
    rest = builder.shl(builder.and_(bits, const(0x7FFF)), const(13))
    scaled = builder.fmul(builder.bitcast(rest, kind), constant(kind, 2.0**112))
    special = builder.or_(rest, const(0x7F800000))
    is_special = builder.icmp_unsigned(">=", rest, const(0x7C00 << 13))
    rest = builder.select(is_special, special, builder.bitcast(scaled, bits.type))
    sign = builder.shl(builder.and_(bits, const(0x8000)), const(16))
    return builder.bitcast(builder.or_(rest, sign), kind)


def _narrow_half(builder, value):
    """float32 to float16 bits (in 32), rounding to nearest even."""
    kind = like(value.type, i32)

    def const(number):
        return constant(kind, number)

    bits = builder.bitcast(value, kind)
    rest = builder.and_(bits, const(0x7FFFFFFF))
    # below 2**-14: adding 0.5 leaves the multiples of 2**-24 in the last bits
    small = builder.fadd(builder.bitcast(rest, value.type), constant(value.type, 0.5))
    small = builder.sub(builder.bitcast(small, kind), const(0x3F000000))
    odd = builder.and_(builder.lshr(rest, const(13)), const(1))
    normal = builder.add(builder.add(rest, const(0xFFF - (112 << 23))), odd)
    normal = builder.lshr(normal, const(13))
    is_small = builder.icmp_unsigned("<", rest, const(113 << 23))
    half = builder.select(is_small, small, normal)
    is_big = builder.icmp_unsigned(">=", rest, const(0x477FF000))
    is_nan = builder.icmp_unsigned(">", rest, const(0x7F800000))
    half = builder.select(is_big, const(0x7C00), half)
    half = builder.select(is_nan, const(0x7E00), half)
    sign = builder.and_(builder.lshr(bits, const(16)), const(0x8000))
    return builder.or_(half, sign)


def load_at(builder, code, ptr, index, lanes=None):
    where = element_at(builder, ptr, index)
    if lanes is None:
        return _widen(builder, code, builder.load(where))
    where = builder.bitcast(where, vector_type(lanes, STORAGE[code]).as_pointer())
    raw = builder.load(where, align=ELEMENT_BYTES[code])
    return _widen(builder, code, raw)


def load_run(builder, code, ptr, index, count):
    """`count` vectors of consecutive elements.

    A pair of vectors of bfloat16 comes dealt: the even elements, then the odd ones. One load and
    two operations on whole lanes make a pair; in the order of addresses lanes would have to cross.
    """
    if code == BF16:
        pair, out = vector_type(LANES, i32), []
        for _ in range(0, count, 2):
            where = builder.bitcast(element_at(builder, ptr, index), pair.as_pointer())
            raw = builder.load(where, align=2)
            even = builder.shl(raw, constant(pair, 16))
            odd = builder.and_(raw, constant(pair, 0xFFFF0000))
            out += [builder.bitcast(x, vector_type(LANES)) for x in (even, odd)]
            index = builder.add(index, i64(2 * LANES))
        return out
    out = []
    for _ in range(count):
        out.append(load_at(builder, code, ptr, index, LANES))
        index = builder.add(index, i64(LANES))
    return out


def store_run(builder, code, ptr, index, vectors, no_nan=False, past=False):
    """Store vectors to consecutive elements, so that `load_run` gives them back.

    With `past` they are whole cache lines, and written to memory past the caches.
    """
    if code == BF16:
        for even, odd in zip(vectors[::2], vectors[1::2], strict=True):
            if no_nan and WORDS:
                raw = _rounded_words(builder, even, odd)
            else:
                raw = _rounded_pair(builder, even, odd, no_nan)
            _put(builder, ptr, index, raw, 2, past)
            index = builder.add(index, i64(2 * LANES))
        return
    for vector in vectors:
        _put(builder, ptr, index, _narrow(builder, code, vector), ELEMENT_BYTES[code], past)
        index = builder.add(index, i64(LANES))


def _put(builder, ptr, index, raw, align, past):
    where = builder.bitcast(element_at(builder, ptr, index), raw.type.as_pointer())
    stored = builder.store(raw, where, align=LINE if past else align)
    if past:
        stored.set_metadata("nontemporal", builder.module.add_metadata([i32(1)]))


def store_at(builder, code, ptr, index, value):
    raw = _narrow(builder, code, value)
    where = builder.bitcast(element_at(builder, ptr, index), raw.type.as_pointer())
    builder.store(raw, where, align=ELEMENT_BYTES[code])


def prefetch_at(builder, address, level):
    """Ask for memory that will be read, and soon written."""
    where = builder.inttoptr(address, byte_pointer)
    kinds = [byte_pointer, i32, i32, i32]
    fn = c_function(builder, "llvm.prefetch.p0", ir.VoidType(), kinds)
    builder.call(fn, [where, i32(0), i32(4 - level), i32(1)])
