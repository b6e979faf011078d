"""What ``sluice.warmup`` compiles, and how it shares the work out."""

from __future__ import annotations

import importlib
import sys
import time

import pytest
import torch

import sluice
from sluice import dispatch
from sluice.backends.cpu import kernel_of, kernels
from sluice.layers import QwenShape
from sluice.model_calls import ModelCall, ModelCalls

module = importlib.import_module("sluice.warmup")
TINY = QwenShape("tiny", 32, 1, 2, 4, (0, 1, 2), head_k_dim=8, head_v_dim=8)
OPERATORS = {
    "decode", "verify", "commit", "prefill", "causal_conv1d", "conv_qkv", "rms_norm_gated", "step",
}  # fmt: skip
CPU = torch.device("cpu")
FP32 = torch.float32
WHAT = (TINY, 1, CPU, module.Kinds(FP32, FP32))


def test_every_operator_is_covered_and_every_call_is_named_once():
    ready: list[str] = []
    served = sluice.warmup(TINY, device="cpu", dtype=torch.float32, progress=ready.append)
    names = [name for name, _ in served]
    assert len(set(names)) == len(names)
    assert {name.split()[1] for name in names} == OPERATORS
    if dispatch.unavailable("cpu") is None:
        assert {"decode", "prefill"} <= set(ready)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"models": None}, "models: expected a model's name, got None"),
        ({"models": ["Qwen3.5-0.8B", 3]}, "models: expected a model's name, got 3"),
        ({"models": "qwen3.5-35b"}, "models: expected a known model .did you mean"),
        ({"device": "tpu"}, "device: expected a device, such as 'cpu'"),
        ({"dtype": "float32"}, "dtype: expected a torch.dtype, got 'float32'"),
        ({"state_dtype": "float32"}, "state_dtype: expected a torch.dtype, got 'float32'"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(given, message):
    with pytest.raises(sluice.ContractError, match=f"warmup: {message}"):
        sluice.warmup(**{"models": TINY, "device": "cpu", **given})


def test_a_gpu_gets_a_prompt_that_can_be_cut():
    names = [form.name for form in module.forms(TINY, 1, torch.device("cuda"), WHAT[3])]
    assert f"tiny prefill packed 2 x {module.LONG_PROMPT}" in names
    assert f"tiny prefill dense 2 x {module.LONG_PROMPT}" in names


def test_drafts_as_engines_keep_them_are_compiled_when_asked_for():
    kinds = WHAT[3]
    few = {form.name for form in module.forms(TINY, 1, CPU, kinds)}
    more = [form for form in module.forms(TINY, 1, CPU, kinds, 4) if form.name not in few]
    assert {form.name.split()[1] for form in more} == {
        "decode_each", "verify_buffered", "commit_layers", "conv_qkv_start",
    }  # fmt: skip
    specs = {form.name.split()[1]: form.spec(CPU) for form in more}
    assert specs["decode_each"].states == 4
    assert specs["verify_buffered"].buffered
    assert specs["commit_layers"].layers == 2
    assert specs["conv_qkv_start"].window_start is not None
    if dispatch.unavailable("cpu") is None:
        assert kernel_of(specs["decode_each"]) == "decode_states"
        assert "decode_states" in kernels()


def test_checkpoints_are_compiled_when_asked_for():
    few = {form.name for form in module.forms(*WHAT)}
    more = [f for f in module.forms(*WHAT, checkpoints=True) if f.name not in few]
    specs = [form.spec(CPU) for form in more]
    assert {spec.op for spec in specs} == {"prefill", "conv_qkv"}
    for op in ("prefill", "conv_qkv"):
        assert {s.checkpoints for s in specs if s.op == op} == {"every", "positions"}
    narrow = WHAT[3]._replace(slots_dtype=torch.int32)
    specs = [f.spec(CPU) for f in module.forms(*WHAT[:3], narrow, checkpoints=True)]
    kept = {s.checkpoint_slots.dtype for s in specs if getattr(s, "checkpoint_slots", None)}
    assert kept == {torch.int32}


def test_the_dtypes_asked_for_are_those_of_the_tensors():
    bf16, int32 = torch.bfloat16, torch.int32
    kinds = module.Kinds(bf16, FP32, bf16, "kv", int32)
    (qkvz, _), options = ModelCalls(TINY, kinds, CPU).step(2, 1, True)
    found = (options[name].dtype for name in ("A_log", "dt_bias", "state", "slots", "conv_weight"))
    assert (qkvz.dtype, *found) == (bf16, FP32, FP32, bf16, int32, bf16)
    assert options["state_layout"] == "kv"
    served = sluice.warmup(TINY, device="cpu", dtype=FP32, slots_dtype=int32, state_layout="kv")
    assert {name.split()[1] for name, _ in served} == OPERATORS


def test_a_backend_compiles_what_it_serves_and_nothing_else(monkeypatch):
    """What a GPU's backend does with the specs is tests/gpu/test_compile_ahead.py."""
    heard: list[str] = []

    def compile(specs, share, progress):
        heard.extend(f"{spec.op} {share}" for spec in specs)

    specs = [call.spec(CPU) for call in module.forms(*WHAT)]
    for name in dispatch.ORDER:
        backend = importlib.import_module(f"sluice.backends.{name}")
        monkeypatch.setattr(backend, "compile", pytest.fail, raising=False)
    served = importlib.import_module(f"sluice.backends.{dispatch.explain(specs[0]).chosen}")
    monkeypatch.setattr(served, "compile", compile)
    dispatch.compile(specs[:1], (1, 3))
    assert heard == ["decode (1, 3)"]


class Other:
    """Stands in for a process that compiles a share."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def join(self, timeout: float) -> None:
        self.log.append(f"wait {timeout} s")

    def kill(self) -> None:
        self.log.append("kill")


def test_what_others_leave_is_compiled_when_they_have_ended(monkeypatch):
    log: list[str] = []

    def compile(specs, share=(0, 1), progress=None):
        log.append(f"compile {len(specs)} {share}")

    monkeypatch.setattr(dispatch, "compile", compile)
    todo = list(module.forms(*WHAT))
    served = module.run(todo, CPU, None, [Other(log), Other(log)])
    ends = [f"wait {module.PATIENCE} s", "kill"]
    n = len(todo)
    assert log == [f"compile {n} (0, 3)", *ends, *ends, f"compile {n} (0, 1)"]
    assert [name for name, _ in served] == [form.name for form in todo]


def started(monkeypatch: pytest.MonkeyPatch, make) -> list:
    monkeypatch.setattr(module.os, "cpu_count", lambda: 3 * module.CORES)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    return module.compile_aside(make)


def test_others_compile_a_share_each_and_run_nothing(monkeypatch, tmp_path):
    def compile(specs, share):
        (tmp_path / str(share)).write_text(f"{specs[0].device} {len(specs)}")
        sys.stderr.write("said by another process")

    monkeypatch.setattr(dispatch, "compile", compile)
    todo = list(module.forms(*WHAT))
    others = started(monkeypatch, lambda: (todo, torch.device("cuda")))
    for other in others:
        other.join()
    assert [other.exitcode for other in others] == [0, 0]
    compiled = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert compiled == dict.fromkeys(["(1, 3)", "(2, 3)"], f"cuda {len(todo)}")


def test_others_that_fail_leave_their_share(monkeypatch):
    def make():
        raise RuntimeError("no such GPU")

    others = started(monkeypatch, make)
    todo = list(module.forms(*WHAT))
    assert len(module.run(todo, CPU, None, others)) == len(todo)
    assert 0 not in [other.exitcode for other in others]


def test_an_other_that_does_not_end_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    others = started(monkeypatch, lambda: time.sleep(60))
    begin = time.perf_counter()
    module.run([], CPU, None, others)
    assert time.perf_counter() - begin < 30
    others[0].join()
    assert others[0].exitcode != 0


def test_there_are_no_others_for_few_cores_or_in_a_process_that_knows_its_gpu(monkeypatch):
    def make():
        pytest.fail("called")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2 * module.CORES - 1)
    assert module.compile_aside(make) == []
    monkeypatch.setattr(module.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert module.compile_aside(make) == []


def _decode(state: torch.Tensor, dtype: torch.dtype = torch.float32) -> ModelCall:
    HK, HV, K, V = 2, 4, 16, 8
    sizes = ((HK, K), (HK, K), (HV, V), (HV,), (HV,))
    tokens = tuple(torch.empty(3, 1, *size, dtype=dtype, device="meta") for size in sizes)
    slots = torch.empty(3, dtype=torch.int32, device="meta")
    return ModelCall("a call", "decode", lambda: (tokens, {"state": state, "slots": slots}))


def _pool(*order: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[P, HV, V, K], whose dimensions lie in memory in this order."""
    sizes = (9, 4, 8, 16)
    made = torch.empty([sizes[i] for i in order], dtype=dtype, device="meta")
    return made.permute([order.index(i) for i in range(4)])


def test_calls_that_can_be_made_are_not_refused():
    strided = torch.empty(9, 3, 4, 8, 16, device="meta")[:, 1]
    assert module.refused([_decode(_pool(0, 1, 2, 3)), _decode(strided)], CPU) is None


def test_a_call_that_the_contract_or_every_backend_refuses_is_a_reason_and_no_error():
    good, turned = _decode(_pool(0, 1, 2, 3)), _decode(_pool(0, 1, 3, 2))
    reason = module.refused([good, turned], CPU)
    assert reason.startswith("decode: state: expected contiguous last three dimensions, got")
    reason = module.refused([good], torch.device("xpu"))
    assert reason.startswith("decode: ")
    assert "cpu runs on cpu, not on xpu" in reason
