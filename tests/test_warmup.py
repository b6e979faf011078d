"""What ``sluice.warmup`` runs, and how it shares the work out."""

from __future__ import annotations

import contextlib
import importlib
import sys

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


class Other:
    """A process that compiles a part, and is waited for."""

    def __init__(self, log: list[str], part: str) -> None:
        self.log, self.part = log, part
        log.append(f"start {part}")

    def wait(self, timeout: float) -> None:
        self.log.append(f"wait for {self.part}")


@pytest.mark.parametrize("cold", [True, False])
def test_other_processes_compile_a_part_where_nothing_is_on_disk(monkeypatch, cold):
    log: list[str] = []
    monkeypatch.setattr(module, "COLD_SECONDS", 0.0 if cold else 1e9)
    monkeypatch.setattr(module, "CORES", 1)
    monkeypatch.setattr(module, "_beside", lambda part, argv: Other(log, part))
    todo = list(module.forms(*WHAT))
    served = module.run_with_others(todo, CPU, log.append, ["--model=tiny"])
    assert sorted(served) == sorted(module.run(todo, CPU, None))
    names = [form.name for form in todo]
    theirs = [form.name for form in todo if form.part()] if cold else []
    assert {form.part() for form in todo} == {*module.BESIDE, None}
    own = [name for name in names if name not in theirs]
    starts, waits = ([f"{what} {part}" for part in module.BESIDE] for what in ("start", "wait for"))
    if not cold:
        starts = waits = []
    assert log == [own[0], *starts, *own[1:], *waits, *theirs]


def test_a_process_that_cannot_start_leaves_its_part(monkeypatch):
    def no(*_, **__):
        raise OSError("no interpreter")

    monkeypatch.setattr(module, "COLD_SECONDS", 0.0)
    monkeypatch.setattr(module, "CORES", 1)
    monkeypatch.setattr(module.subprocess, "Popen", no)
    todo = list(module.forms(*WHAT))
    assert len(module.run_with_others(todo, CPU, None, [])) == len(todo)


def test_a_process_that_does_not_end_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    other = module.subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    module._wait(other)
    assert other.wait(10) != 0


def test_another_process_compiles_its_part_and_runs_nothing(monkeypatch):
    """The command as it is started, but for the device."""
    argv = ["--model=Qwen3.5-4B", "--tp=8", "--dtype=float32", "--device=cpu"]
    assert module._beside("conv", argv).wait() == 0
    assert module._beside("conv", [*argv, "--no-such-option"]).wait() != 0
    compiled: list[int] = []

    @contextlib.contextmanager
    def compiling(device, calls):
        compiled.append(len(list(calls)))
        yield

    monkeypatch.setattr(dispatch, "compiling", compiling)
    todo = list(module.forms(*WHAT))
    module.compile_part(todo, CPU, "conv")
    assert compiled == [sum("conv" in form.name for form in todo)]
