"""Chunked prefill on Hopper: Triton's kernels over chunks, then the serial half in Gluon."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sluice.backends.hopper.prefill_state import hopper_state_kernel
from sluice.backends.triton import prefill as portable
from sluice.backends.triton.launch import dense
from sluice.contract.problem import DeltaProblem
from sluice.contract.tensors import DeltaTensors

CHUNK, BLOCK_V, NUM_BUFFERS = 64, 64, 2
"""Two programs fit an SM: 112 KiB of shared memory each (H200, 2026-11-15)."""


def prefill(p: DeltaProblem, t: DeltaTensors) -> None:
    """Serve ``prefill``.

    Few heads and a long sequence are Triton's: it splits them over the SMs. So are calls without a
    whole chunk, and views whose rows TMA cannot reach (16-byte steps).
    """
    plan = portable.plan(p, portable.processors(p.device))
    if plan.segment or p.T < CHUNK or p.N == 0 or not all(map(_reachable, (t.q, t.k, t.v, t.out))):
        portable.run(p, t, plan)
        return
    run(p, t)


def run(p: DeltaProblem, t: DeltaTensors) -> None:
    """Both halves, without a split."""
    parts = portable.chunk_parts(p, t)
    assert parts.a is not None
    tokens, rows = p.B * p.T, t.rows

    def matrix(x: Tensor, heads: int, width: int) -> TensorDescriptor:
        """A descriptor over [tokens, heads * width] in tiles of [CHUNK, width of one head]."""
        step = x.stride(1) if x.dim() == 4 else x.stride(0)
        size, block = x.shape[-1], min(width, x.shape[-1])
        return TensorDescriptor(
            x, [tokens, heads * size], [step, 1], [CHUNK, block], _tile(block, p.dtype)
        )

    with torch.cuda.device(p.device):
        hopper_state_kernel[(p.N * p.HV * (p.V // BLOCK_V),)](
            q_desc=matrix(t.q, p.HQ, p.K),
            k_desc=matrix(t.k, p.HK, p.K),
            v_desc=matrix(t.v, p.HV, BLOCK_V),
            a_desc=matrix(parts.a, p.HV, CHUNK),
            p_desc=matrix(parts.p, p.HV, CHUNK),
            o_desc=matrix(t.out, p.HV, BLOCK_V),
            q_ptr=t.q,
            k_ptr=t.k,
            v_ptr=t.v,
            a_ptr=parts.a,
            p_ptr=parts.p,
            o_ptr=t.out,
            g2_ptr=parts.g2,
            r_q_ptr=parts.r_q,
            r_k_ptr=parts.r_k,
            state_ptr=t.state,
            slots_ptr=dense(rows.slots),
            write_slots_ptr=dense(rows.write_slots),
            has_state_ptr=dense(rows.has_state),
            cu_seqlens_ptr=dense(rows.cu_seqlens),
            scale=p.scale,
            N=p.N,
            T=p.T,
            pad_slot=p.rows.pad_slot,
            stride_q_t=t.q.stride(1),
            stride_k_t=t.k.stride(1),
            stride_v_t=t.v.stride(1),
            stride_o_t=t.out.stride(1),
            stride_state_p=t.state.stride(0),
            HQ=p.HQ,
            HK=p.HK,
            HV=p.HV,
            K=p.K,
            V=p.V,
            BLOCK_V=BLOCK_V,
            NUM_BUFFERS=NUM_BUFFERS,
            STATE_KV=p.state_layout == "kv",
            num_warps=4,
        )


@functools.cache
def _tile(width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([CHUNK, width], kind)


def _reachable(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and x.stride(1) * x.element_size() % 16 == 0
