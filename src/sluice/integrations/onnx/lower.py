"""What sluice's operators become in an ONNX graph while ``torch.onnx.export`` traces them.

The recurrence is one ``com.microsoft::LinearAttention`` node, the convolution one
``CausalConvWithState``; l2 norm, gates, split and gated norm are plain operators around them.
All arithmetic is float32, as the contract promises, whatever the input dtype: gates are never
rounded, and a runtime needs float32 kernels only. States are read from and written to the caller's
tensors, which torch turns into inputs and outputs of the graph.

``sluice.calls`` hands over here by name, so that nothing of this is imported in eager use.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from sluice.contract.errors import ContractError
from sluice.contract.meta import Meta
from sluice.layers.weights import split_interleaved

if TYPE_CHECKING:
    from sluice.calls import Operator

DOMAIN = "com.microsoft"
NORM_EPS = 1e-6  # of the l2 norm, docs/contract.md


def lower(op: Operator, t: Any, options: tuple[Any, ...], backend: str | None) -> None:
    """Write a call's ONNX nodes instead of running it; refuses what no node expresses."""
    o = SimpleNamespace(**dict(zip(op.spec.OPTIONS, options, strict=True)))
    _refuse(op.name, t, o, backend)
    _LOWER[op.name](op, t, o)


def _checked(op: Operator, t: Any, o: Any) -> Any:
    """The spec of a call, checked."""
    metas = [None if x is None else Meta(x.shape, x.stride(), x.dtype, x.device) for x in t]
    spec = op.spec.make(op.name, metas, [getattr(o, name) for name in op.spec.OPTIONS])
    op.check(spec)
    return spec


# --------------------------------------------------------------------------------- the operators


def _delta(op: Operator, t: Any, o: Any) -> None:
    """``prefill`` and ``decode``: a graph has no limit on tokens, so one form serves both."""
    traced = not isinstance(t.q.shape[1], int)
    p = _checked(op._replace(name="prefill") if traced else op, t, o)
    _one_row_per_sequence(op.name, t.state, "state", p.B)
    g, beta = _float(t.g), _float(t.beta)
    if t.A_log is not None:
        g = raw_decay(g, t.A_log, t.dt_bias)
        beta = None if beta is None else write_strength(beta, o.neg_eigval)
    q, k, v = t.q.float(), t.k.float(), t.v.float()
    if o.normalize_qk:
        q, k = unit(q), unit(k)
    past = _read(t.state, t.has_state, swapped=o.state_layout == "vk")
    out, present = attention(q, k, v, past, g, beta, p.q_scale)
    t.out.copy_(out.to(t.out.dtype))
    _write(t.state, present, swapped=o.state_layout == "vk")


def _conv(op: Operator, t: Any, o: Any) -> None:
    p = _checked(op, t, o)
    y = _convolve(op.name, t, o, p.B)
    t.out.copy_(y.to(t.out.dtype))


def _conv_qkv(op: Operator, t: Any, o: Any) -> None:
    p = _checked(op, t, o)
    y = _convolve(op.name, t, o, p.B)
    q, k, v = split_heads(y, p)
    if o.normalize_qk:
        q, k = unit(q), unit(k)
    for buffer, x in ((t.q, q), (t.k, k), (t.v, v)):
        buffer.copy_(x.to(buffer.dtype))
    if t.a is not None:
        t.g.copy_(raw_decay(t.a.float(), t.A_log, t.dt_bias))
    if t.b is not None:
        t.beta.copy_(write_strength(t.b.float(), o.neg_eigval))


def _norm(op: Operator, t: Any, o: Any) -> None:
    _checked(op, t, o)
    t.out.copy_(gated_norm(t.x, t.z, t.weight, o.eps, o.activation).to(t.out.dtype))


def _step(op: Operator, t: Any, o: Any) -> None:
    """A whole layer, with nothing rounded in between."""
    p = _checked(op, _one_token(t), o)
    _one_row_per_sequence(op.name, t.state, "state", p.N)
    qkv, z, b, a = t.qkv, t.z, t.b, t.a
    if o.order == "interleaved":
        heads = SimpleNamespace(num_k_heads=p.HK, r=p.HV // p.HK, head_k_dim=p.K, head_v_dim=p.V)
        parts, z, b, a = split_interleaved(heads, t.qkv, t.b)  # type: ignore[arg-type]
        qkv = torch.cat([x.flatten(-2) for x in parts], dim=-1)
        z, b, a = z.flatten(2), b.flatten(2), a.flatten(2)
    else:
        qkv, z = (qkv, z) if z is not None else qkv.split([p.D, p.HV * p.V], dim=-1)
        b, a = (b, a) if a is not None else b.split([p.HV, p.HV], dim=-1)
    window = SimpleNamespace(
        x=qkv, weight=t.conv_weight, bias=t.conv_bias, state=t.conv_state, has_state=t.has_state
    )
    convolution = SimpleNamespace(activation=o.conv_activation, freeze=False)
    y = _convolve(op.name, window, convolution, p.N)
    q, k, v = split_heads(y, p)
    if o.normalize_qk:
        q, k = unit(q), unit(k)
    g = raw_decay(a.float(), t.A_log, t.dt_bias)
    past = _read(t.state, t.has_state, swapped=o.state_layout == "vk")
    out, present = attention(q, k, v, past, g, write_strength(b.float(), o.neg_eigval), p.q_scale)
    out = gated_norm(out, z.unflatten(-1, (p.HV, p.V)), t.norm_weight, o.eps, o.gate_activation)
    t.out.copy_(out.flatten(2).to(t.out.dtype))
    _write(t.state, present, swapped=o.state_layout == "vk")


_LOWER = {
    "prefill": _delta,
    "decode": _delta,
    "causal_conv1d": _conv,
    "conv_qkv": _conv_qkv,
    "rms_norm_gated": _norm,
    "step": _step,
}


# -------------------------------------------------------------------------------------- the nodes


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``LinearAttention`` on [B, T, heads, width] float32: o, and the state [B, HV, K, V]."""
    B, T, HQ, K = q.shape
    HV, V = v.shape[2:]
    rule = ("gated_delta" if g is not None else "delta") if beta is not None else "gated"
    rule = "linear" if g is None and beta is None else rule
    if scale == 0.0:  # the attribute's 0 means K ** -0.5
        q, scale = q * 0.0, 1.0
    decay = g.flatten(2) if g is not None and g.dim() == 4 else g
    heads = max(HQ, HV)
    o, present = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::LinearAttention",
        [q.flatten(2), k.flatten(2), v.flatten(2), past, decay, beta],
        {
            "update_rule": rule,
            "scale": float(scale),
            "q_num_heads": HQ,
            "kv_num_heads": HV,
        },
        dtypes=[torch.float32, torch.float32],
        shapes=[[B, T, heads * V], [B, HV, K, V]],
        version=1,
    )
    return o.unflatten(-1, (heads, V)), present


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """``CausalConvWithState`` on [B, T, D] float32: y, and the window [B, D, W - 1]."""
    (B, T, D), W = x.shape, weight.shape[1]
    y, present = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::CausalConvWithState",
        [x.transpose(1, 2), weight.unsqueeze(1), bias, past],
        {"activation": activation or "none"},
        dtypes=[torch.float32, torch.float32],
        shapes=[[B, D, T], [B, D, W - 1]],
        version=1,
    )
    return y.transpose(1, 2), present


def _convolve(op: str, t: Any, o: Any, B: int) -> Tensor:
    """The convolution, activated, float32; rolls the window unless it is frozen."""
    x, weight = t.x.float(), t.weight.float()
    if t.state is None:
        return convolution(x, weight, _float(t.bias), None, o.activation)[0]
    _one_row_per_sequence(op, t.state, "conv_state" if op == "step" else "state", B)
    past, kept, L = _read(t.state, t.has_state), weight.shape[1] - 1, t.state.shape[2]
    y, present = convolution(x, weight, _float(t.bias), past[..., L - kept :], o.activation)
    if o.freeze:
        return y
    if kept < L:  # ONNX keeps W - 1 columns, this pool more
        present = torch.cat([past, x.transpose(1, 2)], dim=-1).narrow(-1, x.shape[1], L)
    _write(t.state, present)
    return y


# -------------------------------------------------------------------------------- plain operators


def unit(x: Tensor) -> Tensor:
    """x over its length; eps is inside the root."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def raw_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """g = -exp(A_log) softplus(a + dt_bias), per head or per key."""
    a = a if dt_bias is None else a + dt_bias.float()
    A = A_log.float().exp()
    return -(A.unsqueeze(-1) if a.dim() == 4 else A) * softplus(a)


def write_strength(b: Tensor, doubled: bool) -> Tensor:
    """beta = sigmoid(b), doubled for negative eigenvalues."""
    return 2.0 * b.sigmoid() if doubled else b.sigmoid()


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """weight x / sqrt(mean x^2 + eps) act(z), float32."""
    x, z = x.float(), z.float()
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.float()
    return y * (silu(z) if activation == "silu" else z.sigmoid())


def split_heads(y: Tensor, p: Any) -> tuple[Tensor, Tensor, Tensor]:
    """[Q | K | V] channels as heads."""
    q, k, v = y.split([p.HK * p.K, p.HK * p.K, p.HV * p.V], dim=-1)
    q, k = q.unflatten(-1, (p.HK, p.K)), k.unflatten(-1, (p.HK, p.K))
    return q, k, v.unflatten(-1, (p.HV, p.V))


# ----------------------------------------------------------------------------------------- states


def _read(state: Tensor, has_state: Tensor | None, *, swapped: bool = False) -> Tensor:
    """A state as float32 [.., K, V], with zeros for rows without one; swapped: from [.., V, K]."""
    x = state.float()
    if has_state is not None:  # not a product: 0 · NaN is NaN
        x = torch.where(has_state.view(-1, *[1] * (x.dim() - 1)), x, torch.zeros_like(x))
    return x.transpose(2, 3) if swapped else x


def _write(state: Tensor, x: Tensor, *, swapped: bool = False) -> None:
    state.copy_((x.transpose(2, 3) if swapped else x).to(state.dtype))


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


def _one_token(t: Any) -> Any:
    """The call with one token, for checks while the number of tokens is unknown."""
    if isinstance(t.qkv.shape[1], int):
        return t
    cut = {name: getattr(t, name) for name in ("qkv", "z", "b", "a", "out")}
    return t._replace(**{n: None if x is None else x[:, :1] for n, x in cut.items()})


# --------------------------------------------------------------------------------------- refusals


def _refuse(op: str, t: Any, o: Any, backend: str | None) -> None:
    """Refuse options that ONNX's operators cannot express."""

    def refuse(option: str, reason: str, got: object = "given") -> None:
        raise ContractError(op, option, f"none in an ONNX graph ({reason})", got)

    if op not in _LOWER:
        raise ContractError(op, "torch.onnx.export", "an operator of ONNX", "draft tokens")
    if backend is not None:
        refuse("backend", "the runtime that loads it chooses its kernels", repr(backend))
    if getattr(t, "cu_seqlens", None) is not None:
        refuse("cu_seqlens", "its operators take no packed sequences")
    for name in ("slots", "write_slots"):
        if getattr(t, name, None) is not None:
            refuse(name, "a state has one row per sequence, there is no pool")
    if getattr(t, "checkpoint_slots", None) is not None:
        refuse("checkpoints", "its operators give the last state only")
    if getattr(t, "window_start", None) is not None:
        refuse("window_start", "its operators roll the whole window")
    if getattr(o, "batch_invariant", False):
        refuse("batch_invariant", "no runtime promises the bits of a row", True)
    if t[0].dtype == torch.float64:
        refuse("float64", "its operators are float32 and float16")


def _one_row_per_sequence(op: str, state: Tensor, name: str, B: int) -> None:
    """Refuse a pool with more rows than sequences: a node writes all rows."""
    if state.shape[0] != B:
        expected = "one row per sequence in an ONNX graph"
        raise ContractError(op, name, expected, f"{state.shape[0]} rows, {B} sequences")
