"""The Gluon kernel of gradients as backward calls launch it, and what it may spill."""

from __future__ import annotations

import torch
import triton

import sluice
from sluice.backends.hopper import gradients
from sluice.backends.triton import prefill_backward
from sluice.backends.triton.arguments import Binding, KernelCall
from tests.gpu.cross import backward_specs_of, gpu_like
from tests.training.calls import Call

USUAL = Call("norm", B=1, T=256, K=128, V=128)
CALLS = [
    USUAL,
    USUAL.of(name="norm, raw gates, packed", lengths=(100, 0, 156), raw=True),
    USUAL.of(name="no norm", normalize=False),
    USUAL.of(name="no decay", decay=None),
]
SPILLS = {"norm": 232, "norm, raw gates, packed": 296, "no norm": 200, "no decay": 128}
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
    SPILLS = {"norm": 104, "norm, raw gates, packed": 144, "no norm": 56, "no decay": 8}
"""Bytes of stack per thread beside 160, 144 and 176 registers, the most of bfloat16 and float16.
Mostly places of tiles and tokens."""


def kernel_call(call: Call, dtype: torch.dtype) -> KernelCall:
    """The launch for the backward of such a call."""

    def run() -> tuple[object, None, object]:
        leaves, options = call.make(dtype)
        return leaves, None, sluice.prefill(**leaves, **options)

    with gpu_like("sm_90") as device:
        (spec,) = backward_specs_of(run, device)
        memory = Binding(spec)
        (made,) = gradients.gradient_calls(
            spec, memory, prefill_backward.workspace(spec, memory, 0)
        )
    return made
