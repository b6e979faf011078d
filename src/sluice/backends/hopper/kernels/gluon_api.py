"""Names of Gluon that are private, or that differ between releases of Triton.

Gluon is experimental. The kernels compile for Hopper with Triton 3.6, 3.7, 3.8 and 3.9; everything
else they use has the same name in these releases. ``TESTED`` in ``__init__.py`` lists the releases
with which they ran on a GPU. docs/kernels/triton.md says what a new release needs.

| here        | 3.6                             | 3.7        | 3.8             | 3.9              |
|-------------|---------------------------------|------------|-----------------|------------------|
| aggregate   | triton.language.core._aggregate | as before  | gluon.aggregate | as before        |
| barrier     | gl.thread_barrier               | gl.barrier | as before       | as before        |
| reinterpret | shared memory's _reinterpret    | as before  | as before       | its reinterpret  |
| async_load  | tma.async_copy_global_to_shared | as before  | tma.async_load, | the old name     |
| async_store | tma.async_copy_shared_to_global | as before  | tma.async_store | raises when used |
"""

from __future__ import annotations

import typing

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""A barrier of the warps that run the same role."""

if hasattr(tma, "async_load"):
    async_load, async_store = tma.async_load, tma.async_store
else:
    async_load = tma.async_copy_global_to_shared
    async_store = tma.async_copy_shared_to_global


def aggregate(cls):
    """Make ``cls`` a record that kernels can build, pass on and hand to other warps.

    The constructor takes the annotated fields in order or by name. Constexpr fields stay constants,
    also in what ``gl.warp_specialize`` hands over.
    """
    if hasattr(gluon, "aggregate"):
        return gluon.aggregate(cls)
    fields = typing.get_type_hints(cls)  # _aggregate does not evaluate annotations

    def init(self, *args, **kwargs):
        for name, value in {**dict(zip(fields, args, strict=False)), **kwargs}.items():
            setattr(self, name, value)

    init.__triton_builtin__ = True  # it runs in Python; Triton does not compile it
    cls.__annotations__, cls.__init__ = fields, init
    return core._aggregate(cls)


if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(smem, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """The same shared memory as a tensor of another type, shape and layout."""
        return smem.reinterpret(dtype, shape, layout)

else:

    @gluon.jit
    def reinterpret(smem, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """The same shared memory as a tensor of another type, shape and layout."""
        return smem._reinterpret(dtype, shape, layout)
