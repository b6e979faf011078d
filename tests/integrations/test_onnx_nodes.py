"""``run_node`` and the standard form of the two operators: node by node, against the oracle.

onnx's own node cases for both operators run against sluice here; docs/onnx.md says how to run ONNX
Runtime's parity tests.
"""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch

pytest.importorskip("onnxscript", reason="needs sluice-gdn[onnx]")
pytest.importorskip("onnxruntime", reason="needs sluice-gdn[onnx]")

import numpy as np
import onnx_ir
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from tests.integrations.onnx_calls import GROUPS, H, K, V, inputs

from sluice.contract.errors import ContractError
from sluice.integrations.onnx import run_node
from sluice.integrations.onnx.standard import to_standard
from sluice.testing import oracle
from sluice.testing.compare import assert_within

RULES = ("linear", "gated", "delta", "gated_delta")
NAMES = ("query", "key", "value", "past_state", "decay", "beta")
NODES = [
    (rule, heads, state, per_key, shared)
    for rule, heads, state, per_key, shared in itertools.product(
        RULES, GROUPS, (True, False), (True, False), (True, False)
    )
    if ("gated" in rule or not per_key) and ("delta" in rule or not shared)
]


def attention_node(rule, heads, state, per_key, shared, T):
    """The node, its inputs by name, and the oracle's result."""
    hq, hk, hv = GROUPS[heads]
    i = inputs(2, T, seed=T)
    q, k, v = i["q"][:, :, :hq], i["k"][:, :, :hk], i["v"][:, :, :hv]
    g = i["g_key" if per_key else "g"][:, :, :hv] if "gated" in rule else None
    beta = i["beta"][:, :, : 1 if shared else hv] if "delta" in rule else None
    past = i["state"][:, :hv].contiguous() if state else None
    wide = None if beta is None else beta.expand(-1, -1, hv)
    exact = oracle.delta(q, k, v, g, wide, state=past, state_layout="kv", scale=0.3)
    packed = (q.flatten(2), k.flatten(2), v.flatten(2), past, g, beta)
    packed = (*packed[:4], None if g is None else g.flatten(2), beta)
    feeds = {n: x.numpy() for n, x in zip(NAMES, packed, strict=True) if x is not None}
    attributes = {"q_num_heads": hq, "kv_num_heads": hv, "update_rule": rule, "scale": 0.3}
    names = [n if n in feeds else "" for n in NAMES]
    node = helper.make_node(
        "LinearAttention", names, ["o", "state"], domain="com.microsoft", **attributes
    )
    return node, feeds, [x.flatten(2) if x is exact[0] else x for x in exact]


def model_of(node, feeds):
    """A model of one node with dynamic batch and length."""
    infos = []
    for name, x in feeds.items():
        shape = ["B", *x.shape[1:]] if name == "past_state" else ["B", "T", x.shape[2]]
        infos.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in node.output]
    graph = helper.make_graph([node], "node", infos, outputs)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("case", NODES, ids=lambda c: "-".join(map(str, c)))
def test_sluice_the_kernel_and_the_standard_form_equal_the_oracle(case):
    """All rules, groupings, decays, kinds of beta, states: one model for two lengths."""
    sessions = None
    for T in (1, 7):
        node, feeds, exact = attention_node(*case, T)
        if sessions is None:
            model = model_of(node, feeds)
            standard = onnx_ir.to_proto(to_standard(onnx_ir.from_proto(model)))
            sessions = [
                onnxruntime.InferenceSession(m.SerializeToString()) for m in (model, standard)
            ]
        made = {
            "sluice": run_node(node, feeds, backend="reference"),
            "kernel": sessions[0].run(None, feeds),
            "standard": sessions[1].run(None, feeds),
        }
        for name, outputs in made.items():
            for x, e in zip(outputs, exact, strict=True):
                assert_within(torch.from_numpy(x), e, 1e-5, name=f"{name}, T={T}")


def test_the_standard_form_runs_in_onnxs_reference_evaluator():
    node, feeds, exact = attention_node("gated_delta", "fewer q", True, False, False, 9)
    standard = to_standard(onnx_ir.from_proto(model_of(node, feeds)))
    made = ReferenceEvaluator(onnx_ir.to_proto(standard)).run(None, feeds)
    for x, e in zip(made, exact, strict=True):
        assert_within(torch.from_numpy(x), e, 1e-5, name="reference evaluator")


@pytest.mark.parametrize("width", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("channels_last", [0, 1])
def test_a_convolution_of_any_width(width, channels_last):
    gen = torch.Generator().manual_seed(width)
    x, weight = torch.randn(2, 6, 11, generator=gen), torch.randn(6, 1, width, generator=gen)
    bias, past = torch.randn(6, generator=gen), torch.randn(2, 6, width - 1, generator=gen)
    kept = past.clone()
    line = torch.cat([past, x], -1).double()
    y = torch.nn.functional.conv1d(line, weight.double(), bias.double(), groups=6)
    exact = [torch.nn.functional.silu(y), line[..., 11:]]
    given = [x, weight, bias, past]
    if channels_last:
        given = [x.transpose(1, 2), weight, bias, past.transpose(1, 2)]
        exact = [e.transpose(1, 2) for e in exact]
    attributes = {"activation": "swish", "channels_last": channels_last}
    arrays = [z.numpy() for z in given]
    made = run_node("CausalConvWithState", arrays, attributes, backend="reference")
    for z, e in zip(made, exact, strict=True):
        assert_within(torch.from_numpy(z), e, 1e-5, name=f"width {width}")
    assert torch.equal(past, kept)  # an input must not be updated


def node_cases(op, module):
    """onnx's own cases: (name, node, inputs by name, outputs, tolerances)."""
    from onnx.backend.test.case import node as cases

    file = importlib.import_module(f"onnx.backend.test.case.node.{module}")
    found, expect = [], cases.expect

    def collect(node, inputs, outputs, name, **options):
        names = [n for n in node.input if n]
        found.append((name, node, dict(zip(names, inputs, strict=True)), outputs))

    file.expect = collect
    try:
        kind = getattr(file, op)
        for name in sorted(vars(kind)):
            if name.startswith("export"):
                getattr(kind, name)()
    finally:
        file.expect = expect
    return found


@pytest.mark.parametrize(
    ("op", "module", "count"),
    [
        ("LinearAttention", "linear_attention", 14),
        ("CausalConvWithState", "causal_conv_with_state", 13),
    ],
)
def test_onnxs_own_node_cases(op, module, count):
    pytest.importorskip(f"onnx.backend.test.case.node.{module}", reason="needs onnx >= 1.22")
    found = node_cases(op, module)
    assert len(found) >= count
    for name, node, feeds, outputs in found:
        made = run_node(node, feeds, backend="reference")
        for x, exact in zip(made, outputs, strict=True):
            assert x.dtype == exact.dtype, name
            np.testing.assert_allclose(x, exact, rtol=1e-3, atol=1e-7, err_msg=name)


HEADS = {"q_num_heads": 2, "kv_num_heads": 4}
ONES = np.ones((1, 2, 8), dtype=np.float32)


@pytest.mark.parametrize(
    ("node", "given", "attributes", "domain", "message"),
    [
        ("Attention", [ONES] * 3, {}, "", "node: expected one of LinearAttention"),
        ("LinearAttention", [ONES] * 3, HEADS, "org.other", "domain: expected one of"),
        ("LinearAttention", [ONES] * 3, {**HEADS, "window": 3}, "com.microsoft", "window"),
        ("LinearAttention", [ONES] * 3, {**HEADS, "update_rule": "kda"}, "", "update_rule"),
        ("LinearAttention", [ONES] * 3, HEADS, "com.microsoft", "decay: expected a tensor"),
        ("LinearAttention", [ONES] * 3, HEADS, "", "q_num_heads: expected a multiple"),
        ("LinearAttention", [ONES] * 3, {**HEADS, "state_window": 2}, "com.microsoft", "window"),
        ("LinearAttention", [ONES.astype("d")] * 3, HEADS, "", "expected float32, float16"),
        ("CausalConvWithState", [ONES, ONES[:, :1]], {"dilation": 2}, "", "dilation: expected 1"),
        ("CausalConvWithState", [ONES, ONES[:, :1]], {"activation": "relu"}, "", "activation"),
    ],
)
def test_what_is_not_known_is_refused(node, given, attributes, domain, message):
    with pytest.raises(ContractError, match=message):
        run_node(node, given, attributes, domain=domain)


def test_bfloat16_arrays_come_and_go():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rounded = inputs(1, 3)["v"][:, :, :, :K].flatten(2).numpy().astype(ml_dtypes.bfloat16)
    heads = {"q_num_heads": H, "kv_num_heads": H, "update_rule": "linear"}
    o, state = run_node("LinearAttention", [rounded] * 3, heads, backend="reference")
    assert o.dtype == state.dtype == ml_dtypes.bfloat16
    x = torch.from_numpy(rounded.astype(np.float32)).unflatten(2, (H, K))
    exact, _ = oracle.delta(x, x, x)
    assert_within(torch.from_numpy(o.astype(np.float32)), exact.flatten(2), 1e-2, name="o")
    assert V != K  # the states of both operators are not square elsewhere
