"""How ``step`` is launched; its kernel is in kernels/step.py."""

from __future__ import annotations

from typing import Any

import torch

from sluice.backends.triton import configs
from sluice.backends.triton.arguments import Binding, Kernel, Pointer, inverse, kernel_call
from sluice.backends.triton.arrivals import arrivals_of
from sluice.backends.triton.launch import COUNTERS, Launches
from sluice.contract.spec import StepSpec

STEP = Kernel("sluice.backends.triton.kernels.step", "step_kernel")


def _places(p: StepSpec, memory: Binding) -> dict[str, Any]:
    """Where heads lie in the projections, in either order; z and a may be tensors of their own.

    Split: [Q | K | V], z, b and a. Interleaved (Qwen3-Next): per key head [q | k | r v | r z] and
    [r b | r a].
    """
    r, split = p.HV // p.HK, p.order == "split"
    z, a = memory["z"], memory["a"]
    z_name, a_name = ("qkv" if z is None else "z"), ("b" if a is None else "a")
    if z is None:
        z = Pointer("qkv", p.qkv.dtype, p.z_offset * p.qkv.dtype.itemsize)
    if a is None:
        a = Pointer("b", p.b.dtype, p.a_offset * p.b.dtype.itemsize)
    stride_b, stride_a = p.b.strides[2], memory.metas[a_name].strides[2]
    group = 2 * p.K + 2 * r * p.V
    return {
        "x_ptr": memory["qkv"],
        "z_ptr": z,
        "b_ptr": memory["b"],
        "a_ptr": a,
        "k_offset": p.HK * p.K if split else p.K,
        "v_offset": 2 * p.HK * p.K if split else 2 * p.K,
        **memory.strides("qkv", "nt", "x"),
        **memory.strides(z_name, "nt", "z"),
        **memory.strides("b", "nt"),
        **memory.strides(a_name, "nt", "a"),
        "stride_q_g": p.K if split else group,
        "stride_v_g": r * p.V if split else group,
        "stride_z_g": r * p.V if split else group,
        "stride_b_g": r * stride_b if split else 2 * r * stride_b,
        "stride_a_g": r * stride_a if split else 2 * r * stride_a,
        "stride_b_h": stride_b,
        "stride_a_h": stride_a,
    }


def launches(spec: StepSpec) -> Launches:
    """The kernel of ``step``."""
    memory, p = Binding(spec), spec
    config = configs.step(p.state_dtype, p.state_layout, p.K, p.V)
    arrivals = None
    if p.HV > p.HK:  # several value heads read one window: the last of them writes it
        pool, HK = spec.TENSORS.index("conv_state"), p.HK
        memory.counters = lambda tensors: arrivals_of(tensors[pool], HK)
        arrivals = Pointer(COUNTERS, torch.int32)
    call = kernel_call(
        STEP,
        p.N * p.HV,
        config,
        p.device,
        **_places(p, memory),
        conv_weight_ptr=memory["conv_weight"],
        conv_bias_ptr=memory.dense("conv_bias"),
        A_log_ptr=memory.dense("A_log"),
        dt_bias_ptr=memory.dense("dt_bias"),
        norm_weight_ptr=memory.dense("norm_weight"),
        conv_state_ptr=memory["conv_state"],
        state_ptr=memory["state"],
        y_ptr=memory["out"],
        arrivals_ptr=arrivals,
        slots_ptr=memory.dense("slots"),
        write_slots_ptr=memory.dense("write_slots"),
        has_state_ptr=memory.dense("has_state"),
        scale=p.q_scale,
        beta_scale=p.beta_scale,
        eps=float(p.eps),
        pad_slot=p.pad_slot,
        **memory.strides("conv_weight", "dw", "w"),
        **memory.strides("conv_state", "pdl", "conv"),
        stride_state_p=p.state.strides[0],
        **memory.strides("out", "nt", "y"),
        T=p.T,
        HK=p.HK,
        HV=p.HV,
        readers=p.HV // p.HK,
        inverse_HV=inverse(p.HV),
        inverse_readers=inverse(p.HV // p.HK),
        K=p.K,
        V=p.V,
        L=p.L,
        W=p.W,
        PIECES=configs.power_of_two(configs.blocks(p.K, config.PIECE_K)),
        PIECE_K=config.PIECE_K,
        BLOCK_V=configs.power_of_two(p.V),
        BLOCK_L=configs.power_of_two(p.L),
        NORMALIZE_QK=p.normalize_qk,
        CONV_SILU=p.conv_silu,
        GATE_SIGMOID=p.gate_activation == "sigmoid",
        STATE_KV=p.state_layout == "kv",
        ONE_TOKEN=p.T == 1,
    )
    return Launches(spec, memory, [call])
