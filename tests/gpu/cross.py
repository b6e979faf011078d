"""Compile the backend's kernels for a GPU that is absent, with the arguments of a real call.

    launches = captured(lambda: sluice.decode(..., backend="triton"))
    compile_for(launches[0], TARGETS["sm_90"])

A call is made with CPU tensors; instead of running, each launch's kernel, arguments and options are
taken and compiled as Triton would for these arguments (dtypes, alignment, constants).
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import target_info

from sluice import dispatch
from sluice.backends import triton as backend
from sluice.backends.triton import launch as launching

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


class Launch(NamedTuple):
    """The arguments of one launch."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


class Resources(NamedTuple):
    """The resources that a kernel uses; None where the target does not report them."""

    registers: int | None
    spills: int | None  # bytes of stack per thread
    shared: int
    instructions: int | None


def captured(call: Callable[[], Any]) -> list[Launch]:
    """The launches that ``call`` would make."""
    found: list[Launch] = []
    with _capturing(lambda *launch: found.append(Launch(*launch))):
        call()
    return found


@contextlib.contextmanager
def _capturing(run: Callable[..., None]) -> Iterator[None]:
    saved = launching.run, dispatch.select
    launching.run = run
    dispatch.select = lambda problem, _=None: backend.kernel(problem.op)
    try:
        yield
    finally:
        launching.run, dispatch.select = saved


def source(launch: Launch) -> ASTSource:
    """The kernel specialised to the launch's arguments, as a call on a GPU would."""
    fn, signature, constants, attributes = launch.kernel, {}, {}, {}
    for i, parameter in enumerate(fn.params):
        value, name = launch.arguments[parameter.name], parameter.name
        free = parameter.do_not_specialize
        if (
            parameter.is_constexpr
            or value is None
            or (type(value) is int and value == 1 and not free)
        ):
            signature[name] = "constexpr"
            constants[(i,)] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            aligned = not parameter.do_not_specialize_on_alignment
        elif isinstance(value, float):
            signature[name], aligned = "fp32", False
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = not free and value % 16 == 0
        if aligned:  # tensors of these tests start at multiples of 64 bytes
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(fn, signature=signature, constexprs=constants, attrs=attributes)


def compile_for(launch: Launch, target: GPUTarget) -> Any:
    """The compiled kernel, for ``target``."""
    saved = target_info.current_target

    def current_target() -> GPUTarget:  # queried during compilation
        return target

    current_target.__triton_builtin__ = True
    target_info.current_target = current_target
    try:
        return triton.compile(source(launch), target=target, options=dict(launch.options))
    finally:
        target_info.current_target = saved


def resources(compiled: Any) -> Resources:
    """Registers, stack, shared memory and the number of instructions of a compiled kernel."""
    shared = compiled.metadata.shared
    if "cubin" not in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
        spills = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])
        return Resources(registers, spills, shared, None)
    usage = _cuobjdump(compiled, "-res-usage")
    found = {key: int(n) for key, n in re.findall(r"(REG|STACK):(\d+)", usage)}
    code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass(compiled), flags=re.MULTILINE)
    return Resources(found["REG"], found["STACK"], shared, len(code))


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
