"""The CPU kernels with vectors of other widths: 16 lanes (AVX-512), 8 (AVX2), and 4 (SSE, ARM)."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytest.importorskip("numba")

CPUS = {8: ("haswell", "+avx,+avx2,+fma,+f16c"), 4: ("x86-64", "+sse2")}
CODE = """
import sluice
from sluice.backends.cpu import llvm
from sluice.testing import cases

assert llvm.LANES == {lanes}, llvm.LANES
for case, dtype in cases.pairs("decode", "rms_norm_gated"):
    inputs = case.inputs(dtype, "cpu")
    expected = case.expected(inputs)  # before the states are updated
    case.check(case.run(sluice, inputs, backend="cpu"), expected)
print("checked")
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names features of x86")
@pytest.mark.parametrize("lanes", CPUS)
def test_narrower_vectors_keep_the_contract(lanes, tmp_path):
    cpu, features = CPUS[lanes]
    settings = (f"NUMBA_CPU_NAME={cpu}", f"NUMBA_CPU_FEATURES={features}")
    run = ["env", *settings, f"NUMBA_CACHE_DIR={tmp_path}", sys.executable, "-c"]
    found = subprocess.run([*run, CODE.format(lanes=lanes)], capture_output=True, text=True)
    assert "checked" in found.stdout, found.stderr[-2000:]


GRADIENTS = """
import torch
from sluice.backends.cpu import llvm
from tests.training.calls import Call, check

assert llvm.LANES == {lanes}, llvm.LANES
base = Call("base")
for call in (base, base.of(HQ=8, K=40, V=24, T=70), base.of(HK=1, HQ=1, delta=False)):
    check(call, torch.float32, "cpu")
    check(call.of(decay="key", raw=call.HK == 1), torch.float32, "cpu")
print("checked")
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names features of x86")
@pytest.mark.parametrize("lanes", CPUS)
def test_narrower_vectors_have_exact_gradients(lanes, tmp_path):
    """The products of the backward pass have tiles of other shapes there."""
    cpu, features = CPUS[lanes]
    settings = (f"NUMBA_CPU_NAME={cpu}", f"NUMBA_CPU_FEATURES={features}")
    run = ["env", *settings, f"NUMBA_CACHE_DIR={tmp_path}", sys.executable, "-c"]
    found = subprocess.run([*run, GRADIENTS.format(lanes=lanes)], capture_output=True, text=True)
    assert "checked" in found.stdout, found.stderr[-2000:]


WIDE = """
from sluice.backends.cpu import numba_private

machine = numba_private.TARGET
numba_private.TARGET = machine._replace(features=machine.features | {"+avx512f"})
import sluice
from sluice.backends.cpu import llvm
from sluice.testing import cases

assert (llvm.LANES, llvm.REGISTERS) == (16, 32)
one_token = {"one", "batch", "K128_V128", "state_bf16", "state_fp16"}
checked = 0
for case, dtype in cases.pairs("decode", "rms_norm_gated"):
    if case.op == "decode" and case.name.split("/")[1] not in one_token:
        continue
    inputs = case.inputs(dtype, "cpu")
    expected = case.expected(inputs)  # before the states are updated
    case.check(case.run(sluice, inputs, backend="cpu"), expected)
    checked += 1
print("checked", checked)
"""


@pytest.mark.slow
def test_sixteen_lanes_and_32_registers_keep_the_contract(tmp_path):
    """The kernels of AVX-512 on any machine: LLVM splits vectors that are wider than its own.

    Which instructions AVX-512 has for them, only a machine that has it can show.
    """
    run = ["env", f"NUMBA_CACHE_DIR={tmp_path}", sys.executable, "-c", WIDE]
    found = subprocess.run(run, capture_output=True, text=True)
    assert found.stdout.split()[:1] == ["checked"], found.stderr[-2000:]
    assert int(found.stdout.split()[1]) >= 20


COMPILED = """
from sluice.backends import cpu
from sluice.backends.cpu import llvm

assert (llvm.LANES, llvm.REGISTERS) == (16, 32)
cpu.kernels()["rms_norm_gated"].compile()
print("compiled")
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names features of x86")
@pytest.mark.parametrize(("cpu", "more"), [("znver4", ",+avx512bf16"), ("skylake-avx512", "")])
def test_kernels_compile_for_machines_with_avx512(cpu, more, tmp_path):
    """With AVX-512's BF16 instructions and without; compiled, not run."""
    features = f"+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512dq{more}"
    settings = (f"NUMBA_CPU_NAME={cpu}", f"NUMBA_CPU_FEATURES={features}")
    run = ["env", *settings, f"NUMBA_CACHE_DIR={tmp_path}", sys.executable, "-c", COMPILED]
    found = subprocess.run(run, capture_output=True, text=True)
    assert found.stdout == "compiled\n", found.stderr[-2000:]
    assert len(list(tmp_path.iterdir())) == 1
