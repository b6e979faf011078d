"""Providers adapt their libraries correctly, refuse with a reason, and fail when wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.bench import stand_ins

import sluice
from sluice.bench.check import moved
from sluice.bench.providers import MODULES, PEERS, own, pipeline, provider
from sluice.bench.providers.base import Call, Job
from sluice.bench.session import Session

CPU = {
    "sluice": "prefill decode verify causal_conv1d conv_qkv rms_norm_gated step layer train",
    "sluice:separate": "conv_qkv step layer",
    "sluice:invariant": "prefill",
    "transformers": "prefill decode causal_conv1d conv_qkv rms_norm_gated step layer train",
    "onnxruntime": "prefill decode causal_conv1d conv_qkv rms_norm_gated step layer",
    "torch": "prefill decode verify causal_conv1d conv_qkv rms_norm_gated step layer",
}
GPU = {
    "fla": "prefill decode causal_conv1d conv_qkv rms_norm_gated step layer train",
    "flashqla": "prefill layer train",
    "flashinfer": "prefill decode verify layer",
    "causal-conv1d": "causal_conv1d",
}
SIZES = {
    "prefill": ("70", "2x33", "20+1+9"),
    "decode": ("N=3",),
    "verify": ("N=5",),
    "causal_conv1d": ("9", "2x5", "N=3"),
    "conv_qkv": ("2x5", "N=3"),
    "rms_norm_gated": ("3",),
    "step": ("N=3",),
    "layer": ("2x9",),
    "train": ("70", "2x33", "20+1+9"),
}


def served(table):
    return [(name, op) for name, ops in table.items() for op in ops.split()]


@pytest.mark.parametrize(("name", "op"), served(CPU))
def test_a_cpu_provider_agrees_with_the_oracle(name, op, judge):
    if name in ("transformers", "onnxruntime"):
        pytest.importorskip(name)
    if name == "onnxruntime":
        pytest.importorskip("onnx")
    for size in SIZES[op]:
        verdict = judge(name, op, size)
        assert verdict["status"] == "ok", verdict["reason"]
        assert max(verdict["errors"].values()) < 1e-5
        assert verdict["method"] == "host clock"
        assert verdict["sets"] == 2
        assert verdict["first_call_s"] > 0


def test_a_wrong_gradient_is_not_timed(judge, monkeypatch):
    right = sluice.prefill

    def wrong(q, *others, **options):  # the gradient of q is off by 1%, all else is right
        o, state = right(q + 0.01 * (q - q.detach()), *others, **options)
        return o, state

    monkeypatch.setattr(sluice, "prefill", wrong)
    verdict = judge("transformers", "train", "9")  # judged by float64, which is wrong here
    assert (verdict["status"], verdict["reason"].split(":")[0]) == ("wrong", "dq")


@pytest.mark.parametrize(
    "name", ["sluice", "sluice:separate", "transformers", "onnxruntime", "torch"]
)
@pytest.mark.parametrize("op", ["step", "layer"])
def test_the_interleaved_order_is_taken_apart(name, op, judge):
    if not name.startswith("sluice"):
        pytest.importorskip(name)
    verdict = judge(name, op, SIZES[op][0], model="Qwen3-Next-80B-A3B")
    assert verdict["status"] == "ok", verdict["reason"]


@pytest.mark.parametrize("op", CPU["torch"].split())
def test_plain_torch_is_right_in_16_bits(op, judge):
    """The dtypes of a GPU run: bfloat16 inputs, a float32 state."""
    for size in SIZES[op]:
        verdict = judge("torch", op, size, torch.bfloat16)
        assert verdict["status"] == "ok", verdict["reason"]


@pytest.mark.parametrize("op", CPU["torch"].split())
def test_plain_torch_never_waits_for_a_device(op, small):
    """Meta tensors raise when a value is read, which a graph could not capture."""
    workload = small(op, SIZES[op][0], torch.bfloat16)
    inputs = workload.case.inputs(torch.bfloat16)
    job = Job(workload, torch.bfloat16, torch.device("meta"), moved(inputs, torch.device("meta")))
    with torch.no_grad():
        provider("torch").prepare(job).run()


@pytest.mark.parametrize(("name", "op"), served(GPU))
def test_a_gpu_provider_hands_over_the_right_tensors(name, op, judge, monkeypatch):
    stand_ins.fla(monkeypatch)
    stand_ins.others(monkeypatch)
    for size in SIZES[op]:
        verdict = judge(name, op, size, torch.bfloat16)
        assert verdict["status"] == "ok", verdict["reason"]
        assert verdict["errors"]
    assert all(isinstance(note, str) for note in verdict["converted"])


@pytest.mark.parametrize("name", ["sluice", "sluice:invariant", "fla"])
def test_a_raw_prefill_makes_its_gates_and_unit_keys_itself(name, judge, monkeypatch):
    stand_ins.fla(monkeypatch)
    for size in SIZES["prefill"]:
        verdict = judge(name, "prefill", size, torch.bfloat16, raw=True)
        assert verdict["status"] == "ok", verdict["reason"]


@pytest.mark.parametrize("name", ["flashqla", "flashinfer", "torch", "transformers"])
def test_who_takes_finished_gates_only_refuses_a_raw_prefill(name, judge, monkeypatch):
    stand_ins.others(monkeypatch)
    verdict = judge(name, "prefill", "9", torch.bfloat16, raw=True)
    assert verdict["status"] == "refused"
    assert "finished gates" in verdict["reason"]


@pytest.mark.parametrize("name", ["flashqla", "flashinfer"])
def test_a_layer_around_a_peers_recurrence_needs_fla(name, judge, monkeypatch):
    stand_ins.others(monkeypatch)
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "fla.modules.causal_conv1d", None)
    verdict = judge(name, "layer", "2x9", torch.bfloat16)
    assert verdict["status"] == "refused"
    assert "FLA for the rest is not here" in verdict["reason"]


def test_invariant_and_separate_are_what_they_say(small, monkeypatch):
    """One passes batch_invariant to prefill; the other never calls a fused operator."""

    def job(op, size):
        workload = small(op, size)
        inputs = workload.case.inputs(torch.float32)
        return Job(workload, torch.float32, torch.device("cpu"), inputs)

    asked = []
    inner = sluice.prefill
    monkeypatch.setattr(
        sluice, "prefill", lambda *a, **k: asked.append(k["batch_invariant"]) or inner(*a, **k)
    )
    provider("sluice:invariant").prepare(job("prefill", "9")).run()
    assert asked == [True, True]  # once to choose a backend, once to run

    def fused(*args, **options):
        raise AssertionError("a fused call")

    monkeypatch.setattr(sluice, "prefill", inner)
    monkeypatch.setattr(sluice, "step", fused)
    monkeypatch.setattr(sluice, "conv_qkv", fused)
    for op, size in (("step", "N=2"), ("layer", "2x5"), ("conv_qkv", "5+3")):
        provider("sluice:separate").prepare(job(op, size)).run()


def test_gpu_providers_keep_a_bfloat16_state(judge, monkeypatch):
    stand_ins.fla(monkeypatch)
    stand_ins.others(monkeypatch)
    served = (
        ("fla", "decode"),
        ("fla", "step"),
        ("flashinfer", "decode"),
        ("flashinfer", "verify"),
    )
    for name, op in served:
        verdict = judge(name, op, "N=2", torch.bfloat16, state_dtype=torch.bfloat16)
        assert verdict["status"] == "ok", verdict["reason"]


@pytest.mark.parametrize(
    ("name", "op", "size", "reason"),
    [
        ("torch", "prefill", "129", "token by token, to 128"),
        ("torch", "prefill", "100+29", "token by token, to 128"),
        ("torch", "layer", "2x129", "token by token, to 128"),
        ("torch", "causal_conv1d", "5+3", "no packed prompts"),
        ("transformers", "verify", "N=2", "has no verify"),
        ("sluice:chunked", "decode", "N=2", "chunked: has no decode"),
        ("sluice:separate", "decode", "N=2", "is one call"),
        ("sluice:invariant", "decode", "N=2", "prefill's option"),
    ],
)
def test_what_is_not_there_is_refused_with_a_reason(name, op, size, reason, judge):
    verdict = judge(name, op, size)
    assert verdict["status"] == "refused"
    assert reason in verdict["reason"]


@pytest.mark.parametrize(
    ("name", "reason"), [("flashqla", "has no step"), ("flashinfer", "no gated norm")]
)
def test_a_peer_without_a_step_says_so(name, reason, judge):
    verdict = judge(name, "step", "N=2", torch.bfloat16)
    assert verdict["status"] == "refused"
    assert reason in verdict["reason"]


def test_a_dtype_that_is_not_there_is_refused(judge, monkeypatch):
    pytest.importorskip("onnxruntime")
    assert "float32" in judge("onnxruntime", "decode", "N=2", torch.bfloat16)["reason"]
    stand_ins.others(monkeypatch)
    assert "bfloat16 or float16" in judge("flashqla", "prefill", "9")["reason"]
    assert "bfloat16 or float16" in judge("flashinfer", "prefill", "9")["reason"]


def _spoiled(spoil):
    """A provider whose decode is sluice's, with its output or its state changed."""
    inner = provider("torch")
    whole = inner._decode

    def decode(job):
        call = whole(job)

        def run():
            return spoil(call.run(), job, call)

        return Call(run, call.outputs, call.converted, call.mutable)

    inner._decode = decode
    return inner


@pytest.mark.parametrize(
    ("spoil", "status", "reason"),
    [
        (lambda o, job, call: o * 1.02, "wrong", "o: relative error 2"),
        (lambda o, job, call: torch.zeros_like(o), "wrong", "o: relative error 1"),
        (lambda o, job, call: call.mutable[0].mul_(1.02) is None or o, "wrong", "state: relative"),
        (lambda o, job, call: o * float("nan"), "wrong", "not finite"),
        (lambda o, job, call: o[..., :-1], "wrong", "shape"),
        (lambda o, job, call: 1 / 0, "error", "ZeroDivisionError"),
        (
            lambda o, job, call: Path("/no/such/place.py").read_text(),
            "error",
            "directory: 'place.py'",
        ),
    ],
)
def test_a_provider_that_is_wrong_is_never_timed(spoil, status, reason, small, judge, monkeypatch):
    """Reliability row 33: a row is timed only after its output matched the oracle."""
    from sluice.bench import session

    monkeypatch.setattr(session, "provider", lambda name: _spoiled(spoil))
    verdict = judge("torch", "decode", "N=2")
    assert verdict["status"] == status
    assert reason in verdict["reason"]
    assert not verdict["errors"]


def test_every_provider_says_how_it_is_had_and_is_loaded_by_name():
    for name in MODULES:
        found = provider(name)
        assert found.name == name
        assert found.install
        assert found.is_peer == (name in PEERS)
    assert provider("ort").name == "onnxruntime"
    assert provider("sluice:reference").name == "sluice:reference"


def test_no_library_is_imported_before_it_is_its_turn():
    code = (
        "import sys; from sluice.bench import run, table, html, compare, docs, command\n"
        "from sluice.bench.providers import MODULES, provider\n"
        "[provider(name) for name in MODULES]\n"
        "heavy = {'transformers', 'onnx', 'onnxruntime', 'fla', 'flash_qla', 'flashinfer', 'rich',"
        " 'causal_conv1d', 'triton', 'numba'}\n"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    start = f"import sys; sys.path.insert(0, {str(sluice.__path__[0])!r} + '/..');"
    done = subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_missing_library_is_listed_with_how_to_get_it():
    found = Session("causal-conv1d", "cpu", 1).start()
    assert found["missing"] == "runs on cuda only"
    session = Session("transformers", "cpu", 1)
    session.provider.missing = lambda: "ModuleNotFoundError: No module named 'transformers'"
    found = session.start()
    assert found["missing"].startswith("ModuleNotFoundError")
    assert found["install"] == "pip install transformers"
    assert found["version"] is None


def test_transformers_own_functions_are_measured_whatever_they_lead_to(monkeypatch):
    """With FLA installed, the names in transformers' module call FLA."""
    pytest.importorskip("transformers")
    import functools

    from sluice.bench.providers import transformers

    module = transformers.load(transformers.MODULE)
    inner = transformers._function("torch_chunk_gated_delta_rule")

    @functools.wraps(inner)
    def elsewhere(*args, **kwargs):
        raise AssertionError("not transformers' own")

    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", elsewhere)
    assert transformers._function("torch_chunk_gated_delta_rule") is inner


def test_the_backend_that_serves_is_named(judge):
    verdict = judge("sluice:reference", "layer", "2x9")
    assert verdict["detail"] == "reference"
    assert judge("sluice", "prefill", "70")["detail"]


def test_a_backend_alone_is_measured_where_another_serves(judge, monkeypatch):
    """Otherwise it would repeat sluice's own row."""
    served = judge("sluice", "prefill", "9")["detail"]
    verdict = judge(f"sluice:{served}", "prefill", "9")
    assert verdict["status"] == "refused"
    assert verdict["reason"] == f"sluice is served by {served} here: the same row"
    assert judge("sluice:reference", "prefill", "9")["status"] == "ok"
    # a layer is several calls: it is enough if another backend serves one of them
    inner = own._first
    mixed = {"prefill": "hopper"}
    monkeypatch.setattr(own, "_first", lambda spec: mixed.get(spec.op) or inner(spec))
    assert judge(f"sluice:{served}", "layer", "9")["status"] == "ok"
    assert judge(f"sluice:{served}", "decode", "N=1")["status"] == "refused"


def test_fla_says_that_a_small_state_comes_back_as_float32(small, judge, monkeypatch):
    stand_ins.fla(monkeypatch)
    for dtype, note in ((torch.float32, pipeline.FRESH), (torch.bfloat16, pipeline.FRESH_32)):
        for op in ("decode", "step"):
            workload = small(op, "N=2", state_dtype=dtype)
            inputs = workload.case.inputs(torch.bfloat16)
            job = Job(workload, torch.bfloat16, torch.device("cpu"), inputs)
            assert note in provider("fla").prepare(job).converted
