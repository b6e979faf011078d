"""The parameter block that every operator's kernel takes, and how a spec fills it.

One layout serves all kernels, so that functions they share are compiled once. What a spec says
(strides, storage types, sizes, options) is written once, when a call is bound; an address per
tensor is all that is left.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from sluice.backends.cpu.block import Fields
from sluice.backends.cpu.llvm import BF16, F16, F32, F64
from sluice.backends.cpu.one_token import serves
from sluice.backends.cpu.operands import HEAD_DECAY, KEY_DECAY, NO_DECAY
from sluice.contract.draft_spec import CommitSpec, VerifySpec
from sluice.contract.meta import Meta
from sluice.contract.spec import (
    MAX_DECODE_TOKENS,
    ConvQkvSpec,
    ConvSpec,
    DeltaSpec,
    NormSpec,
    StepSpec,
)

CODES = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.float64: F64}
DECAYS = {"none": NO_DECAY, "head": HEAD_DECAY, "key": KEY_DECAY}

FAR_BYTES = 24 << 20
"""A call that reads and writes more than this does not find it in a last-level cache later."""

TENSORS = {
    # tokens [B, T, H, D], whose last stride is 1
    "q": "b t h",
    "k": "b t h",
    "v": "b t h",
    "o": "b t h",
    "state": "p code",
    # gates [B, T, H], of the rule and of conv_qkv, which makes the first two; z of the gated norm
    "g": "b t h code",
    "beta": "b t h code",
    "a": "b t h code",
    "b": "b t h code",
    "z": "b t h code",
    "A": "h code",
    "dt": "h code",
    # rows of a pool, packed sequences, checkpoints
    "slots": "wide",
    "write": "wide",
    "has_state": "",
    "window": "wide",
    "cu": "wide",
    "cu_host": "wide",
    "checkpoints": "wide",
    "positions": "wide",
    # a draft
    "accepted": "wide",
    "draft_k": "",
    "draft_d": "",
    "draft_g": "",
    "draft_slots": "wide",
    # convolution: tokens [B, T, D], taps [D, W], windows [P, D, L]
    "x": "b t d",
    "y": "b t d",
    "weight": "d w code",
    "bias": "d code",
    "conv": "p d l code",
    "norm": "d code",
}
"""Each tensor's address field, and what else a block says about it: the stride of each dimension,
the storage type (``code``), whether indices are int64 (``wide``). Without a stride it is dense."""

PARAMS = Fields(
    "params",
    " ".join(TENSORS),
    " ".join(f"{name}_{part}" for name, parts in TENSORS.items() for part in parts.split())
    # what the call computes
    + " io kv T N HQ HK HV K V D W L decay delta raw double normalize silu sigmoid freeze"
    # how: heads per task, the path for one token, whether states come from memory (of a
    # convolution: whether results go there), tokens of a unit (of the gated norm: vectors)
    " heads_per_task one_token far unit_t"
    # pool and checkpoints
    " P pad owned columns every"
    # write slots of a sequence where each token has one; drafts in buffers: their rows and tokens,
    # and for a commit of many layers what lies between two of them
    " states buffered S draft_tokens layers state_layer conv_layer x_layer"
    # what screen.py looks at: tokens per sequence at most, gates per token, which gates
    " most_tokens g_count beta_count makes_gates"
    # step: z and a inside of qkvz and ba, and the distance from key head to key head
    " interleaved z_offset z_group a_offset a_group b_group",
    "scale eps",
)

RENAMED = {
    "A_log": "A",
    "dt_bias": "dt",
    "write_slots": "write",
    "window_start": "window",
    "cu_seqlens": "cu",
    "cu_seqlens_cpu": "cu_host",
    "checkpoint_slots": "checkpoints",
    "checkpoint_positions": "positions",
    "out": "o",
    "num_accepted": "accepted",
    "conv_inputs": "x",
    "conv_state": "conv",
    "conv_weight": "weight",
    "conv_bias": "bias",
    "norm_weight": "norm",
    "qkv": "x",
}
"""Fields of tensors that a spec names in another way."""
RENAMED_IN: Mapping[str, Mapping[str, str]] = {
    "causal_conv1d": {"state": "conv", "out": "y"},
    "conv_qkv": {"state": "conv"},
    "rms_norm_gated": {"x": "q", "weight": "norm"},
    "step": {"b": "beta", "a": "g", "out": "y"},
}
UNREAD = {"verify": ("conv_inputs", "conv_state", "draft_x")}
"""Tensors that a kernel has no use for."""


def sources_of(spec: Any) -> dict[str, str]:
    """For each address field that the call sets, the tensor it is the address of."""
    return _sources(spec.op, tuple([x for x in spec.TENSORS if getattr(spec, x) is not None]))


@functools.cache  # as many as there are sets of optional tensors
def _sources(op: str, given: tuple[str, ...]) -> dict[str, str]:
    renamed, unread = {**RENAMED, **RENAMED_IN.get(op, {})}, UNREAD.get(op, ())
    found = {renamed.get(name, name): name for name in given if name not in unread}
    if op == "step":
        found = {"z": "qkv", "g": "b"} | found  # where z and a are inside of qkvz and ba
    return found


def describe(field: str, meta: Meta) -> dict[str, int]:
    """What a block says about a tensor."""
    strides, code, wide = _PARTS[field]
    found = dict(zip(strides, meta.strides, strict=False))
    if code:
        found[code] = CODES[meta.dtype]
    elif wide:
        found[wide] = int(meta.dtype == torch.int64)
    return found


def _parts(field: str, said: str) -> tuple[tuple[str, ...], str, str]:
    """The fields of a tensor's strides, of its storage type and of the width of its indices."""
    names = [f"{field}_{part}" for part in said.split()]
    code, wide = f"{field}_code", f"{field}_wide"
    strides = tuple(name for name in names if name not in (code, wide))
    return strides, code if code in names else "", wide if wide in names else ""


_PARTS = {field: _parts(field, said) for field, said in TENSORS.items()}


def one_layer(spec: Any, name: str, meta: Meta) -> Meta:
    """A tensor of a commit of many layers as one of them has it."""
    stacked = getattr(spec, "stacked", False) and name in ("state", "conv_state", "conv_inputs")
    return meta.squeeze(0) if stacked else meta


def is_readable(field: str, meta: Meta) -> bool:
    """Whether kernels can read a tensor as it lies. If not, it is copied."""
    if not _PARTS[field][0]:
        return meta.is_dense()
    if field == "g" and meta.dim() == 4:
        return meta.strides[3] == 1
    return field != "dt" or meta.dim() == 1 or meta.is_dense()


def constants(spec: Any) -> dict[str, Any]:
    """The fields that follow from the spec's sizes and options."""
    return {"io": CODES[spec.dtype]} | _CONSTANTS[spec.op](spec)


def _sizes(spec: Any, names: str) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in names.split()}


def _pool(spec: Any, owned: bool = True) -> dict[str, Any]:
    return {"P": spec.P, "pad": spec.pad_slot, "owned": owned}


def _state(spec: Any) -> dict[str, Any]:
    bytes_of_states = spec.N * spec.HV * spec.K * spec.V * spec.state_dtype.itemsize
    return {"kv": spec.state_layout == "kv", "far": bytes_of_states > FAR_BYTES}


def _checkpoints(spec: Any) -> dict[str, Any]:
    kept = spec.checkpoint_slots
    return {"every": spec.checkpoint_every, "columns": 0 if kept is None else kept.shape[1]}


def _delta(spec: DeltaSpec) -> dict[str, Any]:
    vk = spec.state_layout == "vk"
    return {
        **_sizes(spec, "T N HQ HK HV K V delta"),
        **_pool(spec, owned=spec.op != "verify"),
        **_state(spec),
        **_checkpoints(spec),
        "decay": DECAYS[spec.decay],
        "raw": spec.raw_gates,
        "double": spec.neg_eigval,
        "normalize": spec.normalize_qk,
        "one_token": spec.delta and spec.decay != "key" and vk and serves(spec.K),
        "most_tokens": 0 if spec.op == "prefill" else MAX_DECODE_TOKENS,
        "g_count": spec.HV,
        "beta_count": spec.HV,
        "scale": spec.q_scale,
        "states": spec.states,
        **(_buffers(spec) if isinstance(spec, VerifySpec) else {}),
    }


def _buffers(spec: VerifySpec) -> dict[str, Any]:
    if not spec.buffered:
        return {}
    assert spec.draft_k is not None
    S, M = spec.draft_k.shape[:2]
    return {"buffered": 1, "S": S, "draft_tokens": M}


def _commit(spec: CommitSpec) -> dict[str, Any]:
    found = {
        "layers": spec.layers,
        **_layers(spec),
        **_sizes(spec, "T N HK HV K V D L"),
        **_pool(spec),
        **_state(spec),
        "decay": DECAYS[spec.decay],
    }
    if spec.conv_inputs is not None:
        found["io"] = CODES[spec.conv_inputs.dtype]
    return found


def _layers(spec: CommitSpec) -> dict[str, Any]:
    if not spec.stacked:
        return {}
    pools = {"state": spec.state, "conv": spec.conv_state, "x": spec.conv_inputs}
    steps = {f"{name}_layer": x.strides[0] for name, x in pools.items() if x is not None}
    return {"buffered": 1, "S": spec.S, "draft_tokens": spec.T, **steps}


def _conv(spec: ConvSpec | ConvQkvSpec) -> dict[str, Any]:
    return {
        **_sizes(spec, "T N D W L freeze silu"),
        "far": 2 * math.prod(spec.x.shape) * spec.dtype.itemsize > FAR_BYTES,
        **_pool(spec, owned=not spec.freeze),
        **_checkpoints(spec),
    }


def _conv_qkv(spec: ConvQkvSpec) -> dict[str, Any]:
    return {
        **_conv(spec),
        **_sizes(spec, "HK HV K V"),
        "normalize": spec.normalize_qk,
        "double": spec.neg_eigval,
        "makes_gates": 1,
        "g_count": spec.HV,
        "beta_count": spec.HV,
    }


def _norm(spec: NormSpec) -> dict[str, Any]:
    return {
        **_sizes(spec, "V eps"),
        "N": spec.vectors,
        "sigmoid": spec.activation == "sigmoid",
    }


def _step(spec: StepSpec) -> dict[str, Any]:
    heads = spec.HV // spec.HK
    interleaved = spec.order == "interleaved"
    a = spec.b if spec.a is None else spec.a
    gates = 2 * heads if interleaved else heads  # per key head
    return {
        **_sizes(spec, "T N HK HV K V W D L eps"),
        **_pool(spec),
        **_state(spec),
        "HQ": spec.HK,
        "decay": HEAD_DECAY,
        "delta": 1,
        "raw": 1,
        "double": spec.neg_eigval,
        "normalize": spec.normalize_qk,
        "silu": spec.conv_silu,
        "sigmoid": spec.gate_activation == "sigmoid",
        "one_token": spec.state_layout == "vk" and serves(spec.K),
        "interleaved": interleaved,
        "z_offset": spec.z_offset if spec.z is None else 0,
        "z_group": 2 * spec.K + 2 * heads * spec.V if interleaved else heads * spec.V,
        "a_offset": spec.a_offset if spec.a is None else 0,
        "a_group": gates * a.strides[2],
        "b_group": gates * spec.b.strides[2],
        "g_count": 0 if spec.a is None else spec.HV,  # a inside of ba is looked at with b
        "beta_count": spec.b.shape[2],
        "scale": spec.q_scale,
    }


_CONSTANTS: Mapping[str, Any] = {
    "prefill": _delta,
    "decode": _delta,
    "verify": _delta,
    "commit": _commit,
    "causal_conv1d": _conv,
    "conv_qkv": _conv_qkv,
    "rms_norm_gated": _norm,
    "step": _step,
}
