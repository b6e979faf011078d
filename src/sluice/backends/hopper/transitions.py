"""``prefill`` in two passes on Hopper, as triton/transitions.py says, with the Gluon kernels."""

from __future__ import annotations

from sluice.backends.hopper import prefill
from sluice.backends.triton import gpu
from sluice.backends.triton.arguments import Binding
from sluice.backends.triton.launch import Launches
from sluice.backends.triton.transitions import chain_calls, check_kept, effects_of
from sluice.contract.spec import PassSpec


def launches(p: PassSpec) -> Launches:
    """The kernels of a pass."""
    memory = Binding(p)
    parts = prefill.workspace(p, memory)
    effects = effects_of(p, memory)
    if p.op == "resume":
        check_kept(p, memory)
        width = prefill.width(p, p.segments, gpu.processors(p.device))
        plan = prefill.Plan(p.segment, width)
        return Launches(p, memory, prefill.last_calls(p, memory, parts, plan, effects))
    plan = prefill.Plan(p.segment, 128)
    calls = [
        prefill.chunks_call(p, memory, parts),
        prefill.states_call(p, memory, parts, plan, effects, output=False, every=True),
    ]
    return Launches(p, memory, [*calls, *chain_calls(p, memory, effects)])
