"""How ``conv_qkv`` is launched; its kernel is in kernels/conv_qkv.py."""

from __future__ import annotations

from sluice.backends.triton import configs
from sluice.backends.triton.arguments import Binding, Kernel, inverse, kernel_call
from sluice.backends.triton.conv import average, checkpoint_calls, shared, units
from sluice.backends.triton.launch import Launches
from sluice.contract.spec import ConvQkvSpec

CONV_QKV = Kernel("sluice.backends.triton.kernels.conv_qkv", "conv_qkv_kernel")
FEW_HEADS = 16
"""Gates of fewer heads take the kernel of so many."""


def constant_steps(p: ConvQkvSpec, config: configs.Config) -> dict[str, int]:
    """The strides that ``inner_unit`` has as constants; zeros where it cannot be used.

    It needs heads without gaps. Units cut for short sequences take the general path.
    """
    x, q, k, v = p.x.strides, p.q.strides, p.k.strides, p.v.strides
    serves = (
        p.K == p.V == config.BLOCK_D
        and config.UNIT_T > config.BLOCK_T
        and x[2] == 1
        and p.weight.is_dense()
        and q[1] == k[1]
        and q[2] == k[2] == p.K
        and v[2] == p.V
    )
    found = (x[1], q[1], v[1]) if serves else (0, 0, 0)
    return dict(zip(("STEP_X", "STEP_QK", "STEP_V"), found, strict=True))


def launches(spec: ConvQkvSpec) -> Launches:
    """The kernel of ``conv_qkv``, after that of its checkpoints."""
    memory, p = Binding(spec), spec
    config = configs.conv_qkv(p.K, p.V, average(p), p.x.dtype.itemsize)
    both = shared(p, memory)
    parts = 2 * p.HK + p.HV + (p.g is not None or p.beta is not None)
    call = kernel_call(
        CONV_QKV,
        units(p, config.UNIT_T) * parts,
        config,
        p.device,
        **both,
        a_ptr=memory["a"],
        b_ptr=memory["b"],
        A_log_ptr=memory.dense("A_log"),
        dt_bias_ptr=memory.dense("dt_bias"),
        q_ptr=memory["q"],
        k_ptr=memory["k"],
        v_ptr=memory["v"],
        g_ptr=memory["g"],
        beta_ptr=memory["beta"],
        beta_scale=p.beta_scale,
        **memory.strides("a", "bth"),
        **memory.strides("b", "bth"),
        **memory.strides("q", "bth"),
        **memory.strides("k", "bth"),
        **memory.strides("v", "bth"),
        **memory.strides("g", "bth"),
        **memory.strides("beta", "bth"),
        HK=p.HK,
        HV=p.HV,
        inverse_parts=inverse(parts),
        K=p.K,
        V=p.V,
        UNIT_T=config.UNIT_T,
        BLOCK_T=config.BLOCK_T,
        BLOCK_D=config.BLOCK_D,
        BLOCK_H=max(FEW_HEADS, configs.power_of_two(p.HV)),
        NORMALIZE_QK=p.normalize_qk,
        **constant_steps(p, config),
    )
    return Launches(spec, memory, [*checkpoint_calls(p, memory, both), call])
