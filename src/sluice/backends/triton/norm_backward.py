"""How the backward of ``rms_norm_gated`` is launched; its kernel is in kernels/norm_backward.py."""

from __future__ import annotations

import itertools
import math
import operator

from sluice.backends.triton import configs
from sluice.backends.triton.arguments import Binding, Kernel, KernelCall, Pointer, kernel_call
from sluice.backends.triton.configs import Config
from sluice.backends.triton.launch import Launches
from sluice.backends.triton.norm import merged
from sluice.contract.backward import NormBackwardSpec

_FOLDER = "sluice.backends.triton.kernels."
NORM_BACKWARD = Kernel(_FOLDER + "norm_backward", "norm_backward_kernel")
SUM_PARTS = Kernel(_FOLDER + "parts", "sum_parts_kernel")
PROGRAMS = 512
"""Programs that share the rows, whatever the GPU: the order of sums is the same on all."""
NAMES = ("x", "z", "dy", "dx", "dz")


def sum_parts(memory: Binding, parts: Pointer, count: int, made: str, size: int) -> KernelCall:
    """The launch that sums ``parts`` [count, size] into a tensor of the spec."""
    block = min(64, configs.power_of_two(max(size, 1)))
    return kernel_call(
        SUM_PARTS,
        configs.blocks(size, block),
        Config(num_warps=4),
        memory.spec.device,
        parts_ptr=parts,
        made_ptr=memory[made],
        parts=count,
        D=size,
        BLOCK_P=32,
        BLOCK_D=block,
    )


def launches(spec: NormBackwardSpec) -> Launches:
    """One launch per index of the dimensions beyond three, then the sum for the weight."""
    memory, p = Binding(spec), spec
    metas = [getattr(p, name) for name in NAMES]
    sizes, steps = merged(list(p.x.shape[:-1]), [list(m.strides[:-1]) for m in metas])
    outer, inner = sizes[:-3], sizes[-3:]
    config, calls = configs.norm(p.V), []
    vectors = math.prod(inner)
    programs = min(PROGRAMS, configs.blocks(vectors, config.BLOCK_T)) if p.V > 0 else 0
    indices = list(itertools.product(*map(range, outer)))
    parts = memory.scratch("ws.parts", len(indices) * programs, p.V)
    for i, index in enumerate(indices):
        pointers = {
            f"{name}_ptr": Pointer(
                name, m.dtype, m.dtype.itemsize * sum(map(operator.mul, index, s))
            )
            for name, m, s in zip(NAMES, metas, steps, strict=True)
        }
        strides = {
            f"stride_{name}_{d}": step
            for name, s in zip(NAMES, steps, strict=True)
            for d, step in zip("012", s[-3:], strict=True)
        }
        call = kernel_call(
            NORM_BACKWARD,
            programs,
            config,
            p.device,
            **pointers,
            weight_ptr=memory["weight"],
            parts_ptr=parts,
            eps=float(p.eps),
            rows=vectors,
            D1=inner[1],
            D2=inner[2],
            part=i * programs,
            **strides,
            V=p.V,
            BLOCK_R=config.BLOCK_T,
            BLOCK_V=configs.power_of_two(p.V),
            SIGMOID=p.activation == "sigmoid",
        )
        calls.append(call)
    calls.append(sum_parts(memory, parts, len(indices) * programs, "dweight", p.V))
    return Launches(spec, memory, calls)
