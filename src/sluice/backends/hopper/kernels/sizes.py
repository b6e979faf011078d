"""Sizes that the host and the Gluon kernels share; Triton is not needed to read them."""

from __future__ import annotations

COPY_WIDTH = 64  # columns per TMA copy: 128 bytes of 16-bit numbers, one swizzled row


def key_heads(HK: int, HV: int) -> int:
    """Key heads per program of four warps: two if each has only two value heads."""
    return 2 if HV == 2 * HK and HK % 2 == 0 else 1
