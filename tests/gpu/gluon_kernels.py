"""The Gluon kernels as calls launch them, what they may spill, and an order they must keep."""

from __future__ import annotations

import re
from typing import Any

import triton

import sluice
from sluice.backends.hopper import prefill
from sluice.backends.hopper.prefill import CHUNKS, CHUNKS_WARP, STATE
from sluice.backends.triton.arguments import KernelCall
from sluice.layers import QwenShape
from sluice.model_calls import Kinds, ModelCalls
from tests.gpu.cross import gpu_like, specs_of

NARROW, WIDE, SPLIT = (0, 64), (0, 128), (1216, 128)


def spec(
    HV: int = 32,
    layout: str = "vk",
    packed: bool = True,
    slots: bool = True,
    norm: bool = False,
    raw: bool = False,
    decay: bool = True,
) -> Any:
    """A prefill of two prompts of 4,096 tokens, 16 key heads."""
    model = ModelCalls(QwenShape("", 64, 16, HV, 4, (0,)), Kinds(state_layout=layout))
    (q, k, v, g, beta), options = model.prefill(2, 4096, packed)
    if raw:
        rates = ("A_log", "dt_bias")
        options = {**options, **{name: model.weights[name].float() for name in rates}}
    if slots:
        rows = {"slots": model.rows(2)["slots"], "write_slots": model.rows(2)["slots"]}
        options = {**options, **rows, "has_state": model.packed(2, 1)["has_state"]}
    gates = g if decay else None, beta
    (made,) = specs_of(lambda: sluice.prefill(q, k, v, *gates, **options, normalize_qk=norm))
    return made


KERNELS = {
    "chunks": (CHUNKS, NARROW, {}),
    "chunks, raw gates and norm": (CHUNKS, NARROW, {"raw": True, "norm": True}),
    "chunks, no decay": (CHUNKS, NARROW, {"decay": False}),
    "chunks, a key head a program": (
        CHUNKS, NARROW, {"HV": 64, "raw": True, "norm": True},
    ),
    "chunks, a value head per key head": (CHUNKS_WARP, NARROW, {"HV": 16}),
    "chunks, a value head per key head, raw gates and norm": (
        CHUNKS_WARP, NARROW, {"HV": 16, "raw": True, "norm": True},
    ),
    "chunks, a value head per key head, no decay": (
        CHUNKS_WARP, NARROW, {"HV": 16, "decay": False, "norm": True},
    ),
    "states, 64 columns": (STATE, NARROW, {}),
    "states, 128 columns, no norm": (STATE, WIDE, {}),
    "states, 128 columns": (
        STATE, WIDE, {"norm": True, "layout": "kv", "packed": False},
    ),
    "states, 128 columns, own states": (
        STATE, WIDE, {"norm": True, "layout": "kv", "packed": False, "slots": False},
    ),
    "segments' effects": (STATE, SPLIT, {"norm": True}),
}  # fmt: skip


def kernel_call(name: str) -> KernelCall:
    """The launch of a kernel by its plan; of segments' effects the first of two."""
    kernel, plan, options = KERNELS[name]
    with gpu_like("sm_90"):
        calls = prefill.planned_launches(spec(**options), prefill.Plan(*plan)).calls
    return next(call for call in calls if call.kernel == kernel)


SPILLS: dict[str, int] = {}
"""Bytes of stack per thread; 64 for kernels that are not named. With Triton 3.6 none has more than
40."""
if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
    SPILLS |= {
        "states, 128 columns, no norm": 112,
        "states, 128 columns": 208,
        "states, 128 columns, own states": 208,
    }
    """With its newer ptxas: offsets of threads, of which a chunk loads a few words. Most of them
    come from an option that Triton sets around a fault of ptxas (docs/kernels/triton.md)."""


def hurried(ptx: str) -> list[str]:
    """Arrivals at an mbarrier after a store to shared memory, without a barrier in between.

    One thread arrives for its whole group, so a barrier must separate the others' stores from it.
    compute-sanitizer's racecheck does not see this order (tests/gpu/race_probe.py).
    """
    found, stored = [], False
    for line in ptx.splitlines():
        if re.search(r"\bst\.shared|\bstmatrix", line):
            stored = True
        elif re.search(r"\bbar(rier)?\.(warp\.)?sync", line):
            stored = False
        elif "mbarrier.arrive" in line and "expect_tx" not in line and stored:
            found.append(line.strip())
    return found
