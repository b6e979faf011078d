"""Many calls of sluice's operators as one module, so that one export tests them all.

A call is a function of the inputs by name; its oracle is the same call in float64. Every call gets
its own copy of the states. Its results and its final states are outputs of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import sluice
from sluice.testing import oracle
from sluice.testing.inputs import decay, generator, keys, normal, raw_decay, uniform

H, K, V, W = 4, 8, 12, 4
HK, HV = 2, 4
D = 2 * HK * K + HV * V
GROUPS = {"equal": (4, 4, 4), "fewer q": (2, 2, 4), "fewer k": (4, 1, 4), "more q": (4, 2, 2)}
NARROW = ("q", "k", "v", "x", "z", "weight", "bias", "window", "norm")  # float16 in float16 calls

Inputs = dict[str, Tensor]
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Call:
    """One call and its oracle."""

    run: Callable[[Inputs], Outputs]
    exact: Callable[[Inputs], Outputs]


class Calls(nn.Module):
    """The module: inputs by position, in the order of ``names``; all outputs in one list."""

    def __init__(self, calls: dict[str, Call], names: list[str]) -> None:
        super().__init__()
        self.calls, self.names = calls, names

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        given = dict(zip(self.names, inputs, strict=True))
        return [x for call in self.calls.values() for x in call.run(given).values()]

    def output_names(self, inputs: Inputs) -> list[str]:
        return [f"{name}: {x}" for name, c in self.calls.items() for x in c.exact(inputs)]


def inputs(B: int, T: int, *, seed: int = 0) -> Inputs:
    """All tensors that the calls take, in float32."""
    gen = generator(seed)
    raw = raw_decay(gen, B, T, H)
    given = {
        **raw,
        "g": decay(**raw),
        "g_key": -uniform(gen, B, T, H, K),
        "beta": uniform(gen, B, T, H),
        "b": normal(gen, B, T, H),
        "a_key": normal(gen, B, T, H, K),
        "dt_key": normal(gen, H, K),
        "state": normal(gen, B, H, K, V),
        "state_vk": normal(gen, B, H, V, K),
        "q": normal(gen, B, T, H, K),
        "k": keys(gen, B, T, H, K),
        "v": normal(gen, B, T, H, V),
        "x": normal(gen, B, T, D),
        "z": normal(gen, B, T, HV * V),
        "weight": normal(gen, D, W) / 2,
        "bias": normal(gen, D),
        "window": normal(gen, B, D, W),
        "norm": normal(gen, V),
    }
    given = {name: x.float() for name, x in given.items()}
    return given | {"has_state": torch.arange(B) % 2 == 0}


def dynamic(name: str) -> dict[int, str]:
    """The dynamic dimensions of an input."""
    if name in ("A_log", "dt_bias", "dt_key", "weight", "bias", "norm"):
        return {}
    return {0: "B"} if name in ("state", "state_vk", "window", "has_state") else {0: "B", 1: "T"}


def attention(op: str, rule: str, heads: str, **options: Any) -> Call:
    """A call of ``prefill`` or ``decode``; ``state`` names an input, and may be missing."""
    hq, hk, hv = GROUPS[heads]
    given = options.pop("state", None)

    def arguments(i: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        g = i["g_key" if "per key" in rule else "g"][:, :, :hv] if "gated" in rule else None
        beta = i["beta"][:, :, :hv] if "delta" in rule else None
        if options.get("A_log") is not None:
            g = i["a_key" if "per key" in rule else "a"][:, :, :hv]
            beta = None if beta is None else i["b"][:, :, :hv]
        named = {n: i[x][:hv] if isinstance(x, str) and x in i else x for n, x in options.items()}
        if "has_state" in options:
            named["has_state"] = i["has_state"]
        named["state"] = None if given is None else i[given][:, :hv].clone()
        q, k, v = i["q"][:, :, :hq], i["k"][:, :, :hk], i["v"][:, :, :hv]
        if options.get("layout") == "bhtd":
            q, k, v, g, beta = (
                None if x is None else x.transpose(1, 2) for x in (q, k, v, g, beta)
            )
        return (q, k, v, g, beta), named

    def run(i: Inputs) -> Outputs:
        tensors, named = arguments(i)
        o, state = getattr(sluice, op)(*tensors, **named)
        return {"o": o, "state": state}

    def exact(i: Inputs) -> Outputs:
        tensors, named = arguments(i)
        o, state = oracle.delta(*tensors, **named)
        return {"o": o, "state": state}

    return Call(run, exact)


def recurrence() -> dict[str, Call]:
    """Every rule, every grouping, every option of the recurrence, from a state and from none."""
    raw = {"A_log": "A_log", "dt_bias": "dt_bias"}
    kv = {"state": "state", "state_layout": "kv"}
    return {
        "linear": attention("prefill", "linear", "equal", **kv),
        "linear, scale 0": attention("prefill", "linear", "more q", scale=0.0),
        "gated": attention("prefill", "gated", "more q", **kv),
        "gated per key": attention("prefill", "gated per key", "fewer q", state_layout="kv"),
        "gated, raw": attention(
            "prefill", "gated", "fewer q", state="state_vk", A_log="A_log", layout="bhtd"
        ),
        "delta": attention("decode", "delta", "fewer q", has_state=True, scale=0.3, **kv),
        "delta, from nothing": attention("prefill", "delta", "fewer k"),
        "gated_delta": attention("prefill", "gated_delta", "fewer q", **kv),
        "gated_delta, raw": attention(
            "decode", "gated_delta", "fewer q", state="state_vk", neg_eigval=True, **raw
        ),
        "gated_delta per key, raw": attention(
            "prefill",
            "gated_delta per key",
            "more q",
            state="state_vk",
            normalize_qk=True,
            A_log="A_log",
            dt_bias="dt_key",
        ),
    }


def conv(width: int, columns: int | None, bias: bool, activation: str | None, **more: Any) -> Call:
    """``causal_conv1d`` of this width, from a window with this number of columns."""

    def arguments(i: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        state = None if columns is None else i["window"][..., :columns].clone()
        named = {"activation": activation, "state": state, **more}
        return (i["x"], i["weight"][:, :width], i["bias"] if bias else None), named

    def run(i: Inputs) -> Outputs:
        tensors, named = arguments(i)
        return dict(zip(("y", "state"), sluice.causal_conv1d(*tensors, **named), strict=True))

    def exact(i: Inputs) -> Outputs:
        tensors, named = arguments(i)
        return dict(zip(("y", "state"), oracle.conv(*tensors, **named), strict=True))

    return Call(run, exact)


def qkv(state: bool, **options: Any) -> Call:
    heads = {"num_k_heads": HK, "num_v_heads": HV, "head_k_dim": K, "head_v_dim": V}

    def arguments(i: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        gates = {name: i[name] for name in ("a", "b", "A_log", "dt_bias")}
        window = i["window"].clone() if state else None
        return (i["x"], i["weight"]), {**heads, **gates, **options, "state": window}

    def run(i: Inputs) -> Outputs:
        tensors, named = arguments(i)
        heads = sluice.conv_qkv(*tensors, **named)
        made = dict(zip(("q", "k", "v", "g", "beta"), heads, strict=True))
        return made | ({"state": named["state"]} if state else {})

    def exact(i: Inputs) -> Outputs:
        tensors, named = arguments(i)
        made, window = oracle.conv_qkv(*tensors, **named)
        named = dict(zip(("q", "k", "v", "g", "beta"), made, strict=True))
        return named | ({"state": window} if state else {})

    return Call(run, exact)


def norm(activation: str) -> Call:
    def arguments(i: Inputs) -> tuple[Any, ...]:
        return i["v"], i["z"].unflatten(-1, (HV, V)), i["norm"]

    def run(i: Inputs) -> Outputs:
        return {"y": sluice.rms_norm_gated(*arguments(i), eps=1e-5, activation=activation)}

    def exact(i: Inputs) -> Outputs:
        return {"y": oracle.rms_norm_gated(*arguments(i), eps=1e-5, activation=activation)}

    return Call(run, exact)


def step(order: str, layout: str, columns: int, **options: Any) -> Call:
    def arguments(i: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        together = (torch.cat([i["x"], i["z"]], -1), torch.cat([i["b"], i["a"]], -1))
        pairs = ((i["x"], i["z"]), (i["b"], i["a"]))
        named = {"conv_weight": i["weight"], "conv_bias": i["bias"], "norm_weight": i["norm"]}
        named |= {"A_log": i["A_log"], "dt_bias": i["dt_bias"], "order": order, **options}
        named["conv_state"] = i["window"][..., :columns].clone()
        named["state"] = i["state" if layout == "kv" else "state_vk"].clone()
        named["state_layout"] = layout
        return (together if order == "interleaved" else pairs), named

    def run(i: Inputs) -> Outputs:
        tensors, named = arguments(i)
        y = sluice.step(*tensors, **named)
        return {"y": y, "window": named["conv_state"], "state": named["state"]}

    def exact(i: Inputs) -> Outputs:
        tensors, named = arguments(i)
        return dict(zip(("y", "window", "state"), oracle.step(*tensors, **named), strict=True))

    return Call(run, exact)


def half(call: Call) -> Call:
    """The call on float16 tensors; gates and states stay float32."""

    def narrow(i: Inputs) -> Inputs:
        return i | {name: i[name].half() for name in NARROW}

    return Call(lambda i: call.run(narrow(i)), lambda i: call.exact(narrow(i)))


def around() -> dict[str, Call]:
    """The operators around the recurrence."""
    return {
        "conv 4": conv(4, 3, True, "silu"),
        "conv 3, longer window": conv(3, 4, False, None),
        "conv 2, frozen": conv(2, 1, False, "silu", freeze=True),
        "conv 4, from nothing": conv(4, None, True, None),
        "conv_qkv": qkv(True, neg_eigval=True),
        "norm": norm("sigmoid"),
        "step split": step("split", "kv", 3, gate_activation="sigmoid", neg_eigval=True),
        "step interleaved": step("interleaved", "vk", 4, scale=0.5),
    }


def calls() -> dict[str, Call]:
    """All of them, and three in float16."""
    whole = recurrence() | around()
    narrow = ("gated_delta, raw", "conv_qkv", "step split")
    return whole | {f"float16 {name}": half(whole[name]) for name in narrow}
