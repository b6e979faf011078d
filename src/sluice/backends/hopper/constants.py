"""Numbers that the Gluon kernels share."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from sluice.contract.chunk_length import CHUNK

C = gl.constexpr(CHUNK)  # tokens per chunk
COPY_WIDTH = gl.constexpr(64)  # columns per TMA copy: 128 bytes of 16-bit numbers, one swizzled row
GROUP_V = gl.constexpr(64)  # value columns per state group, one copy wide
NORM_EPS = gl.constexpr(1e-6)
LOG2_E = gl.constexpr(1.4426950408889634)
