"""How the backward of the convolutions is launched; kernels are in kernels/conv_backward.py."""

from __future__ import annotations

from typing import Any

from sluice.backends.triton import configs
from sluice.backends.triton.arguments import Binding, Kernel, KernelCall, kernel_call
from sluice.backends.triton.configs import Config
from sluice.backends.triton.launch import Launches
from sluice.backends.triton.prefill_backward import gate_sums
from sluice.contract.backward import ConvBackwardSpec, ConvQkvBackwardSpec

_FOLDER = "sluice.backends.triton.kernels."
CONV_BACKWARD = Kernel(_FOLDER + "conv_backward", "conv_backward_kernel")
CONV_WEIGHTS = Kernel(_FOLDER + "conv_backward", "conv_weights_kernel")
GATES_BACKWARD = Kernel(_FOLDER + "conv_backward", "gates_backward_kernel")
GATES = Config(num_warps=4, BLOCK_T=64)
CONV = Config(num_warps=4, BLOCK_T=8, BLOCK_D=64, UNIT_T=64)


def launches(spec: ConvBackwardSpec | ConvQkvBackwardSpec) -> Launches:
    """The kernels of the backward of either convolution."""
    return _qkv(spec) if isinstance(spec, ConvQkvBackwardSpec) else _conv(spec)


def _conv(spec: ConvBackwardSpec) -> Launches:
    """Of ``causal_conv1d``."""
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
    return Launches(spec, memory, _calls(spec, memory, given, BLOCK_D, blocks))


def _calls(
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


def _qkv(spec: ConvQkvBackwardSpec) -> Launches:
    """Of ``conv_qkv``: convolution, split and norm, then the gates."""
    memory, p = Binding(spec), spec
    given = {
        "dy_ptr": memory["dq"],
        "dk_ptr": memory["dk"],
        "dv_ptr": memory["dv"],
        "dwindow_ptr": None,
        "HK": p.HK,
        "HV": p.HV,
        "K": p.K,
        "V": p.V,
        "NORMALIZE_QK": p.normalize_qk,
    }
    block = configs.power_of_two(max(p.K, p.V))
    calls = _calls(p, memory, given, block, 2 * p.HK + p.HV)
    if p.a is not None or p.b is not None:
        calls += _gates(p, memory)
    return Launches(spec, memory, calls)


def _gates(p: ConvQkvBackwardSpec, memory: Binding) -> list[KernelCall]:
    programs = configs.blocks(p.B * p.T, GATES.BLOCK_T)
    parts = None if p.a is None else memory.scratch("ws.gates", programs, 2, p.HV)
    calls = [
        kernel_call(
            GATES_BACKWARD,
            programs,
            GATES,
            p.device,
            a_ptr=memory["a"],
            b_ptr=memory["b"],
            A_log_ptr=memory.dense("A_log"),
            dt_bias_ptr=memory.dense("dt_bias"),
            dg_ptr=memory["dg"],
            dbeta_ptr=memory["dbeta"],
            da_ptr=memory["da"],
            db_ptr=memory["db"],
            parts_ptr=parts,
            cu_seqlens_ptr=memory.dense("cu_seqlens"),
            beta_scale=2.0 if p.neg_eigval else 1.0,
            N=p.N,
            T=p.T,
            tokens=p.B * p.T,
            **memory.strides("a", "bth"),
            **memory.strides("b", "bth"),
            HV=p.HV,
            BLOCK_T=GATES.BLOCK_T,
            BLOCK_H=configs.power_of_two(p.HV),
        )
    ]
    if parts is not None:
        calls.append(gate_sums(memory, parts, programs, p.HV))
    return calls
