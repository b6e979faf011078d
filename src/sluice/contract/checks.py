"""Checks made always, on the host, from metadata alone. Each returns the problem backends receive.

Shapes in messages are in the canonical form: ``[B, T, heads, width]``, packed input as B = 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sluice.contract import need as shared
from sluice.contract.need import FLOATS, INTEGERS, Need
from sluice.contract.options import (
    CommitOptions,
    ConvOptions,
    DeltaOptions,
    NormOptions,
    StepOptions,
)
from sluice.contract.problem import (
    MAX_DECODE_TOKENS,
    CommitProblem,
    ConvProblem,
    ConvQkvProblem,
    DeltaProblem,
    NormProblem,
    StepProblem,
)
from sluice.contract.tensors import (
    CommitTensors,
    ConvQkvTensors,
    ConvTensors,
    DeltaTensors,
    NormTensors,
    Rows,
    StepTensors,
)


def delta(op: str, t: DeltaTensors, o: DeltaOptions) -> DeltaProblem:
    """Check a ``prefill``, ``decode`` or ``verify`` call."""
    need = Need(op, t.q.device)
    need(t.q.dim() == 4, "q", "4 dimensions [B, T, HQ, K]", f"shape {list(t.q.shape)}")
    B, T, HQ, K = t.q.shape
    need.tensor(t.q, "q", (B, T, HQ, K), FLOATS)
    need.tensor(t.k, "k", (B, T, None, K), (t.q.dtype,), "[B, T, HK, K]")
    need.tensor(t.v, "v", (B, T, None, None), (t.q.dtype,), "[B, T, HV, V]")
    HK, (HV, V) = t.k.shape[2], t.v.shape[2:]
    for x, name in ((t.q, "q"), (t.k, "k"), (t.v, "v")):
        need.innermost(x, name)
    need(min(HQ, HK, HV, K, V) > 0, "q, k, v", "at least one head and width", f"{HQ, HK, HV, K, V}")
    need(HV % HK == 0, "v", f"heads a multiple of k's {HK}", f"{HV} heads")
    need(
        HV % HQ == 0 or HQ % HV == 0,
        "q",
        f"heads that divide v's {HV} or are a multiple of them",
        f"{HQ} heads",
    )
    N = shared.sequences(need, t.rows, B)
    if op != "prefill" and t.rows.cu_seqlens is None:
        need(T <= MAX_DECODE_TOKENS, "q", f"at most {MAX_DECODE_TOKENS} tokens a row", f"T={T}")
    decay = _gates(need, t, o, (B, T, HV, K))

    tail = (V, K) if o.state_layout == "vk" else (K, V)
    need.choice(o.state_layout, "state_layout", ("vk", "kv"))
    shared.state(need, t.state, (HV, *tail), N, t.rows, t.q.dtype)
    rows = shared.addressing(need, t.rows, N, t.state.shape[0], o.pad_slot)
    kind = shared.checkpoints(need, t, o.checkpoint_every, N)
    scale = K**-0.5 if o.scale is None else need.number(o.scale, "scale")
    need.out(t.out, "out", (B, T, max(HQ, HV), V), t.v.dtype)
    need.innermost(t.out, "out")
    return DeltaProblem(
        op=op,
        device=t.q.device,
        dtype=t.q.dtype,
        B=B,
        T=T,
        N=N,
        HQ=HQ,
        HK=HK,
        HV=HV,
        K=K,
        V=V,
        varlen=t.rows.cu_seqlens is not None,
        cu_seqlens_cpu=t.rows.cu_seqlens_cpu is not None,
        token_rows=all(_token_rows(x) for x in (t.q, t.k, t.v, t.out)),
        decay=decay,
        delta=t.beta is not None,
        raw_gates=t.A_log is not None,
        neg_eigval=o.neg_eigval,
        normalize_qk=o.normalize_qk,
        scale=scale,
        state_dtype=t.state.dtype,
        state_layout=o.state_layout,
        rows=rows,
        checkpoints=kind,
        checkpoint_every=o.checkpoint_every,
        batch_invariant=o.batch_invariant,
    )


def commit(t: CommitTensors, o: CommitOptions) -> CommitProblem:
    """Check a ``commit`` call; the draft's own tensors come from ``verify``."""
    need = Need("commit", t.draft_k.device)
    B, T, HK, K = t.draft_k.shape
    HV, V = t.draft_d.shape[2:]
    N = shared.sequences(need, t.rows, B)
    need.tensor(t.num_accepted, "num_accepted", (N,), INTEGERS, "[N]")
    tail = (V, K) if o.state_layout == "vk" else (K, V)
    shared.state(need, t.state, (HV, *tail), N, t.rows, t.draft_k.dtype)
    rows = shared.addressing(need, t.rows, N, t.state.shape[0], o.pad_slot)
    D, L = shared.window(need, t.conv_inputs, t.conv_state, (B, T, N), t.state.shape[0], t.rows)
    return CommitProblem(
        op="commit",
        device=t.draft_k.device,
        dtype=t.draft_k.dtype,
        B=B,
        T=T,
        N=N,
        HK=HK,
        HV=HV,
        K=K,
        V=V,
        varlen=t.rows.cu_seqlens is not None,
        cu_seqlens_cpu=t.rows.cu_seqlens_cpu is not None,
        decay=_decay_kind(t.draft_g),
        state_dtype=t.state.dtype,
        state_layout=o.state_layout,
        rows=rows,
        D=D,
        L=L,
        conv_dtype=None if t.conv_state is None else t.conv_state.dtype,
    )


def window(op: str, conv_inputs: Tensor | None, conv_state: Tensor | None, t: DeltaTensors) -> None:
    """Check the conv window that ``verify`` hands on to ``commit``, before anything runs."""
    if conv_inputs is None and conv_state is None:
        return
    need, (B, T) = Need(op, t.q.device), t.q.shape[:2]
    N = shared.sequences(need, t.rows, B)
    need.tensor(t.state, "state", (None,) * 4, FLOATS)
    shared.window(need, conv_inputs, conv_state, (B, T, N), t.state.shape[0], t.rows)


def conv(t: ConvTensors, o: ConvOptions) -> ConvProblem:
    """Check a ``causal_conv1d`` call."""
    need = Need("causal_conv1d", t.x.device)
    fields = _conv_fields(need, t, o)
    need.out(t.out, "out", tuple(t.x.shape), t.x.dtype)
    return ConvProblem(**fields)


def conv_qkv(t: ConvQkvTensors, o: ConvOptions) -> ConvQkvProblem:
    """Check a ``conv_qkv`` call; q, k, v, g and beta are its output buffers."""
    need = Need("conv_qkv", t.x.device)
    fields = _conv_fields(need, t, o)
    B, T, D = t.x.shape
    (HK, K), (HV, V) = t.q.shape[2:], t.v.shape[2:]
    need(
        D == 2 * HK * K + HV * V,
        "x",
        f"2·{HK}·{K} + {HV}·{V} = {2 * HK * K + HV * V} channels [Q | K | V]",
        f"{D} channels",
    )
    need(HV % HK == 0, "num_v_heads", f"a multiple of num_k_heads = {HK}", HV)
    for x, name, heads, width in (
        (t.q, "out.q", HK, K),
        (t.k, "out.k", HK, K),
        (t.v, "out.v", HV, V),
    ):
        need.out(x, name, (B, T, heads, width), t.x.dtype)
        need.innermost(x, name)
    need(t.a is None or t.A_log is not None, "A_log", "a tensor, since a is given", None)
    for parameter, name in ((t.A_log, "A_log"), (t.dt_bias, "dt_bias")):
        if parameter is not None:
            got = f"shape {list(parameter.shape)}"
            need(t.a is not None, name, "None, since a is not given", got)
            need.tensor(parameter, name, (HV,), FLOATS, "[HV]")
    for raw, made, names in ((t.a, t.g, ("a", "out.g")), (t.b, t.beta, ("b", "out.beta"))):
        if raw is not None:
            assert made is not None
            need.tensor(raw, names[0], (B, T, HV), FLOATS, "[B, T, HV]")
            # never narrower: beta rounded to bfloat16 drifts over thousands of decode steps
            wide = torch.float64 if t.x.dtype == torch.float64 else torch.float32
            need.out(made, names[1], (B, T, HV), wide)
    need(not o.neg_eigval or t.b is not None, "neg_eigval", "False, since b is not given", True)
    return ConvQkvProblem(
        **fields,
        HK=HK,
        HV=HV,
        K=K,
        V=V,
        normalize_qk=o.normalize_qk,
        gate=t.a is not None,
        beta=t.b is not None,
        neg_eigval=o.neg_eigval,
    )


def norm(t: NormTensors, o: NormOptions) -> NormProblem:
    """Check a ``rms_norm_gated`` call."""
    need = Need("rms_norm_gated", t.x.device)
    need(t.x.dim() >= 1, "x", "at least one dimension", f"shape {list(t.x.shape)}")
    V = t.x.shape[-1]
    need.tensor(t.x, "x", tuple(t.x.shape), FLOATS)
    need.tensor(t.z, "z", tuple(t.x.shape), FLOATS, "x's")
    need.tensor(t.weight, "weight", (V,), FLOATS, "[V]")
    need.choice(o.activation, "activation", ("silu", "sigmoid"))
    eps = need.number(o.eps, "eps", least=0.0)
    need.out(t.out, "out", tuple(t.x.shape), t.x.dtype)
    for x, name in ((t.x, "x"), (t.z, "z"), (t.weight, "weight"), (t.out, "out")):
        need.innermost(x, name)
    rows = t.x.numel() // V if V > 0 else 0
    return NormProblem(
        op="rms_norm_gated",
        device=t.x.device,
        dtype=t.x.dtype,
        rows=rows,
        V=V,
        eps=eps,
        activation=o.activation,
    )


def step(t: StepTensors, o: StepOptions) -> StepProblem:
    """Check a ``step`` call."""
    need = Need("step", t.qkv.device)
    need.choice(o.state_layout, "state_layout", ("vk", "kv"))
    need.choice(o.order, "order", ("split", "interleaved"))
    need(t.qkv.dim() == 3, "qkvz", "3 dimensions [N, T, channels]", f"shape {list(t.qkv.shape)}")
    need(t.state.dim() == 4, "state", "4 dimensions [P, HV, V, K]", f"shape {list(t.state.shape)}")
    N, T, packed = t.qkv.shape
    HV, V, K = t.state.shape[1:]
    V, K = (V, K) if o.state_layout == "vk" else (K, V)
    need(T <= MAX_DECODE_TOKENS, "qkvz", f"at most {MAX_DECODE_TOKENS} tokens a row", f"T={T}")
    need.tensor(t.qkv, "qkvz", (N, T, packed), FLOATS)
    need.tensor(t.conv_weight, "conv_weight", (None, None), FLOATS, "[D, W]")
    D, W = t.conv_weight.shape
    HK = (D - HV * V) // (2 * K)
    need(
        HK > 0 and D == 2 * HK * K + HV * V and HV % HK == 0,
        "conv_weight",
        f"2·HK·{K} + {HV}·{V} channels, HK dividing {HV} (HV, V, K are state's)",
        f"{D} channels",
    )
    need(2 <= W <= 4, "conv_weight", "a width of 2 to 4", W)
    if o.order == "split":
        need(t.z is not None and t.a is not None, "qkvz, ba", "qkv, z, b and a", "a part missing")
        assert t.z is not None
        assert t.a is not None
        need.tensor(t.qkv, "qkv", (N, T, D), FLOATS, "[N, T, D]")
        need.tensor(t.z, "z", (N, T, HV * V), (t.qkv.dtype,), "[N, T, HV·V]")
        need.innermost(t.z, "z")
        need.tensor(t.b, "b", (N, T, HV), FLOATS, "[N, T, HV]")
        need.tensor(t.a, "a", (N, T, HV), FLOATS, "[N, T, HV]")
    else:
        need(t.z is None and t.a is None, "qkvz, ba", "one tensor each, as interleaved", "a pair")
        need.tensor(t.qkv, "qkvz", (N, T, D + HV * V), FLOATS, "[N, T, D + HV·V]")
        need.tensor(t.b, "ba", (N, T, 2 * HV), FLOATS, "[N, T, 2·HV]")
    need.innermost(t.qkv, "qkvz")
    if t.conv_bias is not None:
        need.tensor(t.conv_bias, "conv_bias", (D,), FLOATS, "[D]")
    need.tensor(t.A_log, "A_log", (HV,), FLOATS, "[HV]")
    need.tensor(t.dt_bias, "dt_bias", (HV,), FLOATS, "[HV]")
    need.tensor(t.norm_weight, "norm_weight", (V,), FLOATS, "[V]")
    need.choice(o.conv_activation, "conv_activation", ("silu", "none", None))
    need.choice(o.gate_activation, "gate_activation", ("silu", "sigmoid"))
    eps = need.number(o.eps, "eps", least=0.0)
    tail = (V, K) if o.state_layout == "vk" else (K, V)
    shared.state(need, t.state, (HV, *tail), N, t.rows, t.qkv.dtype)
    L = shared.conv_state(need, "conv_state", t.conv_state, D, W - 1, N, t.rows)
    if t.rows.slots is not None or t.rows.write_slots is not None:
        need(
            t.conv_state.shape[0] == t.state.shape[0],
            "conv_state",
            f"the {t.state.shape[0]} slots of state",
            f"{t.conv_state.shape[0]} slots",
        )
    rows = shared.addressing(need, t.rows, N, t.state.shape[0], o.pad_slot)
    need.out(t.out, "out", (N, T, HV * V), t.qkv.dtype)
    need.innermost(t.out, "out")
    scale = K**-0.5 if o.scale is None else need.number(o.scale, "scale")
    return StepProblem(
        op="step",
        device=t.qkv.device,
        dtype=t.qkv.dtype,
        N=N,
        T=T,
        HK=HK,
        HV=HV,
        K=K,
        V=V,
        W=W,
        D=D,
        L=L,
        order=o.order,
        bias=t.conv_bias is not None,
        conv_activation=o.conv_activation or "none",
        gate_activation=o.gate_activation,
        eps=eps,
        scale=scale,
        normalize_qk=o.normalize_qk,
        neg_eigval=o.neg_eigval,
        state_dtype=t.state.dtype,
        conv_dtype=t.conv_state.dtype,
        state_layout=o.state_layout,
        rows=rows,
    )


def _gates(need: Need, t: DeltaTensors, o: DeltaOptions, dims: tuple[int, int, int, int]) -> str:
    """Check the gates and their raw parameters; return the kind of decay."""
    B, T, HV, K = dims
    kind = _decay_kind(t.g)
    if t.g is not None:
        need(
            t.g.shape == (B, T, HV) or t.g.shape == (B, T, HV, K),
            "g",
            f"shape {[B, T, HV]} (per head) or {[B, T, HV, K]} (per key)",
            f"shape {list(t.g.shape)}",
        )
        need.tensor(t.g, "g", tuple(t.g.shape), FLOATS)
    if t.beta is not None:
        need.tensor(t.beta, "beta", (B, T, HV), FLOATS, "[B, T, HV]")
    if t.A_log is not None:
        need(t.g is not None, "A_log", "the raw decay a as g beside it", "g=None")
        need.tensor(t.A_log, "A_log", (HV,), FLOATS, "[HV]")
    if t.dt_bias is not None:
        need(t.A_log is not None, "dt_bias", "A_log beside it (raw gates)", "A_log=None")
        need.tensor(t.dt_bias, "dt_bias", (HV,) if kind == "head" else (HV, K), FLOATS)
    raw_beta = t.A_log is not None and t.beta is not None
    need(
        not o.neg_eigval or raw_beta, "neg_eigval", "raw gates: A_log, and the raw b as beta", True
    )
    return kind


def _token_rows(x: Tensor) -> bool:
    """Whether [B, T, H, D] lies as a matrix: a token's heads together, batch rows in sequence."""
    (B, T, H, D), (stride_b, stride_t, stride_h, _) = x.shape, x.stride()
    return (H == 1 or stride_h == D) and (B == 1 or T == 1 or stride_b == T * stride_t)


def _decay_kind(g: Tensor | None) -> str:
    return "none" if g is None else "key" if g.dim() == 4 else "head"


def _conv_fields(need: Need, t: ConvTensors | ConvQkvTensors, o: ConvOptions) -> dict[str, Any]:
    """The checks both convolutions share; the fields of a ``ConvProblem``."""
    need(t.x.dim() == 3, "x", "3 dimensions [B, T, D]", f"shape {list(t.x.shape)}")
    B, T, D = t.x.shape
    need.tensor(t.x, "x", (B, T, D), FLOATS)
    need(D > 0, "x", "at least one channel", f"shape {list(t.x.shape)}")
    need.tensor(t.weight, "weight", (D, None), FLOATS, "[D, W]")
    W = t.weight.shape[1]
    need(2 <= W <= 4, "weight", "a width of 2 to 4", W)
    if t.bias is not None:
        need.tensor(t.bias, "bias", (D,), FLOATS, "[D]")
    need.choice(o.activation, "activation", ("silu", "none", None))
    N = shared.sequences(need, t.rows, B)
    L, P = 0, 0
    if t.state is not None:
        L, P = shared.conv_state(need, "state", t.state, D, W - 1, N, t.rows), t.state.shape[0]
    else:
        for x, name in zip(t.rows[:3], Rows._fields[:3], strict=True):
            need(x is None, name, "state beside it", "state=None")
        need(t.checkpoint_slots is None, "checkpoints", "state beside them", "state=None")
        need(not o.freeze, "freeze", "state beside it", "state=None")
    need(
        not o.freeze or (t.checkpoint_slots is None and t.rows.write_slots is None),
        "freeze",
        "no write_slots and no checkpoints, since nothing is written",
        "one of them",
    )
    return {
        "op": need.op,
        "device": t.x.device,
        "dtype": t.x.dtype,
        "B": B,
        "T": T,
        "N": N,
        "D": D,
        "W": W,
        "varlen": t.rows.cu_seqlens is not None,
        "cu_seqlens_cpu": t.rows.cu_seqlens_cpu is not None,
        "bias": t.bias is not None,
        "activation": o.activation or "none",
        "L": L,
        "state_dtype": None if t.state is None else t.state.dtype,
        "rows": shared.addressing(need, t.rows, N, P, o.pad_slot),
        "freeze": o.freeze,
        "checkpoints": shared.checkpoints(need, t, o.checkpoint_every, N),
        "checkpoint_every": o.checkpoint_every,
    }
