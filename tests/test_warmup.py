"""What ``sluice.warmup`` runs, and how it shares the work out."""

from __future__ import annotations

import importlib
import pickle

import torch

import sluice
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


def test_shares_are_all_the_forms(monkeypatch):
    ran: list[str] = []
    monkeypatch.setattr(module.Form, "run", lambda form: ran.append(form.name))
    for share in range(3):
        module.help_with(pickle.dumps((WHAT, share, 3)).hex())
    assert sorted(ran) == sorted(form.name for form in module.forms(*WHAT))


def test_a_helper_is_a_process_that_ends_well(monkeypatch):
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    (helper,) = module._start_helpers(WHAT)
    assert helper.wait(timeout=120) == 0


def test_on_one_core_there_is_no_helper(monkeypatch):
    monkeypatch.setattr(module.os, "cpu_count", lambda: 1)
    assert module._start_helpers(WHAT) == []
