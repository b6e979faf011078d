"""causal-conv1d's functions (1.7), served by sluice, on CPU and GPU.

Inputs are channel-first ``[B, D, T]``, in either memory order; states ``[B, D, L]``, L >= W - 1,
with the same strides upstream takes. ``causal_conv1d_fn`` has gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sluice import gradients, ops
from sluice.compat import common
from sluice.compat.common import need
from sluice.compat.fla_conv import WIDTHS

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"]


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``causal_conv1d.causal_conv1d_fn``: y [B, D, T], and final states [B, D, W - 1] if asked.

    ``seq_idx`` [B, T] separates packed sequences; negative entries are padding and give zeros. Then
    ``initial_states`` belong to the first sequence of each row, and final states are refused, as
    upstream. The host reads its borders. ``final_states_out`` is written in place, and refused
    without ``return_final_states``.
    """
    op = "causal_conv1d_fn"
    common.tensors(op, x=x, weight=weight, seq_idx=seq_idx, final_states_out=final_states_out)
    act, W = common.silu_or_none(op, activation), weight.shape[1]
    need(x.dim() == 3, op, "x", "[B, D, T]", f"shape {list(x.shape)}")
    need(
        return_final_states or final_states_out is None,
        op,
        "final_states_out",
        "return_final_states beside it",
        return_final_states,
    )
    if seq_idx is not None:
        need(not return_final_states, op, "return_final_states", "False beside seq_idx", True)
        return _packed(op, x, weight, bias, seq_idx, initial_states, act)
    y, final = _conv(x, weight, bias, initial_states, act)
    if not return_final_states:
        return y
    if final_states_out is not None:
        size = [x.shape[0], x.shape[1], W - 1]
        got = list(final_states_out.shape)
        need(got == size, op, "final_states_out", f"shape {size}", got)
        final_states_out.copy_(final)
        final = final_states_out
    return y, final


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """``causal_conv1d.causal_conv1d_update``: y like x; ``conv_state`` [P, D, L] in place.

    ``x`` is [B, D] or [B, D, T]. With ``cache_seqlens`` [B] the state is a ring, written from
    column ``cache_seqlens % L`` on. Negative ``conv_state_indices`` are padding: the output is
    zeros, and no state is touched. As upstream, there is no gradient; asking for one raises.
    """
    op = "causal_conv1d_update"
    common.tensors(op, x=x, weight=weight, cache_seqlens=cache_seqlens)
    act, W = common.silu_or_none(op, activation), weight.shape[1]
    need(W in WIDTHS, op, "weight", f"a width of {WIDTHS}", f"width {W}")
    single = x.dim() == 2
    x = x.unsqueeze(-1) if single else x
    need(x.dim() == 3, op, "x", "[B, D] or [B, D, T]", f"{x.dim()} dimensions")
    options = {"activation": act, "layout": "bdt", "slots": conv_state_indices}
    if cache_seqlens is None:
        y, _ = ops.causal_conv1d(x, weight, bias, state=conv_state, **options)  # type: ignore[arg-type]
    else:
        need(cache_seqlens.shape == x.shape[:1], op, "cache_seqlens", "[B]", cache_seqlens.shape)
        y = _ring(x, conv_state, weight, bias, cache_seqlens, conv_state_indices, act)
    return y.squeeze(-1) if single else y


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """``causal_conv1d.causal_conv1d_varlen.causal_conv1d_varlen_states``: [N, D, state_len].

    The last inputs of each packed sequence of ``x`` [T, D], with zeros before its first token.
    """
    common.tensors("causal_conv1d_varlen_states", x=x, cu_seqlens=cu_seqlens)
    starts, ends = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    at = ends + torch.arange(-state_len, 0, device=x.device)
    states = x[at.clamp(min=0)] if len(x) else x.new_zeros(*at.shape, x.shape[1])
    return torch.where((at >= starts).unsqueeze(-1), states, 0).transpose(1, 2)


def _conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, act: str | None
) -> tuple[Tensor, Tensor]:
    """y and the last W - 1 inputs."""
    W = weight.shape[1]
    if W not in WIDTHS or gradients.wanted(x, weight, bias, state):
        y, final = gradients.conv(x.mT, weight, bias, state, length=W - 1, activation=act)
        return y.mT, final.to(x.dtype)
    made = x.mT.new_zeros(x.shape[0], W - 1, x.shape[1]).mT  # channel-last, as upstream makes it
    if state is not None:
        made.copy_(state)
    y = torch.empty_like(x)
    ops.causal_conv1d(x, weight, bias, activation=act, state=made, layout="bdt", out=y)
    return y, made


def _packed(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor,
    initial: Tensor | None,
    act: str | None,
) -> Tensor:
    """Runs of equal ``seq_idx`` in each row as sequences of one packed row."""
    (B, D, T), W = x.shape, weight.shape[1]
    ok = seq_idx.shape == (B, T)
    need(ok, op, "seq_idx", f"shape {[B, T]}", f"shape {list(seq_idx.shape)}")
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    starts = begins.flatten().nonzero().squeeze(1)
    borders = torch.cat([starts, starts.new_full((1,), B * T)])
    tokens = x.mT.reshape(1, B * T, D)
    states = None
    if initial is not None:
        size, got = [B, D, W - 1], list(initial.shape)
        need(got == size, op, "initial_states", f"shape {size}", f"shape {got}")
        states = initial.new_zeros(len(starts), D, W - 1)
        if T > 0:  # the number of each row's first sequence, which is the one that goes on
            first = begins.flatten().cumsum(0).view(B, T)[:, 0] - 1
            states = states.index_copy(0, first, initial)
    if W not in WIDTHS or gradients.wanted(x, weight, bias, initial):
        y, _ = gradients.conv(
            tokens, weight, bias, states, length=0, activation=act, cu_seqlens=borders
        )
    else:
        y, _ = ops.causal_conv1d(
            tokens, weight, bias, activation=act, state=states, cu_seqlens=borders
        )
    return torch.where((seq_idx >= 0).unsqueeze(1), y.view(B, T, D).mT, 0)


def _ring(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    at: Tensor,
    slots: Tensor | None,
    act: str | None,
) -> Tensor:
    """An update of a ring: unroll it to read, and write at its current position."""
    (B, D, T), L, W = x.shape, conv_state.shape[2], weight.shape[1]
    rows = torch.arange(B, device=x.device) if slots is None else slots.long()
    before = torch.arange(1 - W, 0, device=x.device) + at.long().unsqueeze(1)
    channels = torch.arange(D, device=x.device).view(1, D, 1)
    live = rows >= 0
    row = rows.clamp(min=0).view(B, 1, 1)
    window = conv_state[row, channels, (before % L).unsqueeze(1)]
    own = torch.where(live, torch.arange(B, device=x.device), -1)
    y, _ = ops.causal_conv1d(x, weight, bias, activation=act, state=window, slots=own, layout="bdt")
    kept = min(T, L)
    after = (at.long().unsqueeze(1) + torch.arange(T - kept, T, device=x.device)) % L
    column = after[live].unsqueeze(1)
    conv_state[row[live], channels, column] = x[live][..., T - kept :].to(conv_state.dtype)
    return y
