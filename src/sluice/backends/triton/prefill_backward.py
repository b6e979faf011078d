"""The backward of prefill: plan, workspace, and the launches of kernels/backward_*.py.

Seven kernels: what depends on no state (two), the states forward, their gradients back, pairs of
tokens, the gradients of queries, and those of keys and gates. With 16 bits one more makes the Bg of
hard chunks and, with decay, one adds what low terms give; with raw gates one sums over chunks, and
long sequences of few heads are split by three more. Nothing of the forward pass is kept
but its inputs. The workspace, with the size of v as the unit (16-bit inputs, K = V = 128): the
states before and after each chunk 2 each, E and Y 1 each, P, Bg, N and H 0.5 each, factors 0.1; low
terms 3.5, and 4 more with decay; segments at most ROOM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sluice.backends.triton import configs, gpu, prefill_key_backward
from sluice.backends.triton.arguments import Binding, Kernel, KernelCall, Pointer, kernel_call
from sluice.backends.triton.configs import Config
from sluice.backends.triton.launch import Launches
from sluice.backends.triton.prefill import (
    EXACT,
    INVERSE,
    JOIN_BLOCK_V,
    SEGMENTS,
    STAGES,
)
from sluice.backends.triton.prefill_arguments import WHOLE, units_of
from sluice.backends.triton.prefill_backward_parts import Parts, all_hard, workspace
from sluice.backends.triton.toolchain import interpreted
from sluice.contract.backward import DeltaBackwardSpec
from sluice.contract.chunk_length import CHUNK

_FOLDER = "sluice.backends.triton.kernels."
LOCAL = Kernel(_FOLDER + "backward_chunks", "backward_local_kernel")
BACKWARD_INVERSE = Kernel(_FOLDER + "backward_inverse", "backward_inverse_kernel")
HARD_INVERSE = Kernel(_FOLDER + "backward_inverse", "backward_hard_inverse_kernel")
STATES = Kernel(_FOLDER + "backward_states", "backward_states_kernel")
JOIN = Kernel(_FOLDER + "backward_states", "backward_join_kernel")
WALK = Kernel(_FOLDER + "backward_walk", "backward_walk_kernel")
PAIRS = Kernel(_FOLDER + "backward_pairs", "backward_pairs_kernel")
QUERIES = Kernel(_FOLDER + "backward_gradients", "backward_queries_kernel")
KEYS = Kernel(_FOLDER + "backward_gradients", "backward_keys_kernel")
LOWS = Kernel(_FOLDER + "backward_lows", "backward_lows_kernel")
SUMS = Kernel(_FOLDER + "backward_gradients", "backward_sums_kernel")


WARPS, WARPS_ELSEWHERE = 4, 8
"""Warps of every kernel with large products. On Hopper these are one warpgroup: with two, Triton up
to 3.8 puts no barrier between one group's products and the other's next tile in the same shared
memory (triton-lang/triton 11047). Other NVIDIA GPUs have more for the kernels that go through
chunks in parallel, and half as many columns of dK at a time: four warps would spill."""


STATES_US, WALK_US = (2.7, 1.9), (4.5, 3.5)
JOIN_US, LAUNCHES_US = 2.0, 12.0
"""The plan's model, for an H200, in microseconds. Of the walk forward (STATES) and the walk back
(WALK): a chunk, and a chunk of a segment's effect. Then one join, and three more launches. The walk
forward was measured; the walk back is estimated from its products."""
HARD_PRECISION = "bf16x6"
"""Of the products that make the Bg of hard chunks: three bfloat16 terms, as many bits as float32
has. Tensor cores truncate the low terms of tf32x3, and where keys repeat these errors agree: one
beta of 0.99 would leave three times the error in dg. Triton's interpreter does not know it."""
HARD_UNITS = 4
"""Chunks that a program looks at for hard ones, where few are: most programs end at once, and so
many fit on the GPU side by side."""
STATE_TOKENS, ROOM = 768, 1.0
"""A segment's states and transition take as much memory as the values of STATE_TOKENS tokens. All
segments together may take ROOM times the memory of v."""


class Plan(NamedTuple):
    """How the kernels are cut and launched."""

    local: Config
    states: Config  # BLOCK_V: value columns per program, of the walk as well
    walk: Config
    pairs: Config  # BLOCK_V: value columns per step, as in the next two
    queries: Config
    keys: Config  # PIECE_K: columns of dK at a time
    lows: Config  # BLOCK_V, PIECE_K: columns at a time
    segment: int = 0  # tokens; 0: no sequence is split
    alongside: bool = False  # Hopper's: the walk back runs beside the walk forward
    programs: int = 0  # of Hopper's gradients; 0: one per SM


def plan_of(p: DeltaBackwardSpec) -> Plan:
    """The plan, by shapes and the GPU alone."""
    columns = max(16, configs.power_of_two(p.V))
    if p.dtype == torch.float32:
        few = Config(num_warps=WARPS, BLOCK_V=16, PIECE_K=64)
        return Plan(few, few, few, few, few, few, few)
    wide = p.K > 128
    large = gpu.shared_memory(p.device) >= 160 << 10
    rows = 64 if gpu.has_wgmma(p.device) else 32
    block = min(rows if not wide or large else 16, columns)
    stages = STAGES if large and not wide else 1
    serial = Config(num_warps=WARPS, BLOCK_V=block, num_stages=stages, fp_fusion=True)
    elsewhere = gpu.shares_sm(p.device)
    warps, piece = (WARPS_ELSEWHERE, 32) if elsewhere else (WARPS, 64)
    step = 64 if large or (elsewhere and not wide) else 32
    last = Config(num_warps=warps, BLOCK_V=min(step, columns), num_stages=3, fp_fusion=True)
    return Plan(
        local=Config(num_warps=warps, fp_fusion=True),
        states=serial,
        walk=serial,
        pairs=last,
        queries=last,
        keys=last._replace(PIECE_K=piece),
        lows=last._replace(PIECE_K=piece),
        segment=0 if wide else best_segment(p, block, gpu.processors(p.device)),
    )


def best_segment(p: DeltaBackwardSpec, block: int, processors: int) -> int:
    """Tokens of a segment by a model of rounds over the SMs; 0: no sequence is split."""
    sequences = max(p.N, 1)
    longest = longest_sequence(p)
    heads, columns = sequences * p.HV, configs.blocks(p.V, block)
    keys = configs.blocks(p.K, block)

    def cost(segment: int) -> float:
        (states, effect), (walk, effect_back) = STATES_US, WALK_US
        if not segment:
            rounds = configs.blocks(heads * columns, processors)
            return rounds * configs.blocks(longest, CHUNK) * (states + walk)
        segments, chunks = configs.blocks(longest, segment), segment // CHUNK
        effects = configs.blocks(heads * ((segments - 1) * columns + segments * keys), processors)
        back = configs.blocks(heads * (segments - 1) * columns, processors)
        rounds = configs.blocks(heads * segments * columns, processors)
        in_chunks = effects * effect + back * effect_back + rounds * (states + walk)
        return chunks * in_chunks + segments * JOIN_US + LAUNCHES_US

    return shortest(p, cost)


def longest_sequence(p: DeltaBackwardSpec) -> int:
    """Tokens of the longest sequence; of packed ones, which the host does not know, the mean."""
    return p.T if not p.varlen else -(-p.T // max(p.N, 1))


def shortest(p: DeltaBackwardSpec, cost: Callable[[int], float]) -> int:
    """The length of a segment that costs least among those that the workspace has room for."""
    room = ROOM * p.T * (1 if p.varlen else max(p.N, 1)) / STATE_TOKENS
    longest = longest_sequence(p)
    lengths = [s for s in SEGMENTS if s < longest and units_of(p, s, tail=False) <= room]
    return min([0, *lengths], key=cost)


def launches(spec: DeltaBackwardSpec) -> Launches:
    """The kernels of ``prefill_backward``."""
    if spec.decay == "key":
        return prefill_key_backward.launches(spec)
    return planned_launches(spec, plan_of(spec))


FLOAT32_MEMORY = {64: 96 << 10, 128: 160 << 10, 256: 288 << 10}
"""Shared memory that the kernels need for float32 keys, by their width rounded up."""


def refuse(spec: DeltaBackwardSpec) -> str | None:
    """Refuse float32 keys that do not fit into shared memory, unless decay is per key."""
    if spec.dtype == torch.float32 and spec.decay != "key":
        needed = FLOAT32_MEMORY[max(64, configs.power_of_two(spec.K))]
        if needed > gpu.shared_memory(spec.device):
            return f"float32 keys of {spec.K} need {needed >> 10} kB of shared memory in backward"
    return None


Walks = Callable[[DeltaBackwardSpec, Binding, Parts, Plan, dict[str, Any], int], list[KernelCall]]
"""Makes the launches of both walks: of a spec, its memory, the workspace, a plan, sizes that
kernels share, and the number of segments."""


Gradients = Callable[[DeltaBackwardSpec, Binding, Parts], list[KernelCall]]
"""Makes the launches after the walks: of a spec, its memory and the workspace."""


def planned_launches(
    spec: DeltaBackwardSpec,
    plan: Plan,
    walks: Walks | None = None,
    gradients: Gradients | None = None,
) -> Launches:
    """The same by a given plan; with other kernels in place of Triton's where they are given."""
    p, memory = spec, Binding(spec)
    exact = p.dtype == torch.float32
    split = 0 < plan.segment < p.T
    segments = units_of(p, plan.segment if split else WHOLE, tail=False)
    w = workspace(p, memory, segments if split else 0, pairs=gradients is None)
    units = units_of(p, CHUNK, tail=True)
    BLOCK_K = max(16, configs.power_of_two(p.K))
    sizes = {
        "cu_seqlens_ptr": memory.dense("cu_seqlens"),
        "N": p.N,
        "T": p.T,
        "tokens": p.B * p.T,
        "HK": p.HK,
        "HV": p.HV,
        "K": p.K,
        "PRECISION": EXACT if exact else "tf32",
    }
    raw = {"A_log_ptr": memory.dense("A_log"), "dt_bias_ptr": memory.dense("dt_bias")}
    scales = {"scale": p.q_scale, "beta_scale": p.beta_scale}
    calls = [
        kernel_call(
            LOCAL,
            units * p.HV,
            plan.local,
            p.device,
            q_ptr=memory["q"],
            k_ptr=memory["k"],
            g_ptr=memory["g"],
            beta_ptr=memory["beta"],
            **raw,
            p_ptr=w.p,
            p_low_ptr=w.p_low,
            hard_ptr=w.hard,
            dq_ptr=memory["dq"],
            dk_ptr=memory["dk"],
            dv_ptr=memory["dv"],
            dg_ptr=memory["dg"],
            dbeta_ptr=memory["dbeta"],
            beta32_ptr=w.beta32,
            g2_ptr=w.g2,
            g2_low_ptr=w.g2_low,
            decay_in_ptr=w.decay_in,
            decay_out_ptr=w.decay_out,
            decay_q_ptr=w.decay_q,
            r_k_ptr=w.r_k,
            r_q_ptr=w.r_q,
            **scales,
            **sizes,
            **memory.strides("q", "bth"),
            **memory.strides("k", "bth"),
            **memory.strides("g", "bth"),
            **memory.strides("beta", "bth"),
            HQ=p.HQ,
            V=p.V,
            BLOCK_K=min(BLOCK_K, 32 if exact else 128),
            ONCE=gpu.has_wgmma(p.device) and not exact and BLOCK_K <= 128,
            ALL_HARD=w.hard is not None and all_hard(p),
        )
    ]
    if w.b is not None:
        calls += _inverses(p, memory, w, sizes | {"BLOCK_K": BLOCK_K}, units)
    sizes |= {"V": p.V, "BLOCK_K": BLOCK_K}
    calls += (walks or _walks)(p, memory, w, plan, sizes, segments)
    if w.by_low is not None:
        calls.append(_lows(p, memory, w, plan, sizes, units))
    if gradients is None:
        calls += _gradients(p, memory, w, plan, sizes, units)
    else:
        calls += gradients(p, memory, w)
    if w.by_gate is not None:
        calls.append(gate_sums(memory, w.by_gate, units, p.HV))
    return Launches(spec, memory, calls)


def hard_precision() -> str:
    """HARD_PRECISION; in Triton's interpreter, whose products are of float32, another name."""
    return EXACT if interpreted() else HARD_PRECISION


def _inverses(
    p: DeltaBackwardSpec, memory: Binding, w: Parts, sizes: dict[str, Any], units: int
) -> list[KernelCall]:
    """Bg of all chunks as one term, and that of hard chunks as two."""
    common = {
        "k_ptr": memory["k"],
        "beta32_ptr": w.beta32,
        "g2_ptr": w.g2,
        "r_k_ptr": w.r_k,
        "b_ptr": w.b,
        "b_down_ptr": w.b_down,
        **sizes,
        **memory.strides("k", "bth"),
    }
    calls, looked_at = [], HARD_UNITS
    if w.hard is not None and all_hard(p):
        looked_at = 1
    else:
        single = common | {"g2_low_ptr": w.g2_low}
        calls.append(kernel_call(BACKWARD_INVERSE, units * p.HV, INVERSE, p.device, **single))
    if w.hard is not None:
        programs = configs.blocks(units, looked_at) * p.HV
        double = common | {"b_low_ptr": w.b_low, "hard_ptr": w.hard, "PRECISION": hard_precision()}
        config = Config(num_warps=WARPS_ELSEWHERE if gpu.shares_sm(p.device) else WARPS)
        calls.append(
            kernel_call(HARD_INVERSE, programs, config, p.device, **double, UNITS=looked_at)
        )
    return calls


def _walks(
    p: DeltaBackwardSpec,
    memory: Binding,
    w: Parts,
    plan: Plan,
    sizes: dict[str, Any],
    segments: int,
) -> list[KernelCall]:
    """The walk over states, and the walk back; where sequences are split, the states at the borders
    of segments before both."""
    split = w.segments is not None
    columns = configs.blocks(p.V, plan.states.BLOCK_V)
    common = {
        "k_ptr": memory["k"],
        "b_ptr": w.b,
        "b_down_ptr": w.b_down,
        "beta32_ptr": w.beta32,
        "decay_in_ptr": w.decay_in,
        "decay_out_ptr": w.decay_out,
        "g2_ptr": w.g2,
        "hard_ptr": w.hard,
        "segments_ptr": w.segments,
        "segment_size": plan.segment if split else WHOLE,
        **sizes,
        **memory.strides("k", "bth"),
        "BLOCK_V": plan.states.BLOCK_V,
        "STATE_KV": p.state_layout == "kv",
    }

    def states(effect: bool, hard: bool) -> KernelCall:
        blocks = columns + configs.blocks(p.K, plan.states.BLOCK_V) if effect else columns
        return kernel_call(
            STATES,
            segments * p.HV * blocks,
            plan.states,
            p.device,
            **common,
            b_low_ptr=w.b_low if hard else None,
            v_ptr=memory["v"],
            e_ptr=w.e,
            e_low_ptr=w.e_low,
            state_ptr=memory.dense("state"),
            S_ptr=w.before,
            S_low_ptr=w.before_low,
            **memory.strides("v", "bth"),
            STAGES=plan.states.num_stages,
            EFFECT=effect,
            HARD=hard,
        )

    def walk(effect: bool, hard: bool) -> KernelCall:
        return kernel_call(
            WALK,
            segments * p.HV * columns,
            plan.walk,
            p.device,
            **common,
            b_low_ptr=w.b_low if hard else None,
            q_ptr=memory["q"],
            do_ptr=memory["do"],
            decay_q_ptr=w.decay_q,
            p_ptr=w.p,
            p_low_ptr=w.p_low,
            dv_ptr=memory["dv"],
            y_ptr=w.y,
            y_low_ptr=w.y_low,
            dS_ptr=w.after,
            dS_low_ptr=w.after_low,
            dfinal_ptr=memory.dense("dfinal"),
            dstate_ptr=memory["dstate"],
            **memory.strides("q", "bth"),
            HQ=p.HQ,
            STAGES=plan.walk.num_stages,
            EFFECT=effect,
            HARD=hard,
        )

    def both(effect: bool) -> list[KernelCall]:
        kinds = launches_by_hardness(w)
        return [make(effect, hard) for make in (states, walk) for hard in kinds]

    if not split:
        return both(False)
    return [*both(True), join_call(p, memory, w, plan), *both(False)]


def launches_by_hardness(w: Parts) -> tuple[bool, ...]:
    """HARD of each launch of a walk: once for programs without a hard chunk, once for those
    with one; where no chunk is hard, once."""
    return (False,) if w.hard is None else (False, True)


def join_call(p: DeltaBackwardSpec, memory: Binding, w: Parts, plan: Plan) -> KernelCall:
    """States at the borders of segments, and their gradients, from what segments do to any."""
    return kernel_call(
        JOIN,
        p.N * p.HV * configs.blocks(p.V, JOIN_BLOCK_V) * 2,
        Config(num_warps=8),
        p.device,
        segments_ptr=w.segments,
        state_ptr=memory.dense("state"),
        dfinal_ptr=memory.dense("dfinal"),
        cu_seqlens_ptr=memory.dense("cu_seqlens"),
        N=p.N,
        T=p.T,
        segment_size=plan.segment,
        HV=p.HV,
        K=p.K,
        V=p.V,
        BLOCK_K=max(16, configs.power_of_two(p.K)),
        BLOCK_V=JOIN_BLOCK_V,
        STAGES=2 if gpu.shared_memory(p.device) >= 160 << 10 else 1,
        PRECISION=EXACT,
        STATE_KV=p.state_layout == "kv",
    )


def _lows(
    p: DeltaBackwardSpec,
    memory: Binding,
    w: Parts,
    plan: Plan,
    sizes: dict[str, Any],
    units: int,
) -> KernelCall:
    """What the low terms of hard chunks add to the gradients of decays."""
    return kernel_call(
        LOWS,
        units * p.HV,
        plan.lows,
        p.device,
        q_ptr=memory["q"],
        k_ptr=memory["k"],
        do_ptr=memory["do"],
        e_ptr=w.e,
        e_low_ptr=w.e_low,
        y_ptr=w.y,
        y_low_ptr=w.y_low,
        hard_ptr=w.hard,
        S_ptr=w.before,
        S_low_ptr=w.before_low,
        dS_ptr=w.after,
        dS_low_ptr=w.after_low,
        beta32_ptr=w.beta32,
        g2_ptr=w.g2,
        r_k_ptr=w.r_k,
        decay_in_ptr=w.decay_in,
        decay_out_ptr=w.decay_out,
        decay_q_ptr=w.decay_q,
        by_low_ptr=w.by_low,
        **sizes,
        **memory.strides("q", "bth"),
        **memory.strides("k", "bth"),
        HQ=p.HQ,
        BLOCK_V=plan.lows.BLOCK_V,
        PIECE=min(plan.lows.PIECE_K, sizes["BLOCK_K"]),
    )


def _gradients(
    p: DeltaBackwardSpec,
    memory: Binding,
    w: Parts,
    plan: Plan,
    sizes: dict[str, Any],
    units: int,
) -> list[KernelCall]:
    """The last three kernels: pairs of tokens, gradients of queries, then of keys and gates."""
    if w.e is None:
        d = {"d_ptr": memory["v"], **memory.strides("v", "bth", "d")}
    else:
        row = p.HV * p.V
        d = {"d_ptr": w.e, "stride_d_b": p.T * row if p.B > 1 else 0}
        d |= {"stride_d_t": row, "stride_d_h": p.V}
    d |= {"d_low_ptr": w.e_low}
    common = {
        "k_ptr": memory["k"],
        "hard_ptr": w.hard,
        "n_ptr": w.n,
        "n_down_ptr": w.n_down,
        **sizes,
        **memory.strides("k", "bth"),
        "HQ": p.HQ,
    }
    pairs = kernel_call(
        PAIRS,
        units * p.HV,
        plan.pairs,
        p.device,
        **common,
        **d,
        do_ptr=memory["do"],
        y_ptr=w.y,
        y_low_ptr=w.y_low,
        p_ptr=w.p,
        p_low_ptr=w.p_low,
        beta32_ptr=w.beta32,
        g2_ptr=w.g2,
        g2_low_ptr=w.g2_low,
        r_k_ptr=w.r_k,
        r_q_ptr=w.r_q,
        n_low_ptr=w.n_low,
        h_ptr=w.h,
        h_down_ptr=w.h_down,
        by_pair_ptr=w.by_pair,
        dbeta_ptr=memory["dbeta"],
        scale=p.q_scale,
        beta_scale=p.beta_scale,
        BLOCK_V=plan.pairs.BLOCK_V,
        STAGES=plan.pairs.num_stages,
        RAW_BETA=p.raw_gates,
    )
    queries = kernel_call(
        QUERIES,
        units * p.HQ,
        plan.queries,
        p.device,
        **common,
        q_ptr=memory["q"],
        do_ptr=memory["do"],
        n_low_ptr=w.n_low,
        S_ptr=w.before,
        decay_q_ptr=w.decay_q,
        r_q_ptr=w.r_q,
        dq_ptr=memory["dq"],
        by_query_ptr=w.by_query,
        **memory.strides("q", "bth"),
        BLOCK_V=plan.queries.BLOCK_V,
        STAGES=plan.queries.num_stages,
    )
    keys = kernel_call(
        KEYS,
        units * p.HK,
        plan.keys,
        p.device,
        **common,
        **d,
        q_ptr=memory["q"],
        g_ptr=memory["g"],
        A_log_ptr=memory.dense("A_log"),
        dt_bias_ptr=memory.dense("dt_bias"),
        h_ptr=w.h,
        h_down_ptr=w.h_down,
        S_ptr=w.before,
        dS_ptr=w.after,
        by_pair_ptr=w.by_pair,
        by_query_ptr=w.by_query,
        by_low_ptr=w.by_low,
        beta32_ptr=w.beta32,
        g2_ptr=w.g2,
        decay_in_ptr=w.decay_in,
        decay_out_ptr=w.decay_out,
        r_k_ptr=w.r_k,
        y_ptr=w.y,
        dk_ptr=memory["dk"],
        dg_ptr=memory["dg"],
        by_gate_ptr=w.by_gate,
        **memory.strides("q", "bth"),
        **memory.strides("g", "bth"),
        BLOCK_V=plan.keys.BLOCK_V,
        PIECE=min(plan.keys.PIECE_K, sizes["BLOCK_K"]),
        STAGES=plan.keys.num_stages,
    )
    return [pairs, queries, keys]


def gate_sums(memory: Binding, parts: Pointer, count: int, HV: int) -> KernelCall:
    """The launch that sums ``parts`` [count, 2, HV] into dA_log and ddt_bias."""
    return kernel_call(
        SUMS,
        HV,
        Config(num_warps=4),
        memory.spec.device,
        by_gate_ptr=parts,
        dA_log_ptr=memory["dA_log"],
        ddt_bias_ptr=memory["ddt_bias"],
        units=count,
        HV=HV,
        BLOCK=128,
    )
