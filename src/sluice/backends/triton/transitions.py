"""``transitions``: the parallel half of prefill, the effects of segments, and their chain.

The kernels are those of a split prefill (prefill.py), except that a row's last segment runs too and
that the chain carries a map instead of a state. Nothing is made that only outputs need, but QKg.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sluice.backends.triton import configs, gpu, prefill
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
from sluice.contract.spec import DeltaSpec

CHAIN = Kernel("sluice.backends.triton.kernels.transitions", "chain_kernel")
BLOCK_V = 16


def has_kernels(p: DeltaSpec) -> bool:
    """Whether segments run side by side; else ``prefill`` runs twice (``transitions_by``)."""
    return p.dtype != torch.float32 and p.K <= 128 and p.decay != "key"


def launches(p: DeltaSpec) -> Launches:
    """The kernels of ``transitions``; where ``prefill`` runs twice, those of one of its runs."""
    if not has_kernels(p):
        v = p.v.new_empty(p.B, p.T, p.HV, p.K)
        state = p.state.new_empty(p.B, p.HV, p.K, p.K)
        one = replace(p, op="prefill", v=v, out=v, state=state, checkpoint_every=0)
        return prefill.launches(one)
    memory = Binding(p)
    parts = prefill.workspace(p, memory)
    _, wide = prefill.widths(p)
    plan = wide._replace(segment=p.checkpoint_every)
    effects = effects_of(p, memory)
    calls = prefill.chunk_calls(p, memory, parts)
    calls += prefill.segment_calls(p, memory, parts, plan, effects, every=True)
    return Launches(p, memory, [*calls, *chain_calls(p, memory, effects)])


def effects_of(p: DeltaSpec, memory: Binding) -> Pointer:
    """Where the segments' effects go: with one segment per row they are the result."""
    if p.state.shape[1] == 1:
        return Pointer("state", p.state.dtype)
    return prefill.segment_states(p, memory, p.B * p.state.shape[1])


def chain_calls(p: DeltaSpec, memory: Binding, effects: Pointer) -> list[KernelCall]:
    """The kernel that joins segments, where a row has several."""
    if p.state.shape[1] == 1:
        return []
    call = kernel_call(
        CHAIN,
        p.B * p.HV * configs.blocks(p.V + p.K, BLOCK_V),
        Config(num_warps=8),
        p.device,
        effects_ptr=effects,
        maps_ptr=memory["state"],
        segments=p.state.shape[1],
        HV=p.HV,
        inverse_HV=inverse(p.HV),
        K=p.K,
        V=p.V,
        BLOCK_K=max(16, configs.power_of_two(p.K)),
        BLOCK_V=BLOCK_V,
        STAGES=prefill.STAGES if gpu.shared_memory(p.device) >= 160 << 10 else 1,
        PRECISION=prefill.EXACT,
    )
    return [call]
