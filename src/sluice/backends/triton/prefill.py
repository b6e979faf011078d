"""Chunked prefill: plan, workspace, and the launches of prefill_chunks.py and prefill_state.py.

Workspace, for v of size 1 (16-bit inputs, V = 128): Ag 0.5 and P 0.5 per output head, decays,
scales and inverse lengths 0.05, and where sequences are split 131 kB a segment and value head.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from sluice.backends.triton import configs
from sluice.backends.triton.configs import Config
from sluice.backends.triton.launch import dense, launch, strides
from sluice.backends.triton.prefill_chunks import (
    prefill_inverse_kernel,
    prefill_products_kernel,
)
from sluice.backends.triton.prefill_key import prefill_key_kernel
from sluice.backends.triton.prefill_state import (
    prefill_join_kernel,
    prefill_segments_kernel,
    prefill_state_kernel,
)
from sluice.contract.problem import DeltaProblem
from sluice.contract.tensors import DeltaTensors

CHUNK = 64
WHOLE = 1 << 30  # tokens: a segment that no sequence outgrows
JOIN_BLOCK_V = 16
STAGES = 3 if torch.version.hip is None else 1  # tiles ahead: 64 kB is all an AMD GPU has
EXACT = "tf32x3" if torch.version.hip is None else "ieee"  # as good as float32 products


class Plan(NamedTuple):
    """How a call is cut: tokens a segment (0: sequences stay whole), value columns a program."""

    segment: int
    BLOCK_V: int
    num_warps: int
    stages: int


def plan(p: DeltaProblem, processors: int) -> Plan:
    """Chosen by shapes alone, from what was measured on an H200 (2026-11-15, Triton 3.6).

    Few columns a program and many tiles ahead while there is an SM for each program; beyond, fewer
    tiles, so that two programs share an SM. A long sequence is split where its heads would leave
    three SMs of four idle. With ``batch_invariant`` nothing is split and the width is fixed, so
    that a row's bits follow from its own tokens.
    """
    narrow, wide = (min(columns, max(16, configs.power_of_two(p.V))) for columns in (16, 32))
    if p.dtype == torch.float32 or p.K > 128:
        # with one stage K = 256 spills 152 bytes on Hopper, and its results are wrong (Triton 3.6)
        return Plan(0, wide, 4, 1 if p.dtype == torch.float32 else min(STAGES, 2))
    programs = p.N * p.HV * configs.blocks(p.V, wide)
    if p.batch_invariant or programs > processors:
        return Plan(0, wide, 4, min(STAGES, 2))
    longest = p.T if not p.varlen else p.T // max(p.N, 1)
    if 4 * programs <= processors and longest >= 8192:
        return Plan(max(2048, configs.power_of_two(longest // 16)), wide, 4, STAGES)
    if p.N * p.HV * configs.blocks(p.V, narrow) <= processors:
        return Plan(0, narrow, 4, STAGES)
    return Plan(0, wide, 4, STAGES)


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device; one for the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def prefill(p: DeltaProblem, t: DeltaTensors) -> None:
    """Serve ``prefill``."""
    if p.decay == "key":
        run_per_key(p, t)
    else:
        run(p, t, plan(p, processors(p.device)))


def run_per_key(p: DeltaProblem, t: DeltaTensors) -> None:
    """Decay per key: one kernel, no workspace, no split."""
    rows, kept = t.rows, t.checkpoint_slots
    block = min(32 if p.K <= 128 else 16, max(16, configs.power_of_two(p.V)))
    launch(
        prefill_key_kernel,
        units_of(p, WHOLE, tail=True) * p.HV * configs.blocks(p.V, block),
        Config(num_warps=4),
        p.device,
        q_ptr=t.q,
        k_ptr=t.k,
        v_ptr=t.v,
        g_ptr=t.g,
        beta_ptr=t.beta,
        A_log_ptr=dense(t.A_log),
        dt_bias_ptr=dense(t.dt_bias),
        state_ptr=t.state,
        o_ptr=t.out,
        slots_ptr=dense(rows.slots),
        write_slots_ptr=dense(rows.write_slots),
        has_state_ptr=dense(rows.has_state),
        cu_seqlens_ptr=dense(rows.cu_seqlens),
        checkpoint_slots_ptr=dense(kept),
        checkpoint_positions_ptr=dense(t.checkpoint_positions),
        scale=p.scale,
        beta_scale=2.0 if p.neg_eigval else 1.0,
        N=p.N,
        T=p.T,
        M=0 if kept is None else kept.shape[1],
        every=p.checkpoint_every,
        pad_slot=p.rows.pad_slot,
        segment_size=WHOLE,
        **strides(t.q, "q", "bth"),
        **strides(t.k, "k", "bth"),
        **strides(t.v, "v", "bth"),
        **strides(t.g, "g", "bth"),
        **strides(t.beta, "beta", "bth"),
        **strides(t.out, "o", "bth"),
        stride_state_p=t.state.stride(0),
        HQ=p.HQ,
        HK=p.HK,
        HV=p.HV,
        K=p.K,
        V=p.V,
        BLOCK_K=max(16, configs.power_of_two(p.K)),
        BLOCK_V=block,
        NORM=p.normalize_qk,
        STATE_KV=p.state_layout == "kv",
    )


class Parts(NamedTuple):
    """What the parallel half leaves for the serial one: tensors over B * T tokens."""

    a: Tensor | None  # [.., HV, C]: Ag; None without beta
    p: Tensor  # [.., HO, C]: P, over p_scale; float16, or float32 as the inputs
    p_scale: Tensor | None  # [.., HO] float32: powers of two; None with float32 inputs
    g2: Tensor | None  # [.., HV] float32; None without g
    r_q: Tensor | None  # [.., HQ] float32; None without norm
    r_k: Tensor | None  # [.., HK] float32


def chunk_parts(p: DeltaProblem, t: DeltaTensors) -> Parts:
    """The parallel half: run prefill_chunks.py's kernels over all chunks."""
    tokens, exact = p.B * p.T, p.dtype == torch.float32
    BLOCK_K = max(16, configs.power_of_two(p.K))
    empty = functools.partial(torch.empty, device=p.device)
    a = empty(tokens, p.HV, CHUNK, dtype=p.dtype) if p.delta else None
    products = empty(tokens, p.HO, CHUNK, dtype=p.dtype if exact else torch.float16)
    p_scale = None if exact else empty(tokens, p.HO, dtype=torch.float32)
    g2 = None if t.g is None else empty(tokens, p.HV, dtype=torch.float32)
    r_q = empty(tokens, p.HQ, dtype=torch.float32) if p.normalize_qk else None
    r_k = empty(tokens, p.HK, dtype=torch.float32) if p.normalize_qk else None
    dims = {"HK": p.HK, "HV": p.HV, "K": p.K, "V": p.V, "BLOCK_K": BLOCK_K}
    sizes = {"cu_seqlens_ptr": dense(t.rows.cu_seqlens), "N": p.N, "T": p.T}
    precision = EXACT if exact else "tf32"
    units = units_of(p, CHUNK, tail=True)
    launch(
        prefill_products_kernel,
        units * p.HK,
        Config(num_warps=4),
        p.device,
        q_ptr=t.q,
        k_ptr=t.k,
        g_ptr=t.g,
        A_log_ptr=dense(t.A_log),
        dt_bias_ptr=dense(t.dt_bias),
        p_ptr=products,
        p_scale_ptr=p_scale,
        g2_ptr=g2,
        r_q_ptr=r_q,
        r_k_ptr=r_k,
        o_ptr=t.out,
        **sizes,
        **strides(t.q, "q", "bth"),
        **strides(t.k, "k", "bth"),
        **strides(t.g, "g", "bth"),
        stride_o_t=t.out.stride(1),
        stride_o_h=t.out.stride(2),
        HQ=p.HQ,
        **dims,
        PRECISION=precision,
    )
    if a is not None:
        launch(
            prefill_inverse_kernel,
            units * p.HV,
            Config(num_warps=1),
            p.device,
            k_ptr=t.k,
            beta_ptr=t.beta,
            g2_ptr=g2,
            r_k_ptr=r_k,
            a_ptr=a,
            beta_scale=2.0 if p.neg_eigval else 1.0,
            **sizes,
            **strides(t.k, "k", "bth"),
            **strides(t.beta, "beta", "bth"),
            HK=p.HK,
            HV=p.HV,
            K=p.K,
            BLOCK_K=BLOCK_K,
            PRECISION=precision,
            RAW_BETA=p.raw_gates,
        )
    return Parts(a, products, p_scale, g2, r_q, r_k)


def run(p: DeltaProblem, t: DeltaTensors, plan: Plan) -> None:
    """Serve ``prefill`` by a given plan."""
    a, products, p_scale, g2, r_q, r_k = chunk_parts(p, t)
    BLOCK_K = max(16, configs.power_of_two(p.K))
    rows, sizes = t.rows, {"cu_seqlens_ptr": dense(t.rows.cu_seqlens), "N": p.N, "T": p.T}
    exact = p.dtype == torch.float32
    precision = EXACT if exact else "tf32"
    segment = plan.segment or WHOLE
    units = units_of(p, segment, tail=False)
    config = Config(num_warps=plan.num_warps, num_stages=plan.stages)
    common = {
        "k_ptr": t.k,
        "v_ptr": t.v,
        "a_ptr": a,
        "g2_ptr": g2,
        "r_k_ptr": r_k,
        **sizes,
        **strides(t.k, "k", "bth"),
        **strides(t.v, "v", "bth"),
        "HK": p.HK,
        "HV": p.HV,
        "K": p.K,
        "V": p.V,
        "BLOCK_K": BLOCK_K,
        "segment_size": segment,
        "STAGES": plan.stages,
        "PRECISION": precision,
    }
    pool = {
        "state_ptr": t.state,
        "slots_ptr": dense(rows.slots),
        "has_state_ptr": dense(rows.has_state),
        "pad_slot": p.rows.pad_slot,
        "stride_state_p": t.state.stride(0),
        "STATE_KV": p.state_layout == "kv",
    }
    blocks = configs.blocks(p.V, plan.BLOCK_V)
    joined = None
    if plan.segment and plan.segment < p.T:
        joined = torch.empty(units, p.HV, p.K, p.V + p.K, dtype=torch.float32, device=p.device)
        launch(
            prefill_segments_kernel,
            units * p.HV * (blocks + configs.blocks(p.K, plan.BLOCK_V)),
            config,
            p.device,
            **common,
            joined_ptr=joined,
            BLOCK_V=plan.BLOCK_V,
        )
        join(p, t, joined, segment)
    kept = t.checkpoint_slots
    launch(
        prefill_state_kernel,
        units * p.HV * blocks,
        config,
        p.device,
        **common,
        q_ptr=t.q,
        p_ptr=products,
        p_scale_ptr=p_scale,
        r_q_ptr=r_q,
        joined_ptr=joined,
        o_ptr=t.out,
        **pool,
        write_slots_ptr=dense(rows.write_slots),
        checkpoint_slots_ptr=dense(kept),
        checkpoint_positions_ptr=dense(t.checkpoint_positions),
        scale=p.scale,
        M=0 if kept is None else kept.shape[1],
        every=p.checkpoint_every,
        **strides(t.q, "q", "bth"),
        **strides(t.out, "o", "bth"),
        HQ=p.HQ,
        BLOCK_V=plan.BLOCK_V,
    )


def join(p: DeltaProblem, t: DeltaTensors, joined: Tensor, segment: int) -> None:
    """From what each segment does to any state, the states that segments start from."""
    rows = t.rows
    launch(
        prefill_join_kernel,
        p.N * p.HV * configs.blocks(p.V, JOIN_BLOCK_V),
        Config(num_warps=8),
        p.device,
        joined_ptr=joined,
        state_ptr=t.state,
        slots_ptr=dense(rows.slots),
        has_state_ptr=dense(rows.has_state),
        cu_seqlens_ptr=dense(rows.cu_seqlens),
        N=p.N,
        T=p.T,
        pad_slot=p.rows.pad_slot,
        segment_size=segment,
        stride_state_p=t.state.stride(0),
        HV=p.HV,
        K=p.K,
        V=p.V,
        BLOCK_K=max(16, configs.power_of_two(p.K)),
        BLOCK_V=JOIN_BLOCK_V,
        PRECISION=EXACT,
        STATE_KV=p.state_layout == "kv",
    )


def units_of(p: DeltaProblem, size: int, *, tail: bool) -> int:
    """Work units of ``size`` tokens, as ``find_sequence`` counts them; at least one a sequence."""
    if not p.varlen:
        return p.N * max(configs.blocks(p.T, size), 1)
    return p.T // size + p.N + (1 if tail else 0)
