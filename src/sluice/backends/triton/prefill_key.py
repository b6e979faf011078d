"""Prefill with decay per key: which kernels serve a call, and their launches."""

from __future__ import annotations

from typing import Any

from sluice.backends.triton import configs, gpu
from sluice.backends.triton.arguments import Binding, Kernel, inverse, kernel_call
from sluice.backends.triton.launch import Launches
from sluice.backends.triton.prefill_arguments import (
    WHOLE,
    checkpoints,
    pool,
    query_heads,
    units_of,
)
from sluice.contract.spec import DeltaSpec

_FOLDER = "sluice.backends.triton.kernels."
PREFILL_KEY = Kernel(_FOLDER + "prefill_key", "prefill_key_kernel")
PREFILL_KEY_CHUNKS = Kernel(_FOLDER + "prefill_key_pieces", "prefill_key_chunks_kernel")
PREFILL_KEY_STATES = Kernel(_FOLDER + "prefill_key_pieces", "prefill_key_states_kernel")
CHUNK = 16  # tokens


def launches(spec: DeltaSpec) -> Launches:
    """One kernel on the GPUs of configs.KEY_WHOLE; on others two. No sequence is split."""
    whole = gpu.capability(spec.device)[0] in configs.KEY_WHOLE
    return in_one(spec) if whole else in_pieces(spec)


def in_one(spec: DeltaSpec) -> Launches:
    """One kernel, no workspace."""
    memory, p = Binding(spec), spec
    config = configs.prefill_key(p.K, p.V)
    call = kernel_call(
        PREFILL_KEY,
        units_of(p, WHOLE, tail=True) * p.HV * configs.blocks(p.V, config.BLOCK_V),
        config,
        p.device,
        **common(p, memory),
        **of_states(p, memory),
        **of_beta(p, memory),
        BLOCK_V=config.BLOCK_V,
        NORMALIZE_QK=p.normalize_qk,
    )
    return Launches(spec, memory, [call])


def in_pieces(spec: DeltaSpec) -> Launches:
    """What needs no state for all chunks at once, then the states."""
    memory, p = Binding(spec), spec
    tokens, config = p.B * p.T, configs.prefill_key_states(p.K, p.V)
    shared = {
        **common(p, memory),
        "ab_ptr": memory.scratch("ws.ab", p.HV, tokens, CHUNK) if p.delta else None,
        "qkg_ptr": memory.scratch("ws.qkg", p.HO, tokens, CHUNK),
        "r_k_ptr": memory.scratch("ws.r_k", p.HV, tokens) if p.normalize_qk else None,
        "r_q_ptr": memory.scratch("ws.r_q", p.HO, tokens) if p.normalize_qk else None,
        "tokens": tokens,
    }
    chunks = kernel_call(
        PREFILL_KEY_CHUNKS,
        units_of(p, CHUNK, tail=False) * p.HO,
        configs.KEY_CHUNKS,
        p.device,
        **shared,
        **of_beta(p, memory),
        HO=p.HO,
        inverse_HO=inverse(p.HO),
        PIECE=configs.KEY_CHUNKS.PIECE_K,
    )
    states = kernel_call(
        PREFILL_KEY_STATES,
        units_of(p, WHOLE, tail=True) * p.HV * configs.blocks(p.V, config.BLOCK_V),
        config,
        p.device,
        **shared,
        **of_states(p, memory),
        BLOCK_V=config.BLOCK_V,
        PIECE=config.PIECE_K,
    )
    return Launches(spec, memory, [chunks, states])


def common(p: DeltaSpec, memory: Binding) -> dict[str, Any]:
    """The arguments of all three kernels."""
    return {
        "q_ptr": memory["q"],
        "k_ptr": memory["k"],
        "g_ptr": memory.rows("g"),
        "A_log_ptr": memory.dense("A_log"),
        "dt_bias_ptr": memory.dense("dt_bias"),
        "cu_seqlens_ptr": memory.dense("cu_seqlens"),
        "scale": p.q_scale,
        "N": p.N,
        "T": p.T,
        **memory.strides("q", "bth"),
        **memory.strides("k", "bth"),
        **memory.strides("g", "bth"),
        **query_heads(p),
        "R_K": p.HV // p.HK,
        "inverse_R_K": inverse(p.HV // p.HK),
        "K": p.K,
        "BLOCK_K": max(16, configs.power_of_two(p.K)),
    }


def of_beta(p: DeltaSpec, memory: Binding) -> dict[str, Any]:
    """The arguments of kernels that read beta."""
    return {
        "beta_ptr": memory["beta"],
        "beta_scale": p.beta_scale,
        **memory.strides("beta", "bth"),
    }


def of_states(p: DeltaSpec, memory: Binding) -> dict[str, Any]:
    """The arguments of kernels that carry states."""
    return {
        "v_ptr": memory["v"],
        "o_ptr": memory["out"],
        **pool(p, memory),
        "write_slots_ptr": memory.dense("write_slots"),
        **checkpoints(p, memory),
        "segment_size": WHOLE,
        **memory.strides("v", "bth"),
        **memory.strides("out", "bth", "o"),
        "HV": p.HV,
        "inverse_HV": inverse(p.HV),
        "V": p.V,
    }
