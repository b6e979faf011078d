"""The interpreter in C++: built once, and kernels that it runs."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.emulator.ptx import SMEM, Program, UnknownError, parse

HERE = Path(__file__).parent
SHARED_BASE = 1024  # core.hpp
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
AHEAD = ("hopper_state_kernel",)
"""Kernels that load a stage ahead of the last one, without waiting, and use nothing of it."""
SPECIALS = ("%tid.x", "%ctaid.x", "%nctaid.x", "%ntid.x")
ZEROS = ("%ctaid.y", "%ctaid.z", "%tid.y", "%tid.z", "%cluster_ctaid.x", "%cluster_ctarank")


class EmulatorError(RuntimeError):
    """A kernel did what no kernel may."""


def missing() -> str | None:
    """Why the emulator cannot be built here; None if it can."""
    return None if shutil.which("g++") else "no C++ compiler (g++)"


@functools.cache
def _library() -> Any:
    """The interpreter; built at the first use of these sources on this machine."""
    sources = sorted(HERE.glob("*.[ch]pp"))
    told = hashlib.sha256(b"".join(x.read_bytes() for x in sources) + " ".join(FLAGS).encode())
    told.update(Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0][:600])
    cache = Path(tempfile.gettempdir()) / f"sluice-emulator-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    made = cache / f"{told.hexdigest()[:16]}.so"
    if not made.exists():
        new = made.with_suffix(f".{os.getpid()}")
        units = [str(x) for x in sources if x.suffix == ".cpp"]
        subprocess.run(["g++", *FLAGS, *units, "-o", str(new)], check=True)
        new.rename(made)
    library = ctypes.CDLL(str(made))
    library.kernel_make.restype = ctypes.c_void_p
    return library


def _array(kind: Any, values: Sequence[Any]) -> Any:
    return (kind * len(values))(*values)


class Kernel:
    """A kernel that can be launched.

    Args:
        text: PTX.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.program: Program = parse(text)
        self.sources = {op.line: op.source for op in self.program.operations}
        self.launches = self.executed = 0
        operations = self.program.operations
        self._kept = (
            _array(ctypes.c_char_p, [op.name.encode() for op in operations]),
            _array(ctypes.c_int32, [x for op in operations for x in op.operands]),
            _array(ctypes.c_int32, [len(op.operands) for op in operations]),
            _array(ctypes.c_int32, [op.guard for op in operations]),
            _array(ctypes.c_uint8, [op.negated for op in operations]),
            _array(ctypes.c_int32, [op.line for op in operations]),
        )
        unknown = ctypes.create_string_buffer(256)
        made = _library().kernel_make(len(operations), *self._kept, unknown)
        if made is None:
            line, _, name = unknown.value.decode().partition("|")
            raise UnknownError(f"{self.program.name}: {name}: {self._line(int(line))}")
        self._kernel = ctypes.c_void_p(made)

    def _line(self, line: int) -> str:
        text = self.text.splitlines()[line - 1].strip()
        return f"{text[:160]} (PTX line {line}, {self.sources.get(line, '')})"

    def launch(
        self,
        grid: int,
        threads: int,
        shared: int,
        places: Sequence[int],
        ranges: Sequence[tuple[int, int]],
        seed: int = 0,
    ) -> None:
        """Run it. ``places``: where its parameters lie. ``ranges``: memory it may touch."""
        program = self.program
        block = ctypes.create_string_buffer(program.parameter_bytes + 64)
        base = ctypes.addressof(block) + -ctypes.addressof(block) % 64
        for (at, size), place in zip(program.parameters, places, strict=True):
            ctypes.memmove(base + at, place, size)
        self._fill(base)
        message, executed = ctypes.create_string_buffer(512), ctypes.c_uint64()
        bounds = _array(ctypes.c_uint64, [x for pair in ranges for x in pair])
        failed = _library().kernel_launch(
            self._kernel, grid, threads // 32, shared, program.register_bytes,
            ctypes.c_uint64(base), ctypes.c_uint64(program.parameter_bytes),
            len(ranges), bounds, seed, program.name in AHEAD, ctypes.byref(executed), message,
        )  # fmt: skip
        self.launches += 1
        self.executed += executed.value
        if failed:
            line, _, what = message.value.decode().partition("|")
            raise EmulatorError(f"{program.name}: {what}: {self._line(int(line))}")

    def _fill(self, parameters: int) -> None:
        """Constants and symbols."""
        program = self.program
        filled = [*program.constants]
        for place, bits, name, more in program.symbols:
            filled.append((place, bits, (SHARED_BASE if name == SMEM else parameters) + more))
        specials = dict.fromkeys(SPECIALS, -1)
        for place, name in program.specials:
            if name in ZEROS:
                filled.append((place, 32, 0))
            elif name in specials:
                specials[name] = place
            else:
                raise UnknownError(f"{program.name}: the register {name}")
        places, bits, values = zip(*filled, strict=True)
        _library().kernel_fill(
            self._kernel, len(filled), _array(ctypes.c_int32, places), _array(ctypes.c_int32, bits),
            _array(ctypes.c_uint64, [x & (1 << 64) - 1 for x in values]),
            _array(ctypes.c_int32, list(specials.values())),
        )  # fmt: skip
