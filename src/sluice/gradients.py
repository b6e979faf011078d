"""Gradients for training: the delta rule, the convolution, and a packed layer.

Forward runs the inference kernels. Backward goes over the chunks from the last to the first and
differentiates each one in plain torch; it recomputes the states between them. It needs memory for
one chunk's graph and one state per chunk. Plain torch is slower than a backward kernel, but exact,
on any device. Only first derivatives are defined. The host reads the borders of packed sequences.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from sluice import ops
from sluice.backends.chunked.prefill import CHUNKS, chunk
from sluice.backends.reference.recurrence import Tokens, l2_normalize
from sluice.contract.errors import SluiceError
from sluice.layers.gated_delta_net import _project
from sluice.layers.qwen import QwenShape


class Call(NamedTuple):
    """The arguments of a delta rule call that have no gradient."""

    scale: float | None = None
    normalize_qk: bool = False
    state_layout: str = "kv"
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None

    def sequences(self, q: Tensor) -> int:
        """N."""
        return q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def spans(self, T: int) -> list[tuple[slice, int, int]]:
        """The states and tokens that run together: all rows, or one packed sequence at a time."""
        if self.cu_seqlens is None:
            return [(slice(None), 0, T)]
        bounds = self.cu_seqlens if self.cu_seqlens_cpu is None else self.cu_seqlens_cpu
        pairs = enumerate(pairwise(bounds.tolist()))
        return [(slice(i, i + 1), start, stop) for i, (start, stop) in pairs]


def wanted(*tensors: Tensor | None) -> bool:
    """Whether autograd wants a gradient of any of these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    call: Call,
    *,
    recompute: bool = True,
) -> tuple[Tensor, Tensor]:
    """``ops.prefill`` with gradients: o and the final states, which are new tensors.

    Args:
        q: [B, T, HQ, K]; ``k``, ``v``, ``g`` and ``beta`` as in ``prefill``, gates activated.
        state: the initial states [N, HV, K, V] ("vk": [N, HV, V, K]), or None for zeros.
        call: the rest of the call.
        recompute: compute states and chunks again in backward. False keeps them, which takes more
            memory and less time.
    """
    if recompute:
        o, final = _DeltaRule.apply(q, k, v, g, beta, state, call)
        return o, final
    return _plain(q, k, v, g, beta, state, call)


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    *,
    length: int,
    activation: str | None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A causal convolution of any width with gradients: y and the final windows.

    Args:
        x: [B, T, D]; weight: [D, W]; bias: [D] or None.
        state: the initial windows [N, D, L], or None for zeros.
        length: L, the columns of the final windows. activation: "silu" or None.
        cu_seqlens: borders of packed sequences, B = 1.
    """
    spans = Call(cu_seqlens=cu_seqlens).spans(x.shape[1])
    taps = weight.to(_wide(x))
    ys, windows = [], []
    for rows, start, stop in spans:
        part = x[:, start:stop]
        window = _window(part, None if state is None else state[rows], taps.shape[1] - 1)
        line = torch.cat([window, part.mT.to(window.dtype)], dim=-1).to(taps.dtype)
        y = line.new_zeros(()) if bias is None else bias.to(taps.dtype)[:, None]
        for w in range(taps.shape[1]):
            y = y + line[..., w : w + stop - start] * taps[:, w, None]
        ys.append((silu(y) if activation else y).mT.to(x.dtype))
        before = _window(part, None if state is None else state[rows], length)
        line = torch.cat([before, part.mT.to(before.dtype)], dim=-1)
        windows.append(line[..., line.shape[-1] - length :])
    tail = x.new_zeros(x.shape[0], x.shape[1] - spans[-1][2], x.shape[2]) if spans else 0 * x
    y = torch.cat([*ys, tail], dim=1)
    return y, torch.cat(windows) if windows else x.new_zeros(0, x.shape[2], length)


def rms_norm_gated(x: Tensor, z: Tensor, weight: Tensor, *, eps: float, activation: str) -> Tensor:
    """(C6) in plain torch, rounded once."""
    wide, gate = x.to(_wide(x)), z.to(_wide(x))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    gate = silu(gate) if activation == "silu" else gate.sigmoid()
    return (y * gate).to(x.dtype)


def log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """g = -exp(A_log) softplus(a + dt_bias) in float32, for [.., HV] or [.., HV, K]."""
    a = a.to(_wide(a))
    rate = A_log.to(a.dtype).exp()
    rate = rate.unsqueeze(-1) if a.dim() == 4 else rate
    return -rate * softplus(a if dt_bias is None else a + dt_bias.to(a.dtype))


def strength(b: Tensor, neg_eigval: bool = False) -> Tensor:
    """beta = sigmoid(b) in float32, doubled where negative eigenvalues are allowed."""
    return b.to(_wide(b)).sigmoid() * (2 if neg_eigval else 1)


def packed_layer(
    layer: Any, shape: QwenShape, x: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A whole layer over packed sequences [1, T, hidden], each from zero, with gradients.

    Returns its output and what a transformers cache keeps: windows [N, D, W] and states
    [N, HV, K, V].
    """
    s = shape
    qkv, z, b, a = _project(layer, s, x)
    taps = layer.conv1d.weight[:, 0]
    y, windows = conv(
        qkv,
        taps,
        layer.conv1d.bias,
        None,
        length=s.conv_width,
        activation="silu",
        cu_seqlens=cu_seqlens,
    )
    q, k, v = y.split([s.key_dim, s.key_dim, s.value_dim], dim=-1)
    q, k = (x.unflatten(-1, (s.num_k_heads, s.head_k_dim)) for x in (q, k))
    v = v.unflatten(-1, (s.num_v_heads, s.head_v_dim))
    g, beta = log_decay(a, layer.A_log, layer.dt_bias), strength(b)
    call = Call(normalize_qk=True, cu_seqlens=cu_seqlens)
    o, states = delta_rule(q, k, v, g, beta, None, call)
    o = o.unflatten(-2, (s.num_k_heads, s.r))
    o = rms_norm_gated(o, z, layer.norm.weight, eps=s.norm_eps, activation=s.gate_activation)
    out: Tensor = layer.out_proj(o.flatten(-3))
    return out, windows, states


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor | None,
        state: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, g, beta, state)
        ctx.call = call
        made = None if state is None else state.detach().to(_wide(v), copy=True).contiguous()
        o, final = ops.prefill(
            *(None if x is None else x.detach() for x in (q, k, v, g, beta)),  # type: ignore[arg-type]
            state=made,
            **call._asdict(),
        )
        return o, final

    @staticmethod
    def backward(ctx: Any, do: Tensor, dS: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph: no second derivatives
            raise SluiceError("the delta rule has first derivatives only, not with create_graph")
        call: Call = ctx.call
        with torch.enable_grad():
            given = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
            q, k, v, g, beta, state = given
            tokens, S = _prepare(q, k, v, g, beta, state, call)  # type: ignore[arg-type]
        with torch.no_grad():
            grads = _through_chunks(tokens, S, do, _kv(dS, call), call)
        leaves = [x for x in given if x is not None]
        roots = [x for x in (*tokens, None if given[-1] is None else S) if x is not None]
        found = torch.autograd.grad(roots, leaves, grads[: len(roots)])
        by_leaf = iter(found)
        return (*(None if x is None else next(by_leaf) for x in given), None)


def _through_chunks(x: Tokens, S: Tensor, do: Tensor, dS: Tensor, call: Call) -> list[Tensor]:
    """Gradients of the prepared tokens and initial states, chunk by chunk from the last."""
    x = Tokens(*(None if y is None else y.detach() for y in x))  # type: ignore[arg-type]
    C, S = _chunk_length(x), S.detach()
    grads = [None if y is None else torch.zeros_like(y) for y in x]
    dS, do = dS.to(S.dtype).clone(), do.to(S.dtype)
    for rows, start, stop in call.spans(x.v.shape[1]):
        if start == stop:  # an empty sequence passes its state on
            continue
        cuts = [*range(start, stop, C), stop]
        states = [S[rows]]
        for a, b in pairwise(cuts[:-1]):  # no chunk starts from the last one's state
            states.append(chunk(x.span(a, b), states[-1])[1])
        back = dS[rows]
        for (a, b), before in zip(reversed(list(pairwise(cuts))), reversed(states), strict=True):
            with torch.enable_grad():
                leaves = [None if y is None else y.detach().requires_grad_() for y in x.span(a, b)]
                S_in = before.detach().requires_grad_()
                o, S_out = chunk(Tokens(*leaves), S_in)  # type: ignore[arg-type]
                wrt = [y for y in (*leaves, S_in) if y is not None]
                found = torch.autograd.grad(
                    [o, S_out], wrt, [do[:, a:b], back], allow_unused=True, materialize_grads=True
                )
            parts = iter(found)
            for total in grads:
                if total is not None:
                    total[:, a:b] = next(parts)
            back = next(parts)
        dS[rows] = back
    return [*(y for y in grads if y is not None), dS]


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    call: Call,
) -> tuple[Tensor, Tensor]:
    """The same, with torch's own graph."""
    tokens, S = _prepare(q, k, v, g, beta, state, call)
    assert S is not None
    T, HO, C = v.shape[1], max(q.shape[2], v.shape[2]), _chunk_length(tokens)
    os, finals, end = [], [], 0
    for rows, start, stop in call.spans(T):
        one = S[rows]
        for a in range(start, stop, C):
            o, one = chunk(tokens.span(a, min(a + C, stop)), one)
            os.append(o.to(v.dtype))
        finals.append(one)
        end = stop
    os.append(v.new_zeros(v.shape[0], T - end, HO, v.shape[3]))
    return torch.cat(os, dim=1), _kv(torch.cat(finals) if finals else S, call)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    call: Call,
) -> tuple[Tokens, Tensor]:
    """Cast, normalise and scale; states as [N, HV, K, V]. Autograd follows."""
    dtype = _wide(v)
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if call.normalize_qk:
        q, k = l2_normalize(q), l2_normalize(k)
    g, beta = (None if x is None else x.to(dtype) for x in (g, beta))
    if state is None:
        S = v.new_zeros(call.sequences(q), v.shape[2], k.shape[3], v.shape[3])
    else:
        S = _kv(state.to(dtype), call)
    return Tokens(q * scale, k, v, g, beta), S


def _window(x: Tensor, state: Tensor | None, length: int) -> Tensor:
    """The last ``length`` columns before ``x`` [n, T, D], zeros where ``state`` has none."""
    if state is None:
        return x.new_zeros(x.shape[0], x.shape[2], length)
    lacking = max(length - state.shape[-1], 0)
    state = torch.nn.functional.pad(state, (lacking, 0))
    return state[..., state.shape[-1] - length :]


def _kv(S: Tensor, call: Call) -> Tensor:
    """From the caller's layout to [.., K, V], or back."""
    return S.mT if call.state_layout == "vk" else S


def _chunk_length(x: Tokens) -> int:
    if x.g is None:
        return CHUNKS["none"]
    return CHUNKS["head" if x.g.dim() == 3 else "key"]


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic."""
    return torch.promote_types(x.dtype, torch.float32)
