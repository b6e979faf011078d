"""The parameter block that every kernel takes: its fields, and how tensors fill them.

One layout serves all kernels, so that functions they share are compiled once. Fields that follow
from the problem alone are remembered for the very same problem; addresses and what else is known
only then are written into a copy in every call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sluice.backends.cpu.launch import Fields
from sluice.backends.cpu.llvm import BF16, F16, F32, F64, REGISTERS
from sluice.backends.cpu.prepare import HEAD_DECAY, KEY_DECAY, NO_DECAY
from sluice.contract.problem import (
    MAX_DECODE_TOKENS,
    CommitProblem,
    ConvProblem,
    ConvQkvProblem,
    DeltaProblem,
    NormProblem,
    Problem,
    StateAddressing,
    StepProblem,
)
from sluice.contract.tensors import (
    CommitTensors,
    ConvQkvTensors,
    ConvTensors,
    DeltaTensors,
    Rows,
    StepTensors,
)

CODES = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.float64: F64}
DECAYS = {"none": NO_DECAY, "head": HEAD_DECAY, "key": KEY_DECAY}

FAR_BYTES = 24 << 20  # states of a call beyond this do not stay in a last-level cache

PARAMS = Fields(
    "params",
    # token tensors [B, T, H, D] and gates [B, T, H]: addresses, strides, storage types
    "q k v o state g beta group q_b q_t q_h q_d k_b k_t k_h k_d v_b v_t v_h v_d o_b o_t o_h o_d"
    " state_p g_b g_t g_h g_code beta_b beta_t beta_h beta_code A A_h A_code dt dt_h dt_code"
    # rows and checkpoints: address and whether elements are int64
    " slots slots_wide write write_wide has_state pad cu cu_wide bounds bounds_wide P owned most"
    " checkpoints checkpoints_wide positions positions_wide columns every accepted accepted_wide"
    " draft_k draft_d draft_g"
    # convolution: tokens [B, T, D], taps [D, W], state [P, D, L]
    " x x_b x_t x_d y y_b y_t y_d weight weight_d weight_w weight_code bias bias_d bias_code"
    " conv conv_p conv_d conv_l conv_code L D W silu freeze"
    # raw gates that are inputs where g and beta are outputs, the gated norm, the layer's order
    " a a_b a_t a_h a_code b b_b b_t b_h b_code z z_b z_t z_h z_code norm norm_d norm_code sigmoid"
    " interleaved gates makes_gates"
    # constants of the problem
    " io state_code kv T N HQ HK HV K V decay delta raw double normalize single far",
    "scale eps",
)

Block = bytearray
AT = PARAMS.offset

_put2, _put3, _put4, _put5 = (struct.Struct(f"={n}q").pack_into for n in (2, 3, 4, 5))
_put1, _put8, _put10 = (struct.Struct(f"={n}q").pack_into for n in (1, 8, 10))

A_RAW, B_RAW = AT["a"], AT["b"]
A, DT, BIAS, X, Y, Z, WEIGHT, CONV = (
    AT[name] for name in ("A", "dt", "bias", "x", "y", "z", "weight", "conv")
)
TOKENS, NORM, DRAFTS, ACCEPTED, IO, HEADS, SLOTS = (
    AT[name] for name in ("q", "norm", "draft_k", "accepted", "io", "HK", "slots")
)

_known: dict[int, tuple[Problem, bytes]] = {}
_MOST_KNOWN = 1024


def _block(p: Any, make: Callable[[Any], dict[str, Any]]) -> Block:
    """A fresh block, the fields that follow from the problem set."""
    known = _known.get(id(p))
    if known is None or known[0] is not p:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        known = _known[id(p)] = (p, PARAMS.block({"io": CODES[p.dtype]} | make(p)))
    return bytearray(known[1])


def dense(x: Tensor | None) -> Tensor | None:
    """Index tensors are read as plain arrays."""
    return x if x is None or x.is_contiguous() else x.contiguous()


def _index(x: Tensor | None) -> tuple[int, int]:
    """Address and whether elements are int64, of a contiguous index tensor."""
    return (0, 0) if x is None else (x.data_ptr(), int(x.dtype == torch.int64))


def _set_rows(block: Block, r: Rows, pad: int) -> Rows:
    """The index tensors; returns contiguous ones to keep alive."""
    if r.slots is None and r.write_slots is None and r.has_state is None and r.cu_seqlens is None:
        return r
    r = Rows(*map(dense, r))
    slots, write, has_state, cu, cu_cpu = r
    known = 0 if has_state is None else has_state.data_ptr()
    _put10(block, SLOTS, *_index(slots), *_index(write), known, pad, *_index(cu), *_index(cu_cpu))
    return r


def _set_checkpoints(block: Block, t: Any) -> tuple[Tensor | None, Tensor | None]:
    if t.checkpoint_slots is None:
        return None, None
    slots, positions = dense(t.checkpoint_slots), dense(t.checkpoint_positions)
    assert slots is not None
    _put5(block, AT["checkpoints"], *_index(slots), *_index(positions), slots.shape[1])
    return slots, positions


def _gate(x: Tensor) -> tuple[int, ...]:
    """Address, the strides of B, T and H, and the storage type."""
    b, t, h = x.stride() if x.dim() == 3 else x.stride()[:3]
    return x.data_ptr(), b, t, h, CODES[x.dtype]


def _set(block: Block, name: str, x: Tensor) -> None:
    """One of the tensors whose addresses lie together: with strides, and the type of a gate."""
    _put1(block, AT[name], x.data_ptr())
    if name == "state":
        _put1(block, AT["state_p"], x.stride(0))
    elif name in ("g", "beta"):
        _put4(block, AT[name + "_b"], *_gate(x)[1:])
    else:
        _put4(block, AT[name + "_b"], *x.stride())


def _parameter(x: Tensor) -> tuple[int, ...]:
    return (x.data_ptr(), x.stride(0), CODES[x.dtype])


def _pool(rows: StateAddressing, owned: bool = True) -> dict[str, Any]:
    return {"P": rows.P, "pad": rows.pad_slot, "owned": owned}


def _delta_constants(p: DeltaProblem) -> dict[str, Any]:
    bytes_of_states = p.N * p.HV * p.K * p.V * p.state_dtype.itemsize
    return {
        "state_code": CODES[p.state_dtype],
        "kv": p.state_layout == "kv",
        **{name: getattr(p, name) for name in ("T", "N", "HQ", "HK", "HV", "K", "V", "delta")},
        "decay": DECAYS[p.decay],
        "raw": p.raw_gates,
        "double": p.neg_eigval,
        "normalize": p.normalize_qk,
        "single": p.delta and p.decay != "key" and p.state_layout == "vk" and REGISTERS >= 32,
        "far": bytes_of_states > FAR_BYTES,
        "every": p.checkpoint_every,
        "gates": p.HV,
        "most": 0 if p.op == "prefill" else MAX_DECODE_TOKENS,
        **_pool(p.rows, owned=p.op != "verify"),
        "scale": p.scale,
    }


def delta_block(p: DeltaProblem, t: DeltaTensors, group: int) -> tuple[Block, object]:
    """The block of ``prefill``, ``decode`` and ``verify``, and tensors to keep alive with it.

    A task takes ``group`` value heads. The same problem always comes with the same strides
    (library.py), so they are remembered with it and only addresses are written.
    """
    q, k, v, g, beta, A_log, dt_bias, state, rows, slots, _, out, *drafts = t
    if p.decay == "key":
        assert g is not None
        g, dt_bias = g if g.stride(3) == 1 else g.contiguous(), dense(dt_bias)
    known = _known.get(id(p))
    if known is None or known[0] is not p:
        block = _block(p, _delta_constants)
        given = {"q": q, "k": k, "v": v, "o": out, "state": state, "g": g, "beta": beta}
        for name, x in given.items():
            if x is not None:
                _set(block, name, x)
        _known[id(p)] = (p, bytes(block))
    else:
        block = bytearray(known[1])
    _put8(
        block, TOKENS, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), state.data_ptr(),
        0 if g is None else g.data_ptr(), 0 if beta is None else beta.data_ptr(), group,
    )  # fmt: skip
    if A_log is not None:
        _put3(block, A, *_parameter(A_log))
        if dt_bias is not None:
            _put3(block, DT, *_parameter(dt_bias))
    if drafts[0] is not None:
        _put3(block, DRAFTS, *(0 if x is None else x.data_ptr() for x in drafts))
    kept = _set_checkpoints(block, t) if slots is not None else None
    return block, (_set_rows(block, rows, p.rows.pad_slot), g, dt_bias, kept)


def _commit_constants(p: CommitProblem) -> dict[str, Any]:
    return {
        "state_code": CODES[p.state_dtype],
        "kv": p.state_layout == "kv",
        **{name: getattr(p, name) for name in ("T", "N", "HK", "HV", "K", "V", "D", "L")},
        "decay": DECAYS[p.decay],
        **_pool(p.rows),
    }


def commit_block(p: CommitProblem, t: CommitTensors) -> tuple[Block, object]:
    """The block of ``commit``."""
    block = _block(p, _commit_constants)
    drafts = [dense(x) for x in (t.draft_k, t.draft_d, t.draft_g)]
    accepted = dense(t.num_accepted)
    _put3(block, DRAFTS, *(0 if x is None else x.data_ptr() for x in drafts))
    _put2(block, ACCEPTED, *_index(accepted))
    _set(block, "state", t.state)
    if t.conv_inputs is not None and t.conv_state is not None:
        _put4(block, X, t.conv_inputs.data_ptr(), *t.conv_inputs.stride())
        _put1(block, IO, CODES[t.conv_inputs.dtype])
        _put5(block, CONV, *_conv_state(t.conv_state))
    return block, (_set_rows(block, t.rows, p.rows.pad_slot), drafts, accepted)


def _conv_constants(p: ConvProblem) -> dict[str, Any]:
    return {
        **{name: getattr(p, name) for name in ("T", "N", "D", "W", "L", "freeze")},
        "silu": p.activation == "silu",
        "every": p.checkpoint_every,
        **({} if p.state_dtype is None else _pool(p.rows, owned=not p.freeze)),
    }


def _conv_state(x: Tensor) -> tuple[int, ...]:
    return (x.data_ptr(), *x.stride(), CODES[x.dtype])


def _set_taps(block: Block, weight: Tensor, bias: Tensor | None) -> None:
    _put4(block, WEIGHT, weight.data_ptr(), *weight.stride(), CODES[weight.dtype])
    if bias is not None:
        _put3(block, BIAS, *_parameter(bias))


def _set_conv(block: Block, p: ConvProblem, t: ConvTensors | ConvQkvTensors) -> object:
    """What both convolutions read, and the conv state."""
    _put4(block, X, t.x.data_ptr(), *t.x.stride())
    _set_taps(block, t.weight, t.bias)
    if t.state is not None:
        _put5(block, CONV, *_conv_state(t.state))
    return _set_rows(block, t.rows, p.rows.pad_slot), _set_checkpoints(block, t)


def conv_block(p: ConvProblem, t: ConvTensors) -> tuple[Block, object]:
    """The block of ``causal_conv1d``."""
    block = _block(p, _conv_constants)
    _put4(block, Y, t.out.data_ptr(), *t.out.stride())
    return block, _set_conv(block, p, t)


def _conv_qkv_constants(p: ConvQkvProblem) -> dict[str, Any]:
    heads = {name: getattr(p, name) for name in ("HK", "HV", "K", "V")}
    flags = {"normalize": p.normalize_qk, "double": p.neg_eigval, "gates": p.HV, "makes_gates": 1}
    return _conv_constants(p) | heads | flags


def conv_qkv_block(p: ConvQkvProblem, t: ConvQkvTensors) -> tuple[Block, object]:
    """The block of ``conv_qkv``."""
    block = _block(p, _conv_qkv_constants)
    for name, x in zip("qkv", (t.q, t.k, t.v), strict=True):
        _set(block, name, x)
    if t.a is not None and t.g is not None:
        assert t.A_log is not None
        _put5(block, A_RAW, *_gate(t.a))
        _set(block, "g", t.g)
        _put3(block, A, *_parameter(t.A_log))
        if t.dt_bias is not None:
            _put3(block, DT, *_parameter(t.dt_bias))
    if t.b is not None and t.beta is not None:
        _put5(block, B_RAW, *_gate(t.b))
        _set(block, "beta", t.beta)
    return block, _set_conv(block, p, t)


def _norm_constants(p: NormProblem) -> dict[str, Any]:
    return {"N": p.rows, "V": p.V, "sigmoid": p.activation == "sigmoid", "eps": p.eps}


def norm_block(p: NormProblem, x: Tensor, z: Tensor, weight: Tensor, out: Tensor) -> Block:
    """The block of ``rms_norm_gated``, for tensors of four dimensions."""
    block = _block(p, _norm_constants)
    _set(block, "q", x)
    _set(block, "o", out)
    _put5(block, Z, *_gate(z))
    _put3(block, NORM, *_parameter(weight))
    _put2(block, HEADS, out.shape[1], out.shape[2])
    return block


def _step_constants(p: StepProblem) -> dict[str, Any]:
    bytes_of_states = p.N * p.HV * p.K * p.V * p.state_dtype.itemsize
    names = ("T", "N", "HK", "HV", "K", "V", "W", "D", "L", "scale", "eps")
    return {
        **{name: getattr(p, name) for name in names},
        "HQ": p.HK,
        "state_code": CODES[p.state_dtype],
        "kv": p.state_layout == "kv",
        "silu": p.conv_activation == "silu",
        "sigmoid": p.gate_activation == "sigmoid",
        "interleaved": p.order == "interleaved",
        "normalize": p.normalize_qk,
        "double": p.neg_eigval,
        "decay": HEAD_DECAY,
        "delta": 1,
        "raw": 1,
        "single": p.state_layout == "vk" and REGISTERS >= 32,
        "far": bytes_of_states > FAR_BYTES,
        "gates": 2 * p.HV if p.order == "interleaved" else p.HV,
        **_pool(p.rows),
    }


def step_block(p: StepProblem, t: StepTensors) -> tuple[Block, object]:
    """The block of ``step``; where the order is interleaved, z and a lie in qkvz and ba."""
    block = _block(p, _step_constants)
    z, a = (t.qkv, t.b) if t.z is None or t.a is None else (t.z, t.a)
    _put4(block, X, t.qkv.data_ptr(), *t.qkv.stride())
    _put5(block, Z, *_gate(z))
    _put4(block, Y, t.out.data_ptr(), *t.out.stride())
    _set(block, "g", a)
    _set(block, "beta", t.b)
    _put3(block, A, *_parameter(t.A_log))
    _put3(block, DT, *_parameter(t.dt_bias))
    _set_taps(block, t.conv_weight, t.conv_bias)
    _put3(block, NORM, *_parameter(t.norm_weight))
    _put5(block, CONV, *_conv_state(t.conv_state))
    _set(block, "state", t.state)
    return block, _set_rows(block, t.rows, p.rows.pad_slot)
