"""What ``sluice.warmup`` runs, and how it shares the work out."""

from __future__ import annotations

import contextlib
import importlib

import pytest
import torch

import sluice
import sluice.backends.chunked
from sluice import backends, dispatch
from sluice.layers import QwenShape

module = importlib.import_module("sluice.warmup")
TINY = QwenShape("tiny", 32, 1, 2, 4, (0, 1, 2), head_k_dim=8, head_v_dim=8)
OPERATORS = {
    "decode", "verify", "commit", "prefill", "causal_conv1d", "conv_qkv", "rms_norm_gated", "step",
}  # fmt: skip
CPU = torch.device("cpu")
WHAT = (TINY, 1, CPU, torch.float32, torch.float32, "vk")


def test_every_operator_is_run_and_every_form_is_named_once():
    started: list[str] = []
    served = sluice.warmup(TINY, device="cpu", dtype=torch.float32, progress=started.append)
    names = [name for name, _ in served]
    assert started == names
    assert len(set(names)) == len(names)
    assert {name.split()[1] for name in names} == OPERATORS


def test_a_gpu_gets_prompts_of_every_cut():
    names = [form.name for form in module.forms(TINY, 1, torch.device("cuda"), *WHAT[3:])]
    for N, T in (module.PROMPT, *module.LONG_PROMPTS):
        assert f"tiny prefill packed {N} x {T}" in names
        assert f"tiny prefill dense {N} x {T}" in names


def test_a_backend_hears_of_the_calls_before_they_are_made(monkeypatch):
    """What a GPU's backend does with them is tests/gpu/test_launch.py."""
    heard: list[str] = []

    @contextlib.contextmanager
    def compiling(calls):
        calls = list(calls)
        heard.extend(f"compile {call()}" for call in calls)
        yield
        heard.append("done")

    monkeypatch.setattr(backends.chunked, "compiling", compiling, raising=False)
    with dispatch.compiling("cpu", [lambda: "this", lambda: "that"]):
        heard.append("run")
    assert heard == ["compile this", "compile that", "run", "done"]
    with dispatch.compiling("mps", [lambda: pytest.fail("not for this device")]):
        pass
