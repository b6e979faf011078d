"""``run_node``: ONNX's LinearAttention and CausalConvWithState, computed by sluice.

It takes and returns NumPy arrays, so that the tests of other projects for these operators can run
against sluice: those of ONNX Runtime (``com.microsoft``) and the node cases of onnx itself (opset
27, domain "").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from sluice import ops
from sluice.contract.errors import ContractError
from sluice.contract.spec import MAX_DECODE_TOKENS

DOMAINS = ("com.microsoft", "", "ai.onnx")
RULES = ("linear", "gated", "delta", "gated_delta")
WIDEST = 4  # taps of one call of causal_conv1d


def run_node(
    node: Any,
    inputs: Sequence[Any] | Mapping[str, Any],
    attributes: Mapping[str, Any] | None = None,
    *,
    domain: str = "com.microsoft",
    backend: str | None = None,
) -> tuple[Any, Any]:
    """Compute one ONNX node with sluice.

    Args:
        node: an ``onnx.NodeProto``, or an operator's name: "LinearAttention",
            "CausalConvWithState".
        inputs: NumPy arrays in the node's order, None for an omitted one; or by name, with a
            ``NodeProto``. float32, float16, or ml_dtypes' bfloat16.
        attributes: with a name; a ``NodeProto`` has its own.
        domain: with a name: "com.microsoft", or "" for the standard operator, which is stricter.
        backend: a backend of sluice; by default sluice chooses.

    Returns:
        the two outputs of either operator: output and present_state.

    Raises:
        ContractError: an operator, an attribute or an input that is unknown or does not fit.

    >>> import numpy
    >>> q = numpy.ones((1, 3, 2), dtype=numpy.float32)
    >>> heads = {"q_num_heads": 1, "kv_num_heads": 1, "update_rule": "linear", "scale": 1.0}
    >>> o, state = run_node("LinearAttention", [q, q, q], heads)
    >>> o[0].tolist(), state.shape
    ([[2.0, 2.0], [4.0, 4.0], [6.0, 6.0]], (1, 1, 2, 2))
    """
    if hasattr(node, "op_type"):
        name, domain, attributes = node.op_type, node.domain, _attributes(node)
        if isinstance(inputs, Mapping):
            inputs = [inputs[x] if x else None for x in node.input]
    else:
        name, attributes = node, dict(attributes or {})
        if isinstance(inputs, Mapping):
            raise ContractError("run_node", "inputs", "a list beside an operator's name", "a dict")
    if name not in _RUN:
        raise ContractError("run_node", "node", f"one of {', '.join(_RUN)}", repr(name))
    if domain not in DOMAINS:
        raise ContractError(name, "domain", f"one of {list(DOMAINS)}", repr(domain))
    run, known = _RUN[name]
    unknown = sorted(set(attributes) - set(known))
    if unknown:
        raise ContractError(name, unknown[0], f"one of the attributes {list(known)}", "another")
    tensors = [None if x is None else _tensor(name, x) for x in inputs]
    with torch.no_grad():
        made = run(name, tensors, {**known, **attributes}, domain == "com.microsoft", backend)
    return _array(made[0]), _array(made[1])


def _attention(
    op: str, inputs: list[Tensor | None], a: dict[str, Any], contributed: bool, backend: str | None
) -> tuple[Tensor, Tensor]:
    q, k, v, past, decay, beta = [*inputs, *[None] * (6 - len(inputs))]
    _need(op, min(len(inputs), 3) == 3 and all(x is not None for x in (q, k, v)), "query, key")
    rule, HQ, HV = _text(a["update_rule"]), a["q_num_heads"], a["kv_num_heads"]
    if rule not in RULES:
        raise ContractError(op, "update_rule", f"one of {list(RULES)}", repr(rule))
    if a["state_window"]:
        raise ContractError(op, "state_window", "0", a["state_window"])
    if not contributed and (HQ < HV or HQ % HV):
        raise ContractError(op, "q_num_heads", f"a multiple of kv_num_heads = {HV}", HQ)
    for name, x, used in (
        ("decay", decay, rule in ("gated", "gated_delta")),
        ("beta", beta, rule in ("delta", "gated_delta")),
    ):
        if used and x is None:
            raise ContractError(op, name, f'a tensor, since update_rule is "{rule}"', None)
        if x is not None and not used and not contributed:
            raise ContractError(op, name, f'none, since update_rule is "{rule}"', "a tensor")
    B, T = q.shape[:2]
    K, V = q.shape[2] // max(HQ, 1), v.shape[2] // max(HV, 1)
    q, k, v = (
        _heads(op, "query", q, HQ, K),
        _heads(op, "key", k, -1, K),
        _heads(op, "value", v, HV, V),
    )
    g = None
    if rule in ("gated", "gated_delta"):
        per_key = decay.shape[2] == HV * K
        g = decay.unflatten(2, (HV, K)) if per_key else decay
    strength = beta.expand(B, T, HV) if rule in ("delta", "gated_delta") else None
    state = q.new_zeros(B, HV, K, V) if past is None else past.clone()
    call = ops.decode if T <= MAX_DECODE_TOKENS else ops.prefill
    scale = float(a["scale"]) or None
    o, state = call(
        q, k, v, g, strength, scale=scale, state=state, state_layout="kv", backend=backend
    )
    return o.flatten(2), state


def _convolution(
    op: str, inputs: list[Tensor | None], a: dict[str, Any], contributed: bool, backend: str | None
) -> tuple[Tensor, Tensor]:
    x, weight, bias, past = [*inputs, *[None] * (4 - len(inputs))]
    _need(op, x is not None and weight is not None, "input, weight")
    activation = _text(a["activation"])
    if activation not in ("none", "silu", "swish"):
        raise ContractError(op, "activation", "none, silu or swish", repr(activation))
    for name, only in (("ndim", 1), ("dilation", 1), ("state_window", 0)):
        if a[name] != only:
            raise ContractError(op, name, str(only), a[name])
    if x.dim() != 3 or weight.dim() != 3:
        got = f"{list(x.shape)} and {list(weight.shape)}"
        raise ContractError(op, "input, weight", "3 dimensions", got)
    if not a["channels_last"]:
        x = x.transpose(1, 2)
        past = None if past is None else past.transpose(1, 2)
    (B, T, C), W = x.shape, weight.shape[2]
    past = x.new_zeros(B, W - 1, C) if past is None else past
    if tuple(past.shape) != (B, W - 1, C):
        raise ContractError(op, "past_state", f"{W - 1} columns of {C}", list(past.shape))
    silu = "silu" if activation != "none" else None
    if 2 <= W <= WIDEST:
        state = past.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        y, state = ops.causal_conv1d(x, weight, bias, activation=silu, state=state, backend=backend)
        present = state.transpose(1, 2)
    else:
        line = torch.cat([past, x], dim=1)
        y, present = _any_width(line, weight[:, 0], bias, silu, backend), line[:, T:]
    if not a["channels_last"]:
        y, present = y.transpose(1, 2), present.transpose(1, 2)
    return y, present


def _any_width(
    line: Tensor, taps: Tensor, bias: Tensor | None, silu: str | None, backend: str | None
) -> Tensor:
    """For wider convolutions: add up a few taps at a time, and round once."""
    W, T = taps.shape[1], line.shape[1] - taps.shape[1] + 1
    total = line.new_zeros(line.shape[0], T, line.shape[2], dtype=torch.float32)
    for first in range(0, W, WIDEST):
        part = taps[:, first : first + WIDEST].float()
        last = first + part.shape[1] - 1  # tap `last` of output t lies at line[t + last]
        if part.shape[1] == 1:
            part = torch.nn.functional.pad(part, (1, 0))
        y, _ = ops.causal_conv1d(line.float(), part, activation=None, backend=backend)
        total += y[:, last : last + T]
    total = total if bias is None else total + bias.float()
    return (torch.nn.functional.silu(total) if silu else total).to(line.dtype)


# each operator, its attributes and their defaults
_RUN: dict[str, tuple[Any, dict[str, Any]]] = {
    "LinearAttention": (
        _attention,
        {
            "update_rule": "gated_delta",
            "scale": 0.0,
            "q_num_heads": 0,
            "kv_num_heads": 0,
            "chunk_size": 64,
            "state_window": 0,
        },
    ),
    "CausalConvWithState": (
        _convolution,
        {"activation": "none", "ndim": 1, "channels_last": 0, "dilation": 1, "state_window": 0},
    ),
}


def _heads(op: str, name: str, x: Tensor, heads: int, width: int) -> Tensor:
    """[B, T, heads width] as [B, T, heads, width]; any number of heads for -1."""
    if x.dim() != 3 or width < 1 or x.shape[2] % width or heads * width not in (-width, x.shape[2]):
        expected = f"[B, T, {'heads' if heads < 0 else heads}·{width}]"
        raise ContractError(op, name, expected, f"shape {list(x.shape)}")
    return x.unflatten(2, (x.shape[2] // width, width))


def _need(op: str, given: bool, names: str) -> None:
    if not given:
        raise ContractError(op, names, "a tensor each", None)


def _attributes(node: Any) -> dict[str, Any]:
    from onnx import helper

    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _tensor(op: str, x: Any) -> Tensor:
    """A tensor over an array's memory; bfloat16 is a dtype of ml_dtypes."""
    x = numpy.ascontiguousarray(x)
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(numpy.int16)).view(torch.bfloat16)
    if x.dtype not in (numpy.float32, numpy.float16):
        raise ContractError(op, "inputs", "float32, float16 or bfloat16", x.dtype)
    return torch.from_numpy(x)


def _array(x: Tensor) -> Any:
    x = x.contiguous()
    if x.dtype != torch.bfloat16:
        return x.numpy()
    from ml_dtypes import bfloat16

    return x.view(torch.int16).numpy().view(bfloat16)
