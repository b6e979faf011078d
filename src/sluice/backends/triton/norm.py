"""How ``rms_norm_gated`` is launched; its kernel is in kernels/norm.py."""

from __future__ import annotations

import itertools
import math
import operator

from sluice.backends.triton import configs
from sluice.backends.triton.arguments import Binding, Kernel, Pointer, kernel_call
from sluice.backends.triton.launch import Launches
from sluice.contract.spec import NormSpec

NORM = Kernel("sluice.backends.triton.kernels.norm", "rms_norm_gated_kernel")


def merged(sizes: list[int], steps: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Leading dimensions and each tensor's strides, with dimensions merged where all allow it."""
    sizes, steps = list(sizes), [list(s) for s in steps]
    i = 0
    while i + 1 < len(sizes):
        if (
            sizes[i] == 1
            or sizes[i + 1] == 1
            or all(s[i] == s[i + 1] * sizes[i + 1] for s in steps)
        ):
            for s in steps:
                del s[i if sizes[i + 1] != 1 else i + 1]
            sizes[i : i + 2] = [sizes[i] * sizes[i + 1]]
        else:
            i += 1
    missing = max(0, 3 - len(sizes))
    return [1] * missing + sizes, [[0] * missing + s for s in steps]


def launches(spec: NormSpec) -> Launches:
    """The kernel of ``rms_norm_gated``, one launch per index of the dimensions beyond three."""
    memory, p = Binding(spec), spec
    names = ("x", "z", "out")
    metas = [getattr(p, name) for name in names]
    sizes, steps = merged(list(p.x.shape[:-1]), [list(m.strides[:-1]) for m in metas])
    outer, inner = sizes[:-3], sizes[-3:]
    config, calls = configs.norm(p.V), []
    vectors = math.prod(inner)
    for index in itertools.product(*map(range, outer)):
        pointers = [
            Pointer(name, m.dtype, m.dtype.itemsize * sum(map(operator.mul, index, s)))
            for name, m, s in zip(names, metas, steps, strict=True)
        ]
        strides = {
            f"stride_{name}_{d}": step
            for name, s in zip(("x", "z", "y"), steps, strict=True)
            for d, step in zip("012", s[-3:], strict=True)
        }
        call = kernel_call(
            NORM,
            configs.blocks(vectors, config.BLOCK_T) if p.V > 0 else 0,
            config,
            p.device,
            x_ptr=pointers[0],
            z_ptr=pointers[1],
            weight_ptr=memory["weight"],
            y_ptr=pointers[2],
            eps=float(p.eps),
            rows=vectors,
            D1=inner[1],
            D2=inner[2],
            **strides,
            V=p.V,
            BLOCK_R=config.BLOCK_T,
            BLOCK_V=configs.power_of_two(p.V),
            SIGMOID=p.activation == "sigmoid",
        )
        calls.append(call)
    return Launches(spec, memory, calls)
