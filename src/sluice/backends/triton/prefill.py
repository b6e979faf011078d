"""Chunked prefill: plan, workspace, and the launches of prefill_chunks.py and prefill_state.py.

Workspace, for v of size 1 (16-bit inputs, V = 128): Ag 0.5 and P 0.5 per output head, decays,
factors and inverse lengths 0.06 to 0.1, and where sequences are split 131 kB a segment and value
head.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from sluice.backends.triton import configs
from sluice.backends.triton import launch as launching
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


PRODUCTS, INVERSE = Config(num_warps=4, maxnreg=96), Config(num_warps=1)
"""Five programs of the products an SM, not three, are worth the 8 bytes that are spilled (16-bit
inputs, K = 128, Hopper); the inverse is quickest with the registers it asks for."""
SEGMENTS = sorted(tokens << i for tokens in (1024, 1216, 1536) for i in range(16))
"""Tokens of a segment: what a plan may choose."""
STATE_TOKENS, ROOM = 512, 0.38
"""A segment's state and transition take as much memory as the values of so many tokens; all of them
together may take this part of v, so that the workspace stays below 1.5 times v."""
NARROW_US, WIDE_US = (2.7, 1.9), (3.0, 2.1)
JOIN_US, LAUNCH_US = 2.0, 4.0
"""The plan's model, for an H200: microseconds of a chunk, and of a chunk of a segment's effect, by
width; of one join; and of a launch more."""


class Plan(NamedTuple):
    """How a call is cut: tokens a segment (0: sequences stay whole), value columns a program."""

    segment: int
    BLOCK_V: int
    num_warps: int
    stages: int


def plan(p: DeltaProblem, processors: int) -> Plan:
    """The cheapest cut by a model of rounds over the SMs; shapes alone decide.

    With ``batch_invariant`` nothing is split and the width is fixed, so that a row's bits follow
    from its own tokens.
    """
    if p.dtype == torch.float32:
        return Plan(0, 16, 4, 1)
    if p.K > 128:
        columns = 64 if _has_wgmma(p.device) and p.V > 32 else 16
        return Plan(0, columns, 8 if columns > 16 else 4, min(_stages(p), 2))
    narrow, wide = _widths(p)
    if p.batch_invariant:
        return wide
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


def every_plan(p: DeltaProblem) -> list[Plan]:
    """A plan for each of the kernels that a problem like this needs, whatever its size."""
    if p.dtype == torch.float32 or p.K > 128:
        return [plan(p, 1)]
    widths = dict.fromkeys(_widths(p))
    return [width._replace(segment=s) for width in widths for s in (0, SEGMENTS[0])]


def _widths(p: DeltaProblem) -> tuple[Plan, Plan]:
    """As little as is quick, and as much as a program can hold.

    Hopper's tensor cores want 64 rows, and two groups of four warps share what is done with them;
    others are better served with half of that.
    """
    rows = 64 if _has_wgmma(p.device) else 32
    columns = max(16, configs.power_of_two(p.V))
    narrow = Plan(0, min(rows, columns), 8 if min(rows, columns) == 64 else 4, _stages(p))
    if columns <= rows or torch.version.hip is not None:
        return narrow, narrow
    return narrow, narrow._replace(BLOCK_V=2 * rows, num_warps=8)


def _cost(
    p: DeltaProblem, plan: Plan, us: tuple[float, float], longest: int, processors: int
) -> float:
    """Microseconds of the serial half."""
    whole, effect = us
    states, columns = max(p.N, 1) * p.HV, configs.blocks(p.V, plan.BLOCK_V)
    if not plan.segment:
        return configs.blocks(states * columns, processors) * configs.blocks(longest, CHUNK) * whole
    segments, chunks = configs.blocks(longest, plan.segment), plan.segment // CHUNK
    effects = states * (segments - 1) * (columns + configs.blocks(p.K, plan.BLOCK_V))
    cost = configs.blocks(effects, processors) * chunks * effect
    cost += configs.blocks(states * segments * columns, processors) * chunks * whole
    return cost + (segments - 1) * JOIN_US + 2 * LAUNCH_US


def _stages(p: DeltaProblem) -> int:
    """STAGES; fewer with some 100 kB of shared memory instead of 160 or more, or more queries."""
    fewer = (_shared_memory(p.device) < 160 << 10) + p.HO // p.HV - 1
    return max(1, STAGES - fewer)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; any number for the interpreter."""
    if device.type != "cuda":
        return 1 << 20
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def _has_wgmma(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


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
        return
    for chosen in every_plan(p) if launching.every_plan() else [plan(p, processors(p.device))]:
        run(p, t, chosen)


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
    b: Tensor | None  # [HV, ..] float32: beta; None without
    hard: Tensor | None  # [HV, chunks] int32; None without beta, and with float32 inputs
    p: Tensor  # [.., HO, C]: scale P, over lift; float16, or float32 as the inputs
    lift: Tensor | None  # [HO, ..] float32, by chunk: powers of two; None with float32 inputs
    forget: Tensor | None  # [HV, ..] float32; None without g and norm
    keep: Tensor | None  # [HV, ..] float32
    read: Tensor | None  # [HO, ..] float32; None without norm
    g2: Tensor | None  # [HV, ..] float32; None without g
    r_k: Tensor | None  # [.., HK] float32; None without norm


def chunk_parts(p: DeltaProblem, t: DeltaTensors) -> Parts:
    """The parallel half: run prefill_chunks.py's kernels over all chunks."""
    tokens, exact = p.B * p.T, p.dtype == torch.float32
    BLOCK_K = max(16, configs.power_of_two(p.K))
    empty = functools.partial(torch.empty, device=p.device)
    a = empty(tokens, p.HV, CHUNK, dtype=p.dtype) if p.delta else None
    products = empty(tokens, p.HO, CHUNK, dtype=p.dtype if exact else torch.float16)
    vector = functools.partial(empty, dtype=torch.float32)
    b = vector(p.HV, tokens) if p.delta else None
    hard = None
    if p.delta and not exact:
        hard = empty(p.HV, tokens // CHUNK + p.N, dtype=torch.int32)
    lift = None if exact else vector(p.HO, tokens)
    g2 = None if t.g is None else vector(p.HV, tokens)
    factors = t.g is not None or p.normalize_qk
    forget, keep = (vector(p.HV, tokens) if factors else None for _ in range(2))
    read = vector(p.HO, tokens) if p.normalize_qk else None
    r_k = vector(tokens, p.HK) if p.normalize_qk else None
    dims = {"HK": p.HK, "HV": p.HV, "K": p.K, "V": p.V, "BLOCK_K": BLOCK_K}
    sizes = {"cu_seqlens_ptr": dense(t.rows.cu_seqlens), "N": p.N, "T": p.T, "tokens": tokens}
    precision, usual = EXACT if exact else "tf32", not exact and p.K <= 128
    units = units_of(p, CHUNK, tail=True)
    launch(
        prefill_products_kernel,
        units * p.HK,
        PRODUCTS if usual else PRODUCTS._replace(maxnreg=None),
        p.device,
        q_ptr=t.q,
        k_ptr=t.k,
        g_ptr=t.g,
        A_log_ptr=dense(t.A_log),
        dt_bias_ptr=dense(t.dt_bias),
        p_ptr=products,
        lift_ptr=lift,
        forget_ptr=forget,
        keep_ptr=keep,
        read_ptr=read,
        g2_ptr=g2,
        r_k_ptr=r_k,
        o_ptr=t.out,
        scale=p.scale,
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
            INVERSE,
            p.device,
            k_ptr=t.k,
            beta_ptr=t.beta,
            g2_ptr=g2,
            r_k_ptr=r_k,
            a_ptr=a,
            b_ptr=b,
            hard_ptr=hard,
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
    return Parts(a, b, hard, products, lift, forget, keep, read, g2, r_k)


def run(p: DeltaProblem, t: DeltaTensors, plan: Plan) -> None:
    """Serve ``prefill`` by a given plan."""
    parts = chunk_parts(p, t)
    BLOCK_K = max(16, configs.power_of_two(p.K))
    rows = t.rows
    exact = p.dtype == torch.float32
    precision = EXACT if exact else "tf32"
    segment = plan.segment or WHOLE
    units = units_of(p, segment, tail=False)
    config = Config(num_warps=plan.num_warps, num_stages=plan.stages, fp_fusion=True)
    common = {
        "k_ptr": t.k,
        "v_ptr": t.v,
        "a_ptr": parts.a,
        "b_ptr": parts.b,
        "hard_ptr": parts.hard,
        "forget_ptr": parts.forget,
        "keep_ptr": parts.keep,
        "g2_ptr": parts.g2,
        "cu_seqlens_ptr": dense(rows.cu_seqlens),
        "N": p.N,
        "T": p.T,
        "tokens": p.B * p.T,
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
    kinds = (False,) if parts.hard is None else (False, True)  # of programs: see prefill_walk.py
    joined = None
    if plan.segment and plan.segment < p.T:
        joined = torch.empty(units, p.HV, p.K, p.V + p.K, dtype=torch.float32, device=p.device)
        for hard in kinds:
            launch(
                prefill_segments_kernel,
                units * p.HV * (blocks + configs.blocks(p.K, plan.BLOCK_V)),
                config,
                p.device,
                **common,
                joined_ptr=joined,
                BLOCK_V=plan.BLOCK_V,
                HARD=hard,
            )
        join(p, t, joined, segment)
    kept = t.checkpoint_slots
    for hard in kinds:
        launch(
            prefill_state_kernel,
            units * p.HV * blocks,
            config,
            p.device,
            **common,
            q_ptr=t.q,
            p_ptr=parts.p,
            lift_ptr=parts.lift,
            read_ptr=parts.read,
            r_k_ptr=parts.r_k,
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
            HARD=hard,
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
        STAGES=STAGES if _shared_memory(p.device) >= 160 << 10 else 1,
        PRECISION=EXACT,
        STATE_KV=p.state_layout == "kv",
    )


def units_of(p: DeltaProblem, size: int, *, tail: bool) -> int:
    """Work units of ``size`` tokens, as ``find_sequence`` counts them; at least one a sequence."""
    if not p.varlen:
        return p.N * max(configs.blocks(p.T, size), 1)
    return p.T // size + p.N + (1 if tail else 0)
