"""Device functions that all kernels share: the launch wait, activations, powers of two.

Arithmetic is float32. A product and a sum become one rounding where ``tl.fma`` says so. Kernels
that must agree bit by bit (decode, verify, commit) are compiled with ``enable_fp_fusion`` off, so
that nothing else is fused; ``conv_qkv``, ``step`` and the serial kernels of 16-bit prefill leave it
on (``Config.fp_fusion``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq, is_cuda

NORM_EPS = tl.constexpr(1e-6)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def begin():
    """Wait for the kernels before this one, and let the next one start up to its own wait.

    From Hopper on, a kernel's programs may be put on the SMs while the kernel before it still runs
    (programmatic dependent launch), which saves a microsecond between two kernels. A kernel must
    not read or write memory before the wait. (One does: hopper/kernels/backward_walk_kernel.py says
    why it may.)
    """
    if cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def divide(n, d, inverse):
    """n // d and n % d of int32 numbers, 0 <= n, with ``inverse`` from ``arguments.inverse``.

    The product is the quotient or one less. It takes 5 instructions where a division takes 40, and
    programs divide before they know what to load.
    """
    quotient = ((n.to(tl.int64) * inverse) >> 31).to(tl.int32)
    rest = n - quotient * d
    quotient = tl.where(rest >= d, quotient + 1, quotient)
    return quotient, tl.where(rest >= d, rest - d, rest)


@triton.jit
def exp(x, SCALE: tl.constexpr = LOG2_E):
    """exp(x), to 2 ulp and the rounding of x · log2(e); results below 2**-126 are zero.

    With SCALE = -LOG2_E it is exp(-x), and the sign costs nothing.

    ``tl.exp`` spends three more instructions on subnormal results, and a division four more than
    the reciprocal: in a convolution that takes as long as its memory traffic.
    """
    if is_cuda():
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * SCALE], tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp2(x * SCALE)
    return y


@triton.jit
def reciprocal(x):
    """1 / x, to 1 ulp."""
    if is_cuda():
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 / x
    return y


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return reciprocal(1.0 + exp(x, -LOG2_E))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to float32's precision on both sides of zero.

    With e = exp(-|x|) and s = e / (2 + e) <= 1/3: log(1 + e) = 2 atanh(s), a series in s². The
    hardware's logarithm loses all relative precision near 1, where slow heads have their gates.
    """
    e = exp(tl.abs(x), -LOG2_E)
    s = e * reciprocal(2.0 + e)
    s2 = s * s
    series = s2 * (1.0 / 13.0) + (1.0 / 11.0)
    series = s2 * series + (1.0 / 9.0)
    series = s2 * series + (1.0 / 7.0)
    series = s2 * series + (1.0 / 5.0)
    series = s2 * series + (1.0 / 3.0)
    series = s2 * series + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def silu(x):
    """x · sigmoid(x)."""
    return x * sigmoid(x)


@triton.jit
def float16_scale(largest, LEAST: tl.constexpr):
    """Powers of two (up, down): ``up`` brings ``largest`` to [2¹³, 2¹⁴), ``down`` undoes it.

    In that range float16 has all its bits, with room for sums. A number below 2^(LEAST - 127) is
    scaled as if it were that large, so that ``up``, ``down`` and their products with other factors
    stay in float32's range. For zero both are 1.
    """
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.where(bits == 0, 140 * (1 << 23), tl.maximum(bits, LEAST * (1 << 23)))
    up = (254 * (1 << 23) - bits + 13 * (1 << 23)).to(tl.float32, bitcast=True)
    return up, (bits - 13 * (1 << 23)).to(tl.float32, bitcast=True)
