"""Checks made once per spec, on the host, from metadata alone.

Shapes in messages are in the canonical form: ``[B, T, heads, width]``, packed input as B = 1.
"""

from __future__ import annotations

import torch

from sluice.contract import drafts
from sluice.contract import require as shared
from sluice.contract.chunk_length import CHUNK
from sluice.contract.draft_spec import CommitSpec, VerifySpec
from sluice.contract.meta import Meta
from sluice.contract.require import FLOATS, INTEGERS, Require
from sluice.contract.spec import (
    MAX_DECODE_TOKENS,
    ConvQkvSpec,
    ConvSpec,
    DeltaSpec,
    NormSpec,
    PassSpec,
    StepSpec,
)


def delta(spec: DeltaSpec) -> None:
    """Check a ``prefill``, ``decode`` or ``verify`` call."""
    require = Require(spec.op, spec.q.device)
    N, (B, T, HV, K) = _recurrence(require, spec)
    q, v, HQ, V = spec.q, spec.v, spec.HQ, spec.V
    if spec.op != "prefill" and not spec.varlen:
        most = MAX_DECODE_TOKENS
        require(most >= T, "q", f"at most {most} tokens per row", f"T={T}")
    require.choice(spec.state_layout, "state_layout", ("vk", "kv"))
    tail = (V, K) if spec.state_layout == "vk" else (K, V)
    shared.state(require, spec, (HV, *tail), N, q.dtype)
    shared.addressing(require, spec, N, None if spec.varlen else T)
    shared.checkpoints(require, spec, N)
    if spec.scale is not None:
        require.number(spec.scale, "scale")
    require.out(spec.out, "out", (B, T, max(HQ, HV), V), v.dtype)
    require.innermost(spec.out, "out")


def passes(spec: PassSpec) -> None:
    """Check a ``transitions`` or ``resume`` call; state, out, map and kept are made to fit."""
    require = Require(spec.op, spec.q.device)
    _recurrence(require, spec)
    require(spec.delta, "beta", "a tensor: without it the transition is the decay", None)
    ok = spec.segment > 0 and spec.segment % CHUNK == 0
    require(ok, "segment", f"a multiple of {CHUNK} tokens", spec.segment)


def _recurrence(require: Require, spec: DeltaSpec) -> tuple[int, tuple[int, int, int, int]]:
    """Check tokens and gates; N, and B, T, HV and K."""
    q, k, v = spec.q, spec.k, spec.v
    require(q.dim() == 4, "q", "4 dimensions [B, T, HQ, K]", f"shape {list(q.shape)}")
    B, T, HQ, K = q.shape
    require.tensor(q, "q", (B, T, HQ, K), FLOATS)
    require.tensor(k, "k", (B, T, None, K), (q.dtype,), "[B, T, HK, K]", "q")
    require.tensor(v, "v", (B, T, None, None), (q.dtype,), "[B, T, HV, V]", "q")
    HK, (HV, V) = k.shape[2], v.shape[2:]
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        require.innermost(x, name)
    sizes = HQ, HK, HV, K, V
    require(min(sizes) > 0, "q, k, v", "at least one head and width", f"{sizes}")
    require(HV % HK == 0, "v", f"heads a multiple of k's {HK}", f"{HV} heads")
    require(
        HV % HQ == 0 or HQ % HV == 0,
        "q",
        f"heads that divide v's {HV} or are a multiple of them",
        f"{HQ} heads",
    )
    N = shared.sequences(require, spec, B)
    _gates(require, spec, (B, T, HV, K))
    return N, (B, T, HV, K)


def commit(spec: CommitSpec) -> None:
    """Check a ``commit`` call; a draft by row comes from ``verify`` as it is."""
    require = Require("commit", spec.draft_k.device)
    if spec.stacked:
        drafts.stacked(require, spec)
        return
    require(spec.draft_slots is None, "draft_slots", "buffers beside it", "a draft by row")
    drafts.by_row(require, spec)
    B, T, _, K = spec.draft_k.shape
    HV, V = spec.draft_d.shape[2:]
    N = shared.sequences(require, spec, B)
    require.tensor(spec.num_accepted, "num_accepted", (N,), INTEGERS, "[N]")
    require.choice(spec.state_layout, "state_layout", ("vk", "kv"))
    tail = (V, K) if spec.state_layout == "vk" else (K, V)
    shared.state(require, spec, (HV, *tail), N, spec.draft_k.dtype)
    shared.addressing(require, spec, N)
    shared.window(require, spec, spec.conv_inputs, spec.conv_state, (B, T, N))


def verify(spec: VerifySpec) -> None:
    """Check a ``verify`` call, and the conv window that it hands on to ``commit``."""
    delta(spec)
    require = Require(spec.op, spec.q.device)
    shared.window(require, spec, spec.conv_inputs, spec.conv_state, (spec.B, spec.T, spec.N))
    if spec.buffered:
        drafts.buffers(require, spec)
    else:
        for x, name in ((spec.draft_slots, "draft_slots"), (spec.draft_x, "buffers.x")):
            require(x is None, name, "buffers beside it", "buffers=None")


def conv(spec: ConvSpec) -> None:
    """Check a ``causal_conv1d`` call."""
    require = Require("causal_conv1d", spec.x.device)
    _conv(require, spec)
    require.out(spec.out, "out", tuple(spec.x.shape), spec.x.dtype)


def conv_qkv(spec: ConvQkvSpec) -> None:
    """Check a ``conv_qkv`` call; q, k, v, g and beta are its output buffers."""
    require = Require("conv_qkv", spec.x.device)
    _conv(require, spec)
    B, T, D = spec.x.shape
    (HK, K), (HV, V) = spec.q.shape[2:], spec.v.shape[2:]
    require(
        D == 2 * HK * K + HV * V,
        "x",
        f"2·{HK}·{K} + {HV}·{V} = {2 * HK * K + HV * V} channels [Q | K | V]",
        f"{D} channels",
    )
    require(HV % HK == 0, "num_v_heads", f"a multiple of num_k_heads = {HK}", HV)
    for x, name, heads, width in (
        (spec.q, "out.q", HK, K),
        (spec.k, "out.k", HK, K),
        (spec.v, "out.v", HV, V),
    ):
        require.out(x, name, (B, T, heads, width), spec.x.dtype)
        require.innermost(x, name)
    given = spec.a is not None
    require(not given or spec.A_log is not None, "A_log", "a tensor, since a is given", None)
    for parameter, name in ((spec.A_log, "A_log"), (spec.dt_bias, "dt_bias")):
        if parameter is not None:
            require(given, name, "None, since a is not given", f"shape {list(parameter.shape)}")
            require.tensor(parameter, name, (HV,), FLOATS, "[HV]")
    for raw, made, names in (
        (spec.a, spec.g, ("a", "out.g")),
        (spec.b, spec.beta, ("b", "out.beta")),
    ):
        if raw is not None:
            assert made is not None
            require.tensor(raw, names[0], (B, T, HV), FLOATS, "[B, T, HV]")
            # never narrower: beta rounded to bfloat16 drifts over thousands of decode steps
            wide = torch.float64 if spec.x.dtype == torch.float64 else torch.float32
            require.out(made, names[1], (B, T, HV), wide)
    ok = not spec.neg_eigval or spec.b is not None
    require(ok, "neg_eigval", "False, since b is not given", True)


def norm(spec: NormSpec) -> None:
    """Check a ``rms_norm_gated`` call."""
    require, x = Require("rms_norm_gated", spec.x.device), spec.x
    require(x.dim() >= 1, "x", "at least one dimension", f"shape {list(x.shape)}")
    require.tensor(x, "x", tuple(x.shape), FLOATS)
    require.tensor(spec.z, "z", tuple(x.shape), FLOATS, "x's")
    require.tensor(spec.weight, "weight", (x.shape[-1],), FLOATS, "[V]")
    require.choice(spec.activation, "activation", ("silu", "sigmoid"))
    require.number(spec.eps, "eps", least=0.0)
    require.out(spec.out, "out", tuple(x.shape), x.dtype)
    for y, name in ((x, "x"), (spec.z, "z"), (spec.weight, "weight"), (spec.out, "out")):
        require.innermost(y, name)


def step(spec: StepSpec) -> None:
    """Check a ``step`` call."""
    qkv, state = spec.qkv, spec.state
    require = Require("step", qkv.device)
    require.choice(spec.state_layout, "state_layout", ("vk", "kv"))
    require.choice(spec.order, "order", ("split", "interleaved"))
    require(qkv.dim() == 3, "qkvz", "3 dimensions [N, T, channels]", f"shape {list(qkv.shape)}")
    require(state.dim() == 4, "state", "4 dimensions [P, HV, V, K]", f"shape {list(state.shape)}")
    N, T, packed = qkv.shape
    HV, V, K = spec.HV, spec.V, spec.K
    sizes = f"{HV} heads of {V} x {K}"
    require(min(HV, V, K) > 0, "state", "at least one head and width", sizes)
    most = MAX_DECODE_TOKENS
    require(most >= T, "qkvz", f"at most {most} tokens per row", f"T={T}")
    require.tensor(qkv, "qkvz", (N, T, packed), FLOATS)
    require.tensor(spec.conv_weight, "conv_weight", (None, None), FLOATS, "[D, W]")
    D, W, HK = spec.D, spec.W, spec.HK
    require(
        HK > 0 and D == 2 * HK * K + HV * V and HV % HK == 0,
        "conv_weight",
        f"2·HK·{K} + {HV}·{V} channels, HK dividing {HV} (HV, V, K are state's)",
        f"{D} channels",
    )
    require(2 <= W <= 4, "conv_weight", "a width of 2 to 4", W)
    _projections(require, spec, (N, T, D))
    if spec.conv_bias is not None:
        require.tensor(spec.conv_bias, "conv_bias", (D,), FLOATS, "[D]")
    require.tensor(spec.A_log, "A_log", (HV,), FLOATS, "[HV]")
    require.tensor(spec.dt_bias, "dt_bias", (HV,), FLOATS, "[HV]")
    require.tensor(spec.norm_weight, "norm_weight", (V,), FLOATS, "[V]")
    require.choice(spec.conv_activation, "conv_activation", ("silu", "none", None))
    require.choice(spec.gate_activation, "gate_activation", ("silu", "sigmoid"))
    require.number(spec.eps, "eps", least=0.0)
    tail = (V, K) if spec.state_layout == "vk" else (K, V)
    shared.state(require, spec, (HV, *tail), N, qkv.dtype)
    shared.conv_state(require, spec, "conv_state", spec.conv_state, D, W - 1, N)
    if spec.pooled:
        require(
            spec.conv_state.shape[0] == state.shape[0],
            "conv_state",
            f"the {state.shape[0]} slots of state",
            f"{spec.conv_state.shape[0]} slots",
        )
    shared.addressing(require, spec, N)
    require.out(spec.out, "out", (N, T, HV * V), qkv.dtype)
    require.innermost(spec.out, "out")
    if spec.scale is not None:
        require.number(spec.scale, "scale")


def _projections(require: Require, spec: StepSpec, dims: tuple[int, int, int]) -> None:
    """Check qkvz and ba of ``step``, in either order."""
    (N, T, D), HV, V = dims, spec.HV, spec.V
    qkvz, ba = ("qkvz", "qkv", "z"), ("ba", "b", "a")
    pairs: list[tuple[Meta, Meta | None, tuple[str, ...], tuple[int, int]]] = [
        (spec.qkv, spec.z, qkvz, (D, HV * V)),
        (spec.b, spec.a, ba, (HV, HV)),
    ]
    for first, second, names, widths in pairs:
        if spec.order == "interleaved":
            require(second is None, "qkvz, ba", "one tensor each, as interleaved", "a pair")
        dtypes = FLOATS if names[0] == "ba" else (spec.qkv.dtype,)
        labels = ("[N, T, D]", "[N, T, HV·V]") if names[0] == "qkvz" else ("[N, T, HV]",) * 2
        assert first is not None
        if spec.order == "interleaved":
            whole = "[N, T, D + HV·V]" if names[0] == "qkvz" else "[N, T, 2·HV]"
            require.tensor(first, names[0], (N, T, sum(widths)), dtypes, whole)
            continue
        if second is None and first.dim() > 0:  # one tensor: each part is named
            cut = min(widths[0], first.shape[-1])
            rest = first.shape[-1] - cut
            first, second = first.narrow(-1, 0, cut), first.narrow(-1, cut, rest)
        require.tensor(first, names[1], (N, T, widths[0]), dtypes, labels[0])
        assert second is not None
        require.tensor(second, names[2], (N, T, widths[1]), dtypes, labels[1])
    require.innermost(spec.qkv, "qkvz")
    if spec.z is not None:
        require.innermost(spec.z, "z")


def _gates(require: Require, spec: DeltaSpec, dims: tuple[int, int, int, int]) -> None:
    """Check the gates and their raw parameters."""
    B, T, HV, K = dims
    g, beta, A_log, dt_bias = spec.g, spec.beta, spec.A_log, spec.dt_bias
    if g is not None:
        require(
            tuple(g.shape) in ((B, T, HV), (B, T, HV, K)),
            "g",
            f"shape {[B, T, HV]} (per head) or {[B, T, HV, K]} (per key)",
            f"shape {list(g.shape)}",
        )
        require.tensor(g, "g", tuple(g.shape), FLOATS)
    if beta is not None:
        require.tensor(beta, "beta", (B, T, HV), FLOATS, "[B, T, HV]")
    if A_log is not None:
        require(g is not None, "A_log", "the raw decay a as g beside it", "g=None")
        require.tensor(A_log, "A_log", (HV,), FLOATS, "[HV]")
    if dt_bias is not None:
        require(A_log is not None, "dt_bias", "A_log beside it (raw gates)", "A_log=None")
        require.tensor(dt_bias, "dt_bias", (HV,) if spec.decay == "head" else (HV, K), FLOATS)
    ok = not spec.neg_eigval or (A_log is not None and beta is not None)
    require(ok, "neg_eigval", "raw gates: A_log, and the raw b as beta", True)


def _conv(require: Require, spec: ConvSpec | ConvQkvSpec) -> None:
    """The checks both convolutions share."""
    x, weight = spec.x, spec.weight
    require(x.dim() == 3, "x", "3 dimensions [B, T, D]", f"shape {list(x.shape)}")
    B, T, D = x.shape
    require.tensor(x, "x", (B, T, D), FLOATS)
    require(D > 0, "x", "at least one channel", f"shape {list(x.shape)}")
    require.tensor(weight, "weight", (D, None), FLOATS, "[D, W]")
    W = weight.shape[1]
    require(2 <= W <= 4, "weight", "a width of 2 to 4", W)
    if spec.bias is not None:
        require.tensor(spec.bias, "bias", (D,), FLOATS, "[D]")
    require.choice(spec.activation, "activation", ("silu", "none", None))
    N = shared.sequences(require, spec, B)
    if spec.state is not None:
        shared.conv_state(require, spec, "state", spec.state, D, W - 1, N)
    else:
        for name in ("slots", "write_slots", "has_state", "window_start"):
            require(getattr(spec, name) is None, name, "state beside it", "state=None")
        alone = spec.checkpoint_slots is None
        require(alone, "checkpoints", "state beside them", "state=None")
        require(not spec.freeze, "freeze", "state beside it", "state=None")
    require(
        not spec.freeze or (spec.checkpoint_slots is None and spec.write_slots is None),
        "freeze",
        "no write_slots and no checkpoints, since nothing is written",
        "one of them",
    )
    shared.addressing(require, spec, N)
    shared.checkpoints(require, spec, N)
    if spec.window_start is not None:
        require.tensor(spec.window_start, "window_start", (N,), INTEGERS, "[N]")
        alone = spec.checkpoint_slots is None
        require(alone, "window_start", "no checkpoints beside it", "checkpoints")
        if not spec.varlen and not spec.freeze:
            least = W - 2 + T
            expected = f"at least {least} columns, W - 2 + T, beside window_start"
            require(least <= spec.L, "state", expected, f"{spec.L} columns")
