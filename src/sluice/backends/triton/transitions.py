"""``prefill`` in two passes: ``transitions``, before its state is known, and ``resume``.

The kernels are those of a split prefill (prefill.py). The first pass is the parallel half and the
effects of segments, the last segment of a row included, and their chain, which is the row's map.
The second is what is left: the join, and the pass that makes outputs. The workspace of the first
is kept for the second.
"""

from __future__ import annotations

import torch

from sluice.backends import prefills_of
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
from sluice.contract.errors import ContractError
from sluice.contract.spec import PassSpec

CHAIN = Kernel("sluice.backends.triton.kernels.transitions", "chain_kernel")
BLOCK_V = 16


def has_kernels(p: PassSpec) -> bool:
    """Whether segments run side by side; else ``prefill`` makes the map (``transitions_by``)."""
    return p.dtype != torch.float32 and p.K <= 128 and p.decay != "key"


def launches(p: PassSpec) -> Launches:
    """The kernels of a pass; where ``prefill`` makes the map, those of one of its calls."""
    if not has_kernels(p):
        return prefill.launches(prefills_of(p)[0])
    memory = Binding(p)
    parts = prefill.workspace(p, memory)
    plan = prefill.widths(p)[1]._replace(segment=p.segment)
    effects = effects_of(p, memory)
    if p.op == "resume":
        check_kept(p, memory)
        return Launches(p, memory, prefill.last_calls(p, memory, parts, plan, effects))
    calls = prefill.chunk_calls(p, memory, parts)
    calls += prefill.segment_calls(p, memory, parts, plan, effects, every=True)
    return Launches(p, memory, [*calls, *chain_calls(p, memory, effects)])


def check_kept(p: PassSpec, memory: Binding) -> None:
    """The workspace of a second pass is that of the first, to the byte."""
    found = None if p.kept is None else p.kept.shape[0]
    if found != memory.workspace_bytes:
        expected = f"the {memory.workspace_bytes} bytes of the first pass"
        raise ContractError(p.op, "kept", expected, found)


def effects_of(p: PassSpec, memory: Binding) -> Pointer:
    """Where the segments' effects go: with one segment per row they are the result."""
    if p.segments == 1:
        assert p.map is not None, "one segment needs no second pass"
        return Pointer("map", p.map.dtype)
    return prefill.segment_states(p, memory, p.B * p.segments)


def chain_calls(p: PassSpec, memory: Binding, effects: Pointer) -> list[KernelCall]:
    """The kernel that joins segments, where a row has several."""
    if p.segments == 1:
        return []
    call = kernel_call(
        CHAIN,
        p.B * p.HV * configs.blocks(p.V + p.K, BLOCK_V),
        Config(num_warps=8),
        p.device,
        effects_ptr=effects,
        map_ptr=memory["map"],
        segments=p.segments,
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
