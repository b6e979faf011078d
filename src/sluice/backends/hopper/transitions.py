"""``transitions`` on Hopper: both halves of a split prefill without its last pass."""

from __future__ import annotations

from sluice.backends.hopper import prefill
from sluice.backends.triton.arguments import Binding
from sluice.backends.triton.launch import Launches
from sluice.backends.triton.transitions import chain_calls, effects_of
from sluice.contract.spec import DeltaSpec


def launches(p: DeltaSpec) -> Launches:
    """The kernels of ``transitions``."""
    memory = Binding(p)
    parts = prefill.workspace(p, memory)
    effects = effects_of(p, memory)
    plan = prefill.Plan(p.checkpoint_every, 128)
    calls = [
        prefill.chunks_call(p, memory, parts),
        prefill.states_call(p, memory, parts, plan, effects, output=False, every=True),
    ]
    return Launches(p, memory, [*calls, *chain_calls(p, memory, effects)])
