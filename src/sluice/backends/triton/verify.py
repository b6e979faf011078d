"""How ``commit`` is launched; its kernel is in kernels/verify.py."""

from __future__ import annotations

from sluice.backends.triton import configs
from sluice.backends.triton.arguments import Binding, Kernel, inverse, kernel_call
from sluice.backends.triton.launch import Launches
from sluice.contract.draft_spec import CommitSpec

COMMIT = Kernel("sluice.backends.triton.kernels.verify", "commit_kernel")


def launches(spec: CommitSpec) -> Launches:
    """The kernel of ``commit``."""
    memory, p = Binding(spec), spec
    config = configs.commit(p.state_dtype, p.state_layout, p.K, p.V, p.layers * p.N * p.HV)
    row, conv = memory.dense("draft_slots"), p.conv_state
    strides: dict[str, int | None] = {
        **dict.fromkeys(("stride_state_layer", "stride_conv_layer")),
        **memory.strides("conv_inputs", "btd", "x"),
        **memory.strides("conv_state", "pdl", "conv"),
    }
    if p.stacked:  # rows of all layers' buffers lie one after another
        memory.metas["conv_state"] = p.layer(conv)
        strides |= {
            "stride_state_layer": p.state.strides[0],
            "stride_conv_layer": 0 if conv is None else conv.strides[0],
            **{"stride_x_b": p.T * p.D, "stride_x_t": p.D, "stride_x_d": 1},
            **memory.strides("conv_state", "pdl", "conv"),
        }
    windows = configs.blocks(p.D, configs.WINDOW_CHANNELS)
    programs = p.HV * configs.blocks(p.V, config.BLOCK_V) + windows
    call = kernel_call(
        COMMIT,
        p.layers * p.N * programs,
        config,
        p.device,
        draft_k_ptr=memory.dense("draft_k"),
        draft_d_ptr=memory.dense("draft_d"),
        draft_g_ptr=memory.dense("draft_g"),
        x_ptr=memory["conv_inputs"],
        state_ptr=memory["state"],
        conv_state_ptr=memory["conv_state"],
        num_accepted_ptr=memory.dense("num_accepted"),
        slots_ptr=memory.dense("slots"),
        write_slots_ptr=memory.dense("write_slots"),
        has_state_ptr=memory.dense("has_state"),
        cu_seqlens_ptr=memory.dense("cu_seqlens"),
        draft_slots_ptr=(row or memory.dense("slots")) if p.stacked else None,
        N=p.N,
        T=p.T,
        pad_slot=p.pad_slot,
        rows=p.S if p.stacked else None,
        **strides,
        stride_state_p=p.state.strides[-4],
        row_programs=programs,
        HK=p.HK,
        HV=p.HV,
        R_K=p.HV // p.HK,
        inverse_row_programs=inverse(programs),
        inverse_R_K=inverse(p.HV // p.HK),
        K=p.K,
        V=p.V,
        D=p.D,
        L=p.L,
        BLOCK_V=config.BLOCK_V,
        PIECE_K=config.PIECE_K,
        BLOCK_D=configs.WINDOW_CHANNELS,
        BLOCK_L=max(1, configs.power_of_two(p.L)),
        LOAD=config.LOAD,
        STORE=config.STORE,
        DECAY_PER_KEY=p.decay == "key",
        STATE_KV=p.state_layout == "kv",
    )
    return Launches(spec, memory, [call])
