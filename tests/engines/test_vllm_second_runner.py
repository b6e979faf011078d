"""vLLM's newer model runner (V2), which it takes on a GPU, passes tests of the whole engine too."""

from __future__ import annotations

import subprocess
import sys

TESTS = (
    "test_32_at_once_and_an_abort_in_the_middle",
    "test_chunked_prefill_with_a_small_budget",
    "test_preemption",
    "test_a_prefix_that_is_found_equals_one_that_is_not",
    "test_drafts_of_the_models_own_layer",
    "test_a_prefix_whose_states_drafts_have_left[MTP]",
)


def test_the_whole_engine_with_the_newer_runner(monkeypatch):
    """In a process of its own, whose Triton interprets vLLM's kernels."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.engines.interpreted_triton"]
    names = [f"tests/engines/test_vllm.py::{name}" for name in TESTS]
    done = subprocess.run([*command, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{len(TESTS)} passed" in done.stdout
