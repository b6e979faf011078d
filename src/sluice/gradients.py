"""Gradients as other libraries' interfaces need them, on the operators of sluice.

Thin: the operators have gradients themselves (docs/training.md). What is added are convolutions
wider than the kernels, and gates that are activated one by one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from sluice import ops

WIDTHS = (2, 3, 4)
"""Conv widths that the operators serve; others run in plain torch, which autograd follows."""


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
) -> tuple[Tensor, Tensor]:
    """``ops.prefill`` in its functional form: o and the final states, which are new tensors.

    Args:
        q: [B, T, HQ, K]; ``k``, ``v``, ``g`` and ``beta`` as in ``prefill``, gates activated.
        state: the initial states [N, HV, K, V] ("vk": [N, HV, V, K]), or None for zeros.
        call: the rest of the call.
    """
    options = call._asdict()
    return ops.prefill(q, k, v, g, beta, initial_state=state, **options)


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
    W = weight.shape[1]
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    before = x.new_zeros(N, x.shape[2], 0) if state is None else state
    before = _columns(before, max(length, W - 1))
    if W in WIDTHS:
        y, final = ops.causal_conv1d(
            x, weight, bias, activation=activation, initial_state=before, cu_seqlens=cu_seqlens
        )
        return y, _columns(final, length)
    return _plain_conv(x, weight, bias, before, length, activation, cu_seqlens)


def log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """g = -exp(A_log) softplus(a + dt_bias) in float32, for [.., HV] or [.., HV, K]."""
    a = a.to(_wide(a))
    rate = A_log.to(a.dtype).exp()
    rate = rate.unsqueeze(-1) if a.dim() == 4 else rate
    return -rate * softplus(a if dt_bias is None else a + dt_bias.to(a.dtype))


def strength(b: Tensor, neg_eigval: bool = False) -> Tensor:
    """beta = sigmoid(b) in float32, doubled where negative eigenvalues are allowed."""
    return b.to(_wide(b)).sigmoid() * (2 if neg_eigval else 1)


def _plain_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor,
    length: int,
    activation: str | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Any width, in plain torch; the host reads the borders of packed sequences."""
    taps, T = weight.to(_wide(x)), x.shape[1]
    W, L = taps.shape[1], before.shape[2]
    spans = [(slice(None), 0, T)]
    if cu_seqlens is not None:
        pairs = enumerate(pairwise(cu_seqlens.tolist()))
        spans = [(slice(i, i + 1), start, stop) for i, (start, stop) in pairs]
    ys, windows, end = [], [], 0
    for rows, start, stop in spans:
        n, end = stop - start, stop
        raw = torch.cat([before[rows], x[:, start:stop].mT.to(before.dtype)], dim=-1)
        line = raw.to(taps.dtype)
        y = line.new_zeros(()) if bias is None else bias.to(taps.dtype)[:, None]
        for w in range(W):
            at = L - W + 1 + w
            y = y + line[..., at : at + n] * taps[:, w, None]
        ys.append((silu(y) if activation else y).mT.to(x.dtype))
        windows.append(raw[..., raw.shape[-1] - length :])
    ys.append(x.new_zeros(x.shape[0], T - end, x.shape[2]))
    return torch.cat(ys, dim=1), torch.cat(windows) if windows else before[..., :length]


def _columns(window: Tensor, length: int) -> Tensor:
    """The last ``length`` columns, zeros before them where there are fewer."""
    window = pad(window, (max(length - window.shape[-1], 0), 0))
    return window[..., window.shape[-1] - length :]


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic."""
    return torch.promote_types(x.dtype, torch.float32)
