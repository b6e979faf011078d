"""Numbers that the Gluon kernels share."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from sluice.backends.hopper.kernels import sizes
from sluice.contract.chunk_length import CHUNK

C = gl.constexpr(CHUNK)  # tokens per chunk
COPY_WIDTH = gl.constexpr(sizes.COPY_WIDTH)
GROUP_V = gl.constexpr(64)  # value columns per state group, one copy wide
NORM_EPS = gl.constexpr(1e-6)
LOG2_E = gl.constexpr(1.4426950408889634)
