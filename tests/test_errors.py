"""Every bad call is refused: the error names the argument, what was expected and what came.

One row of a table is one change to a valid call. The message must name the argument and contain
both parts, and every tensor of the call, the pools included, must keep its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import sluice
from sluice import calls
from sluice.testing.case import whole_storage
from sluice.testing.compare import assert_same_bits

N, HK, HV, K, V, W, P = 2, 2, 4, 8, 6, 4, 7
D = 2 * HK * K + HV * V


def _floats(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def _index(*values: int) -> Tensor:
    return torch.tensor(values)


def _delta(T: int) -> dict[str, Any]:
    tokens = {"q": _floats(N, T, HK, K), "k": _floats(N, T, HK, K), "v": _floats(N, T, HV, V)}
    gates = {"g": -_floats(N, T, HV), "beta": _floats(N, T, HV)}
    return {**tokens, **gates, "state": _floats(P, HV, V, K), "slots": _index(3, 1)}


def _valid(op: str) -> dict[str, Any]:
    """Keyword arguments that the operator takes."""
    if op == "prefill":
        return _delta(T=5)
    if op == "decode":
        return _delta(T=2)
    if op == "verify":
        return {**_delta(T=3), "conv_inputs": _floats(N, 3, D), "conv_state": _floats(P, D, W - 1)}
    if op == "commit":
        return {"draft": sluice.verify(**_valid("verify"))[1], "num_accepted": _index(0, 3)}
    if op == "rms_norm_gated":
        return {"x": _floats(3, V), "z": _floats(3, V), "weight": _floats(V)}
    if op == "step":
        weights = {"conv_weight": _floats(D, W), "conv_bias": _floats(D), "A_log": _floats(HV)}
        weights |= {"dt_bias": _floats(HV), "norm_weight": _floats(V)}
        pools = {"conv_state": _floats(P, D, W - 1), "state": _floats(P, HV, V, K)}
        inputs = {"qkvz": _floats(N, D + HV * V), "ba": _floats(N, 2 * HV)}
        return {**inputs, **weights, **pools, "slots": _index(3, 1)}
    conv = {"x": _floats(N, 5, D), "weight": _floats(D, W), "bias": _floats(D)}
    conv |= {"state": _floats(P, D, W - 1), "slots": _index(3, 1)}
    if op == "causal_conv1d":
        return conv
    gates = {"a": _floats(N, 5, HV), "b": _floats(N, 5, HV), "A_log": _floats(HV)}
    heads = {"num_k_heads": HK, "num_v_heads": HV, "head_k_dim": K, "head_v_dim": V}
    return {**conv, **gates, "dt_bias": _floats(HV), **heads}


Table = dict[str, list[tuple[dict[str, Any], str]]]
"""For each operator: a change to its valid call (values, or functions of the valid ones), and the
message, as "argument | a part of what was expected | a part of what came"."""


def _meta(x: Tensor) -> Tensor:
    return x.to("meta")


def _half(x: Tensor) -> Tensor:
    return x.half()


def _cut(x: Tensor) -> Tensor:
    return x[..., :-1]


def _strided(x: Tensor) -> Tensor:
    """The same shape with a last stride of 2."""
    return torch.stack([x, x], dim=-1)[..., 0]


def _expanded(x: Tensor) -> Tensor:
    """All rows of the pool share the same memory."""
    return x[:1].expand_as(x)


def _with(**parts: Any) -> Callable[[sluice.Draft], sluice.Draft]:
    return lambda draft: draft._replace(**{n: f(getattr(draft, n)) for n, f in parts.items()})


def _packed(*bounds: int) -> dict[str, Any]:
    """The two rows of a token tensor as one packed row, with these borders."""
    names = ("q", "k", "v", "g", "beta")
    return {**{n: lambda x: x.flatten(0, 1) for n in names}, "cu_seqlens": _index(*bounds)}


def _packed_conv(*bounds: int) -> dict[str, Any]:
    return {"x": lambda x: x.flatten(0, 1), "cu_seqlens": _index(*bounds)}


def _kept(slots: list[list[int]], **how: Any) -> sluice.Checkpoints:
    if "positions" in how:
        how["positions"] = torch.tensor(how["positions"])
    return sluice.Checkpoints(torch.tensor(slots), **how)


NAN, INF = float("nan"), float("inf")


def _spoil(value: float) -> Callable[[Tensor], Tensor]:
    def spoil(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1)[1] = value
        return x

    return spoil


def _buffers(**changes: Callable[[Tensor], Any]) -> tuple[Any, ...]:
    made = {
        "q": _floats(N, 5, HK, K),
        "k": _floats(N, 5, HK, K),
        "v": _floats(N, 5, HV, V),
        "g": _floats(N, 5, HV),
        "beta": _floats(N, 5, HV),
    }
    return tuple(changes.get(name, lambda x: x)(x) for name, x in made.items())


METADATA: Table = {
    "prefill": [
        ({"q": lambda q: q[0]}, "cu_seqlens | packed input | None"),
        ({"q": lambda q: q[0, 0]}, "q | dimensions | shape [2, 8]"),
        ({"q": lambda q: q[None]}, "q | 4 dimensions | shape [1, 2, 5, 2, 8]"),
        ({"q": _half}, "k | dtype float16 | torch.float32"),
        ({"q": lambda q: q.long()}, "q | dtype float32 | torch.int64"),
        ({"q": [1.0]}, "q | a tensor | list"),
        ({"q": _strided}, "q | a last dimension of stride 1 | strides ["),
        ({"q": lambda q: q[:, :, :0]}, "q, k, v | at least one head | (0, 2, 4"),
        ({"q": lambda q: torch.cat([q, q[:, :, :1]], 2)}, "q | divide v's 4 | 3 heads"),
        ({"k": lambda k: k[:, :3]}, "k | shape [2, 5, any, 8] | shape [2, 3, 2, 8]"),
        ({"k": _cut}, "k | shape [2, 5, any, 8] | shape [2, 5, 2, 7]"),
        ({"k": lambda k: k[0]}, "k | 4 dimensions | shape [5, 2, 8]"),
        ({"k": _meta}, "k | device cpu | device meta"),
        ({"v": lambda v: v[..., 0]}, "v | 4 dimensions | shape [2, 5, 4]"),
        ({"v": lambda v: v[:, :, 0]}, "v | 4 dimensions | shape [2, 5, 6]"),
        ({"v": lambda v: v[:, :, :3]}, "v | a multiple of k's 2 | 3 heads"),
        ({"v": lambda v: v.bfloat16()}, "v | dtype float32 | torch.bfloat16"),
        ({"layout": "thbd"}, "layout | one of ['bthd', 'bhtd'] | 'thbd'"),
        ({"layout": "bhtd"}, "v | shape [2, 2, | shape [2, 4,"),
        ({"g": lambda g: g[..., :3]}, "g | [2, 5, 4] (per head) | [2, 5, 3]"),
        ({"g": lambda g: g.long()}, "g | dtype float32 | torch.int64"),
        ({"g": lambda g: g[0]}, "g | dimensions | shape [5, 4]"),
        ({"beta": _cut}, "beta | shape [2, 5, 4] | shape [2, 5, 3]"),
        ({"beta": _meta}, "beta | device cpu | device meta"),
        ({"A_log": _floats(3)}, "A_log | shape [4] | shape [3]"),
        ({"A_log": _floats(HV), "g": None}, "A_log | the raw decay | g=None"),
        ({"dt_bias": _floats(HV)}, "dt_bias | A_log beside it | A_log=None"),
        ({"A_log": _floats(HV), "dt_bias": _floats(HV, K)}, "dt_bias | [4] | [4, 8]"),
        ({"neg_eigval": True}, "neg_eigval | raw gates | True"),
        ({"neg_eigval": True, "A_log": _floats(HV), "beta": None}, "neg_eigval | the raw b | True"),
        ({"scale": INF}, "scale | a finite number | inf"),
        ({"scale": _floats(1)}, "scale | a finite number | a tensor"),
        ({"scale": "0.5"}, "scale | a finite number | '0.5'"),
        ({"checkpoints": (_index(4, 5), 2)}, "checkpoints | sluice.Checkpoints | tuple"),
        ({"state": _cut}, "state | [any, 4, 6, 8] | [7, 4, 6, 7]"),
        ({"state": lambda s: s[0]}, "state | [any, 4, 6, 8] | [4, 6, 8]"),
        ({"state": lambda s: s.double()}, "state | dtype float32 | torch.float64"),
        ({"state": lambda s: s.mT.contiguous().mT}, "state | contiguous last | strides"),
        ({"state": _expanded}, "state | stride(0) >= 192 | 0"),
        (
            {"state": lambda s: s.as_strided(s.shape, (191, *s.stride()[1:]))},
            "state | stride(0) >= 192 | 191",
        ),
        (
            {"state": lambda s: s.new_zeros(P, HV, V, K + 1)[..., :K]},
            "state | contiguous last three | strides",
        ),
        ({"pad_slot": 1}, "pad_slot | one of [-1, 0] | 1"),
        ({"state": _meta}, "state | device cpu | device meta"),
        ({"state_layout": "kv"}, "state | [any, 4, 8, 6] | [7, 4, 6, 8]"),
        ({"state_layout": "vkx"}, "state_layout | one of ['vk', 'kv'] | 'vkx'"),
        ({"state": lambda s: s[:1], "slots": None}, "state | at least 2 rows | 1 rows"),
        ({"state": None}, "slots | state beside it | state=None"),
        ({"slots": _index(1)}, "slots | shape [2] | shape [1]"),
        ({"slots": [3, 1]}, "slots | a tensor | list"),
        ({"slots": _floats(2)}, "slots | dtype int32 or int64 | torch.float32"),
        ({"slots": _meta}, "slots | device cpu | device meta"),
        ({"write_slots": _index(1, 2, 3)}, "write_slots | shape [2] | shape [3]"),
        ({"has_state": _index(0, 1)}, "has_state | dtype bool | torch.int64"),
        ({"has_state": torch.ones(3).bool()}, "has_state | shape [2] | shape [3]"),
        ({"pad_slot": 0, "slots": None}, "pad_slot | slots or write_slots | 0"),
        ({"pad_slot": -2}, "pad_slot | one of [-1, 0] | -2"),
        ({"cu_seqlens": _index(0, 5)}, "cu_seqlens | B = 1 | B = 2"),
        (_packed(0, 4, 10) | {"cu_seqlens": _floats(3)}, "cu_seqlens | int32 | float32"),
        (_packed() | {"state": None, "slots": None}, "cu_seqlens | [N + 1] | [0]"),
        (_packed() | {"cu_seqlens": torch.tensor(4)}, "cu_seqlens | [N + 1] | []"),
        ({"cu_seqlens_cpu": _index(0, 5)}, "cu_seqlens_cpu | cu_seqlens | alone"),
        (_packed(0, 4, 10) | {"cu_seqlens_cpu": _index(0, 10)}, "cu_seqlens_cpu | [3] | [2]"),
        ({"checkpoints": _kept([[4], [5]])}, "checkpoints | every >= 1 | every=0"),
        (
            {"checkpoints": _kept([[4], [5]], every=2, positions=[[1], [1]])},
            "checkpoints | either every | a tensor",
        ),
        ({"checkpoints": _kept([[4, 5]], every=4)}, "checkpoints.slots | [2, any] | [1, 2]"),
        (
            {"checkpoints": _kept([[4], [5]], positions=[[1, 2], [1, 2]])},
            "checkpoints.positions | [2, 1] | [2, 2]",
        ),
        ({"out": _floats(2, 5, 4, 5)}, "out | [2, 5, 4, 6] | [2, 5, 4, 5]"),
        ({"out": _floats(2, 5, 4, 6).half()}, "out | dtype float32 | torch.float16"),
        ({"out": _floats(2, 5, 1, 6).expand(2, 5, 4, 6)}, "out | overlap | strides"),
        ({"out": _strided(_floats(2, 5, 4, 6))}, "out | stride 1 | strides"),
        ({"out": _floats(5, 6)}, "out | dimensions | shape [5, 6]"),
    ],
    "decode": [
        (_delta(T=9), "q | at most 8 tokens | T=9"),
        ({"state": _expanded}, "state | stride(0) >= 192 | 0"),
        ({"v": lambda v: v[..., 0]}, "v | 4 dimensions | shape [2, 2, 4]"),
        ({"slots": _index(0, 1).bool()}, "slots | int32 or int64 | torch.bool"),
        ({"dt_bias": _floats(HV)}, "dt_bias | A_log beside it | A_log=None"),
    ],
    "verify": [
        ({"conv_state": None}, "conv_state | together | None"),
        ({"conv_inputs": None}, "conv_inputs | together | None"),
        ({"conv_inputs": _cut}, "conv_state | shape [any, 55, any] | [7, 56, 3]"),
        ({"conv_inputs": lambda x: x[:, :2]}, "conv_inputs | [2, 3, any] | [2, 2, 56]"),
        ({"conv_inputs": lambda x: x[0, 0]}, "conv_inputs | dimensions | shape [56]"),
        ({"conv_state": lambda s: s[:3]}, "conv_state | 7 slots | 3"),
        ({"conv_state": _expanded}, "conv_state | without overlap | strides"),
        ({"state": None}, "state | a tensor | None"),
    ],
    "commit": [
        ({"num_accepted": _index(1)}, "num_accepted | shape [2] | shape [1]"),
        ({"num_accepted": _floats(2)}, "num_accepted | int32 or int64 | torch.float32"),
        ({"num_accepted": 2}, "num_accepted | a tensor | int"),
        ({"draft": _with(state=_cut)}, "state | [any, 4, 6, 8] | [7, 4, 6, 7]"),
        ({"draft": _with(conv_state=lambda s: s[:4])}, "conv_state | 7 slots | 4"),
        (
            {
                "draft": lambda d: d._replace(
                    conv_state=d.conv_state[:4], slots=None, write_slots=_index(5, 6)
                )
            },
            "conv_state | 7 slots | 4",
        ),
        ({"draft": "draft"}, "draft | a Draft | str"),
    ],
    "causal_conv1d": [
        ({"x": lambda x: x[0]}, "cu_seqlens | packed input | None"),
        ({"x": lambda x: x[None]}, "x | 3 dimensions | shape [1, 2, 5, 56]"),
        ({"x": lambda x: x.int()}, "x | dtype float32 | torch.int32"),
        ({"x": _cut}, "weight | shape [55, any] | shape [56, 4]"),
        ({"weight": _floats(D, 5)}, "weight | a width of 2 to 4 | 5"),
        ({"weight": _floats(D, 1)}, "weight | a width of 2 to 4 | 1"),
        ({"weight": _floats(D, 0), "state": None, "slots": None}, "weight | a width of 2 to 4 | 0"),
        ({"weight": _floats(D)}, "weight | [D, W] or [D, 1, W] | shape [56]"),
        ({"weight": _meta}, "weight | device cpu | device meta"),
        ({"bias": _cut}, "bias | shape [56] | shape [55]"),
        ({"activation": "relu"}, "activation | one of ['silu' | 'relu'"),
        ({"activation": ["silu"]}, "activation | one of ['silu' | ['silu']"),
        ({"layout": "bhtd"}, "layout | one of ['btd', 'bdt'] | 'bhtd'"),
        ({"layout": "bdt"}, "weight | shape [5, any] | shape [56, 4]"),
        ({"state": lambda s: s[..., 1:]}, "state | at least 3 columns | 2 columns"),
        ({"state": lambda s: s[:, :-1]}, "state | [any, 56, any] | [7, 55, 3]"),
        ({"state": _expanded}, "state | without overlap | strides"),
        (
            {"state": lambda s: s.as_strided(s.shape, (D, 1, 1))},
            "state | without overlap | strides [56, 1, 1]",
        ),
        ({"state": lambda s: s[:1], "slots": None}, "state | 2 rows | 1 rows"),
        ({"state": None}, "slots | state beside it | state=None"),
        ({"state": None, "slots": None, "freeze": True}, "freeze | state | None"),
        ({"freeze": True, "write_slots": _index(3, 1)}, "freeze | no write_slots | "),
        ({"freeze": True, "checkpoints": _kept([[4], [5]], every=4)}, "freeze | no checkpoints | "),
        (
            {"state": None, "slots": None, "checkpoints": _kept([[4], [5]], every=4)},
            "checkpoints | state beside | state=None",
        ),
        ({"cu_seqlens": _index(0, 5)}, "cu_seqlens | B = 1 | B = 2"),
        ({"out": _floats(2, 5, 55)}, "out | [2, 5, 56] | [2, 5, 55]"),
        ({"out": _floats(2, 5, D).half()}, "out | float32 | torch.float16"),
    ],
    "conv_qkv": [
        ({"num_k_heads": 0}, "num_k_heads | at least 1 | 0"),
        ({"num_k_heads": 3}, "x | 2·3·8 + 4·6 channels | 56 channels"),
        ({"num_v_heads": 3, "head_v_dim": 8}, "num_v_heads | num_k_heads = 2 | 3"),
        ({"head_k_dim": 100, "head_v_dim": None}, "x | 2·2·100 + 4·V | 56 channels"),
        ({"head_k_dim": None, "head_v_dim": 100}, "x | 2·2·K + 4·100 | 56 channels"),
        ({"head_v_dim": 8}, "x | 2·2·8 + 4·8 channels | 56 channels"),
        ({"A_log": None}, "A_log | since a is given | None"),
        ({"a": None, "dt_bias": None}, "A_log | a is not given | shape [4]"),
        ({"a": None, "A_log": None}, "dt_bias | a is not given | shape [4]"),
        ({"b": None, "neg_eigval": True}, "neg_eigval | b is not given | True"),
        ({"a": _cut}, "a | shape [2, 5, 4] | shape [2, 5, 3]"),
        ({"b": _meta}, "b | device cpu | device meta"),
        ({"dt_bias": _cut}, "dt_bias | shape [4] | shape [3]"),
        ({"activation": "gelu"}, "activation | one of ['silu' | 'gelu'"),
        ({"state": None}, "slots | state beside it | state=None"),
        ({"freeze": True, "write_slots": _index(3, 1)}, "freeze | no write_slots | "),
        ({"out": lambda _: _buffers()[:3]}, "out | (q, k, v, g, beta) | 3 buffers"),
        ({"out": lambda _: _buffers(q=_cut)}, "out.q | 2 heads of 8 | [2, 5, 2, 7]"),
        ({"out": lambda _: _buffers(q=lambda q: q[..., 0])}, "out.q | 4 dimensions | [2, 5, 2]"),
        (
            {"out": lambda _: _buffers(), "num_k_heads": 4, "head_k_dim": 4},
            "out.q | 4 heads of 4 | [2, 5, 2, 8]",
        ),
        ({"out": lambda _: _buffers(g=lambda g: None)}, "out.g | a is given | None"),
        ({"out": lambda _: _buffers(), "b": None}, "out.beta | b is not given | [2, 5, 4]"),
        (
            {"out": lambda _: _buffers(beta=lambda b: b.bfloat16())},
            "out.beta | dtype float32 | torch.bfloat16",
        ),
    ],
    "rms_norm_gated": [
        ({"x": _floats(1)[0]}, "x | at least one dimension | shape []"),
        ({"x": lambda x: x.long()}, "x | dtype float32 | torch.int64"),
        ({"x": _strided}, "x | stride 1 | strides"),
        ({"x": None}, "x | a tensor | NoneType"),
        ({"x": None, "out": _floats(3, V)}, "x | a tensor | NoneType"),
        ({"out": 3.0}, "out | a tensor | float"),
        ({"z": _cut}, "z | shape [3, 6] | shape [3, 5]"),
        ({"z": _meta}, "z | device cpu | device meta"),
        ({"weight": _cut}, "weight | shape [6] | shape [5]"),
        ({"activation": None}, "activation | 'sigmoid' | None"),
        ({"eps": -1.0}, "eps | a finite number >= 0 | -1.0"),
        ({"eps": NAN}, "eps | a finite number >= 0 | nan"),
        ({"eps": _floats(1)}, "eps | a finite number >= 0 | tensor"),
        ({"out": _floats(3, V).half()}, "out | dtype float32 | torch.float16"),
        ({"out": _floats(1, V).expand(3, V)}, "out | overlap | strides [0, 1]"),
    ],
    "step": [
        ({"qkvz": lambda x: x[0]}, "qkvz | 3 dimensions | shape [80]"),
        ({"qkvz": _cut}, "z | shape [2, 1, 24] | shape [2, 1, 23]"),
        ({"qkvz": lambda x: x.int()}, "qkvz | dtype float32 | torch.int32"),
        ({"qkvz": _floats(N, 9, D + HV * V)}, "qkvz | at most 8 tokens | T=9"),
        (
            {"order": "interleaved", "qkvz": lambda x: (x[:, :D], x[:, D:])},
            "qkvz, ba | one tensor each | a pair",
        ),
        (
            {"order": "interleaved", "ba": lambda x: (x[:, :HV], x[:, HV:])},
            "qkvz, ba | one tensor each | a pair",
        ),
        ({"order": "interleaved", "ba": _cut}, "ba | [2, 1, 8] | [2, 1, 7]"),
        ({"order": "qkvz"}, "order | one of ['split', 'interleaved'] | 'qkvz'"),
        ({"qkvz": lambda x: (x[:, :D],) * 3}, "qkvz | a pair | 3"),
        ({"ba": _cut}, "a | shape [2, 1, 4] | shape [2, 1, 3]"),
        ({"ba": _meta}, "b | device cpu | device meta"),
        ({"conv_weight": _floats(D, 5)}, "conv_weight | a width of 2 to 4 | 5"),
        ({"conv_weight": _floats(D - 1, W)}, "conv_weight | channels | 55 channels"),
        ({"conv_weight": _floats(D)}, "conv_weight | [D, W] | shape [56]"),
        ({"conv_bias": _cut}, "conv_bias | shape [56] | shape [55]"),
        ({"A_log": _cut}, "A_log | shape [4] | shape [3]"),
        ({"A_log": _floats(1)[0]}, "A_log | shape [4] | shape []"),
        ({"dt_bias": None}, "dt_bias | a tensor | NoneType"),
        ({"norm_weight": _cut}, "norm_weight | shape [6] | shape [5]"),
        ({"state": lambda s: s[0, 0]}, "state | 4 dimensions | shape [6, 8]"),
        ({"state": _expanded}, "state | stride(0) >= 192 | 0"),
        ({"state": lambda s: s[:1], "slots": None}, "state | at least 2 rows | 1 rows"),
        ({"state_layout": "kkv"}, "state_layout | one of ['vk', 'kv'] | 'kkv'"),
        ({"conv_state": lambda s: s[:3]}, "conv_state | the 7 slots | 3 slots"),
        ({"conv_state": lambda s: s[..., 1:]}, "conv_state | 3 columns | 2 columns"),
        ({"slots": _index(1)}, "slots | shape [2] | shape [1]"),
        ({"pad_slot": 0, "slots": None}, "pad_slot | slots or write_slots | 0"),
        ({"gate_activation": None}, "gate_activation | 'sigmoid' | None"),
        ({"conv_activation": "sigmoid"}, "conv_activation | 'silu' | 'sigmoid'"),
        ({"scale": NAN}, "scale | a finite number | nan"),
        ({"eps": INF}, "eps | a finite number | inf"),
        ({"out": _floats(N, HV * V - 1)}, "out | [2, 1, 24] | [2, 1, 23]"),
    ],
}

VALUES: Table = {
    "prefill": [
        ({"slots": _index(3, 7)}, "slots[1] | a slot below 7 | 7"),
        ({"slots": _index(3, 3)}, "slots | no slot twice | 3 in rows 0, 1"),
        ({"write_slots": _index(0, 9)}, "write_slots[1] | a slot below 7 | 9"),
        ({"write_slots": _index(5, 5)}, "write_slots | no slot twice | 5 in rows 0, 1"),
        ({"write_slots": _index(1, 5)}, "write_slots[0] | row 1 reads 1 | 1"),
        (_packed(1, 4, 10), "cu_seqlens | 0 rising to at most 10 | [1, 4, 10]"),
        (_packed(0, 6, 4), "cu_seqlens | 0 rising to at most 10 | [0, 6, 4]"),
        (_packed(0, 6, 11), "cu_seqlens | 0 rising to at most 10 | [0, 6, 11]"),
        (
            _packed(0, 6, 10) | {"cu_seqlens_cpu": _index(0, 5, 10)},
            "cu_seqlens_cpu | [0, 6, 10] | others",
        ),
        ({"g": _spoil(NAN)}, "g | finite values | nan at [0, 0, 1]"),
        ({"g": _spoil(-INF)}, "g | finite values | -inf at [0, 0, 1]"),
        ({"beta": _spoil(INF)}, "beta | finite values | inf at [0, 0, 1]"),
        ({"A_log": _spoil(NAN)(_floats(HV))}, "A_log | finite values | nan at [1]"),
        ({"checkpoints": _kept([[4], [5]], every=2)}, "checkpoints.slots | 2 columns | 1 columns"),
        ({"checkpoints": _kept([[4], [7]], every=4)}, "checkpoints.slots[1, 0] | slot below 7 | 7"),
        ({"checkpoints": _kept([[4], [4]], every=4)}, "checkpoints.slots[1, 0] | nothing else | 4"),
        ({"checkpoints": _kept([[4], [3]], every=4)}, "checkpoints.slots[1, 0] | nothing else | 3"),
        (
            {"checkpoints": _kept([[4], [3]], every=4), "write_slots": _index(5, 6)},
            "checkpoints.slots[1, 0] | nothing else | 3",
        ),
        (
            {"checkpoints": _kept([[4], [5]], positions=[[6], [0]])},
            "checkpoints.positions[0, 0] | 0 to 5 tokens | 6",
        ),
    ],
    "decode": [
        (_packed(0, 1, 4) | {"slots": _index(3, 9)}, "slots[1] | a slot below 7 | 9"),
        ({"slots": _index(2, 2)}, "slots | no slot twice | 2 in rows 0, 1"),
        (
            {
                **{n: lambda x: x.repeat(1, 5, *[1] * (x.dim() - 2)).flatten(0, 1) for n in "qkvg"},
                "beta": lambda x: x.repeat(1, 5, 1).flatten(0, 1),
                "cu_seqlens": _index(0, 9, 20),
            },
            "cu_seqlens | at most 8 tokens | 11",
        ),
    ],
    "verify": [
        ({"slots": _index(3, 7)}, "slots[1] | a slot below 7 | 7"),
        ({"beta": _spoil(NAN)}, "beta | finite values | nan"),
    ],
    "commit": [
        ({"num_accepted": _index(0, 4)}, "num_accepted[1] | 0 to 3 tokens | 4"),
        ({"num_accepted": _index(-1, 0)}, "num_accepted[0] | 0 to 3 tokens | -1"),
        (
            {"draft": lambda d: d._replace(slots=_index(2, 2))},
            "slots | no slot twice | 2 in rows 0, 1",
        ),
    ],
    "causal_conv1d": [
        ({"slots": _index(3, 8)}, "slots[1] | a slot below 7 | 8"),
        ({"slots": _index(3, 3)}, "slots | no slot twice | 3 in rows 0, 1"),
        ({"write_slots": _index(1, 3)}, "write_slots[1] | row 0 reads 3 | 3"),
        (_packed_conv(0, 7, 5), "cu_seqlens | 0 rising | [0, 7, 5]"),
        ({"checkpoints": _kept([[4], [1]], every=4)}, "checkpoints.slots[1, 0] | nothing else | 1"),
    ],
    "conv_qkv": [
        ({"a": _spoil(NAN)}, "a | finite values | nan at [0, 0, 1]"),
        ({"b": _spoil(INF)}, "b | finite values | inf at [0, 0, 1]"),
        ({"slots": _index(0, 7)}, "slots[1] | a slot below 7 | 7"),
    ],
    "step": [
        ({"slots": _index(3, 7)}, "slots[1] | a slot below 7 | 7"),
        ({"slots": _index(5, 5)}, "slots | no slot twice | 5 in rows 0, 1"),
        ({"ba": _spoil(NAN)}, "b | finite values | nan at [0, 0, 1]"),
        ({"dt_bias": _spoil(INF)}, "dt_bias | finite values | inf at [1]"),
        ({"ba": _spoil(NAN), "order": "interleaved"}, "ba | finite values | nan at [0, 0, 1]"),
    ],
}

OPERATORS = tuple(METADATA)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a call that has memory, at any depth."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors(part, key)
    elif isinstance(value, tuple):
        for part, inner in zip(getattr(value, "_fields", range(len(value))), value, strict=True):
            yield from _tensors(inner, f"{name}.{part}")


@pytest.mark.parametrize("op", OPERATORS)
def test_the_call_that_rows_change_is_valid(op):
    getattr(sluice, op)(**_valid(op))


def test_every_operator_has_bad_calls():
    assert set(METADATA) == set(calls.OPERATORS)
    assert min(map(len, METADATA.values())) >= 5


ROWS = [
    pytest.param(op, *row, id=f"{op}-{'+'.join(row[0])}-{row[1].split(' | ')[1]}")
    for table in (METADATA, VALUES)
    for op, rows in table.items()
    for row in rows
]


@pytest.mark.parametrize(("op", "change", "message"), ROWS)
def test_a_bad_call_names_its_fault_and_loses_nothing(op, change, message):
    argument, expected, got = message.split(" | ")
    call = _valid(op)
    for name, new in change.items():
        call[name] = new(call.get(name)) if callable(new) else new
    before = [(name, x, whole_storage(x).clone()) for name, x in _tensors(call)]
    with pytest.raises(sluice.ContractError) as caught:
        getattr(sluice, op)(**call)
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.op == op
    assert argument == error.argument
    assert expected in error.expected
    assert got in str(error.got)
    assert str(error) == f"{op}: {argument}: expected {error.expected}, got {error.got}"
    for name, x, kept in before:
        assert_same_bits(whole_storage(x), kept, name)


def test_a_row_that_is_not_read_may_be_written():
    """Row 0 is new, so row 1 may write the slot that row 0 names."""
    call = _valid("prefill")
    call |= {"has_state": torch.tensor([False, True]), "write_slots": _index(5, 3)}
    before = call["state"][1].clone()
    _, state = sluice.prefill(**call)
    fresh = sluice.prefill(**{**_valid("prefill"), "state": None, "slots": None})[1]
    assert_same_bits(state[5], fresh[0], "the new row")
    assert not torch.equal(state[3], before)


def test_checkpoints_of_a_padded_row_are_not_judged():
    call = _valid("prefill")
    before = call["state"].clone()
    call |= {"slots": _index(3, -1), "checkpoints": _kept([[4], [4]], positions=[[2], [99]])}
    _, state = sluice.prefill(**call)
    changed = (state != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [3, 4]


def test_gates_of_padding_may_be_anything():
    x, gate = torch.ones(2, 1, 1, 4), torch.zeros(2, 1, 1)
    gate[0] = float("nan")
    state = torch.zeros(1, 1, 4, 4)
    options = {"state": state, "slots": torch.tensor([-1, 0])}
    o, _ = sluice.decode(x, x, x, gate, gate.clone(), **options)
    assert bool((o[0] == 0).all())
    assert bool(torch.isfinite(o).all())
    with pytest.raises(sluice.ContractError, match="g: expected finite values, got nan at"):
        sluice.decode(x, x, x, gate.flip(0), gate, **options)
