"""Elementary functions on vectors, within about 2 ulp; a NaN stays a NaN."""

from __future__ import annotations

from sluice.backends.cpu.jit import jit_inline
from sluice.backends.cpu.llvm import REGISTERS
from sluice.backends.cpu.simd import fma, keep_nan, pow2, times_pow2, vabs, vmax, vmin, vround
from sluice.backends.cpu.tiles import pair, pick

LOG2E = 1.4426950408889634
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
EXP_LOW, EXP_HIGH = -104.0, 89.0  # beyond these float32 gives 0 and infinity
ROUND = 1.5 * 2.0**23
NORMAL = 87.0  # exp of up to this, and its inverse, are normal numbers


@jit_inline
def _exp_rest(x, n):
    """exp(x) / 2**n: a polynomial on |r| <= ln(2) / 2, off by 3e-9 at most."""
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x))
    poly = fma(r, 1.3814540075e-3, 8.3687451078e-3)
    poly = fma(poly, r, 4.1668390786e-2)
    poly = fma(poly, r, 1.6666520399e-1)
    poly = fma(poly, r, 4.9999993432e-1)
    return fma(poly, r * r, r) + 1.0


@jit_inline
def vexp(x):
    """exp(x)."""
    clamped = vmin(vmax(x, EXP_LOW), EXP_HIGH)
    n = vround(clamped * LOG2E)
    # 2**n in two factors: n reaches -150, below the smallest normal exponent.
    half = vround(n * 0.5)
    return keep_nan(_exp_rest(clamped, n) * pow2(half) * pow2(n - half), x)


@jit_inline
def _vexp_minus(x):
    """exp(-x), kept between 1e-38 and 1e38; a NaN becomes the smallest.

    A sum with ROUND has a whole number in its last bits, from which 2**n is made.
    """
    clamped = vmax(vmin(x, NORMAL), -NORMAL)
    shifted = fma(clamped, -LOG2E, ROUND)
    return times_pow2(_exp_rest(clamped * -1.0, shifted - ROUND), shifted)


@jit_inline
def vlog1p_unit(y):
    """log(1 + y) for y in [0, 1], as 2 atanh(y / (2 + y))."""
    z = y / (y + 2.0)
    z2 = z * z
    poly = fma(z2, 0.06666666667, 0.07692307692)
    poly = fma(poly, z2, 0.09090909091)
    poly = fma(poly, z2, 0.1111111111)
    poly = fma(poly, z2, 0.1428571429)
    poly = fma(poly, z2, 0.2)
    poly = fma(poly, z2, 0.3333333333)
    twice = z + z
    return fma(poly * z2, twice, twice)


@jit_inline
def vsoftplus(x):
    return vmax(x, 0.0) + vlog1p_unit(vexp(vabs(x) * -1.0))


@jit_inline
def vsigmoid(x):
    return keep_nan(1.0 / (_vexp_minus(x) + 1.0), x)


@jit_inline
def vsilu(x):
    return x / (_vexp_minus(x) + 1.0)


@jit_inline
def _silu_each(tile):
    return pair(vsilu(pick(tile, 0)), vsilu(pick(tile, 1)))


@jit_inline
def _sigmoid_each(tile):
    return pair(vsigmoid(pick(tile, 0)), vsigmoid(pick(tile, 1)))


# Of ROWS pairs of vectors. With 32 registers they go through an activation together, operation by
# operation; with 16, its constants leave room for one vector.
ROWS = 2 if REGISTERS >= 32 else 1
silu_rows, sigmoid_rows = (vsilu, vsigmoid) if ROWS == 2 else (_silu_each, _sigmoid_each)
