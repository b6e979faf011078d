"""How ``decode`` and ``verify`` are launched; their kernel is in kernels/decode.py."""

from __future__ import annotations

from sluice.backends.triton import configs
from sluice.backends.triton.arguments import Binding, Kernel, inverse, kernel_call
from sluice.backends.triton.launch import Launches
from sluice.contract.draft_spec import VerifySpec
from sluice.contract.spec import DeltaSpec

DECODE = Kernel("sluice.backends.triton.kernels.decode", "decode_kernel")
DECODE_UNALIGNED = Kernel("sluice.backends.triton.kernels.decode", "decode_unaligned_kernel")


def launches(spec: DeltaSpec) -> Launches:
    """The kernel of ``decode``, and of ``verify``, which writes a draft instead of the state."""
    memory, p = Binding(spec), spec
    g = memory.rows("g") if p.decay == "key" else memory["g"]
    tokens = 2 if p.varlen else p.T
    verify = isinstance(p, VerifySpec)
    buffered = isinstance(p, VerifySpec) and p.buffered
    row = memory.dense("draft_slots") if verify else None
    copied = memory["conv_inputs"] if buffered and p.conv_inputs is not None else None
    D = None if copied is None else p.conv_inputs.shape[2]
    config = configs.decode(p.state_dtype, p.state_layout, p.K, p.V, p.N * p.HV, tokens)
    blocks = configs.blocks(p.V, config.BLOCK_V)
    x_strides = dict.fromkeys(("stride_x_b", "stride_x_t", "stride_x_d"))
    if copied is not None:
        x_strides |= memory.strides("conv_inputs", "btd", "x")
    call = kernel_call(
        DECODE if 32 * config.num_warps >= config.PIECE_K else DECODE_UNALIGNED,
        p.N * p.HV * blocks,
        config,
        p.device,
        q_ptr=memory["q"],
        k_ptr=memory["k"],
        v_ptr=memory["v"],
        g_ptr=g,
        beta_ptr=memory["beta"],
        A_log_ptr=memory.dense("A_log"),
        dt_bias_ptr=memory.dense("dt_bias"),
        state_ptr=memory["state"],
        o_ptr=memory["out"],
        draft_k_ptr=memory["draft_k"],
        draft_d_ptr=memory["draft_d"],
        draft_g_ptr=memory["draft_g"],
        x_ptr=copied,
        draft_x_ptr=None if copied is None else memory["draft_x"],
        draft_slots_ptr=(row or memory.dense("slots")) if buffered else None,
        slots_ptr=memory.dense("slots"),
        write_slots_ptr=memory.dense("write_slots"),
        has_state_ptr=memory.dense("has_state"),
        cu_seqlens_ptr=memory.dense("cu_seqlens"),
        scale=p.q_scale,
        beta_scale=p.beta_scale,
        N=p.N,
        T=p.T,
        pad_slot=p.pad_slot,
        states=p.states or None,
        draft_tokens=p.draft_tokens if buffered else None,
        D=D,
        **x_strides,
        **memory.strides("q", "bth"),
        **memory.strides("k", "bth"),
        **memory.strides("v", "bth"),
        **memory.strides("g", "bth"),
        **memory.strides("beta", "bth"),
        **memory.strides("out", "bth", "o"),
        stride_state_p=p.state.strides[0],
        HV=p.HV,
        R_Q=max(p.HV // p.HQ, 1),
        R_K=p.HV // p.HK,
        inverse_HV=inverse(p.HV),
        inverse_R_Q=inverse(p.HV // p.HQ),
        inverse_R_K=inverse(p.HV // p.HK),
        READERS=max(p.HQ // p.HV, 1),
        K=p.K,
        V=p.V,
        BLOCK_V=config.BLOCK_V,
        PIECE_K=config.PIECE_K,
        LOAD=config.LOAD,
        STORE=config.STORE,
        ONE_TOKEN=p.T == 1 and not p.varlen,
        NORMALIZE_QK=p.normalize_qk,
        DECAY_PER_KEY=p.decay == "key",
        STATE_KV=p.state_layout == "kv",
        BLOCK_X=0 if D is None else configs.power_of_two(configs.blocks(D, p.HV * blocks)),
    )
    # without sequences no program runs, but outputs are still zeros
    return Launches(spec, memory, [call], zeros="out" if p.N == 0 else None)
