"""Chunked prefill on Hopper: the plan, the workspace, and the launches."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sluice.backends.hopper.prefill_chunks import hopper_chunks_kernel, key_heads
from sluice.backends.hopper.prefill_state import hopper_state_kernel
from sluice.backends.triton import launch as launching
from sluice.backends.triton import prefill as portable
from sluice.backends.triton.launch import dense, strides
from sluice.contract.problem import DeltaProblem
from sluice.contract.tensors import DeltaTensors

CHUNK, ROWS = 64, 64
NUM_BUFFERS = 3  # chunks whose tiles and P fit into shared memory
WHOLE = portable.WHOLE
CHUNK_REGISTERS = 128  # of a thread of the parallel half: four programs an SM
SEGMENTS = sorted(tokens << i for tokens in (1024, 1216) for i in range(16))
"""Tokens of a segment: what a plan may choose."""
STATE_TOKENS, ROOM = 512, 0.94
"""A segment's state and transition take as much memory as the values of so many tokens; all of them
together may take this part of v, so that the workspace stays below 1.5 times v."""
CHUNK_US = {64: 1.5, 128: 2.5}
EFFECT_US, JOIN_US, LAUNCH_US = 1.3, 3.4, 8.0
"""The plan's model: microseconds of a chunk by BLOCK_V, of a chunk of a segment's effect, of one
join, and of a launch more, as measured on an H200 (docs/kernels/prefill.md)."""


class Plan(NamedTuple):
    """How a call is cut: tokens a segment (0: sequences stay whole), value columns a program."""

    segment: int
    BLOCK_V: int


def plan(p: DeltaProblem, processors: int) -> Plan:
    """The cheapest cut by a model of rounds over the SMs; shapes alone decide.

    BLOCK_V changes no bit. A split does, so with ``batch_invariant`` there is none.
    """
    sequences = max(p.N, 1)
    longest = p.T if not p.varlen else -(-p.T // sequences)
    chunks = -(-longest // CHUNK)
    best = _serial(sequences * p.HV, chunks, processors), Plan(0, _width(p, 1, processors))
    if p.batch_invariant:
        return best[1]
    room = ROOM * p.T * (1 if p.varlen else sequences) / STATE_TOKENS
    for segment in SEGMENTS:
        if segment >= longest or portable.units_of(p, segment, tail=False) > room:
            continue
        segments, length = -(-longest // segment), segment // CHUNK
        effects = -(-sequences * (segments - 1) * p.HV * 2 // processors)
        cost = effects * length * EFFECT_US + segments * JOIN_US + 2 * LAUNCH_US
        cost += _serial(sequences * segments * p.HV, length, processors)
        best = min(best, (cost, Plan(segment, _width(p, segments, processors))))
    return best[1]


def _serial(states: int, chunks: int, processors: int) -> float:
    return min(chunks * -(-states * (128 // v) // processors) * us for v, us in CHUNK_US.items())


def _width(p: DeltaProblem, segments: int, processors: int) -> int:
    states = max(p.N, 1) * segments * p.HV
    return min(CHUNK_US, key=lambda v: -(-states * (128 // v) // processors) * CHUNK_US[v])


def prefill(p: DeltaProblem, t: DeltaTensors) -> None:
    """Serve ``prefill``.

    Calls without tokens are Triton's, and views whose rows TMA cannot reach (16-byte steps).
    """
    if 0 in (p.N, p.T) or not all(map(_reachable, (t.q, t.k, t.v, t.out))):
        portable.prefill(p, t)
        return
    every = [Plan(segment, v) for v in CHUNK_US for segment in (0, SEGMENTS[0])]
    for chosen in every if launching.every_plan() else [plan(p, portable.processors(p.device))]:
        run(p, t, chosen)


def run(p: DeltaProblem, t: DeltaTensors, plan: Plan) -> None:
    """Both halves, by a given plan. A process's first call compiles its kernels side by side."""
    if hopper_state_kernel.device_caches:
        _run(p, t, plan)
        return
    with launching.compiling([functools.partial(_run, p, t, plan)]):
        _run(p, t, plan)


def _run(p: DeltaProblem, t: DeltaTensors, plan: Plan) -> None:
    with torch.cuda.device(p.device):
        parts = _chunks(p, t)
        if not plan.segment:
            _states(p, t, parts, plan, None, output=True)
            return
        units = portable.units_of(p, plan.segment, tail=False)
        joined = torch.empty(units, p.HV, p.K, p.V + p.K, dtype=torch.float32, device=p.device)
        _states(p, t, parts, plan._replace(BLOCK_V=128), joined, output=False)
        portable.join(p, t, joined, plan.segment)
        _states(p, t, parts, plan, joined, output=True)


class Parts(NamedTuple):
    """What the parallel half leaves for the serial one: tensors over B * T tokens."""

    a: Tensor  # [.., HV, C]: Ag
    b: Tensor  # [HV, ..] float32: beta
    g2: Tensor | None  # [HV, ..] float32: cumulative log2 decay in the chunk; None without g
    r_k: Tensor | None  # [HK, ..] float32: inverse lengths of the keys; None without norm
    hard: Tensor  # [HK, ..] int8, at a chunk's first token: whether its Ag is float16


def _chunks(p: DeltaProblem, t: DeltaTensors) -> Parts:
    """The parallel half."""
    tokens, heads = p.B * p.T, key_heads(p.HK, p.HV)
    assert t.beta is not None
    empty = functools.partial(torch.empty, dtype=torch.float32, device=p.device)
    a = empty(tokens, p.HV, CHUNK, dtype=p.dtype)
    b = empty(p.HV, tokens)
    g2 = None if t.g is None else empty(p.HV, tokens)
    r_k = empty(p.HK, tokens) if p.normalize_qk else None
    hard = empty(p.HK, tokens, dtype=torch.int8)
    _launch(
        hopper_chunks_kernel,
        portable.units_of(p, CHUNK, tail=True) * (p.HK // heads),
        maxnreg=CHUNK_REGISTERS,
        k_desc=_matrix(p, t.k, p.K),
        g_ptr=t.g,
        A_log_ptr=dense(t.A_log),
        dt_bias_ptr=dense(t.dt_bias),
        beta_ptr=t.beta,
        a_ptr=a,
        b_ptr=b,
        g2_ptr=g2,
        r_k_ptr=r_k,
        hard_ptr=hard,
        o_ptr=t.out,
        cu_seqlens_ptr=dense(t.rows.cu_seqlens),
        beta_scale=2.0 if p.neg_eigval else 1.0,
        N=p.N,
        T=p.T,
        **strides(t.g, "g", "bth"),
        **strides(t.beta, "beta", "bth"),
        stride_o_t=t.out.stride(1),
        stride_gates_h=tokens,
        HK=p.HK,
        HV=p.HV,
        K=p.K,
        V=p.V,
        RAW_BETA=p.raw_gates,
    )
    return Parts(a, b, g2, r_k, hard)


def _states(
    p: DeltaProblem,
    t: DeltaTensors,
    parts: Parts,
    plan: Plan,
    joined: Tensor | None,
    *,
    output: bool,
) -> None:
    """The serial half: outputs and final states, or what each segment does to any state."""
    rows, segment = t.rows, plan.segment or WHOLE

    blocks = p.V // plan.BLOCK_V + (0 if output else p.K // plan.BLOCK_V)
    _launch(
        hopper_state_kernel,
        portable.units_of(p, segment, tail=False) * p.HV * blocks,
        q_desc=_matrix(p, t.q, ROWS),
        k_desc=_matrix(p, t.k, ROWS),
        v_desc=_matrix(p, t.v, ROWS),
        a_desc=_matrix(p, parts.a, CHUNK),
        o_desc=_matrix(p, t.out, ROWS),
        o_ptr=t.out,
        b_ptr=parts.b,
        g2_ptr=parts.g2,
        r_k_ptr=parts.r_k,
        hard_ptr=parts.hard,
        joined_ptr=joined,
        state_ptr=t.state,
        slots_ptr=dense(rows.slots),
        write_slots_ptr=dense(rows.write_slots),
        has_state_ptr=dense(rows.has_state),
        cu_seqlens_ptr=dense(rows.cu_seqlens),
        scale=p.scale,
        N=p.N,
        T=p.T,
        pad_slot=p.rows.pad_slot,
        segment_size=segment,
        stride_o_t=t.out.stride(1),
        stride_gates_h=p.B * p.T,
        stride_state_p=t.state.stride(0),
        HQ=p.HQ,
        HK=p.HK,
        HV=p.HV,
        K=p.K,
        V=p.V,
        BLOCK_V=plan.BLOCK_V,
        NUM_BUFFERS=NUM_BUFFERS,
        STATE_KV=p.state_layout == "kv",
        OUTPUT=output,
    )


def _launch(kernel: Any, programs: int, maxnreg: int | None = None, **arguments: Any) -> None:
    options = {"num_warps": 4, "launch_pdl": True}
    if maxnreg is not None:
        options["maxnreg"] = maxnreg
    launching.run(kernel, programs, arguments, options)


def _matrix(p: DeltaProblem, x: Tensor, width: int) -> TensorDescriptor:
    """A descriptor over [B * T, heads * width of a head] in tiles of [CHUNK, width]."""
    return TensorDescriptor(
        x,
        [p.B * p.T, x.shape[-2] * x.shape[-1]],
        [x.stride(-3), 1],
        [CHUNK, width],
        _tile(width, x.dtype),
    )


@functools.cache
def _tile(width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([CHUNK, width], kind)


def _reachable(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and x.stride(1) * x.element_size() % 16 == 0
