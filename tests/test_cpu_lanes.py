"""The CPU kernels with vectors of other widths: 8 lanes (AVX2), and 4 (SSE, ARM)."""

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
