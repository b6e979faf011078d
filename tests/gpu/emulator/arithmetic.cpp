// Operations of a lane on its own registers, and between the lanes of a warp.
#include <algorithm>
#include <cmath>
#include <bit>

#include "core.hpp"

float from_half(u16 x) { return float(std::bit_cast<_Float16>(x)); }
u16 to_half(float x) {
    if (std::isnan(x)) return 0x7fff;
    return std::bit_cast<u16>(_Float16(x));
}

// d = f(a, ...) in the lanes of a mask; the full mask is what compilers vectorise
template <class D, class F>
static inline void each(D* d, u32 mask, F f) {
    if (mask == ALL) {
#pragma GCC ivdep
        for (int l = 0; l < LANES; l++) d[l] = f(l);
    } else {
        for (int l = 0; l < LANES; l++)
            if (mask >> l & 1) d[l] = f(l);
    }
}

#define OP [](Warp & w, const Operation& op, u32 mask)
#define SRC(T, name, i) const T* name = w.at<T>(op.operands[i])

// one, two or three sources of one type
#define UNARY(text, D, T, expr)                                          \
    add(text, OP {                                                       \
        SRC(T, A, 1);                                                    \
        each(w.at<D>(op.operands[0]), mask, [=](int l) -> D { T a = A[l]; return expr; }); \
    }, 2)
#define BINARY(text, D, T, U, expr)                                      \
    add(text, OP {                                                       \
        SRC(T, A, 1);                                                    \
        SRC(U, B, 2);                                                    \
        each(w.at<D>(op.operands[0]), mask, [=](int l) -> D { T a = A[l]; U b = B[l]; return expr; }); \
    }, 3)
#define TERNARY(text, D, T, U, expr)                                     \
    add(text, OP {                                                       \
        SRC(T, A, 1);                                                    \
        SRC(T, B, 2);                                                    \
        SRC(U, C, 3);                                                    \
        each(w.at<D>(op.operands[0]), mask,                              \
             [=](int l) -> D { T a = A[l], b = B[l]; U c = C[l]; return expr; }); \
    }, 4)
// a predicate: a bit per lane
#define COMPARE(text, T, expr)                                           \
    add(text, OP {                                                       \
        SRC(T, A, 1);                                                    \
        SRC(T, B, 2);                                                    \
        u32 found = 0, *d = w.at<u32>(op.operands[0]);                   \
        for (int l = 0; l < LANES; l++) { T a = A[l], b = B[l]; found |= u32(expr) << l; } \
        *d = (*d & ~mask) | (found & mask);                              \
    }, 3)
#define PREDICATE(text, expr)                                            \
    add(text, OP {                                                       \
        u32 a = w.first(op.operands[1]), b = w.first(op.operands[op.count - 1]); \
        u32* d = w.at<u32>(op.operands[0]);                              \
        (void)b;                                                         \
        *d = (*d & ~mask) | (u32(expr) & mask);                          \
    })

static float flush(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.f, x) : x; }
static float least(float a, float b) { return std::isnan(a) ? b : std::isnan(b) ? a : a < b || (a == b && std::signbit(a)) ? a : b; }
static float most(float a, float b) { return std::isnan(a) ? b : std::isnan(b) ? a : a > b || (a == b && !std::signbit(a)) ? a : b; }
static u32 to_tf32(float x) {  // to nearest, ties away from zero
    u32 bits = as_bits(x);
    return std::isfinite(x) ? (bits + 0x1000) & 0xffffe000 : bits & 0xffffe000 ? bits & 0xffffe000 : bits;
}
template <class T>
static T field(T x, u32 from, u32 many, bool sign) {  // bfe
    from &= 255, many &= 255;
    constexpr u32 bits = 8 * sizeof(T);
    if (many == 0) return 0;
    u64 wide = from >= bits ? 0 : u64(std::make_unsigned_t<T>(x)) >> from;
    bool last = std::make_unsigned_t<T>(x) >> std::min(from + many - 1, bits - 1) & 1;
    if (many < 64) wide &= (1ull << many) - 1;
    if (sign && last && many < 64) wide |= ~0ull << many;
    if (sign && last && from >= bits) wide = ~0ull;
    return T(wide);
}
static u32 permute(u32 a, u32 b, u32 how) {
    u64 both = u64(b) << 32 | a;
    u32 made = 0;
    for (int i = 0; i < 4; i++) {
        u32 byte = u32(both >> 8 * (how >> 4 * i & 7)) & 255;
        if (how >> 4 * i & 8) byte = byte & 128 ? 255 : 0;
        made |= byte << 8 * i;
    }
    return made;
}

template <class U, class S>
static void add_integers(const std::string& bits) {
    using W = std::conditional_t<sizeof(U) == 2, u32, u64>;
    using X = std::conditional_t<sizeof(U) == 2, i32, i64>;
    constexpr u32 N = 8 * sizeof(U);
    BINARY("add.b" + bits, U, U, U, U(a + b));
    BINARY("sub.b" + bits, U, U, U, U(a - b));
    BINARY("mul.b" + bits, U, U, U, U(a * b));
    TERNARY("mad.b" + bits, U, U, U, U(a * b + c));
    BINARY("and.b" + bits, U, U, U, a & b);
    BINARY("or.b" + bits, U, U, U, a | b);
    BINARY("xor.b" + bits, U, U, U, a ^ b);
    UNARY("not.b" + bits, U, U, U(~a));
    UNARY("neg.b" + bits, U, U, U(-a));
    UNARY("abs.s" + bits, U, S, U(a < 0 ? -a : a));
    UNARY("mov.b" + bits, U, U, a);
    BINARY("shl.b" + bits, U, U, u32, b >= N ? U(0) : U(a << b));
    BINARY("shr.u" + bits, U, U, u32, b >= N ? U(0) : U(a >> b));
    BINARY("shr.s" + bits, S, S, u32, S(a >> (b >= N ? N - 1 : b)));
    BINARY("min.u" + bits, U, U, U, std::min(a, b));
    BINARY("max.u" + bits, U, U, U, std::max(a, b));
    BINARY("min.s" + bits, S, S, S, std::min(a, b));
    BINARY("max.s" + bits, S, S, S, std::max(a, b));
    BINARY("div.u" + bits, U, U, U, b ? U(a / b) : U(-1));
    BINARY("rem.u" + bits, U, U, U, b ? U(a % b) : a);
    BINARY("div.s" + bits, S, S, S, b == 0 ? S(-1) : b == -1 ? S(-U(a)) : S(a / b));
    BINARY("rem.s" + bits, S, S, S, b == 0 ? a : b == -1 ? S(0) : S(a % b));
    if constexpr (sizeof(U) < 8) {
        BINARY("mul.wide.u" + bits, W, U, U, W(a) * b);
        BINARY("mul.wide.s" + bits, X, S, S, X(a) * b);
        TERNARY("mad.wide.u" + bits, W, U, W, W(a) * b + c);
        TERNARY("mad.wide.s" + bits, X, S, X, X(W(X(a) * b) + W(c)));
        BINARY("mul.hi.u" + bits, U, U, U, U(W(a) * b >> N));
        BINARY("mul.hi.s" + bits, S, S, S, S(X(a) * b >> N));
    } else {
        BINARY("mul.hi.u" + bits, U, U, U, U((unsigned __int128)(a) * b >> N));
    }
    COMPARE("setp.eq.b" + bits, U, a == b);
    COMPARE("setp.ne.b" + bits, U, a != b);
    COMPARE("setp.lt.u" + bits, U, a < b);
    COMPARE("setp.le.u" + bits, U, a <= b);
    COMPARE("setp.gt.u" + bits, U, a > b);
    COMPARE("setp.ge.u" + bits, U, a >= b);
    COMPARE("setp.lt.s" + bits, S, a < b);
    COMPARE("setp.le.s" + bits, S, a <= b);
    COMPARE("setp.gt.s" + bits, S, a > b);
    COMPARE("setp.ge.s" + bits, S, a >= b);
    add("selp.b" + bits, OP {
        SRC(U, A, 1);
        SRC(U, B, 2);
        u32 p = w.first(op.operands[3]);
        each(w.at<U>(op.operands[0]), mask, [=](int l) { return p >> l & 1 ? A[l] : B[l]; });
    });
}

template <class T>
static void add_floats(const std::string& kind) {
    BINARY("add." + kind, T, T, T, a + b);
    BINARY("sub." + kind, T, T, T, a - b);
    BINARY("mul." + kind, T, T, T, a* b);
    BINARY("div." + kind, T, T, T, a / b);
    TERNARY("fma." + kind, T, T, T, std::fma(a, b, c));
    UNARY("neg." + kind, T, T, -a);
    UNARY("abs." + kind, T, T, std::fabs(a));
    UNARY("sqrt." + kind, T, T, std::sqrt(a));
    COMPARE("setp.eq." + kind, T, a == b);
    COMPARE("setp.ne." + kind, T, a < b || a > b);
    COMPARE("setp.lt." + kind, T, a < b);
    COMPARE("setp.le." + kind, T, a <= b);
    COMPARE("setp.gt." + kind, T, a > b);
    COMPARE("setp.ge." + kind, T, a >= b);
    COMPARE("setp.equ." + kind, T, !(a < b || a > b));
    COMPARE("setp.neu." + kind, T, !(a == b));
    COMPARE("setp.ltu." + kind, T, !(a >= b));
    COMPARE("setp.leu." + kind, T, !(a > b));
    COMPARE("setp.gtu." + kind, T, !(a <= b));
    COMPARE("setp.geu." + kind, T, !(a < b));
    COMPARE("setp.num." + kind, T, a == a && b == b);
    COMPARE("setp.nan." + kind, T, a != a || b != b);
}

// two float32 in 64 bits
template <class F>
static u64 two(u64 a, u64 b, u64 c, F f) {
    auto half = [&](int i) { return u64(as_bits(f(as_float(u32(a >> i)), as_float(u32(b >> i)), as_float(u32(c >> i))))); };
    return half(0) | half(32) << 32;
}

static void add_pairs() {
    BINARY("add.f32x2", u64, u64, u64, two(a, b, 0, [](float x, float y, float) { return x + y; }));
    BINARY("sub.f32x2", u64, u64, u64, two(a, b, 0, [](float x, float y, float) { return x - y; }));
    BINARY("mul.f32x2", u64, u64, u64, two(a, b, 0, [](float x, float y, float) { return x * y; }));
    // a 16-bit operand with float32 ones
    BINARY("add.f32.bf16", float, u16, float, from_bfloat(a) + b);
    BINARY("sub.f32.bf16", float, u16, float, from_bfloat(a) - b);
    TERNARY("fma.f32.bf16", float, u16, float, std::fma(from_bfloat(a), from_bfloat(b), c));
    BINARY("add.f32.f16", float, u16, float, from_half(a) + b);
    BINARY("sub.f32.f16", float, u16, float, from_half(a) - b);
    TERNARY("fma.f32.f16", float, u16, float, std::fma(from_half(a), from_half(b), c));
    TERNARY("fma.f32x2", u64, u64, u64, two(a, b, c, [](float x, float y, float z) { return std::fma(x, y, z); }));
}

static void add_conversions() {
    UNARY("cvt.f32.f16", float, u16, from_half(a));
    UNARY("cvt.f32.bf16", float, u16, from_bfloat(a));
    UNARY("cvt.rn.f16.f32", u16, float, to_half(a));
    UNARY("cvt.rn.bf16.f32", u16, float, to_bfloat(a));
    BINARY("cvt.rn.f16x2.f32", u32, float, float, u32(to_half(a)) << 16 | to_half(b));
    BINARY("cvt.rn.bf16x2.f32", u32, float, float, u32(to_bfloat(a)) << 16 | to_bfloat(b));
    UNARY("cvt.f64.f32", double, float, a);
    UNARY("cvt.rn.f32.f64", float, double, float(a));
    UNARY("cvt.rna.tf32.f32", u32, float, to_tf32(a));
    UNARY("cvt.rn.f32.u32", float, u32, float(a));
    UNARY("cvt.rn.f32.s32", float, i32, float(a));
    UNARY("cvt.rn.f32.s64", float, i64, float(a));
    UNARY("cvt.rzi.s32.f32", i32, float, i32(a));
    UNARY("cvt.rmi.f32.f32", float, float, std::floor(a));
    UNARY("cvt.rni.f32.f32", float, float, std::nearbyint(a));
    UNARY("cvt.s64.s32", i64, i32, a);
    UNARY("cvt.u64.u32", u64, u32, a);
    UNARY("cvt.u32.u64", u32, u64, u32(a));
    UNARY("cvt.u16.u32", u16, u32, u16(a));
    UNARY("cvt.u16.u64", u16, u64, u16(a));
    UNARY("cvt.u32.u16", u32, u16, a);
    UNARY("cvt.s32.s16", i32, int16_t, a);
    UNARY("cvt.s64.s32<64", i64, u64, i64(i32(a)));
    UNARY("cvt.u64.u32<64", u64, u64, u64(u32(a)));
    UNARY("cvt.s32.s16<32", i32, u32, i32(int16_t(a)));
    UNARY("cvt.u32.u16<32", u32, u32, u32(u16(a)));
    UNARY("cvt.s32.s8<16", i32, u16, i32(int8_t(a)));
    UNARY("cvt.s32.s8<32", i32, u32, i32(int8_t(a)));
    UNARY("cvt.u32.u8<16", u32, u16, u32(u8(a)));
    UNARY("cvt.u64.u8<16", u64, u16, u64(u8(a)));
    UNARY("cvt.s16.s8<16", int16_t, u16, int16_t(int8_t(a)));
    UNARY("cvt.u64.u16", u64, u16, a);
}

template <class W, class N, int MANY>
static void add_packing(const std::string& name) {
    add("pack." + name, OP {
        each(w.at<W>(op.operands[0]), mask, [&](int l) {
            W made = 0;
            for (int i = 0; i < MANY; i++)
                made |= W(w.at<N>(op.operands[1 + i])[l]) << 8 * sizeof(N) * i;
            return made;
        });
    });
    add("unpack." + name, OP {
        W from[LANES];
        memcpy(from, w.at<W>(op.operands[MANY]), sizeof from);
        for (int i = 0; i < MANY; i++)
            each(w.at<N>(op.operands[i]), mask,
                 [&](int l) { return N(from[l] >> 8 * sizeof(N) * i); });
    });
}

// the lanes that take part must all be here
static u32 members(const Warp& w, const Operation& op, u32 place, u32 mask) {
    u32 asked = w.first(place) & ~w.exited;
    if (asked & ~mask) fail(w, op, "lanes that should take part are elsewhere");
    return asked;
}

template <int MODE>  // 0 idx, 1 up, 2 down, 3 bfly
static void shuffle(Warp& w, const Operation& op, u32 mask) {
    bool told = op.count == 6;  // d|p, a, b, c, mask
    const i32* from = op.operands + (told ? 2 : 1);
    members(w, op, from[3], mask);
    SRC(u32, B, told + 2);
    SRC(u32, C, told + 3);
    u32 a[LANES], inside = 0;
    memcpy(a, w.at<u32>(from[0]), sizeof a);
    u32 made[LANES];
    for (int l = 0; l < LANES; l++) {
        int b = B[l] & 31, segment = C[l] >> 8 & 31, clamp = C[l] & 31;
        int top = (l & segment) | (clamp & ~segment), low = l & segment, j;
        bool ok;
        if (MODE == 1) j = l - b, ok = j >= top;
        else if (MODE == 2) j = l + b, ok = j <= top;
        else if (MODE == 3) j = l ^ b, ok = j <= top;
        else j = low | (b & ~segment), ok = j <= top;
        if (!ok) j = l;
        inside |= u32(ok) << l;
        made[l] = a[j];
    }
    each(w.at<u32>(op.operands[0]), mask, [&](int l) { return made[l]; });
    if (told) *w.at<u32>(op.operands[1]) = inside & mask;
}

template <class F>
static void reduce(Warp& w, const Operation& op, u32 mask, F f) {
    u32 asked = members(w, op, op.operands[2], mask);
    SRC(i32, A, 1);
    i32 made = 0;
    bool any = false;
    for (int l = 0; l < LANES; l++)
        if (asked >> l & 1) made = any ? f(made, A[l]) : A[l], any = true;
    each(w.at<i32>(op.operands[0]), mask, [=](int) { return made; });
}

void add_arithmetic() {
    add_integers<u16, int16_t>("16");
    add_integers<u32, i32>("32");
    add_integers<u64, i64>("64");
    add_floats<float>("f32");
    add_floats<double>("f64");
    add_conversions();
    add_pairs();
    add_packing<u32, u16, 2>("32.2");
    add_packing<u64, u32, 2>("64.2");
    add_packing<u64, u16, 4>("64.4");
    BINARY("min.f32", float, float, float, least(a, b));
    BINARY("max.f32", float, float, float, most(a, b));
    TERNARY("min3.f32", float, float, float, least(least(a, b), c));
    TERNARY("max3.f32", float, float, float, most(most(a, b), c));
    BINARY("min.NaN.f32", float, float, float, a != a || b != b ? NAN : least(a, b));
    BINARY("max.NaN.f32", float, float, float, a != a || b != b ? NAN : most(a, b));
    BINARY("min.relu.s32", i32, i32, i32, std::max(std::min(a, b), 0));
    BINARY("max.relu.s32", i32, i32, i32, std::max(std::max(a, b), 0));
    UNARY("neg.f16", u16, u16, a ^ 0x8000);
    UNARY("neg.f16x2", u32, u32, a ^ 0x80008000);
    UNARY("neg.bf16", u16, u16, a ^ 0x8000);
    UNARY("neg.bf16x2", u32, u32, a ^ 0x80008000);
    UNARY("ex2.f32", float, float, std::exp2(a));
    UNARY("ex2.ftz.f32", float, float, flush(std::exp2(flush(a))));
    UNARY("lg2.f32", float, float, std::log2(a));
    UNARY("lg2.ftz.f32", float, float, std::log2(flush(a)));
    UNARY("rcp.f32", float, float, 1 / a);
    UNARY("rcp.ftz.f32", float, float, flush(1 / flush(a)));
    UNARY("rsqrt.f32", float, float, float(1 / std::sqrt(double(a))));
    UNARY("rsqrt.ftz.f32", float, float, float(1 / std::sqrt(double(flush(a)))));
    UNARY("sqrt.ftz.f32", float, float, flush(std::sqrt(flush(a))));
    BINARY("div.ftz.f32", float, float, float, flush(flush(a) / flush(b)));
    UNARY("popc.b32", u32, u32, u32(std::popcount(a)));
    UNARY("popc.b64", u32, u64, u32(std::popcount(a)));
    UNARY("clz.b32", u32, u32, u32(std::countl_zero(a)));
    UNARY("brev.b32", u32, u32, [](u32 x) { u32 y = 0; for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i); return y; }(a));
    TERNARY("bfe.u32", u32, u32, u32, field<u32>(a, b, c, false));
    TERNARY("bfe.s32", i32, i32, u32, field<i32>(a, u32(b), c, true));
    TERNARY("prmt.b32", u32, u32, u32, permute(a, b, c));
    PREDICATE("and.pred", a& b);
    PREDICATE("or.pred", a | b);
    PREDICATE("xor.pred", a ^ b);
    PREDICATE("not.pred", ~a);
    PREDICATE("mov.pred", a);
    add("shfl.idx.b32", shuffle<0>);
    add("shfl.up.b32", shuffle<1>);
    add("shfl.down.b32", shuffle<2>);
    add("shfl.bfly.b32", shuffle<3>);
    add("redux.add.s32", OP { reduce(w, op, mask, [](i32 a, i32 b) { return i32(u32(a) + u32(b)); }); });
    add("redux.min.s32", OP { reduce(w, op, mask, [](i32 a, i32 b) { return std::min(a, b); }); });
    add("redux.max.s32", OP { reduce(w, op, mask, [](i32 a, i32 b) { return std::max(a, b); }); });
    add("elect", OP {  // d|p, mask: the lowest lane
        u32 asked = members(w, op, op.operands[2], mask), one = asked & -asked;
        each(w.at<u32>(op.operands[0]), mask, [=](int) { return u32(std::countr_zero(one)); });
        u32* p = w.at<u32>(op.operands[1]);
        *p = (*p & ~mask) | one;
    });
}
