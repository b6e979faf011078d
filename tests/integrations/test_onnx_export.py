"""``sluice.integrations.onnx.export``: layers and whole models, run in ONNX Runtime."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs sluice-gdn[transformers]")
pytest.importorskip("onnxscript", reason="needs sluice-gdn[onnx]")
pytest.importorskip("onnxruntime", reason="needs sluice-gdn[onnx]")

import onnx_ir
import onnxruntime
from tests.models import stock_layer, stock_model

import sluice
from sluice import cli
from sluice.contract.errors import ContractError, SluiceError
from sluice.integrations.onnx import Runner, check, export
from sluice.integrations.onnx.export import _quiet, need
from sluice.integrations.onnx.standard import to_standard
from sluice.integrations.transformers import is_accelerated, plain_torch
from sluice.layers import GatedDeltaNet, QwenShape
from sluice.testing.compare import assert_same_bits, assert_within

SMALL = QwenShape("small", 32, 2, 4, 1, (0,), head_k_dim=8, head_v_dim=8)
KINDS = ["full_attention", "linear_attention"]


@pytest.fixture(autouse=True)
def _inference():
    """PyTorch runs uncompiled."""
    with torch.no_grad(), sluice.use_backend("reference"):
        yield


@pytest.fixture(scope="module")
def model():
    return stock_model("qwen3_5", r=3, layers=2, layer_types=KINDS)


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    """The model as a file for ONNX Runtime, written by the command, and the command's output."""
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder / "checkpoint")
    said, out = io.StringIO(), folder / "qwen.onnx"
    with contextlib.redirect_stdout(said):
        assert cli.main(["export", "--model", str(folder / "checkpoint"), "--out", str(out)]) == 0
    return SimpleNamespace(path=out, said=said.getvalue())


# ----------------------------------------------------------------------------------- whole models


def test_a_model_has_one_node_a_layer_and_a_pair_of_names_a_state(exported):
    nodes = [node.op_type for node in onnx_ir.load(exported.path).graph]
    assert nodes.count("LinearAttention") == nodes.count("CausalConvWithState") == 1
    session = onnxruntime.InferenceSession(str(exported.path))
    states = ["0.key", "0.value", "1.conv", "1.recurrent"]
    inputs = [x.name for x in session.get_inputs()]
    assert inputs == ["input_ids", *(f"past.{name}" for name in states)]
    outputs = [x.name for x in session.get_outputs()]
    assert outputs == ["logits", *(f"present.{name}" for name in states)]


def test_the_command_says_that_it_checked(exported):
    assert "4 states, each an input past.* and an output present.*" in exported.said
    (error,) = re.findall(r"largest relative error against PyTorch (\S+),", exported.said)
    assert 0 < float(error) < 1e-5


def greedy_torch(model, ids, tokens):
    with plain_torch(model):
        options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
        return model.generate(ids, **options)[:, ids.shape[1] :]


def test_a_runner_refuses_what_its_graph_does_not_take(exported, tmp_path):
    run = Runner(exported.path, 2, threads=1)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    for given, words in (
        (ids.tolist(), "input_ids: expected a tensor, got list"),
        (ids.int(), "expected dtype torch.int64, got torch.int32"),
        (ids[:1], r"expected shape \[2, tokens\], got shape \[1, 3\]"),
        (ids[0], r"got shape \[3\]"),
        (ids[:, :0], r"got shape \[2, 0\]"),
    ):
        with pytest.raises(ContractError, match=words):
            run(given)
    for batch in (0, "2"):
        with pytest.raises(ContractError, match="batch: expected an int of at least 1"):
            Runner(exported.path, batch)
    text = tmp_path / "text.onnx"
    text.write_text("not a graph")
    for path in (exported.path.parent, text):
        with pytest.raises(ContractError, match="path: expected a file of sluice export"):
            Runner(path)
    for name, value in (("threads", "2"), ("threads", -1), ("providers", "CPUExecutionProvider")):
        with pytest.raises(ContractError, match=f"{name}: expected"):
            Runner(exported.path, **{name: value})
    with pytest.raises(ContractError, match="providers: expected some of"):
        Runner(exported.path, providers=("NoExecutionProvider",))


def test_a_runner_refuses_a_graph_of_another_program(tmp_path):
    onnx = pytest.importorskip("onnx")
    kind = onnx.TensorProto.FLOAT
    a, b, c = (onnx.helper.make_tensor_value_info(name, kind, [2]) for name in "abc")
    node = onnx.helper.make_node("Add", ["a", "b"], ["c"])
    graph = onnx.helper.make_graph([node], "sum", [a, b], [c])
    opset = [onnx.helper.make_opsetid("", 20)]
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=opset, ir_version=10), tmp_path / "sum.onnx"
    )
    with pytest.raises(ContractError, match="expected one input beside the states, got a tensor"):
        Runner(tmp_path / "sum.onnx")


def greedy_onnx(run, ids, tokens, first):
    """The prompt in calls of ``first`` tokens at most, then token by token."""
    for part in ids.split(first, dim=1):
        logits = run(part)
    picks = []
    for _ in range(tokens):
        picks.append(logits[:, -1:].argmax(-1))
        logits = run(picks[-1])
    return torch.cat(picks, 1)


@pytest.mark.parametrize("first", [40, 1, 17], ids="{} at a time".format)
def test_greedy_tokens_equal_pytorchs(model, exported, first):
    ids = torch.randint(1, 90, (2, 40), generator=torch.Generator().manual_seed(3))
    exact = greedy_torch(model, ids, 24)
    assert exact.unique().numel() > 5  # not one token repeated, which would prove little
    run = Runner(exported.path, 2, threads=1)
    assert torch.equal(greedy_onnx(run, ids, 24, first), exact)
    run.reset()
    assert torch.equal(greedy_onnx(run, ids, 24, first), exact)


def test_states_are_carried_in_place(exported):
    """The recurrent state stays in one buffer, the conv window in two that swap."""
    run = Runner(exported.path, 1, threads=1)
    ids = torch.arange(1, 9)[None]
    run(ids)
    before = {name: x.data_ptr() for name, x in run.states.items()}
    seen = {name: x.clone() for name, x in run.states.items()}
    run(ids[:, :1])
    run(ids[:, 1:2])
    for name, x in run.states.items():
        if name.endswith(("recurrent", "conv")):
            assert x.data_ptr() == before[name]
            assert not torch.equal(x, seen[name])
        else:
            assert x.shape[2] == 10
    feeds = {f"past.{name}": x.numpy() for name, x in seen.items()}
    for at in range(2):  # without binding, every state is a copy
        found = run.session.run(None, {"input_ids": ids[:, at : at + 1].numpy(), **feeds})
        feeds = dict(zip(feeds, found[1:], strict=True))
    for name, x in run.states.items():
        assert_same_bits(x, torch.from_numpy(feeds[f"past.{name}"]), name)


def test_the_same_model_in_standard_operators(model, exported, tmp_path):
    ids = torch.randint(1, 90, (1, 30), generator=torch.Generator().manual_seed(4))
    path = tmp_path / "standard.onnx"
    onnx_ir.save(to_standard(onnx_ir.load(exported.path)), path)
    picks = greedy_onnx(Runner(path, 1, threads=1), ids, 12, 30)
    assert torch.equal(picks, greedy_torch(model, ids, 12))


# ----------------------------------------------------------------------------------------- layers


def test_a_layer_of_ours_in_float16_with_standard_operators(tmp_path):
    torch.manual_seed(0)
    layer = GatedDeltaNet(dataclasses.replace(SMALL, conv_width=3)).half()
    made = export(layer, tmp_path / "layer.onnx", target="onnx", external_data=True)
    assert made.external_data
    assert (tmp_path / "layer.onnx.data").stat().st_size > made.bytes // 2  # small ones stay inside
    assert made.error < 5e-3
    types = {x.name: x.dtype for x in onnx_ir.load(made.path).graph.inputs}
    assert types["past.recurrent"] == onnx_ir.DataType.FLOAT  # a state is never narrowed
    assert types["past.conv"] == onnx_ir.DataType.FLOAT16


def test_a_layer_of_transformers_with_interleaved_weights(tmp_path):
    layer, steps = stock_layer("qwen3_next"), []
    made = export(layer, tmp_path / "layer.onnx", progress=steps.append)
    assert len(steps) == 3
    assert 0 < made.error < 1e-5
    assert made.inputs == ("hidden_states", "past.conv", "past.recurrent")
    assert made.outputs == ("output", "present.conv", "present.recurrent")
    assert not is_accelerated(layer)  # unchanged
    assert made.nodes == {"LinearAttention": 1, "CausalConvWithState": 1}


class OneToken(nn.Module):
    """A layer's decode as a user would write it: states updated in place and returned."""

    def __init__(self):
        super().__init__()
        self.layer = GatedDeltaNet(SMALL)

    def forward(self, x, conv_state, state):
        return self.layer(x, conv_state=conv_state, state=state), conv_state, state


def test_torchs_own_export_needs_nothing_else(tmp_path):
    """Parameters that want gradients, a static length of one token, states in place."""
    module = OneToken().eval()
    x, (conv, state) = torch.randn(2, 1, 32), module.layer.zero_states(2)
    with torch.enable_grad(), _quiet():
        program = torch.onnx.export(module, (x, conv, state), dynamo=True, verbose=False)
    program.save(str(tmp_path / "layer.onnx"))
    nodes = [node.op_type for node in program.model.graph]
    assert nodes.count("LinearAttention") == nodes.count("CausalConvWithState") == 1
    session = onnxruntime.InferenceSession(str(tmp_path / "layer.onnx"))
    states = [conv.normal_(), state.normal_()]
    names = [i.name for i in session.get_inputs()]
    feeds = dict(zip(names, (z.numpy().copy() for z in (x, *states)), strict=True))
    exact = module(x, *states)
    for made, e in zip(session.run(None, feeds), exact, strict=True):
        assert_within(torch.from_numpy(made), e, 1e-5, name="one token")


class Alone(nn.Module):
    """A layer without a cache."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def test_an_accelerated_layer_with_gradients_on_does_not_keep_the_traced_length(tmp_path):
    """transformers' own chunk loop, which would run with gradients, would fix the length."""
    layer = Alone(sluice.accelerate(stock_layer("qwen3_5").requires_grad_(True)))
    width = layer.layer.hidden_size
    path = tmp_path / "layer.onnx"
    with torch.enable_grad(), _quiet():
        T = torch.export.Dim("T", min=2, max=512)
        x = torch.randn(1, 70, width)
        torch.onnx.export(layer, (x,), path, dynamo=True, dynamic_shapes=({1: T},), verbose=False)
    session = onnxruntime.InferenceSession(path)
    for length in (5, 130):
        x = torch.randn(1, length, width)
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert_within(torch.from_numpy(y), layer(x), 1e-5, name=f"{length} tokens")


def test_a_file_that_loses_its_state_is_found_and_removed(tmp_path, monkeypatch):
    """The first call, which starts from zero, looks right."""
    bind, kept = Runner._bind, []

    def forgetful(self, at, name, x):
        kept.append(torch.zeros_like(x) if name == "past.recurrent" else x)
        bind(self, at, name, kept[-1])

    monkeypatch.setattr(Runner, "_bind", forgetful)
    with pytest.raises(SluiceError, match="output of call 1, 1 tokens: relative error"):
        export(stock_layer("qwen3_5"), tmp_path / "layer.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", [(1.0, torch.nan), (torch.nan, 1.0), (torch.nan, torch.nan)])
def test_a_result_that_is_not_finite_fails_the_check(where, monkeypatch):
    """NaN compares as neither larger nor smaller than what is allowed."""
    actual, exact = (torch.ones(3) * x for x in where)
    monkeypatch.setattr(check, "_once", lambda *args: [("y", actual, exact)])
    with pytest.raises(SluiceError, match="gives another result than PyTorch: y"):
        check.compare("file", nn.Linear(1, 1), None, ())
    assert check.relative_error(torch.tensor([torch.nan]), torch.ones(1)) == torch.inf


# --------------------------------------------------------------------------------------- refusals


class Prefill(nn.Module):
    """A call with one option more than ONNX can express."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x, state):
        return self.call(x, state)


def slots(n):
    return torch.arange(n)


REFUSED = {
    "slots": lambda x, s: sluice.prefill(x, x, x, state=s, slots=slots(2))[0],
    "write_slots": lambda x, s: sluice.decode(x, x, x, state=s, write_slots=slots(2))[0],
    "cu_seqlens": lambda x, s: sluice.prefill(x[:1], x[:1], x[:1], cu_seqlens=slots(2))[0],
    "checkpoints": lambda x, s: sluice.prefill(
        x, x, x, state=s, checkpoints=sluice.Checkpoints(slots(2)[:, None], every=9)
    )[0],
    "window_start": lambda x, s: sluice.causal_conv1d(
        x[:, :, 0], x[0, 0, :1].expand(4, 4), state=s[:, 0], window_start=slots(2)
    )[0],
    "batch_invariant": lambda x, s: sluice.prefill(x, x, x, batch_invariant=True)[0],
    "backend": lambda x, s: sluice.prefill(x, x, x, backend="reference")[0],
    "float64": lambda x, s: sluice.prefill(x.double(), x.double(), x.double())[0],
    "draft tokens": lambda x, s: sluice.verify(x, x, x, state=s)[0],
    "attention_mask": lambda x, s: GatedDeltaNet(SMALL)(
        torch.zeros(2, 3, 32), attention_mask=x[..., 0, 0] > 0
    ),
    "one row per sequence": lambda x, s: sluice.prefill(x[:1], x[:1], x[:1], state=s)[0],
}


@pytest.mark.parametrize("option", REFUSED)
def test_what_onnx_cannot_express_is_refused_by_name(option, tmp_path):
    args = (torch.randn(2, 3, 2, 4), torch.zeros(2, 2, 4, 4))
    with pytest.raises(ContractError, match=option):
        export(Prefill(REFUSED[option]), tmp_path / "x.onnx", args=args)
    assert not list(tmp_path.iterdir())


def test_torchs_older_exporter_is_refused(tmp_path):
    """It would write the results of this one call as constants."""
    x = torch.randn(2, 3, 2, 4)
    call = Prefill(lambda x, state: sluice.prefill(x, x, x, state=state)[0])
    with pytest.raises(SluiceError, match=r"use .* torch.onnx.export\(dynamo=True\)"), _quiet():
        torch.onnx.export(call, (x, torch.zeros(2, 2, 4, 4)), tmp_path / "x.onnx", dynamo=False)


def test_models_that_are_no_models_are_refused(tmp_path):
    with pytest.raises(ContractError, match="target: expected one of"):
        export(GatedDeltaNet(SMALL), tmp_path / "x.onnx", target="tensorrt")
    with pytest.raises(ContractError, match="got Linear with layers of no declared type"):
        export(nn.Linear(2, 2), tmp_path / "x.onnx")
    with pytest.raises(ContractError, match="float32 or float16 parameters"):
        export(GatedDeltaNet(SMALL).bfloat16(), tmp_path / "x.onnx")
    with pytest.raises(ContractError, match="input_names: expected args beside it"):
        export(GatedDeltaNet(SMALL), tmp_path / "x.onnx", input_names=["x"])
    with pytest.raises(ContractError, match="a directory that exists"):
        export(GatedDeltaNet(SMALL), tmp_path / "nowhere" / "x.onnx")


def test_importing_the_integration_imports_no_onnx():
    code = (
        "import sys, sluice, sluice.integrations.onnx as o; assert o.export and o.run_node; "
        "assert not {'onnx', 'onnxscript', 'onnxruntime', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------ the command


def test_the_command_says_what_it_needs(tmp_path, capsys):
    assert cli.main(["export", "--model", str(tmp_path), "--out", "x.onnx"]) == 2
    assert "--model: expected a directory with config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    out = str(tmp_path / "nowhere" / "x.onnx")
    assert cli.main(["export", "--model", str(tmp_path), "--out", out]) == 2
    assert "--out: expected a file in a directory that exists" in capsys.readouterr().err
    with pytest.raises(
        SluiceError, match=r"needs no_such_package: pip install .sluice-gdn\[onnx\]"
    ):
        need("no_such_package")
