"""Workloads: the notation of sizes, and that their cases are right."""

from __future__ import annotations

import pytest
import torch

import sluice
from sluice.bench import plan
from sluice.contract.errors import SluiceError
from sluice.layers.qwen import PRESETS, preset
from sluice.testing.workload import BATCH_OPS, NAMED, OPS, PROMPT_OPS, describe, parse_size


@pytest.mark.parametrize(
    ("text", "lengths", "written"),
    [
        ("8192", (8192,), "8192"),
        ("4x2048", (2048,) * 4, "4x2048"),
        ("2048+2x512+16x1", (2048, 512, 512, *(1,) * 16), "2048+2x512+16x1"),
        (" 3+3 + 3", (3, 3, 3), "3x3"),
        ("long", (8192,), "8192"),
        ("Many", (1024,) * 8, "8x1024"),
    ],
)
def test_lengths_are_read_as_they_are_said(text, lengths, written):
    size = parse_size(text)
    assert size.lengths == lengths
    assert str(size) == written
    assert parse_size(written) == size


@pytest.mark.parametrize(
    "text", ["", "x3", "4x", "12a", "1,2", "-4", "0", "N=0", "4x0", "N=", "5+0"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"length|token"):
        parse_size(text)


def test_axes():
    assert parse_size("N=4").axis == "batch"
    assert parse_size("64").axis == "length"
    assert parse_size("64+1").axis == parse_size("2x64").axis == "mix"
    assert all(parse_size(written).tokens > 0 for written in NAMED.values())


@pytest.mark.parametrize("op", OPS)
def test_every_workload_agrees_with_the_oracle(op, small):
    """A small version of each timed workload passes the check of the tests."""
    sizes = ["66+3", "2x5"] if op in PROMPT_OPS else []
    sizes += ["N=1", "N=3"] if op in BATCH_OPS else []
    for size in ["2x5"] if op == "layer" else sizes:
        workload = small(op, size)
        case = workload.case
        inputs = case.inputs(torch.float32)
        expected = case.expected(inputs)
        if op == "layer":  # more tokens than step takes: the provider composes its parts
            case = case.with_(tokens=2)
            inputs = case.inputs(torch.float32)
            expected = case.expected(inputs)
        case.check(case.run(sluice, inputs), expected)
        assert workload.heads == (1, 3)
        assert workload.name == f"{op}/Qwen3.5-27B/tp16/{size}"
        assert case.bytes(torch.float32) > 0
        assert case.flops() > 0


def test_a_raw_prefill_agrees_with_the_oracle_and_says_so(small):
    workload = small("prefill", "66+3", raw=True)
    case, inputs = workload.case, workload.case.inputs(torch.float32)
    assert "A_log" in inputs
    assert inputs["normalize_qk"] is True
    assert workload.name.endswith("/66+3/raw")
    expected = case.expected(inputs)
    case.check(case.run(sluice, inputs), expected)
    with pytest.raises(ValueError, match="raw: expected prefill"):
        small("decode", "N=1", raw=True)


def test_a_size_an_operator_has_no_use_for_is_refused():
    shape = preset("Qwen3.5-0.8B")
    for op, size in (("decode", "512"), ("prefill", "N=4"), ("layer", "3+4"), ("convolve", "3")):
        with pytest.raises(ValueError, match="expected"):
            describe(op, shape, parse_size(size))


def test_the_oracle_gives_the_same_on_any_device_asked_for(small):
    case = small("prefill", "9+2").case
    inputs = case.inputs(torch.float32)
    here, there = case.expected(inputs), case.expected(inputs, "cpu")
    assert torch.equal(here.outputs["o"], there.outputs["o"])


# -------------------------------------------------------------------------------------- surfaces


@pytest.mark.parametrize("surface", plan.SURFACES)
def test_surfaces_name_real_models_and_each_workload_once(surface):
    chosen = plan.workloads(surface, plan.Wanted(), torch.bfloat16)
    names = [w.name for w in chosen]
    assert len(set(names)) == len(names)
    assert {w.model for w in chosen} <= set(PRESETS)


@pytest.mark.parametrize("surface", ["cpu", "cuda"])
def test_a_full_surface_has_every_operator_and_what_the_charts_need(surface):
    chosen = plan.workloads(surface, plan.Wanted(), torch.bfloat16)
    assert {w.op for w in chosen} == set(OPS)
    prefills = [w for w in chosen if w.op == "prefill"]
    assert len({w.heads for w in prefills}) >= 3
    assert len({w.size for w in prefills if w.size.axis == "length"}) >= 3
    kinds = {len(set(w.size.lengths)) for w in prefills if len(w.size.lengths) > 1}
    assert 1 in kinds  # many equal ones
    assert max(kinds) > 2  # a ragged mix
    assert len({w.size for w in chosen if w.op == "decode"}) >= 6


def test_the_gpu_surface_has_what_is_compared_with_peers():
    """Fifteen prefills before anything else, then every batch and head count of the others."""
    chosen = plan.workloads("cuda", plan.Wanted(), torch.bfloat16)
    first = chosen[:15]
    assert {(w.op, w.variant) for w in first} == {("prefill", "")}
    assert {w.heads for w in first} == {(2, 8), (16, 32), (16, 64)}
    assert {str(w.size) for w in first} == {"32768", "8192", "2048", "8x4096", "8x1024"}

    def sizes(op, heads, state=torch.float32):
        found = [w for w in chosen if (w.op, w.heads, w.case.state_dtype) == (op, heads, state)]
        return {w.size.batch for w in found if w.size.batch}

    assert {1, 8, 32, 64, 128, 256} <= sizes("decode", (16, 32))
    assert {1, 8, 32, 64, 128, 256} <= sizes("decode", (16, 32), torch.bfloat16)
    assert all({1, 64, 256} <= sizes("decode", h) for h in ((2, 8), (4, 16), (16, 48), (16, 64)))
    assert {1, 4, 16, 64, 256} <= sizes("step", (16, 32))
    assert {1, 16, 64, 256} <= sizes("verify", (16, 32))
    prompts = {(w.case.channels, w.size.tokens) for w in chosen if w.op == "conv_qkv"}
    assert {(8192, n) for n in (512, 2048, 4096, 8192, 16384)} | {(10240, 8192)} <= prompts
    assert {str(w.size) for w in chosen if w.variant == "raw"} == {"8192", "8x1024"}


def test_a_raw_prefill_is_timed_in_a_whole_surface_only():
    def raw(**asked):
        chosen = plan.workloads("cuda", plan.Wanted(**asked), torch.bfloat16)
        return [w for w in chosen if w.variant]

    assert len(raw(ops=("prefill",))) == 2
    assert not raw(ops=("prefill",), lengths=plan.sizes("8192", "--lengths"))


def test_the_gpu_surface_decodes_up_to_512():
    chosen = plan.workloads("cuda", plan.Wanted(), torch.bfloat16)
    batches = {w.size.batch for w in chosen if w.op == "decode"}
    assert {1, 512} <= batches


def test_what_was_asked_for_narrows_the_surface():
    wanted = plan.Wanted(
        ops=("prefill",),
        presets=("qwen3.5-27b",),
        tps=(2,),
        lengths=plan.sizes("8192,4x2048", "--lengths"),
    )
    names = [w.name for w in plan.workloads("cuda", wanted, torch.bfloat16)]
    assert names == ["prefill/Qwen3.5-27B/tp2/8192", "prefill/Qwen3.5-27B/tp2/4x2048"]


def test_a_narrow_state_is_timed_in_a_whole_surface_or_when_asked_for():
    def states(**asked):
        chosen = plan.workloads("cuda", plan.Wanted(("decode",), **asked), torch.bfloat16)
        return {w.case.state_dtype for w in chosen}

    assert states() == {torch.float32, torch.bfloat16}
    assert states(presets=("qwen3.5-4b",)) == {torch.float32}
    assert states(state_dtypes=(torch.float16,)) == {torch.float16}


def test_lengths_leave_operators_that_take_batches_at_their_own():
    wanted = plan.Wanted(ops=("prefill", "decode"), lengths=plan.sizes("64", "--lengths"))
    chosen = plan.workloads("cpu-quick", wanted, torch.float32)
    assert {str(w.size) for w in chosen} == {"64", "N=1", "N=8"}


def test_nothing_asked_for_is_silently_ignored():
    wanted = plan.Wanted(ops=("decode",), lengths=plan.sizes("64", "--lengths"))
    with pytest.raises(SluiceError, match="--lengths is for prefill"):
        plan.workloads("cpu", wanted, torch.float32)


@pytest.mark.parametrize(
    ("name", "meant"), [("prefil", "prefill"), ("decod", "decode"), ("norms", "rms_norm_gated")]
)
def test_a_typo_gets_a_suggestion(name, meant):
    with pytest.raises(SluiceError, match=f"did you mean '{meant}'"):
        plan.op_names([name])


def test_short_names_are_known():
    assert plan.op_names(["conv", "norm", "Prefill"]) == (
        "causal_conv1d",
        "rms_norm_gated",
        "prefill",
    )
