"""How ``causal_conv1d`` is launched; its kernels are in kernels/conv.py."""

from __future__ import annotations

from typing import Any

from sluice.backends.triton import configs
from sluice.backends.triton.arguments import Binding, Kernel, KernelCall, inverse, kernel_call
from sluice.backends.triton.launch import Launches
from sluice.contract.spec import ConvQkvSpec, ConvSpec

CONV = Kernel("sluice.backends.triton.kernels.conv", "conv_kernel")
CONV_ONE = Kernel("sluice.backends.triton.kernels.conv", "conv_one_kernel")
CHECKPOINTS = Kernel("sluice.backends.triton.kernels.conv_checkpoints", "conv_checkpoints_kernel")
NOT_OF_ONE = ("cu_seqlens_ptr", "T", "window_start_ptr", "stride_x_t", "stride_y_t", "BLOCK_L")
"""Arguments that a single token per sequence does not need."""
NOT_OF_CHECKPOINTS = ("weight_ptr", "bias_ptr", "write_slots_ptr", "N", "stride_w_d", "stride_w_w")
NOT_OF_CHECKPOINTS += ("BLOCK_L", "SILU", "WRITE_STATE")
"""Arguments that only a convolution needs."""


def units(p: ConvSpec | ConvQkvSpec, tokens: int) -> int:
    """Work units of ``tokens`` tokens that cover the call: see work_units.py."""
    if p.varlen:
        return p.T // tokens + p.N + 1
    return p.N * max(1, configs.blocks(p.T, tokens))


def average(p: ConvSpec | ConvQkvSpec) -> int:
    """Tokens per sequence on average, which is all that shapes say of packed sequences.

    Of those at least two: the first unit of a sequence writes the window in place, so no other one
    may read it, and units of one token would, where a sequence has more.
    """
    return max(2, configs.blocks(p.T, max(p.N, 1))) if p.varlen else p.T


def shared(p: ConvSpec | ConvQkvSpec, memory: Binding) -> dict[str, Any]:
    """The arguments that both convolutions take."""
    return {
        "x_ptr": memory["x"],
        "weight_ptr": memory["weight"],
        "bias_ptr": memory.dense("bias"),
        "state_ptr": memory["state"],
        "slots_ptr": memory.dense("slots"),
        "write_slots_ptr": memory.dense("write_slots"),
        "has_state_ptr": memory.dense("has_state"),
        "cu_seqlens_ptr": memory.dense("cu_seqlens"),
        "window_start_ptr": memory.dense("window_start"),
        "N": p.N,
        "T": p.T,
        "pad_slot": p.pad_slot,
        **memory.strides("x", "btd"),
        **memory.strides("weight", "dw", "w"),
        **memory.strides("state", "pdl"),
        "L": p.L,
        "W": p.W,
        "BLOCK_L": max(1, configs.power_of_two(p.L)),
        "SILU": p.silu,
        "WRITE_STATE": p.state is not None and not p.freeze,
    }


def checkpoint_calls(
    p: ConvSpec | ConvQkvSpec, memory: Binding, common: dict[str, Any]
) -> list[KernelCall]:
    """What writes the windows inside sequences, if the call asks for any.

    It goes before the convolution, which rolls the windows that early checkpoints read.
    """
    if p.checkpoint_slots is None or not p.checkpoint_slots.numel():
        return []
    config, M = configs.CONV_CHECKPOINTS, p.checkpoint_slots.shape[1]
    columns = configs.blocks(p.x.shape[2], config.BLOCK_D)
    given = {name: x for name, x in common.items() if name not in NOT_OF_CHECKPOINTS}
    call = kernel_call(
        CHECKPOINTS,
        p.checkpoint_slots.numel() * columns,
        config,
        p.device,
        **given,
        checkpoint_slots_ptr=memory.dense("checkpoint_slots"),
        checkpoint_positions_ptr=memory.dense("checkpoint_positions"),
        M=M,
        every=p.checkpoint_every,
        columns=columns,
        inverse_columns=inverse(columns),
        inverse_M=inverse(M),
        D=p.x.shape[2],
        BLOCK_D=config.BLOCK_D,
    )
    return [call]


def launches(spec: ConvSpec) -> Launches:
    """The kernel of ``causal_conv1d``: one for a single token per sequence, one for all else."""
    memory, p = Binding(spec), spec
    both = shared(p, memory)
    common = {**both, "y_ptr": memory["out"], **memory.strides("out", "btd", "y"), "D": p.D}
    one = p.T == 1 and not p.varlen and p.L > 0 and p.state is not None
    if one and p.checkpoints == "none" and p.window_start is None:
        config = configs.conv(p.D, 1)
        given = {name: x for name, x in common.items() if name not in NOT_OF_ONE}
        columns = configs.blocks(p.D, config.BLOCK_D)
        call = kernel_call(
            CONV_ONE,
            p.N * columns,
            config,
            p.device,
            **given,
            columns=columns,
            inverse_columns=inverse(columns),
            BLOCK_D=config.BLOCK_D,
        )
        return Launches(spec, memory, [call])
    config = configs.conv(p.D, max(2, average(p)))
    columns = configs.blocks(p.D, config.BLOCK_D)
    call = kernel_call(
        CONV,
        units(p, config.UNIT_T) * columns,
        config,
        p.device,
        **common,
        columns=columns,
        inverse_columns=inverse(columns),
        UNIT_T=config.UNIT_T,
        STAGES=config.num_stages,
        BLOCK_T=config.BLOCK_T,
        BLOCK_D=config.BLOCK_D,
    )
    return Launches(spec, memory, [*checkpoint_calls(p, memory, both), call])
