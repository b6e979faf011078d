"""Chunked prefill on Hopper: the plan, the workspace, and the launches.

One workspace holds what the parallel half leaves for the serial one. TMA descriptors are encoded
when a call is bound; a launch only moves them to new addresses (``cuda_driver.py``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sluice.backends.hopper.kernels.sizes import COPY_WIDTH, key_heads
from sluice.backends.triton import gpu
from sluice.backends.triton import prefill as portable
from sluice.backends.triton.arguments import Binding, Kernel, KernelCall, Pointer, Tiles
from sluice.backends.triton.launch import Launches
from sluice.backends.triton.prefill_arguments import WHOLE, checkpoints, pool, units_of
from sluice.contract.backward import DeltaBackwardSpec
from sluice.contract.chunk_length import CHUNK
from sluice.contract.spec import DeltaSpec

CHUNKS = Kernel("sluice.backends.hopper.kernels.chunks_kernel", "hopper_chunks_kernel")
CHUNKS_WARP = Kernel(
    "sluice.backends.hopper.kernels.chunks_warp_kernel", "hopper_chunks_warp_kernel"
)
STATE = Kernel("sluice.backends.hopper.kernels.state_kernel", "hopper_state_kernel")
STAGES = 3  # chunks whose tiles and QKg fit into shared memory
SEGMENTS = sorted(tokens << i for tokens in (1024, 1216) for i in range(16))
PARTS = range(2, 17)
"""A segment has one of these numbers of tokens, or is one of so many equal parts of a sequence."""
STATE_TOKENS, ROOM = 512, 0.94
"""A segment's state and transition take as much memory as the values of so many tokens; all of them
together may take this part of v, so that the workspace stays below 1.5 times v."""
CHUNK_US = {64: 1.38, 128: 2.3}
LOAD_US, EFFECT_US, LAUNCH_US, JOIN_US, STATE_US = 0.22, 1.17, 1.9, 1.33, 0.26
"""The plan's model in microseconds, fitted to calls on an H200 (docs/kernels/prefill_log.md): one
chunk by BLOCK_V, and what it takes longer where all SMs load chunks; one chunk of a segment's
effect; one more launch; one step of the join, and one state of a segment that it reads."""


class Plan(NamedTuple):
    """How a call is cut: tokens per segment (0: none is split), value columns per program.

    ``programs``: at most so many programs of the serial half. None: one per SM; 0: one per item.
    """

    segment: int
    BLOCK_V: int
    programs: int | None = None


def best_plan(p: DeltaSpec, processors: int) -> Plan:
    """The cheapest cut by a model of rounds over the SMs; shapes alone decide.

    BLOCK_V changes no bit. A split does, so with ``batch_invariant`` there is none.
    """
    sequences = max(p.N, 1)
    longest = p.T if not p.varlen else -(-p.T // sequences)
    chunks = -(-longest // CHUNK)
    best = _serial(sequences * p.HV, chunks, processors), Plan(0, width(p, 1, processors))
    if p.batch_invariant:
        return best[1]
    room = ROOM * p.T * (1 if p.varlen else sequences) / STATE_TOKENS
    for segment in segments_of(longest):
        if segment >= longest or units_of(p, segment, tail=False) > room:
            continue
        segments, length = -(-longest // segment), segment // CHUNK
        states = sequences * segments * p.HV
        effects = -(-(states - sequences * p.HV) * 2 // processors)
        cost = effects * length * EFFECT_US + segments * JOIN_US + states * STATE_US
        cost += 2 * LAUNCH_US + _serial(states, length, processors)
        best = min(best, (cost, Plan(segment, width(p, segments, processors))))
    return best[1]


def segments_of(longest: int) -> list[int]:
    """Tokens of a segment that a plan may choose for sequences of ``longest`` tokens."""
    equal = {-(-longest // (CHUNK * parts)) * CHUNK for parts in PARTS}
    return sorted(equal.union(SEGMENTS))


def _serial(states: int, chunks: int, processors: int) -> float:
    return chunks * min(_chunk(states, v, processors) for v in CHUNK_US)


def _chunk(states: int, v: int, processors: int) -> float:
    """The time of one chunk in every round, with v columns of a state per program."""
    items = states * (128 // v)
    return -(-items // processors) * CHUNK_US[v] + items / processors * LOAD_US


def width(p: DeltaSpec, segments: int, processors: int) -> int:
    states = max(p.N, 1) * segments * p.HV
    return min(CHUNK_US, key=lambda v: _chunk(states, v, processors))


def all_plans() -> list[Plan]:
    """A plan for each of the kernels that calls of any size need."""
    return [Plan(segment, v) for v in CHUNK_US for segment in (0, SEGMENTS[0])]


def launches(spec: DeltaSpec) -> Launches:
    """The kernels of ``prefill``."""
    return planned_launches(spec, best_plan(spec, gpu.processors(spec.device)))


def all_launches(spec: DeltaSpec) -> list[Launches]:
    """The kernels of every plan that calls like this one have at other sizes."""
    return [planned_launches(spec, plan) for plan in all_plans()]


def planned_launches(spec: DeltaSpec, plan: Plan) -> Launches:
    """Both halves, by a given plan."""
    memory, p = Binding(spec), spec
    parts = workspace(p, memory)
    calls, segments = [chunks_call(p, memory, parts)], None
    if plan.segment:
        units = units_of(p, plan.segment, tail=False)
        segments = portable.segment_states(p, memory, units)
        effects = plan._replace(BLOCK_V=128)
        calls.append(states_call(p, memory, parts, effects, segments, output=False))
    return Launches(spec, memory, [*calls, *last_calls(p, memory, parts, plan, segments)])


def last_calls(
    p: DeltaSpec, memory: Binding, parts: Parts, plan: Plan, segments: Pointer | None
) -> list[KernelCall]:
    """All that needs the state before the tokens."""
    joins = [] if segments is None else [portable.join_call(p, memory, segments, plan.segment)]
    return [*joins, states_call(p, memory, parts, plan, segments, output=True)]


class Parts(NamedTuple):
    """What the parallel half leaves for the serial one: workspace over ``rows`` tokens."""

    ag: Pointer  # [.., HV, C]: Ag
    beta32: Pointer  # [HV, ..] float32: beta
    g2: Pointer | None  # [HV, ..] float32: cumulative log2 decay in the chunk; None without g
    r_k: Pointer | None  # [HK, ..] float32: inverse lengths of the keys; None without norm
    hard: Pointer  # [HK, ..] int8, at a chunk's first token: whether its Ag is float16
    taken: Pointer  # [1] int32: items that programs of the serial half have taken after their first


def has_tails(p: DeltaSpec) -> bool:
    """Whether a checkpoint may lie inside a chunk."""
    return p.checkpoint_slots is not None and (
        p.checkpoint_positions is not None or p.checkpoint_every % CHUNK != 0
    )


def tails(p: DeltaSpec) -> int:
    """How many checkpoints may have a tail."""
    return p.N * p.checkpoint_slots.shape[1] if has_tails(p) else 0


def rows(p: DeltaSpec) -> int:
    """Tokens of the workspace: the call's, then a chunk per tail."""
    return p.B * p.T + CHUNK * tails(p)


def workspace(p: DeltaSpec, memory: Binding) -> Parts:
    """Lay out what the parallel half writes."""
    tokens = rows(p)
    return Parts(
        ag=memory.scratch("ws.ag", tokens, p.HV, CHUNK, dtype=p.dtype),
        beta32=memory.scratch("ws.beta32", p.HV, tokens),
        g2=None if p.g is None else memory.scratch("ws.g2", p.HV, tokens),
        r_k=memory.scratch("ws.r_k", p.HK, tokens) if p.normalize_qk else None,
        hard=memory.scratch("ws.hard", p.HK, tokens, dtype=torch.int8),
        taken=memory.scratch("ws.taken", 1, dtype=torch.int32),
    )


def chunks_call(p: DeltaSpec, memory: Binding, parts: Parts) -> KernelCall:
    """The parallel half."""
    units = units_of(p, CHUNK, tail=True)
    with_tails = has_tails(p)
    saves = checkpoints(p, memory)
    more: dict[str, Any]
    if p.HV == p.HK:  # one warp per head: elsewhere it was slower (docs/kernels/prefill_log.md)
        kernel, programs = CHUNKS_WARP, p.HV
        more = {"ag_desc": _ag_tiles(p, parts), "warps": 1, "maxnreg": 168}  # 12 programs per SM
    else:
        kernel, programs = CHUNKS, p.HK // key_heads(p.HK, p.HV)
        more = {"maxnreg": 128}  # 4 programs per SM
    return _call(
        kernel,
        (units + tails(p)) * programs,
        k_desc=token_tiles(p, "k", p.K),
        g_ptr=memory["g"],
        A_log_ptr=memory.dense("A_log"),
        dt_bias_ptr=memory.dense("dt_bias"),
        beta_ptr=memory["beta"],
        ag_ptr=parts.ag,
        beta32_ptr=parts.beta32,
        g2_ptr=parts.g2,
        r_k_ptr=parts.r_k,
        hard_ptr=parts.hard,
        taken_ptr=parts.taken,
        o_ptr=memory[_out(p)],
        cu_seqlens_ptr=memory.dense("cu_seqlens"),
        checkpoint_positions_ptr=saves["checkpoint_positions_ptr"] if with_tails else None,
        beta_scale=p.beta_scale,
        N=p.N,
        T=p.T,
        M=saves["M"] if with_tails else None,
        every=saves["every"] if with_tails else None,
        units=units if with_tails else None,
        **memory.strides("g", "bth"),
        **memory.strides("beta", "bth"),
        stride_o_t=getattr(p, _out(p)).strides[1],
        stride_gates_h=rows(p),
        HK=p.HK,
        HV=p.HV,
        K=p.K,
        V=p.V,
        RAW_BETA=p.raw_gates,
        TAILS=with_tails,
        **more,
    )


def states_call(
    p: DeltaSpec,
    memory: Binding,
    parts: Parts,
    plan: Plan,
    segments: Pointer | None,
    *,
    output: bool,
    every: bool = False,
) -> KernelCall:
    """The serial half: outputs and final states, or what segments do to any state.

    These are all segments but the last of each sequence, or ``every`` one.
    """
    segment = plan.segment or WHOLE
    saves = dict.fromkeys(("checkpoint_slots_ptr", "checkpoint_positions_ptr", "M", "every"))
    if output and p.checkpoint_slots is not None:
        saves = checkpoints(p, memory)
    waiting = None
    if output and tails(p) and p.state_dtype != torch.float32:
        waiting = memory.scratch("ws.waiting", tails(p), p.HV, p.V, p.K)
    blocks = p.V // plan.BLOCK_V + (0 if output else p.K // plan.BLOCK_V)
    number = units_of(p, segment, tail=False) * p.HV * blocks
    programs = gpu.processors(p.device) if plan.programs is None else plan.programs
    return _call(
        STATE,
        min(number, programs or number),
        q_desc=token_tiles(p, "q", COPY_WIDTH),
        k_desc=token_tiles(p, "k", COPY_WIDTH),
        v_desc=token_tiles(p, "v", COPY_WIDTH),
        ag_desc=_ag_tiles(p, parts),
        o_desc=token_tiles(p, _out(p), COPY_WIDTH),
        o_ptr=memory[_out(p)],
        beta32_ptr=parts.beta32,
        g2_ptr=parts.g2,
        r_k_ptr=parts.r_k,
        hard_ptr=parts.hard,
        taken_ptr=parts.taken,
        segments_ptr=segments,
        **pool(p, memory),
        write_slots_ptr=memory.dense("write_slots"),
        cu_seqlens_ptr=memory.dense("cu_seqlens"),
        **saves,
        waiting_ptr=waiting,
        scale=p.q_scale,
        number=number,
        N=p.N,
        T=p.T,
        segment_size=segment,
        stride_o_t=getattr(p, _out(p)).strides[1],
        stride_gates_h=rows(p),
        HV=p.HV,
        R_Q=p.HV // p.HQ,
        R_K=p.HV // p.HK,
        K=p.K,
        V=p.V,
        BLOCK_V=plan.BLOCK_V,
        STAGES=STAGES,
        OUTPUT=output,
        EVERY=every,
        TAILS=output and has_tails(p),
    )


def _call(
    kernel: Kernel, programs: int, maxnreg: int | None = None, warps: int = 4, **arguments: Any
) -> KernelCall:
    options = {"num_warps": warps, "launch_pdl": True, "enable_fp_fusion": True}
    if maxnreg is not None:
        options["maxnreg"] = maxnreg
    return KernelCall(kernel, programs, options, arguments)


def _out(p: DeltaSpec) -> str:
    """A first pass alone has no output, and no tokens after its rows that need zeros."""
    return "v" if p.out is None else "out"


def _ag_tiles(p: DeltaSpec, parts: Parts) -> Tiles:
    shape, strides = (rows(p), p.HV * CHUNK), (p.HV * CHUNK, 1)
    return Tiles(parts.ag.source, p.dtype, shape, strides, (CHUNK, CHUNK))


def token_tiles(p: DeltaSpec | DeltaBackwardSpec, name: str, width: int) -> Tiles:
    """A tensor [B, T, heads, width of a head] as a matrix of tokens, in tiles of a chunk."""
    meta = getattr(p, name)
    columns = meta.shape[2] * meta.shape[3]
    shape, strides = (p.B * p.T, columns), (meta.strides[1], 1)
    return Tiles(name, meta.dtype, shape, strides, (CHUNK, width))
