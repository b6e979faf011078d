"""Graphs of standard operators only: the two contributed operators become inlined functions.

The recurrence is a ``Scan`` over tokens whose body is the update rule; the convolution is a
depthwise ``Conv`` after a ``Concat`` with the window. Both are built from a node's attributes and
the static widths of its inputs; batch and length stay dynamic. All operators are of opset 18 or
older, so any runtime can load the result.

The operators of the same names in opset 27 would be shorter. But ONNX Runtime 1.31 refuses that
opset, and the standard LinearAttention forbids fewer query than value heads, which Qwen has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice.contract.errors import ContractError, SluiceError

CONTRIBUTED = "com.microsoft"
FUNCTIONS = "sluice"  # the domain of the functions until they are inlined
_FAR = 2**31 - 1


def to_standard(model: Any) -> Any:
    """Replace every contributed node of an ``onnx_ir.Model``; returns it.

    Raises:
        ContractError: a node without static widths, or another operator that is not standard.
    """
    import onnx_ir
    from onnx_ir.passes.common import InlinePass

    made: dict[Any, Any] = {}
    for node in model.graph.all_nodes():
        if node.domain != CONTRIBUTED:
            continue
        if node.op_type not in _FUNCTIONS:
            known = f"one of {', '.join(_FUNCTIONS)}"
            raise ContractError("export", 'target="onnx"', known, node.op_type)
        shapes = tuple(_static(x) for x in node.inputs)
        attributes = {name: a.value for name, a in node.attributes.items()}
        key = (node.op_type, shapes, tuple(sorted(attributes.items())))
        if key not in made:
            name = f"{node.op_type}_{len(made)}"
            body = _Body(name, model.opset_imports[""])
            proto = _FUNCTIONS[node.op_type](body, shapes, attributes)
            made[key] = onnx_ir.serde.deserialize_function(proto)
            model.functions[made[key].identifier()] = made[key]
        node.domain, node.op_type, node.version = FUNCTIONS, made[key].name, None
        node.attributes.clear()
        # a function's body is made for the inputs that are given
        given = [x for x in node.inputs if x is not None]
        node.resize_inputs(len(given))
        for i, x in enumerate(given):
            node.replace_input_with(i, x)
    InlinePass()(model)
    for domain in (FUNCTIONS, CONTRIBUTED):
        model.opset_imports.pop(domain, None)
    foreign = {f"{n.domain}::{n.op_type}" for n in model.graph.all_nodes() if n.domain}
    if foreign:
        raise ContractError("export", 'target="onnx"', "standard operators only", sorted(foreign))
    return model


def _static(x: Any) -> tuple[int | None, ...] | None:
    """The known dimensions of an input; None for an input that is not given."""
    if x is None:
        return None
    return tuple(n if isinstance(n, int) else None for n in x.shape or ())


def _size(shapes: Sequence[Any], at: int, dim: int, name: str) -> int:
    """A dimension that must be known."""
    shape = shapes[at] if at < len(shapes) and shapes[at] else ()
    if len(shape) == 0 or shape[dim] is None:
        raise ContractError("export", 'target="onnx"', f"a static {name}", f"shape {list(shape)}")
    return shape[dim]


@dataclass
class _Body:
    """The nodes of a function in the order they are added; it makes their names."""

    name: str
    opset: int
    nodes: list[Any] = field(default_factory=list)

    def __call__(self, op: str, *inputs: str, outputs: Sequence[str] = (), **options: Any) -> str:
        from onnx import helper

        made = list(outputs) or [f"{op.lower()}_{len(self.nodes)}"]
        self.nodes.append(helper.make_node(op, list(inputs), made, **options))
        return made[0]

    def ints(self, *values: int) -> str:
        return self("Constant", value_ints=list(values))

    def number(self, value: float) -> str:
        return self("Constant", value_float=value)

    def zeros(self, *shape: str) -> str:
        return self("ConstantOfShape", self("Concat", *shape, axis=0))

    def function(self, inputs: list[str]) -> Any:
        from onnx import helper

        opset = [helper.make_opsetid("", self.opset)]
        outputs = ["output", "present"]
        return helper.make_function(
            FUNCTIONS, self.name, inputs, outputs, self.nodes, opset_imports=opset
        )


def _given(names: Sequence[str], shapes: Sequence[Any]) -> list[str]:
    """The names of the inputs that a node has; trailing ones may be missing."""
    return [name for name, shape in zip(names, shapes, strict=False) if shape is not None]


def _linear_attention(f: _Body, shapes: Sequence[Any], attributes: dict[str, Any]) -> Any:
    HQ, HV = attributes["q_num_heads"], attributes["kv_num_heads"]
    given = _given(("q", "k", "v", "past", "decay", "beta"), shapes)
    K, V = _size(shapes, 0, 2, "width of q") // HQ, _size(shapes, 2, 2, "width of v") // HV
    HK, group = _size(shapes, 1, 2, "width of k") // K, max(1, HQ // HV)
    rule = attributes.get("update_rule", "gated_delta")
    scale = attributes.get("scale", 0.0) or K**-0.5

    def heads(x: str, have: int, width: int) -> str:
        """[B, T, have width] as [T, B, HV, width]; fewer heads are repeated to HV."""
        x = f("Reshape", x, f.ints(0, 0, have, width))
        if have < HV:
            x = f("Gather", x, f.ints(*(h * have // HV for h in range(HV))), axis=2)
        return f("Transpose", x, perm=[1, 0, 2, 3])

    batch = f("Shape", "q", start=0, end=1)
    q = f("Mul", "q", f.number(scale))
    if HQ > HV:  # [T, B, HV, group, K]: group is the query heads per state
        q = f("Reshape", q, f.ints(0, 0, HV, group, K))
        q = f("Transpose", q, perm=[1, 0, 2, 3, 4])
    else:
        q = f("Unsqueeze", heads(q, HQ, K), f.ints(3))
    k = heads("k", HK, K)
    scanned = {
        "q_t": q,
        "key_row": f("Unsqueeze", k, f.ints(3)),
        "key_column": f("Unsqueeze", k, f.ints(4)),
        "v_t": f("Unsqueeze", heads("v", HV, V), f.ints(3)),
    }
    if rule in ("gated", "gated_delta"):
        per_key = _size(shapes, 4, 2, "width of the decay") == HV * K
        decay = f("Exp", heads("decay", HV, K if per_key else 1))
        scanned["decay_t"] = f("Unsqueeze", decay, f.ints(4))
    if rule in ("delta", "gated_delta"):
        shared = _size(shapes, 5, 2, "width of beta") == 1
        beta = f("Reshape", "beta", f.ints(0, 0, 1 if shared else HV, 1, 1))
        scanned["beta_t"] = f("Transpose", beta, perm=[1, 0, 2, 3, 4])
    past = "past" if "past" in given else f.zeros(batch, f.ints(HV, K, V))
    f(
        "Scan",
        past,
        *scanned.values(),
        outputs=["present", "tokens"],
        num_scan_inputs=len(scanned),
        body=_update(rule, list(scanned), (HV, group, K, V)),
    )
    tokens = f("Transpose", "tokens", perm=[1, 0, 2, 3, 4])
    f("Reshape", tokens, f.ints(0, 0, max(HQ, HV) * V), outputs=["output"])
    return f.function(given)


def _update(rule: str, scanned: list[str], sizes: tuple[int, int, int, int]) -> Any:
    """One token's update rule, the body of the ``Scan``; the state is [B, HV, K, V]."""
    from onnx import TensorProto, helper

    HV, group, K, V = sizes
    f = _Body("", 0)
    state = f("Mul", "decay_t", "state") if "decay_t" in scanned else "state"
    d = "v_t"
    if "beta_t" in scanned:
        d = f("Mul", "beta_t", f("Sub", "v_t", f("MatMul", "key_row", state)))
    f("Add", state, f("Mul", "key_column", d), outputs=["new_state"])
    f("MatMul", "q_t", "new_state", outputs=["o_t"])
    f("Identity", "new_state", outputs=["carried"])

    def info(name: str, *shape: int | None) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, *shape])

    return helper.make_graph(
        f.nodes,
        rule,
        [info("state", HV, K, V), *(info(x, None, None, None) for x in scanned)],
        [info("carried", HV, K, V), info("o_t", HV, group, V)],
    )


def _causal_conv(f: _Body, shapes: Sequence[Any], attributes: dict[str, Any]) -> Any:
    given = _given(("x", "weight", "bias", "past"), shapes)
    if attributes.get("channels_last") or attributes.get("dilation", 1) != 1:
        raise SluiceError('export: target="onnx": expected channels first, dilation 1')
    C, W = _size(shapes, 1, 0, "number of channels"), _size(shapes, 1, 2, "conv width")
    past = "past"
    if "past" not in given:
        past = f.zeros(f("Shape", "x", start=0, end=2), f.ints(W - 1))
    line = f("Concat", past, "x", axis=2)
    length = f("Shape", "x", start=2, end=3)
    f("Slice", line, length, f.ints(_FAR), f.ints(2), outputs=["present"])
    bias = ["bias"] if "bias" in given else []
    if attributes.get("activation", "none") == "none":
        f("Conv", line, "weight", *bias, group=C, outputs=["output"])
    else:
        y = f("Conv", line, "weight", *bias, group=C)
        f("Mul", y, f("Sigmoid", y), outputs=["output"])
    return f.function(given)


_FUNCTIONS = {"LinearAttention": _linear_attention, "CausalConvWithState": _causal_conv}
