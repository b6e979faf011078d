"""Arguments and sizes that the launches of all kernels of prefill share."""

from __future__ import annotations

from typing import Any

from sluice.backends.triton import configs
from sluice.backends.triton.arguments import Binding, inverse
from sluice.contract.spec import DeltaSpec

WHOLE = 1 << 30  # tokens: a segment longer than any sequence


def value_heads(p: DeltaSpec) -> dict[str, int]:
    """The arguments of kernels whose programs own a value head: how they find it and its keys."""
    return {
        "HV": p.HV,
        "inverse_HV": inverse(p.HV),
        "R_K": p.HV // p.HK,
        "inverse_R_K": inverse(p.HV // p.HK),
    }


def query_heads(p: DeltaSpec) -> dict[str, int]:
    """The arguments of kernels that read queries: how they find them from a value head."""
    R_Q = max(p.HV // p.HQ, 1)
    return {"R_Q": R_Q, "inverse_R_Q": inverse(R_Q), "READERS": p.HO // p.HV}


def pool(p: DeltaSpec, memory: Binding) -> dict[str, Any]:
    """The arguments of kernels that read states."""
    return {
        "state_ptr": memory["state"],
        "slots_ptr": memory.dense("slots"),
        "has_state_ptr": memory.dense("has_state"),
        "pad_slot": p.pad_slot,
        "stride_state_p": p.state.strides[0],
        "STATE_KV": p.state_layout == "kv",
    }


def checkpoints(p: DeltaSpec, memory: Binding) -> dict[str, Any]:
    """The arguments of kernels that write checkpoints."""
    return {
        "checkpoint_slots_ptr": memory.dense("checkpoint_slots"),
        "checkpoint_positions_ptr": memory.dense("checkpoint_positions"),
        "M": 0 if p.checkpoint_slots is None else p.checkpoint_slots.shape[1],
        "every": p.checkpoint_every,
    }


def units_of(p: DeltaSpec, size: int, *, tail: bool) -> int:
    """Work units of ``size`` tokens (work_units.py): at least one per sequence."""
    if not p.varlen:
        return p.N * max(configs.blocks(p.T, size), 1)
    return p.T // size + p.N + (1 if tail else 0)
