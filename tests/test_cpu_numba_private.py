"""What the CPU backend uses of Numba that is not public: loud where one of them is gone."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

import numba
from llvmlite.binding import ffi
from numba.core import registry

import sluice
from sluice import calls
from sluice.backends import cpu
from sluice.backends.cpu import machine_code, numba_private
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.memory import read_int, write_int
from sluice.backends.cpu.struct_view import struct_view

FOLDER = Path(numba_private.__file__).parent
PUBLIC = {"numba", "numba.extending"}


def test_numba_says_what_it_compiles_for():
    assert registry.cpu_target.target_context.codegen().magic_tuple()[0]
    assert numba_private.TARGET.triple.count("-") >= 2
    assert all(feature[0] in "+-" for feature in numba_private.TARGET.features if feature)


def test_without_a_name_of_numba_calls_are_refused_with_the_reason(monkeypatch):
    calls.forget()
    cpu._unusable.cache_clear()
    monkeypatch.setitem(sys.modules, numba_private.__name__, None)
    x = torch.ones(2, 4)
    with pytest.raises(sluice.BackendError, match="cannot use numba"):
        sluice.rms_norm_gated(x, x, torch.ones(4), backend="cpu")
    cpu._unusable.cache_clear()


def test_numba_has_every_pass_that_kernels_need():
    assert numba_private.PIPELINE is numba_private._Pipeline, "kernels compile longer without this"


def test_attributes_can_be_replaced_and_are_put_back():
    assert numba_private.replaceable(), "kernels compile three times as long without this"
    replaced = numba_private.replaced()
    for place, name, _ in replaced:
        assert hasattr(place, name), f"kernels compile longer without {place}.{name}"
    before = [vars(place).get(name) for place, name, _ in replaced]
    with numba_private._as_text():
        for place, name, stand_in in replaced:
            assert vars(place)[name] is stand_in
    assert [vars(place).get(name) for place, name, _ in replaced] == before


cell = struct_view("cell", "address")


def larger(block):
    where = cell(block).address
    write_int(where, max(read_int(where, 0, 8), 42))


def largest_of(kernel: Kernel, number: int) -> int:
    value = torch.tensor([number])
    block = torch.tensor([value.data_ptr()])
    kernel.function(block.data_ptr())
    return int(value)


def test_kernels_compile_by_the_public_way_too(monkeypatch, tmp_path):
    monkeypatch.setattr(numba_private, "cache_folder", lambda: str(tmp_path))
    monkeypatch.setattr(numba_private, "replaceable", lambda: False)
    kernel = Kernel("public", larger)
    assert [largest_of(kernel, x) for x in (7, 50)] == [42, 50]


def test_writing_a_kernel_down_asks_llvm_for_nothing(monkeypatch):
    """LLVM works in another thread meanwhile, and llvmlite lets one thread at a time call it."""
    signature = numba.types.void(numba.types.voidptr)
    numba_private.lower(larger, signature)  # Numba's own parts are compiled by LLVM, once
    asked = []
    call = ffi._lib_fn_wrapper.__call__

    def counting(function, *arguments):
        asked.append(function)
        return call(function, *arguments)

    monkeypatch.setattr(ffi._lib_fn_wrapper, "__call__", counting)
    numba_private.lower(larger, signature)
    assert asked == []


def test_numba_serves_others_before_and_after(monkeypatch, tmp_path):
    """They share what Numba compiles for both: here ``max`` of two integers, and of two floats."""
    monkeypatch.setattr(numba_private, "cache_folder", lambda: str(tmp_path))
    assert numba.njit(lambda x, y: max(x, y))(1.5, 2.5) == 2.5
    kernel = Kernel("shared", larger)
    assert [largest_of(kernel, x) for x in (7, 50)] == [42, 50]
    found = numba.njit(lambda x, y: np.arange(max(x, y)).sum())(3, 5)
    assert found == 10
    assert numba.njit(lambda x, y: max(x, y))(1.5, 2.5) == 2.5


def test_kernels_share_machine_code_and_each_file_is_enough(monkeypatch, tmp_path):
    """The second kernel calls a function in the object of the first; its payload brings both."""
    signature = numba.types.void(numba.types.voidptr)
    first = machine_code.emit(*numba_private.lower(twice, signature))
    second = machine_code.emit(*numba_private.lower(thrice, signature))
    sizes = [json.loads(payload.partition(b"\n")[0])[1] for payload in (first, second)]
    assert (len(sizes[0]), len(sizes[1])) == (1, 2)
    assert sizes[1][:1] == sizes[0]
    (tmp_path / "payload").write_bytes(second)
    program = ["env", f"PAYLOAD={tmp_path / 'payload'}", sys.executable, "-c", ALONE]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.stdout == "33\n", done.stderr[-2000:]


@jit
def long_sum(where, n):
    """Too much to be inlined: 11, in the end."""
    for i in range(n):
        x = read_int(where, i, 8)
        for j in range(x % 5):
            x = x * (n % (j + 3)) // (i + 1) + x % (j + 7) - n // (x * x + 2)
        for j in range(x % 7):
            x = x * (n % (j + 5)) // (i + 3) + x % (j + 11) - n // (x * x + 4)
        for j in range(x % 9):
            x = x * (n % (j + 9)) // (i + 5) + x % (j + 13) - n // (x * x + 6)
        write_int(where, x)
    write_int(where, 11)


def twice(block):
    where = cell(block).address
    long_sum(where, read_int(where, 0, 8))


def thrice(block):
    where = cell(block).address
    long_sum(where, read_int(where, 0, 8))
    write_int(where, 3 * read_int(where, 0, 8))


ALONE = """
import ctypes, os, pathlib
from sluice.backends.cpu import machine_code

value = ctypes.c_int64(0)
block = ctypes.c_int64(ctypes.addressof(value))
address = machine_code.load(pathlib.Path(os.environ["PAYLOAD"]).read_bytes())
ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.addressof(block))
print(value.value)
"""


def test_nothing_else_of_numba_is_private():
    """One module imports ``numba.core``; everything else keeps to the public interface."""
    for path in FOLDER.glob("*.py"):
        if path.name == "numba_private.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert not name.startswith("numba") or name in PUBLIC, f"{path.name}: {name}"
