"""The examples and the benchmark run as documented: under torchrun, and on a CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAIN = ("--backend", "reference")  # or every process would compile the CPU kernels


def run(*command: str) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_context_parallel_example_runs_under_torchrun():
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = run(*launcher, "examples/context_parallel.py", "--tokens", "512", *PLAIN)
    found = [float(x) for x in re.findall(r"against one device: ([\d.e+-]+)", printed)]
    assert len(found) == 3
    assert max(found) < 1e-5
    assert "prefill.transitions: 1 exchanges, 1,048,576 bytes sent" in printed


@pytest.mark.parametrize("name", ["context_parallel", "tensor_parallel"])
def test_an_example_for_ranks_says_how_it_is_started(name):
    command = [sys.executable, f"examples/{name}.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert f"torchrun --standalone --nproc-per-node 4 examples/{name}.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_segments_benchmark_runs_on_a_cpu():
    printed = run("benchmarks/gpu_segments.py", "--device", "cpu", "--tokens", "256", *PLAIN)
    assert "world size 1: every exchange matched" in printed
    assert len(re.findall(r"^2/8 +256 +[248] ", printed, re.MULTILINE)) == 3
    assert "| 64 | 16,384 | 9.0 |" in printed
