"""How the backward of the convolutions is launched; kernels are in kernels/conv_backward.py."""

from __future__ import annotations

from typing import Any

from sluice.backends.triton import configs
from sluice.backends.triton.arguments import Binding, Kernel, KernelCall, kernel_call
from sluice.backends.triton.configs import Config
from sluice.backends.triton.launch import Launches
from sluice.contract.backward import ConvBackwardSpec, ConvQkvBackwardSpec

_FOLDER = "sluice.backends.triton.kernels."
CONV_BACKWARD = Kernel(_FOLDER + "conv_backward", "conv_backward_kernel")
CONV_WEIGHTS = Kernel(_FOLDER + "conv_backward", "conv_weights_kernel")
CONV = Config(num_warps=4, BLOCK_T=8, BLOCK_D=64, UNIT_T=64)


def launches(spec: ConvBackwardSpec) -> Launches:
    """The backward of ``causal_conv1d``."""
    memory = Binding(spec)
    BLOCK_D = min(CONV.BLOCK_D, configs.power_of_two(spec.D))
    given = {
        "dy_ptr": memory["dy"],
        "dk_ptr": None,
        "dv_ptr": None,
        "dwindow_ptr": memory["dwindow"],
        "HK": 0,
        "HV": 0,
        "K": 0,
        "V": 0,
        "NORMALIZE_QK": False,
    }
    blocks = configs.blocks(spec.D, BLOCK_D)
    return Launches(spec, memory, conv_calls(spec, memory, given, BLOCK_D, blocks))


def conv_calls(
    p: ConvBackwardSpec | ConvQkvBackwardSpec,
    memory: Binding,
    given: dict[str, Any],
    BLOCK_D: int,
    blocks: int,
) -> list[KernelCall]:
    """The convolution's gradients, and the sums for its weights."""
    units = p.N * max(configs.blocks(p.T, CONV.UNIT_T), 1)
    if p.varlen:
        units = p.T // CONV.UNIT_T + p.N + 1
    parts = memory.scratch("ws.parts", units, p.W + 1, p.D)
    rows = max(1, CONV.BLOCK_T * CONV.BLOCK_D // BLOCK_D)
    conv = kernel_call(
        CONV_BACKWARD,
        units * blocks,
        CONV,
        p.device,
        x_ptr=memory["x"],
        weight_ptr=memory["weight"],
        bias_ptr=memory.dense("bias"),
        state_ptr=memory["state"],
        dx_ptr=memory["dx"],
        dstate_ptr=memory["dstate"],
        parts_ptr=parts,
        cu_seqlens_ptr=memory.dense("cu_seqlens"),
        N=p.N,
        T=p.T,
        **memory.strides("x", "btd"),
        **memory.strides("weight", "dw", "w"),
        **memory.strides("state", "pdl"),
        D=p.D,
        L=p.L,
        W=p.W,
        UNIT_T=CONV.UNIT_T,
        BLOCK_T=rows,
        BLOCK_D=BLOCK_D,
        BLOCK_L=max(1, configs.power_of_two(p.L)),
        SILU=p.silu,
        **given,
    )
    block = min(64, configs.power_of_two(p.D))
    weights = kernel_call(
        CONV_WEIGHTS,
        configs.blocks(p.D, block) * (p.W + 1),
        Config(num_warps=4),
        p.device,
        parts_ptr=parts,
        dweight_ptr=memory["dweight"],
        dbias_ptr=memory["dbias"],
        parts=units,
        D=p.D,
        W=p.W,
        BLOCK_P=16,
        BLOCK_D=block,
    )
    return [conv, weights]
