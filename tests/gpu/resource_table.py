"""Print registers, stack and shared memory of the GPU kernels, compiled for GPUs that are not here.

    python -m tests.gpu.resource_table [--code] [sm_80 sm_89 ...] [name ...]

"in loops": the instructions of a loop that read or write the stack, at most; the rest is saved once
and read once. A name selects rows that contain it; ``--code`` adds a hash of the machine code, to
see whether a change touched it. With another Triton: ``PYTHONPATH=DIR:src``.
"""
# ruff: noqa: T201

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

import sluice
from sluice.backends.triton import prefill, prefill_key
from sluice.backends.triton.arguments import KernelCall
from tests.gpu import prefill_kernels
from tests.gpu.calls import production
from tests.gpu.cross import (
    SHARED,
    TARGETS,
    backward_specs_of,
    bound,
    compile_for,
    gpu_like,
    kernel_calls,
    loops,
    resources,
    sass,
    specs_of,
    stack_accesses,
)
from tests.training import layer_calls
from tests.training.calls import Call

USUAL = Call("usual", B=1, T=2048, K=128, V=128)
NVIDIA = [target for target in TARGETS if target.startswith("sm")]


def prefills(device: torch.device) -> Iterator[tuple[str, KernelCall]]:
    """The launches of every plan of each call of prefill_kernels.py."""
    for name, (cut, made) in prefill_kernels.CALLS.items():
        (spec,) = specs_of(made, device)
        every = [prefill_key.in_pieces(spec)] if cut == "pieces" else prefill.all_launches(spec)
        for launches in every:
            for call in launches.calls:
                hard = ", hard" if call.arguments.get("HARD") else ""
                columns = f", {call.arguments['BLOCK_V']}" if "BLOCK_V" in call.arguments else ""
                yield f"prefill, {name}{columns}{hard}", call


def training_prefill(dtype: torch.dtype) -> tuple[Any, None, Any]:
    leaves, options = USUAL.make(dtype)
    return leaves, None, sluice.prefill(**leaves, **options)


def backward(device: torch.device) -> Iterator[tuple[str, KernelCall]]:
    made: dict[str, Callable[[], Any]] = {
        "backward": functools.partial(training_prefill, torch.bfloat16),
        "backward, float32": functools.partial(training_prefill, torch.float32),
        **dict(layer_calls.every((torch.bfloat16,))),
    }
    for name, call in made.items():
        for spec in backward_specs_of(call, device):
            for launched in bound(spec).calls:
                yield name, launched


def every(device: torch.device) -> Iterator[tuple[str, KernelCall]]:
    for model_call in production():
        for launched in kernel_calls(model_call.run, device):
            yield model_call.name, launched
    yield from prefills(device)
    yield from backward(device)


def main() -> None:
    given = [x for x in sys.argv[1:] if not x.startswith("--")]
    names = [x for x in given if x not in TARGETS]
    print(f"Triton {triton.__version__}")
    for target in [x for x in given if x in TARGETS] or NVIDIA:
        print(f"\n{target:70} registers  stack  in loops  shared")
        seen: set[str] = set()
        with gpu_like(target) as device:
            for name, call in every(device):
                label = f"{name}: {call.kernel.name.removesuffix('_kernel')}"
                if label in seen or (names and not any(x in label for x in names)):
                    continue
                seen.add(label)
                code = compile_for(call, target)
                used = resources(code)
                text = sass(code) if used.spills or "--code" in sys.argv else ""
                inside = max(map(stack_accesses, loops(text)), default=0)
                row = f"{label:70} {used.registers:9} {used.spills:6} {inside:9} {used.shared:7}"
                if used.shared > 1024 * SHARED[target]:
                    row += "  does not fit"
                if "--code" in sys.argv:
                    lines = re.findall(r"/\*[0-9a-f]{4,}\*/.*", text)
                    row += "  " + hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
                print(row, flush=True)


if __name__ == "__main__":
    main()
