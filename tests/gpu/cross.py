"""Compile the kernels of a call for a GPU that is absent.

    with gpu_like("sm_90") as device:
        (call,) = kernel_calls(lambda: sluice.decode(...), device)
    compile_for(call, "sm_90")

The call is only checked, and its kernels bound as on that GPU; nothing is loaded or launched.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from sluice import calls
from sluice.backends import hopper, module_of
from sluice.backends import triton as portable
from sluice.backends.triton import compiler, gpu, variants
from sluice.backends.triton.arguments import KernelCall

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
"""Shared memory per program, kB."""
PROCESSORS = {
    "sm_80": 108, "sm_89": 128, "sm_90": 132, "sm_100": 148, "sm_120": 170, "gfx942": 304,
}  # fmt: skip
DEVICE = torch.device("cuda", 0)


class Resources(NamedTuple):
    """The resources that a kernel uses; None where the target does not report them."""

    registers: int | None
    spills: int | None  # bytes of stack per thread
    shared: int


@contextlib.contextmanager
def gpu_like(name: str) -> Iterator[torch.device]:
    """In this scope the device has the facts of such a GPU."""
    target = TARGETS[name]
    capability = divmod(target.arch, 10) if target.backend == "cuda" else (0, 0)
    with contextlib.ExitStack() as patches:
        facts = gpu.Facts(capability, PROCESSORS[name], SHARED[name] << 10)
        patches.enter_context(gpu.assume(facts))
        if target.backend == "hip":
            patches.enter_context(mock.patch.object(torch.version, "hip", "6.4"))
        yield DEVICE


def specs_of(call: Callable[[], Any], device: torch.device = DEVICE) -> list[Any]:
    """The specs of the calls that ``call`` makes, on a device. Nothing runs."""
    with calls.check_only() as found:
        call()
    return [spec.on(device) for spec, _ in found]


def backward_specs_of(call: Callable[[], Any], device: torch.device = DEVICE) -> list[Any]:
    """The specs of the backward calls of ``call``, which returns leaves, more, and outputs.

    Nothing runs, so the outputs hold no numbers.
    """
    found = []

    def described(op: Any, tensors: Any, options: Any, form: Any = None, _: Any = None) -> Any:
        spec, outputs = calls._described(op, tensors, options, form)
        found.append(spec.on(device))
        return calls._allocated(tensors, outputs)

    with mock.patch.object(calls, "run", described):
        leaves, _, outputs = call()
        made = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        torch.autograd.grad(made, list(leaves.values()), [torch.empty_like(x) for x in made])
    return [spec for spec in found if spec.op.endswith("_backward")]


def kernel_calls(call: Callable[[], Any], device: torch.device = DEVICE) -> list[KernelCall]:
    """The kernels that Triton's backend launches for ``call``."""
    return [launched for spec in specs_of(call, device) for launched in bound(spec).calls]


def bound(spec: Any, package: Any = portable) -> Any:
    """A backend's launches of a spec, not compiled."""
    assert package in (portable, hopper)
    return module_of(package.__name__, package.OPS, spec.op).launches(spec)


def compile_for(call: KernelCall, name: str) -> Any:
    """The compiled kernel, for a target. A warning of Triton's is an error: users would see it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return compiler.cross_compile(variants.variant(call), TARGETS[name])


class _TranslatedError(Exception):
    pass


def translate_for(call: KernelCall, name: str) -> None:
    """Only the compiler's front end, which takes a fraction of the time: Python to Triton's IR."""
    backend = triton.compiler.compiler.make_backend(TARGETS[name])
    stop = mock.patch.object(type(backend), "make_ttir", side_effect=_TranslatedError)
    with stop, contextlib.suppress(_TranslatedError):
        compile_for(call, name)


def resources(compiled: Any) -> Resources:
    """Registers, stack and shared memory of a compiled kernel."""
    shared = compiled.metadata.shared
    if "cubin" not in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
        spills = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])
        return Resources(registers, spills, shared)
    usage = _cuobjdump(compiled, "-res-usage")
    found = {key: int(n) for key, n in re.findall(r"(REG|STACK):(\d+)", usage)}
    return Resources(found["REG"], found["STACK"], shared)


def instructions(compiled: Any) -> int | None:
    """How many there are; None where the target has no disassembler here, which takes its time."""
    if "cubin" not in compiled.asm:
        return None
    return len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass(compiled), flags=re.MULTILINE))


def loops(code: str) -> list[str]:
    """The bodies of the loops in disassembled machine code, inner ones by themselves too."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", code, flags=re.MULTILINE)
    at = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    jumps = [(i, re.search(r"\bBRA\b.* 0x([0-9a-f]+)", line)) for i, (_, line) in enumerate(lines)]
    back = [(at[int(to[1], 16)], i) for i, to in jumps if to and at[int(to[1], 16)] < i]
    return ["\n".join(line for _, line in lines[a : b + 1]) for a, b in back]


def stack_accesses(code: str) -> int:
    """How many instructions of disassembled machine code read or write the stack."""
    return len(re.findall(r"\b(?:LDL|STL)\b", code))


def sass(compiled: Any) -> str:
    """The machine code, disassembled."""
    return _cuobjdump(compiled, "-sass")


def _cuobjdump(compiled: Any, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        done = subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
