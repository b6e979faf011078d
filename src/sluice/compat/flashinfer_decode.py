"""FlashInfer's decode functions (0.7.2): one or more tokens per row, raw gates, states in place.

Padded rows (negative indices) follow sluice's rule: no state is read or written, whatever the
state's dtype, and the output is zeros.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from sluice import ops
from sluice.compat import common
from sluice.compat.common import need
from sluice.contract.spec import MAX_DECODE_TOKENS

BACKENDS = ("auto", "flashinfer")
"""Upstream's names for "choose a kernel"; its other names ask for one particular engine."""


def gated_delta_rule_decode_pretranspose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose``: o [B, T, HV, V], and states.

    ``state`` [B, HV, V, K], or a pool ``initial_state`` with ``initial_state_indices`` [B] (and
    ``output_state_indices`` to write elsewhere), is updated in place unless
    ``disable_state_update``. T may be more than 1 with either. Refused: ``backend`` other than
    "auto" and "flashinfer"; state and pool together.
    """
    op = "gated_delta_rule_decode_pretranspose"
    choose(op, backend)
    pooled = initial_state is not None
    expected = "a tensor, as initial_state is" if pooled else "None, as initial_state is"
    ok = pooled == (initial_state_indices is not None)
    need(ok, op, "initial_state_indices", expected, _name(initial_state_indices))
    need(pooled != (state is not None), op, "state", "either state or initial_state", _name(state))
    if output_state_indices is not None:
        need(pooled, op, "output_state_indices", "initial_state beside it", None)
    pool = initial_state if pooled else state
    assert pool is not None
    return _decode(
        op,
        (q, k, v, a, b),
        (A_log, dt_bias),
        pool,
        initial_state_indices,
        output_state_indices,
        options=(scale, use_qk_l2norm, "vk"),
        output=output,
        buffer=intermediate_states_buffer,
        frozen=disable_state_update,
    )


def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``flashinfer.gdn_decode.gated_delta_rule_decode``: states [B, HV, K, V], V last, in place.

    Otherwise as ``gated_delta_rule_decode_pretranspose`` with a ``state``; T may be more than 1.
    Refused: ``backend`` other than "auto" and "flashinfer".
    """
    op = "gated_delta_rule_decode"
    choose(op, backend)
    return _decode(
        op,
        (q, k, v, a, b),
        (A_log, dt_bias),
        state,
        None,
        None,
        options=(scale, use_qk_l2norm, "kv"),
        output=output,
    )


def gated_delta_rule_mtp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: Tensor | None = None,
    cache_replayssm: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``flashinfer.gdn_decode.gated_delta_rule_mtp``: T draft tokens per row, from a pool.

    ``intermediate_states_buffer`` [>= B, >= T, HV, V, K] receives the state after each token;
    ``ssm_state_indices`` [B, T] puts it into the pool instead, and then nothing else is written.
    ``disable_state_update`` defaults to True with a warning, as upstream. Padded rows of a given
    ``output`` stay as they are, as upstream. Refused: ``cache_replayssm`` and its buffers (use
    ``sluice.verify`` and ``commit``).
    """
    op = "gated_delta_rule_mtp"
    need(not cache_replayssm, op, "cache_replayssm", "False", cache_replayssm)
    for name, value in (
        ("replayssm_rawv", replayssm_rawv),
        ("replayssm_rawk", replayssm_rawk),
        ("replayssm_g", replayssm_g),
        ("replayssm_beta", replayssm_beta),
    ):
        common.refuse(op, name, value)
    if disable_state_update is None:
        text = f"{op}: disable_state_update is True by default; pass it, upstream will change that"
        warnings.warn(text, FutureWarning, stacklevel=2)
        disable_state_update = True
    if ssm_state_indices is not None:
        alone = intermediate_states_buffer is None
        expected = "no intermediate_states_buffer beside it (they are mutually exclusive)"
        need(alone, op, "ssm_state_indices", expected, "both")
        expected = "False, since ssm_state_indices asks for state writes"
        need(not disable_state_update, op, "disable_state_update", expected, True)
        size = list(q.shape[:2])
        got = list(ssm_state_indices.shape)
        need(got == size, op, "ssm_state_indices", f"shape {size}", f"shape {got}")
    return _decode(
        op,
        (q, k, v, a, b),
        (A_log, dt_bias),
        initial_state,
        initial_state_indices,
        output_state_indices,
        options=(scale, use_qk_l2norm, "vk"),
        output=output,
        buffer=intermediate_states_buffer,
        per_token=ssm_state_indices,
        frozen=disable_state_update,
        keep_padded=True,
    )


def choose(op: str, backend: str) -> None:
    """Refuse a ``backend`` that asks for one of upstream's own engines."""
    need(backend in BACKENDS, op, "backend", "'auto' or 'flashinfer'", repr(backend))


def dense(pool: Tensor) -> bool:
    """Whether the operators take this pool as it is: contiguous rows, any distance apart."""
    return pool.dim() == 4 and (pool.shape[0] == 0 or pool[0].is_contiguous())


def _decode(
    op: str,
    tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    pool: Tensor,
    read: Tensor | None,
    write: Tensor | None,
    *,
    options: tuple[float | None, bool, str],
    output: Tensor | None,
    buffer: Tensor | None = None,
    per_token: Tensor | None = None,
    frozen: bool = False,
    keep_padded: bool = False,
) -> tuple[Tensor, Tensor]:
    """T tokens per row: in one call, or one by one if there are more than a decode takes."""
    q, k, v, a, b = tokens
    common.tensors(op, q=q, k=k, v=v, state=pool, output=output)
    B, T = q.shape[:2]
    if buffer is not None:
        _check_buffer(op, buffer, B, T, pool)
    given: dict[str, Any] = {"scale": options[0], "normalize_qk": options[1]}
    given |= {"A_log": gates[0], "dt_bias": gates[1], "state_layout": options[2]}
    whole, o = read is None or not keep_padded, None
    if output is not None:
        need(output.shape == v.shape, op, "output", f"shape {list(v.shape)}", list(output.shape))
        if whole and output.dtype == v.dtype and output.stride(-1) == 1:
            o = output
    if o is None:
        o = v.new_empty(v.shape)
    serve = ops.decode if T <= MAX_DECODE_TOKENS else ops.prefill
    if buffer is None and per_token is None and dense(pool):
        target = torch.full((B,), -1, device=q.device) if frozen else write
        serve(q, k, v, a, b, state=pool, slots=read, write_slots=target, out=o, **given)
    elif per_token is not None and T <= MAX_DECODE_TOKENS and dense(pool):
        ops.decode(q, k, v, a, b, state=pool, slots=read, write_slots=per_token, out=o, **given)
    else:
        rows = torch.arange(B, device=q.device) if read is None else read.long()
        live = rows >= 0
        own = torch.where(live, torch.arange(B, device=q.device), -1)
        S = pool.index_select(0, rows.clamp(min=0)).contiguous()
        if buffer is None and per_token is None:
            serve(q, k, v, a, b, state=S, slots=own, out=o, **given)
        elif 0 < T <= MAX_DECODE_TOKENS:
            S = S if buffer is None else S.to(common.wide(pool))
            states = torch.cat([S, S.new_empty(B * T, *S.shape[1:])])
            writes = B + torch.arange(B * T, device=q.device).view(B, T)
            ops.decode(q, k, v, a, b, state=states, slots=own, write_slots=writes, out=o, **given)
            S = states[writes[:, -1]]
            _keep(states[B:].view(B, T, *S.shape[1:]), live, pool, buffer, per_token)
        else:
            S = S.to(common.wide(pool))
            _one_by_one(tokens, given, S, own, pool, o, buffer, per_token)
        if per_token is None and not frozen:
            target = rows if write is None else torch.where(live, write.long(), -1)
            scatter(pool, target, S)
    if output is None or o is output:
        return o, pool
    if not whole:
        assert read is not None
        o = torch.where((read >= 0).view(-1, 1, 1, 1), o, output)
    output.copy_(o)
    return output, pool


def _one_by_one(
    tokens: tuple[Tensor, ...],
    given: dict[str, Any],
    S: Tensor,
    own: Tensor,
    pool: Tensor,
    o: Tensor,
    buffer: Tensor | None,
    per_token: Tensor | None,
) -> None:
    """Advance ``S`` token by token, and keep the state after each."""
    for t in range(tokens[0].shape[1]):
        now = [x[:, t : t + 1] for x in tokens]
        ops.decode(*now, state=S, slots=own, out=o[:, t : t + 1], **given)
        to = None if buffer is None else buffer[:, t:]
        at = None if per_token is None else per_token[:, t : t + 1]
        _keep(S[:, None], own >= 0, pool, to, at)


def _keep(
    states: Tensor, live: Tensor, pool: Tensor, buffer: Tensor | None, per_token: Tensor | None
) -> None:
    """Put the states [B, T, ..] of live rows into a buffer, or into these slots of the pool."""
    B, T = states.shape[:2]
    if buffer is not None:
        there = live.view(-1, 1, 1, 1, 1)
        buffer[:B, :T] = torch.where(there, states.to(buffer.dtype), buffer[:B, :T])
    if per_token is not None:
        for t in range(T):
            scatter(pool, torch.where(live, per_token[:, t].long(), -1), states[:, t])


def scatter(pool: Tensor, slots: Tensor, S: Tensor) -> None:
    """Write rows to their slots, except those with negative slots; the host reads nothing.

    A row that must not be written repeats the first one that is (or, if there is none, what slot 0
    holds already): all writers of a slot then write the same bytes.
    """
    if len(slots) == 0 or len(pool) == 0:
        return
    live = slots >= 0
    first = live.to(torch.uint8).argmax().view(1)  # 1-d: a 0-d index would be read by the host
    slot = torch.where(live.any(), slots.index_select(0, first), 0)
    S = S.to(pool.dtype)
    row = torch.where(live.any(), S.index_select(0, first), pool[:1])
    rows = torch.where(live.view(-1, 1, 1, 1), S, row)
    pool.index_copy_(0, torch.where(live, slots, slot), rows)


def _check_buffer(op: str, buffer: Tensor, B: int, T: int, pool: Tensor) -> None:
    name, got = "intermediate_states_buffer", f"shape {list(buffer.shape)}"
    ok = buffer.dim() == 5 and buffer.shape[0] >= B and buffer.shape[1] >= T
    expected = f"shape [>= {B}, >= {T}, {', '.join(map(str, pool.shape[1:]))}]"
    need(ok and buffer.shape[2:] == pool.shape[1:], op, name, expected, got)


def _name(x: Tensor | None) -> str:
    return "None" if x is None else "a tensor"
