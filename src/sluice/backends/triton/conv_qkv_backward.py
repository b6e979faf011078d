"""How the backward of ``conv_qkv`` is launched; kernels are in kernels/conv_backward.py."""

from __future__ import annotations

from sluice.backends.triton import configs
from sluice.backends.triton.arguments import Binding, Kernel, KernelCall, kernel_call
from sluice.backends.triton.configs import Config
from sluice.backends.triton.conv_backward import conv_calls
from sluice.backends.triton.launch import Launches
from sluice.backends.triton.prefill_backward import gate_sums
from sluice.contract.backward import ConvQkvBackwardSpec

GATES_BACKWARD = Kernel("sluice.backends.triton.kernels.conv_backward", "gates_backward_kernel")
GATES = Config(num_warps=4, BLOCK_T=64)


def launches(spec: ConvQkvBackwardSpec) -> Launches:
    """Convolution, split and norm, then the gates."""
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
    calls = conv_calls(p, memory, given, block, 2 * p.HK + p.HV)
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
