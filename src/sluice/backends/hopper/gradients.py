"""The last kernel of the backward of prefill on Hopper: gradients of queries, keys and gates.

It replaces three of Triton's kernels (``triton/prefill_backward.py``): pairs, queries and keys. Of
their workspace it needs neither P, N and H nor the sums by pair and by query.
"""

from __future__ import annotations

from sluice.backends.hopper.prefill import token_tiles
from sluice.backends.triton import gpu
from sluice.backends.triton.arguments import Binding, Kernel, KernelCall, Pointer, Tiles
from sluice.backends.triton.prefill_arguments import units_of
from sluice.backends.triton.prefill_backward_parts import Parts
from sluice.contract.backward import DeltaBackwardSpec
from sluice.contract.chunk_length import CHUNK

GRADIENTS = Kernel("sluice.backends.hopper.kernels.gradients_kernel", "hopper_gradients_kernel")
COLUMNS = 64  # value columns, and rows of a state, per copy


def refuse(p: DeltaBackwardSpec) -> str | None:
    """Why Triton's three kernels must follow Hopper's walks in a call; None if this one can."""
    if p.HQ == p.HK:
        return None
    return f"needs as many query heads as key heads, not {p.HQ} and {p.HK}"


def gradient_calls(
    p: DeltaBackwardSpec, memory: Binding, w: Parts, programs: int = 0
) -> list[KernelCall]:
    """The launch that makes dq, dk, dbeta and dg from what both walks left in the workspace.

    ``programs``: at most so many, each of which goes from chunk to chunk; 0: one per SM.
    """
    chunks = units_of(p, CHUNK, tail=True) * p.HK
    values = (p.B * p.T, p.HV * p.V), (p.HV * p.V, 1), (CHUNK, COLUMNS)
    chunk_slots = p.B * p.T // CHUNK + p.N
    states = (chunk_slots * p.HV * p.V, p.K), (p.K, 1), (COLUMNS, p.K)

    def tiles(part: Pointer | None, of: tuple[tuple[int, int], ...]) -> Tiles | None:
        return None if part is None else Tiles(part.source, part.dtype, *of)

    arguments = {
        "q_desc": token_tiles(p, "q", p.K),
        "k_desc": token_tiles(p, "k", p.K),
        "do_desc": token_tiles(p, "do", COLUMNS),
        "e_desc": tiles(w.e, values),
        "y_desc": tiles(w.y, values),
        "e_low_desc": tiles(w.e_low, values),
        "y_low_desc": tiles(w.y_low, values),
        "before_desc": tiles(w.before, states),
        "after_desc": tiles(w.after, states),
        "g_ptr": memory["g"] if p.raw_gates else None,
        "A_log_ptr": memory.dense("A_log"),
        "dt_bias_ptr": memory.dense("dt_bias"),
        "hard_ptr": w.hard,
        "by_low_ptr": w.by_low,
        "beta32_ptr": w.beta32,
        "g2_ptr": w.g2,
        "decay_in_ptr": w.decay_in,
        "decay_out_ptr": w.decay_out,
        "decay_q_ptr": w.decay_q,
        "r_k_ptr": w.r_k,
        "r_q_ptr": w.r_q,
        "dq_ptr": memory["dq"],
        "dk_ptr": memory["dk"],
        "dg_ptr": memory["dg"],
        "dbeta_ptr": memory["dbeta"],
        "by_gate_ptr": w.by_gate,
        "cu_seqlens_ptr": memory.dense("cu_seqlens"),
        "scale": p.q_scale,
        "beta_scale": p.beta_scale,
        "N": p.N,
        "T": p.T,
        "tokens": p.B * p.T,
        "HK": p.HK,
        "HV": p.HV,
        "chunks": chunks,
        **memory.strides("g", "bth"),
        "K": p.K,
        "V": p.V,
        "RAW_BETA": p.raw_gates,
    }
    options = {"num_warps": 4, "launch_pdl": True, "enable_fp_fusion": True}
    grid = min(chunks, programs or gpu.processors(p.device))
    return [KernelCall(GRADIENTS, grid, options, arguments)]
