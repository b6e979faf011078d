"""sluice's operators, exported by ``torch.onnx.export`` and run in ONNX Runtime, match the oracle.

One graph holds all calls. It serves every length and batch, also those it was not traced with.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("onnxscript", reason="needs sluice-gdn[onnx]")
pytest.importorskip("onnxruntime", reason="needs sluice-gdn[onnx]")

import onnx
import onnx_ir
import onnxruntime
from tests.integrations.onnx_calls import Calls, calls, dynamic, inputs

import sluice
from sluice.integrations.onnx import export
from sluice.integrations.onnx.standard import to_standard
from sluice.testing.compare import assert_within, tolerance

CALLS = calls()
SIZES = ((2, 1), (1, 2), (3, 64), (1, 257))  # none of them traced


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """All calls as one graph, a file for each target; the second is made from the first."""
    folder, given = tmp_path_factory.mktemp("onnx"), inputs(2, 3)
    module = Calls(CALLS, list(given)).eval()
    with sluice.use_backend("reference"):  # for PyTorch in export's own check
        made = export(
            module,
            folder / "ort.onnx",
            args=tuple(given.values()),
            dynamic_shapes=(tuple(dynamic(name) for name in given),),
            input_names=list(given),
            output_names=module.output_names(given),
        )
    assert 0 < made.error < 1e-2
    assert made.nodes == {
        "LinearAttention": 14,
        "CausalConvWithState": 8,
    }  # two convolutions are the same
    model = to_standard(onnx_ir.load(folder / "ort.onnx"))
    onnx_ir.save(model, folder / "onnx.onnx")
    return folder


@pytest.fixture(scope="module", params=["ort", "onnx"])
def run(request, files):
    """The graph as a function of its inputs by name."""
    session = onnxruntime.InferenceSession(str(files / f"{request.param}.onnx"))
    outputs = [x.name for x in session.get_outputs()]

    def call(given):
        feeds = {x.name: given[x.name].numpy() for x in session.get_inputs()}
        found = zip(outputs, session.run(None, feeds), strict=True)
        return {name: torch.from_numpy(x) for name, x in found}

    return call


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_one_graph_equals_the_oracle_at_every_length(run, size):
    given = inputs(*size, seed=size[1])
    found = run(given)
    for name, call in CALLS.items():
        for output, exact in call.exact(given).items():
            made = found[f"{name}: {output}"]
            assert_within(made, exact, tolerance(made.dtype), name=f"{name}: {output}")


@pytest.mark.parametrize("name", ["gated_delta", "gated_delta, raw", "step split"])
def test_decode_goes_on_where_prefill_ended(run, name):
    """Several calls of the graph, linked by its states, against one call of the oracle."""
    whole, at = inputs(2, 70, seed=5), {"window": "window"}
    at["state"] = "state_vk" if "raw" in name else "state"
    tokens = {n for n in whole if dynamic(n).get(1)}
    state, parts, first = dict(whole), [], 0
    for T in (64, 1, 1, 3, 1):
        cut = {n: x[:, first : first + T].contiguous() for n, x in state.items() if n in tokens}
        found = run(state | cut)
        parts.append(found.get(f"{name}: o", found.get(f"{name}: y")))
        for output, carried in at.items():
            new = found.get(f"{name}: {output}")
            if new is not None:
                kept = state[carried].clone()
                kept[..., : new.shape[-1]] = new  # the window has a column no call of width 4 reads
                state[carried] = kept
        first += T
    exact = CALLS[name].exact(whole)
    assert_within(torch.cat(parts, 1), exact.get("o", exact.get("y")), 1e-5, name=name)
    assert_within(found[f"{name}: state"], exact["state"], 1e-5, name=f"{name}: state")


def test_the_standard_target_has_standard_operators_only(files):
    onnx.checker.check_model(str(files / "onnx.onnx"), full_check=True)
    model = onnx_ir.load(files / "onnx.onnx")
    assert {node.domain for node in model.graph.all_nodes()} == {""}
    assert dict(model.opset_imports) == {"": 20}
    assert not model.functions
    assert "Scan" in {node.op_type for node in model.graph}
