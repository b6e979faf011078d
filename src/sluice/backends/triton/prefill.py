"""Chunked prefill: plan, workspace, and the launches of the kernels in kernels/prefill_*.py.

The workspace, with the size of v as the unit (16-bit inputs, V = 128): Ag 0.5; QKg 0.5 per output
head; decays, factors and inverse lengths 0.06 to 0.1; and, if sequences are split, 131 kB per
segment and value head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sluice.backends.triton import configs, gpu, prefill_key
from sluice.backends.triton.arguments import (
    Binding,
    Kernel,
    KernelCall,
    Pointer,
    inverse,
    kernel_call,
)
from sluice.backends.triton.configs import Config
from sluice.backends.triton.launch import Launches
from sluice.backends.triton.prefill_arguments import (
    WHOLE,
    checkpoints,
    pool,
    query_heads,
    units_of,
    value_heads,
)
from sluice.contract.chunk_length import CHUNK
from sluice.contract.spec import DeltaSpec

_FOLDER = "sluice.backends.triton.kernels."
PREFILL_PRODUCTS = Kernel(_FOLDER + "prefill_chunks", "prefill_products_kernel")
PREFILL_INVERSE = Kernel(_FOLDER + "prefill_chunks", "prefill_inverse_kernel")
PREFILL_STATE = Kernel(_FOLDER + "prefill_state", "prefill_state_kernel")
PREFILL_SEGMENTS = Kernel(_FOLDER + "prefill_state", "prefill_segments_kernel")
PREFILL_JOIN = Kernel(_FOLDER + "prefill_state", "prefill_join_kernel")

JOIN_BLOCK_V = 16
STAGES = 3 if torch.version.hip is None else 1  # an AMD GPU has only 64 kB of shared memory
EXACT = "tf32x3" if torch.version.hip is None else "ieee"  # as precise as float32 products


PRODUCTS, INVERSE = Config(num_warps=4, maxnreg=96), Config(num_warps=1)
"""With 96 registers per thread an SM holds five programs of the products instead of three, which is
worth the 8 bytes they spill (16-bit inputs, K = 128, Hopper). The inverse is fastest without a
limit."""
REGISTERS_ELSEWHERE = 128
"""The limit for the products on other GPUs, where they need more: four programs per SM."""
SEGMENTS = sorted(tokens << i for tokens in (1024, 1216, 1536) for i in range(16))
"""The lengths of a segment, in tokens, that a plan may choose."""
STATE_TOKENS, ROOM = 512, 0.38
"""A segment's state and transition take as much memory as the values of STATE_TOKENS tokens. All
segments together may take ROOM times the memory of v, so that the workspace stays below 1.5 v."""
NARROW_US, WIDE_US = (2.7, 1.9), (3.0, 2.1)
JOIN_US, LAUNCH_US = 2.0, 4.0
"""The plan's model, for an H200, in microseconds. For each width: a chunk, and a chunk of the
segment kernel. Then one join, and one more launch."""


class Plan(NamedTuple):
    """How a call is cut: tokens per segment (0: no split), value columns per program."""

    segment: int
    BLOCK_V: int
    num_warps: int
    stages: int

    def config(self, hard: bool, p: DeltaSpec) -> Config:
        """How the serial kernels are compiled.

        Programs with hard chunks hold twice the operands: where two programs share an SM, they get
        twice the warps, and an SM to themselves. In float32 the state is a sum outside of the
        tensor cores: ptxas may not fuse it, or calls with and without checkpoints differ in bits.
        """
        warps = 8 if hard and gpu.shares_sm(p.device) else self.num_warps
        fused = p.dtype != torch.float32
        return Config(num_warps=warps, num_stages=self.stages, fp_fusion=fused)


def best_plan(p: DeltaSpec, processors: int) -> Plan:
    """The cheapest cut, by a model of rounds over the SMs. It depends on shapes alone.

    With ``batch_invariant`` nothing is split and the width is fixed, so a row's bits depend on its
    own tokens alone.
    """
    if p.dtype == torch.float32:
        return Plan(0, 16, 4, 1)
    if p.K > 128:
        columns = 64 if gpu.has_wgmma(p.device) and p.V > 32 else 16
        return Plan(0, columns, 8 if columns > 16 else 4, min(_stages(p, shares=False), 2))
    narrow, wide = widths(p)
    if p.batch_invariant:
        return wide
    processors *= 2 if gpu.shares_sm(p.device) else 1
    sequences = max(p.N, 1)
    longest = p.T if not p.varlen else -(-p.T // sequences)
    room = ROOM * p.T * (1 if p.varlen else sequences) / STATE_TOKENS
    lengths = [s for s in SEGMENTS if s < longest and units_of(p, s, tail=False) <= room]
    choices = [
        (_cost(p, width._replace(segment=segment), us, longest, processors), i, segment)
        for i, (width, us) in enumerate(((narrow, NARROW_US), (wide, WIDE_US)))
        for segment in [0, *lengths]
    ]
    _, i, segment = min(choices)
    return (narrow, wide)[i]._replace(segment=segment)


def all_plans(p: DeltaSpec) -> list[Plan]:
    """One plan per kernel variant that calls like this one need, at any size."""
    if p.dtype == torch.float32 or p.K > 128:
        return [best_plan(p, 1)]
    every = dict.fromkeys(widths(p))
    return [width._replace(segment=s) for width in every for s in (0, SEGMENTS[0])]


def widths(p: DeltaSpec) -> tuple[Plan, Plan]:
    """The narrowest plan that is fast, and the widest that a program can hold.

    Hopper's tensor cores take 64 rows, and two groups of four warps share them. On other GPUs a
    program has half of that, and an SM two programs: 64 columns in eight warps would take as many
    registers, and more than a thread may have.
    """
    rows = 64 if gpu.has_wgmma(p.device) else 32
    columns = max(16, configs.power_of_two(p.V))
    stages = _stages(p, shares=gpu.shares_sm(p.device))
    narrow = Plan(0, min(rows, columns), 8 if min(rows, columns) == 64 else 4, stages)
    if columns <= rows or not gpu.has_wgmma(p.device):
        return narrow, narrow
    return narrow, narrow._replace(BLOCK_V=2 * rows, num_warps=8)


def _cost(
    p: DeltaSpec, plan: Plan, us: tuple[float, float], longest: int, processors: int
) -> float:
    """The time of the serial half, in microseconds."""
    whole, effect = us
    states, columns = max(p.N, 1) * p.HV, configs.blocks(p.V, plan.BLOCK_V)
    if not plan.segment:
        return configs.blocks(states * columns, processors) * configs.blocks(longest, CHUNK) * whole
    segments, chunks = configs.blocks(longest, plan.segment), plan.segment // CHUNK
    effects = states * (segments - 1) * (columns + configs.blocks(p.K, plan.BLOCK_V))
    cost = configs.blocks(effects, processors) * chunks * effect
    cost += configs.blocks(states * segments * columns, processors) * chunks * whole
    return cost + (segments - 1) * JOIN_US + 2 * LAUNCH_US


def _stages(p: DeltaSpec, *, shares: bool) -> int:
    """STAGES, or fewer: less than 160 kB of shared memory, a second program, several readers."""
    fewer = (gpu.shared_memory(p.device) < 160 << 10) + shares + p.HO // p.HV - 1
    return max(1, STAGES - fewer)


def launches(spec: DeltaSpec) -> Launches:
    """The kernels of ``prefill``."""
    if spec.decay == "key":
        return prefill_key.launches(spec)
    return planned_launches(spec, best_plan(spec, gpu.processors(spec.device)))


def all_launches(spec: DeltaSpec) -> list[Launches]:
    """The kernels of every plan that calls like this one need, at any size."""
    if spec.decay == "key":
        return [prefill_key.launches(spec)]
    return [planned_launches(spec, plan) for plan in all_plans(spec)]


class Parts(NamedTuple):
    """The results of the parallel half: workspace over B * T tokens."""

    ag: Pointer | None  # [HV, .., C]: Ag; None without beta
    beta32: Pointer | None  # [HV, ..] float32: beta; None without beta
    hard: Pointer | None  # [HV, chunks] int32; None without beta, and with float32 inputs
    qkg: Pointer  # [HO, .., C]: scale QKg / qkg_down; float16, or float32 as the inputs
    qkg_down: Pointer | None  # [HO, ..] float32: a power of two per chunk; None if float32 inputs
    decay_in: Pointer | None  # [HV, ..] float32; None without g and norm
    decay_out: Pointer | None  # [HV, ..] float32
    decay_q: Pointer | None  # [HO, ..] float32; None without norm
    g2: Pointer | None  # [HV, ..] float32; None without g
    r_k: Pointer | None  # [HK, ..] float32; None without norm


def workspace(p: DeltaSpec, memory: Binding) -> Parts:
    """Lay out the workspace."""
    tokens, exact = p.B * p.T, p.dtype == torch.float32
    gates = p.g is not None
    factors = gates or p.normalize_qk

    def part(wanted: bool, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
        return memory.scratch(name, *shape, dtype=dtype) if wanted else None

    return Parts(
        ag=part(p.delta, "ws.ag", p.HV, tokens, CHUNK, dtype=p.dtype),
        beta32=part(p.delta, "ws.beta32", p.HV, tokens),
        hard=part(p.delta and not exact, "ws.hard", p.HV, tokens // CHUNK + p.N, dtype=torch.int32),
        qkg=part(True, "ws.qkg", p.HO, tokens, CHUNK, dtype=p.dtype if exact else torch.float16),
        qkg_down=part(not exact, "ws.qkg_down", p.HO, tokens),
        decay_in=part(factors, "ws.decay_in", p.HV, tokens),
        decay_out=part(factors, "ws.decay_out", p.HV, tokens),
        decay_q=part(p.normalize_qk, "ws.decay_q", p.HO, tokens),
        g2=part(gates, "ws.g2", p.HV, tokens),
        r_k=part(p.normalize_qk, "ws.r_k", p.HK, tokens),
    )


def chunk_calls(p: DeltaSpec, memory: Binding, parts: Parts) -> list[KernelCall]:
    """The parallel half: prefill_chunks.py's kernels over all chunks."""
    exact = p.dtype == torch.float32
    out = "v" if p.out is None else "out"  # a first pass alone: no tokens after rows need zeros
    BLOCK_K = max(16, configs.power_of_two(p.K))
    sizes = {
        "cu_seqlens_ptr": memory.dense("cu_seqlens"),
        "N": p.N,
        "T": p.T,
        "tokens": p.B * p.T,
    }
    precision, usual = EXACT if exact else "tf32", not exact and p.K <= 128
    most = REGISTERS_ELSEWHERE if gpu.shares_sm(p.device) else PRODUCTS.maxnreg
    units = units_of(p, CHUNK, tail=True)
    products = kernel_call(
        PREFILL_PRODUCTS,
        units * p.HK,
        PRODUCTS._replace(maxnreg=most if usual else None),
        p.device,
        q_ptr=memory["q"],
        k_ptr=memory["k"],
        g_ptr=memory["g"],
        A_log_ptr=memory.dense("A_log"),
        dt_bias_ptr=memory.dense("dt_bias"),
        qkg_ptr=parts.qkg,
        qkg_down_ptr=parts.qkg_down,
        decay_in_ptr=parts.decay_in,
        decay_out_ptr=parts.decay_out,
        decay_q_ptr=parts.decay_q,
        g2_ptr=parts.g2,
        r_k_ptr=parts.r_k,
        o_ptr=memory[out],
        scale=p.q_scale,
        **sizes,
        **memory.strides("q", "bth"),
        **memory.strides("k", "bth"),
        **memory.strides("g", "bth"),
        stride_o_t=getattr(p, out).strides[1],
        stride_o_h=getattr(p, out).strides[2],
        HK=p.HK,
        inverse_HK=inverse(p.HK),
        R_K=p.HV // p.HK,
        **query_heads(p),
        SHARED=p.HQ == p.HK,
        K=p.K,
        V=p.V,
        BLOCK_K=BLOCK_K,
        PRECISION=precision,
    )
    if parts.ag is None:
        return [products]
    inverses = kernel_call(
        PREFILL_INVERSE,
        units * p.HV,
        INVERSE,
        p.device,
        k_ptr=memory["k"],
        beta_ptr=memory["beta"],
        g2_ptr=parts.g2,
        r_k_ptr=parts.r_k,
        ag_ptr=parts.ag,
        beta32_ptr=parts.beta32,
        hard_ptr=parts.hard,
        beta_scale=p.beta_scale,
        **sizes,
        **memory.strides("k", "bth"),
        **memory.strides("beta", "bth"),
        **value_heads(p),
        K=p.K,
        BLOCK_K=BLOCK_K,
        PRECISION=precision,
        RAW_BETA=p.raw_gates,
    )
    return [products, inverses]


def planned_launches(spec: DeltaSpec, plan: Plan) -> Launches:
    """The kernels of ``prefill`` by a given plan."""
    memory, p = Binding(spec), spec
    parts = workspace(p, memory)
    calls, segments = chunk_calls(p, memory, parts), None
    if plan.segment and plan.segment < p.T:
        segments = segment_states(p, memory, units_of(p, plan.segment, tail=False))
        calls += segment_calls(p, memory, parts, plan, segments)
    return Launches(spec, memory, [*calls, *last_calls(p, memory, parts, plan, segments)])


def last_calls(
    p: DeltaSpec, memory: Binding, parts: Parts, plan: Plan, segments: Pointer | None
) -> list[KernelCall]:
    """All that needs the state before the tokens."""
    segment = plan.segment or WHOLE
    joins = [] if segments is None else [join_call(p, memory, segments, segment)]
    return joins + [
        kernel_call(
            PREFILL_STATE,
            units_of(p, segment, tail=False) * p.HV * configs.blocks(p.V, plan.BLOCK_V),
            plan.config(hard, p),
            p.device,
            **serial_arguments(p, memory, parts, plan),
            q_ptr=memory["q"],
            qkg_ptr=parts.qkg,
            qkg_down_ptr=parts.qkg_down,
            decay_q_ptr=parts.decay_q,
            r_k_ptr=parts.r_k,
            segments_ptr=segments,
            o_ptr=memory["out"],
            **pool(p, memory),
            write_slots_ptr=memory.dense("write_slots"),
            **checkpoints(p, memory),
            scale=p.q_scale,
            **memory.strides("q", "bth"),
            **memory.strides("out", "bth", "o"),
            **query_heads(p),
            HARD=hard,
        )
        for hard in kinds(parts)
    ]


def kinds(parts: Parts) -> tuple[bool, ...]:
    """HARD of each launch of a serial kernel.

    It is launched twice: HARD=False skips programs with a hard chunk, HARD=True runs the rest.
    """
    return (False,) if parts.hard is None else (False, True)


def serial_arguments(p: DeltaSpec, memory: Binding, parts: Parts, plan: Plan) -> dict[str, Any]:
    """The arguments that both serial kernels have."""
    return {
        "k_ptr": memory["k"],
        "v_ptr": memory["v"],
        "ag_ptr": parts.ag,
        "beta32_ptr": parts.beta32,
        "hard_ptr": parts.hard,
        "decay_in_ptr": parts.decay_in,
        "decay_out_ptr": parts.decay_out,
        "g2_ptr": parts.g2,
        "cu_seqlens_ptr": memory.dense("cu_seqlens"),
        "N": p.N,
        "T": p.T,
        "tokens": p.B * p.T,
        **memory.strides("k", "bth"),
        **memory.strides("v", "bth"),
        **value_heads(p),
        "K": p.K,
        "V": p.V,
        "BLOCK_K": max(16, configs.power_of_two(p.K)),
        "segment_size": plan.segment or WHOLE,
        "STAGES": plan.stages,
        "PRECISION": EXACT if p.dtype == torch.float32 else "tf32",
        "BLOCK_V": plan.BLOCK_V,
    }


def segment_calls(
    p: DeltaSpec, memory: Binding, parts: Parts, plan: Plan, segments: Pointer, every: bool = False
) -> list[KernelCall]:
    """The effects of segments: of all but the last of each sequence, or of ``every`` one."""
    blocks = configs.blocks(p.V, plan.BLOCK_V) + configs.blocks(p.K, plan.BLOCK_V)
    return [
        kernel_call(
            PREFILL_SEGMENTS,
            units_of(p, plan.segment, tail=False) * p.HV * blocks,
            plan.config(hard, p),
            p.device,
            **serial_arguments(p, memory, parts, plan),
            segments_ptr=segments,
            HARD=hard,
            EVERY=every,
        )
        for hard in kinds(parts)
    ]


def segment_states(p: DeltaSpec, memory: Binding, units: int) -> Pointer:
    """Workspace for each segment's S_zero and transition, and then for the state after it."""
    return memory.scratch("ws.segments", units, p.HV, p.K, p.V + p.K)


def join_call(p: DeltaSpec, memory: Binding, segments: Pointer, segment: int) -> KernelCall:
    """The kernel that computes the states from which segments start."""
    return kernel_call(
        PREFILL_JOIN,
        p.N * p.HV * configs.blocks(p.V, JOIN_BLOCK_V),
        Config(num_warps=8),
        p.device,
        segments_ptr=segments,
        **pool(p, memory),
        cu_seqlens_ptr=memory.dense("cu_seqlens"),
        N=p.N,
        T=p.T,
        segment_size=segment,
        HV=p.HV,
        inverse_HV=inverse(p.HV),
        K=p.K,
        V=p.V,
        BLOCK_K=max(16, configs.power_of_two(p.K)),
        BLOCK_V=JOIN_BLOCK_V,
        STAGES=STAGES if gpu.shared_memory(p.device) >= 160 << 10 else 1,
        PRECISION=EXACT,
    )
