"""The backward of prefill on Hopper: Gluon walks, and gradients in one Gluon kernel.

Plan, workspace (without N and H) and the kernels before the walks are those of
triton/prefill_backward.py. So are the kernels after them in float16, which need a power of two per
chunk, and with fewer or more query heads than key heads.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from sluice.backends.hopper import gradients
from sluice.backends.hopper.kernels.sizes import COPY_WIDTH
from sluice.backends.triton import configs, gpu
from sluice.backends.triton import prefill_backward as portable
from sluice.backends.triton.arguments import Binding, Kernel, KernelCall, Pointer, Tiles
from sluice.backends.triton.launch import Launches
from sluice.backends.triton.prefill_arguments import WHOLE
from sluice.backends.triton.prefill_backward_parts import Parts
from sluice.contract.backward import DeltaBackwardSpec
from sluice.contract.chunk_length import CHUNK

WALK = Kernel("sluice.backends.hopper.kernels.backward_walk_kernel", "hopper_walk_kernel")
STAGES = 3  # chunks whose tiles fit into shared memory
BLOCK_V = 64  # value columns per program
WALK_US, EFFECT_US = (1.0, 1.0), (0.9, 0.5)
"""The plan's model, for an H200, in microseconds: a chunk of either walk, and of a segment's
effect, alone, and what is added where every SM has a program (measured: 1.46 with 64 programs, 1.85
to 2.2 with 128; docs/kernels/backward.md). Then a segment's join, and three more launches."""
JOIN_US, LAUNCHES_US = 2.0, 20.0


def launches(spec: DeltaBackwardSpec) -> Launches:
    """The kernels of ``prefill_backward``."""
    return planned_launches(spec, plan_of(spec))


def planned_launches(spec: DeltaBackwardSpec, plan: portable.Plan) -> Launches:
    """The same by a given plan."""
    fused = spec.dtype == torch.bfloat16 and gradients.refuse(spec) is None
    last = functools.partial(gradients.gradient_calls, programs=plan.programs) if fused else None
    return portable.planned_launches(spec, plan, walks, last)


def plan_of(p: DeltaBackwardSpec) -> portable.Plan:
    """The plan, by shapes and the GPU alone."""
    segment = portable.shortest(p, functools.partial(cost, p))
    return portable.plan_of(p)._replace(segment=segment, alongside=True)


def cost(p: DeltaBackwardSpec, segment: int) -> float:
    """Microseconds of both walks, which run side by side, cut into segments; 0: not cut."""
    processors = gpu.processors(p.device)
    longest = portable.longest_sequence(p)
    heads, columns, keys = max(p.N, 1) * p.HV, p.V // BLOCK_V, p.K // BLOCK_V

    def walked(programs: int, tokens: int, us: tuple[float, float]) -> float:
        rounds, (alone, shared) = configs.blocks(programs, processors), us
        chunk = alone + shared * min(programs / processors, 1.0)
        return rounds * configs.blocks(tokens, CHUNK) * chunk

    if not segment:
        return walked(2 * heads * columns, longest, WALK_US)
    segments = configs.blocks(longest, segment)
    effects = heads * (2 * (segments - 1) * columns + segments * keys)
    joined = segments * JOIN_US + LAUNCHES_US
    walks = walked(2 * heads * segments * columns, segment, WALK_US)
    return walked(effects, segment, EFFECT_US) + joined + walks


def walks(
    p: DeltaBackwardSpec,
    memory: Binding,
    w: Parts,
    plan: portable.Plan,
    sizes: dict[str, Any],
    segments: int,
) -> list[KernelCall]:
    """The walk over states, and the walk back; where sequences are split, the states at the borders
    of segments before both."""
    split = w.segments is not None
    tokens, row = p.B * p.T, p.HV * p.V
    chunk_slots = tokens // CHUNK + p.N
    pads = dict.fromkeys(("q_desc", "p_desc", "dv_desc", "dv_ptr", "p_low_ptr", "decay_q_ptr"))
    common = pads | {
        "k_desc": _input(p, "k", p.K),
        "b_desc": _tiles(w.b, tokens, p.HV * CHUNK, CHUNK, CHUNK),
        "hard_ptr": w.hard,
        "beta32_ptr": w.beta32,
        "decay_in_ptr": w.decay_in,
        "decay_out_ptr": w.decay_out,
        "g2_ptr": w.g2,
        "b_down_ptr": w.b_down,
        "segments_ptr": w.segments,
        "cu_seqlens_ptr": memory.dense("cu_seqlens"),
        "N": p.N,
        "T": p.T,
        "tokens": tokens,
        "segment_size": plan.segment if split else WHOLE,
        "HV": p.HV,
        "R_Q": p.HV // p.HQ,
        "R_K": p.HV // p.HK,
        "K": p.K,
        "V": p.V,
        "STAGES": STAGES,
        "STATE_KV": p.state_layout == "kv",
    }

    def states(effect: bool, hard: bool) -> KernelCall:
        blocks = (p.V + p.K if effect else p.V) // BLOCK_V
        return _call(
            segments * p.HV * blocks,
            **common
            | {
                "v_desc": _input(p, "v", COPY_WIDTH),
                "x_desc": _tiles(w.before, chunk_slots * row, p.K, BLOCK_V, p.K),
                "y_desc": _tiles(w.e, tokens, row, CHUNK, COPY_WIDTH),
                "y_ptr": w.e,
                "y_low_ptr": w.e_low,
                "x_low_ptr": w.before_low,
                "b_low_ptr": w.b_low if hard else None,
                "state_ptr": memory.dense("state"),
                "dstate_ptr": None,
                "BACK": False,
                "EFFECT": effect,
                "HARD": hard,
                "ALONGSIDE": False,
            },
        )

    def walk(effect: bool, hard: bool) -> KernelCall:
        return _call(
            segments * p.HV * (p.V // BLOCK_V),
            **common
            | {
                "q_desc": _input(p, "q", p.K),
                "v_desc": _input(p, "do", COPY_WIDTH),
                "p_desc": _tiles(w.p, tokens, p.HV * CHUNK, CHUNK, CHUNK),
                "x_desc": _tiles(w.after, chunk_slots * row, p.K, BLOCK_V, p.K),
                "y_desc": _tiles(w.y, tokens, row, CHUNK, COPY_WIDTH),
                "dv_desc": _input(p, "dv", COPY_WIDTH),
                "y_ptr": w.y,
                "dv_ptr": memory["dv"],
                "y_low_ptr": w.y_low,
                "x_low_ptr": w.after_low,
                "p_low_ptr": w.p_low,
                "b_low_ptr": w.b_low if hard else None,
                "decay_q_ptr": w.decay_q,
                "state_ptr": memory.dense("dfinal"),
                "dstate_ptr": None if effect else memory["dstate"],
                "BACK": True,
                "EFFECT": effect,
                "HARD": hard,
                "ALONGSIDE": plan.alongside,
            },
        )

    def both(effect: bool) -> list[KernelCall]:
        kinds = portable.launches_by_hardness(w)
        # the walk back begins beside the last walk forward: that of most programs comes last
        forward = [states(effect, hard) for hard in reversed(kinds)]
        return [*forward, *(walk(effect, hard) for hard in kinds)]

    if not split:
        return both(False)
    return [*both(True), portable.join_call(p, memory, w, plan), *both(False)]


def _call(programs: int, **arguments: Any) -> KernelCall:
    options = {"num_warps": 4, "launch_pdl": True, "enable_fp_fusion": True}
    return KernelCall(WALK, programs, options, arguments)


def _input(p: DeltaBackwardSpec, name: str, width: int) -> Tiles:
    """A tensor [B, T, heads, width of a head] as a matrix of tokens, in tiles of a chunk."""
    meta = getattr(p, name)
    shape = (p.B * p.T, meta.shape[2] * meta.shape[3])
    return Tiles(name, meta.dtype, shape, (meta.strides[1], 1), (CHUNK, width))


def _tiles(x: Pointer | None, rows: int, columns: int, height: int, width: int) -> Tiles:
    """A part of the workspace as a matrix."""
    assert x is not None
    return Tiles(x.source, x.dtype, (rows, columns), (columns, 1), (height, width))
