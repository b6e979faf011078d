"""FlashInfer's gated delta functions (0.7.2), served by sluice, on CPU and GPU.

States are ``[.., HV, V, K]``, K last. Prefill takes the decay itself ("linear space": alpha in
(0, 1], not its logarithm); decode takes raw gates. Padded rows (negative indices) follow sluice's
rule: the output is zeros, and no state is read or written, whatever the state's dtype.
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
from sluice.settings import validating

__all__ = [
    "chunk_gated_delta_rule",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
]

SMALLEST_DECAY = 1e-30
"""A smaller decay counts as this one, so that its logarithm stays finite."""


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: str | bool = "auto",
    state_indices: Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flashinfer.chunk_gated_delta_rule``: o [T, H, V], with the final states if asked.

    ``q, k, v`` [T, heads, D] packed by ``cu_seqlens`` (required); ``g`` (alpha, not its log) and
    ``beta`` [T, max(HQ, HV)], ones by default. With more query than value heads each query head has
    its own state, and k and v are repeated. ``state_indices`` makes ``initial_state`` and
    ``output_state`` pools. Checkpoints are written for every ``checkpoint_every_n_tokens``, from
    the start of each sequence. Refused: ``use_cp`` and ``backend`` other than "auto",
    ``_cp_chunk_len``: sluice splits sequences by its own rule. No gradient, as upstream.
    """
    op = "chunk_gated_delta_rule"
    need(use_cp == "auto", op, "use_cp", "'auto'", repr(use_cp))
    need(backend == "auto", op, "backend", "'auto'", repr(backend))
    common.refuse(op, "_cp_chunk_len", _cp_chunk_len)
    need(cu_seqlens is not None, op, "cu_seqlens", "a tensor", None)
    assert cu_seqlens is not None
    need(q.dim() == 3, op, "q", "[T, HQ, K]", f"shape {list(q.shape)}")
    every = checkpoint_every_n_tokens
    _checkpoint_arguments(op, every, state_checkpoints, checkpoint_cu_starts)
    _longest(op, max_seqlen, cu_seqlens)
    T, N, H = q.shape[0], cu_seqlens.shape[0] - 1, max(q.shape[1], v.shape[1])
    if q.shape[1] > v.shape[1]:  # one state per query head
        k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    g = None if g is None else _log_of(op, g, (T, H))
    if beta is None:
        beta = torch.ones(T, H, device=q.device)
    need(beta.shape == (T, H), op, "beta", f"shape {[T, H]}", f"shape {list(beta.shape)}")
    pool, slots = _prefill_pool(
        op, q, v, H, N, initial_state, output_state, output_final_state, state_indices
    )
    kept = None
    if every:
        assert state_checkpoints is not None
        assert checkpoint_cu_starts is not None
        pool, slots, kept = _with_checkpoints(
            pool, slots, N, T, every, state_checkpoints, checkpoint_cu_starts
        )
    o, _ = ops.prefill(
        q,
        k,
        v,
        g,
        beta,
        scale=scale or None,  # for upstream too, 0.0 means the default
        normalize_qk=use_qk_l2norm_in_kernel,
        state=pool,
        slots=slots,
        cu_seqlens=cu_seqlens,
        checkpoints=kept,
        out=output,
    )
    if every:
        assert state_checkpoints is not None
        state_checkpoints.copy_(pool[pool.shape[0] - state_checkpoints.shape[0] :])
    if not output_final_state:
        return o
    if state_indices is not None:
        assert output_state is not None
        _store(output_state, pool, slots, state_indices, cu_seqlens)
        return o, output_state
    if output_state is None:
        return o, pool[:N]
    _store(output_state, pool, slots, None, cu_seqlens)
    return o, output_state


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
    "auto"; state and pool together.
    """
    op = "gated_delta_rule_decode_pretranspose"
    need(backend == "auto", op, "backend", "'auto'", repr(backend))
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
        options=(scale, use_qk_l2norm),
        output=output,
        buffer=intermediate_states_buffer,
        per_token=None,
        frozen=disable_state_update,
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
    ``disable_state_update`` defaults to True with a warning, as upstream. Refused:
    ``cache_replayssm`` and its buffers (use ``sluice.verify`` and ``commit``).
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
        both = intermediate_states_buffer is None
        need(both, op, "ssm_state_indices", "no intermediate_states_buffer beside it", "both")
        need(not disable_state_update, op, "disable_state_update", "False, as states go", True)
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
        options=(scale, use_qk_l2norm),
        output=output,
        buffer=intermediate_states_buffer,
        per_token=ssm_state_indices,
        frozen=disable_state_update,
    )


def _decode(
    op: str,
    tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    pool: Tensor,
    read: Tensor | None,
    write: Tensor | None,
    *,
    options: tuple[float | None, bool],
    output: Tensor | None,
    buffer: Tensor | None,
    per_token: Tensor | None,
    frozen: bool,
) -> tuple[Tensor, Tensor]:
    """T tokens per row: in one call, or one by one if each token's state is kept."""
    q, k, v, a, b = tokens
    B, T = q.shape[:2]
    given: dict[str, Any] = {"scale": options[0], "normalize_qk": options[1]}
    given |= {"A_log": gates[0], "dt_bias": gates[1]}
    o = v.new_empty(v.shape)
    nowhere = torch.full((B,), -1, dtype=torch.int64, device=q.device)
    if buffer is None and per_token is None:
        serve = ops.decode if T <= MAX_DECODE_TOKENS else ops.prefill
        target = nowhere if frozen else write
        serve(q, k, v, a, b, state=pool, slots=read, write_slots=target, out=o, **given)
    else:
        rows = torch.arange(B, device=q.device) if read is None else read.long()
        live = rows >= 0
        own = torch.where(live, torch.arange(B, device=q.device), -1)
        S = pool[rows.clamp(min=0)].to(common.wide(pool))
        if buffer is not None:
            _check_buffer(op, buffer, B, T, pool)
        for t in range(T):
            now = [x[:, t : t + 1] for x in (q, k, v, a, b)]
            ops.decode(*now, state=S, slots=own, out=o[:, t : t + 1], **given)
            if buffer is not None:
                mask = live.view(-1, 1, 1, 1)
                buffer[:B, t] = torch.where(mask, S.to(buffer.dtype), buffer[:B, t])
            if per_token is not None:
                _scatter(pool, torch.where(live, per_token[:, t].long(), -1), S)
        if per_token is None and not frozen:
            target = rows if write is None else torch.where(live, write.long(), -1)
            _scatter(pool, target, S)
    if output is None:
        return o, pool
    need(output.shape == o.shape, op, "output", f"shape {list(o.shape)}", list(output.shape))
    output.copy_(o)
    return output, pool


def _scatter(pool: Tensor, slots: Tensor, S: Tensor) -> None:
    """Write rows to their slots; rows with negative slots are dropped."""
    live = slots >= 0
    pool[slots[live]] = S[live].to(pool.dtype)


def _check_buffer(op: str, buffer: Tensor, B: int, T: int, pool: Tensor) -> None:
    name, got = "intermediate_states_buffer", f"shape {list(buffer.shape)}"
    ok = buffer.dim() == 5 and buffer.shape[0] >= B and buffer.shape[1] >= T
    expected = f"shape [>= {B}, >= {T}, {', '.join(map(str, pool.shape[1:]))}]"
    need(ok and buffer.shape[2:] == pool.shape[1:], op, name, expected, got)


def _prefill_pool(
    op: str,
    q: Tensor,
    v: Tensor,
    H: int,
    N: int,
    initial: Tensor | None,
    out: Tensor | None,
    keep: bool,
    indices: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The states to update, and their slots; the caller's pool if input and output are the same."""
    tail = (H, v.shape[2], q.shape[2])
    if indices is not None:
        need(indices.shape == (N,), op, "state_indices", f"shape {[N]}", list(indices.shape))
        need(not keep or out is not None, op, "output_state", "the pool beside state_indices", None)
    for name, x in (("initial_state", initial), ("output_state", out)):
        if x is not None:
            ok = (
                x.dim() == 4 and tuple(x.shape[1:]) == tail and (indices is not None or len(x) == N)
            )
            expected = f"shape [{'P' if indices is not None else N}, {', '.join(map(str, tail))}]"
            need(ok, op, name, expected, f"shape {list(x.shape)}")
    dtype = common.wide(v)
    if initial is None:
        return v.new_zeros(N, *tail, dtype=dtype), None
    if keep and out is not None and out.data_ptr() == initial.data_ptr():
        return initial, indices
    rows = initial if indices is None else initial[indices.long()]
    rows = rows.to(dtype)
    return rows.clone() if rows is initial else rows.contiguous(), None


def _store(
    out: Tensor, pool: Tensor, slots: Tensor | None, indices: Tensor | None, cu_seqlens: Tensor
) -> None:
    """Copy final states to the caller's buffer, except rows of empty sequences."""
    if pool.data_ptr() == out.data_ptr():
        return
    N = cu_seqlens.shape[0] - 1
    where = torch.arange(N, device=out.device) if indices is None else indices.long()
    final = pool[:N] if slots is None else pool[slots[:N].long()]
    some = (cu_seqlens.diff() > 0).view(-1, 1, 1, 1)
    out[where] = torch.where(some, final.to(out.dtype), out[where])


def _with_checkpoints(
    pool: Tensor,
    slots: Tensor | None,
    N: int,
    T: int,
    every: int,
    kept: Tensor,
    starts: Tensor,
) -> tuple[Tensor, Tensor, ops.Checkpoints]:
    """A pool with room for the checkpoints after the states, and the slot of each."""
    rows = pool[:N] if slots is None else pool[slots.long()]
    room = rows.new_zeros(len(kept), *rows.shape[1:])
    column = torch.arange(max(T // every, 1), device=pool.device)
    counts = starts.diff().unsqueeze(1)
    at = torch.where(column < counts, N + starts[:-1].unsqueeze(1) + column, -1)
    own = torch.arange(N, device=pool.device)
    return torch.cat([rows, room]), own, ops.Checkpoints(at, every=every)


def _checkpoint_arguments(op: str, every: int, kept: Tensor | None, starts: Tensor | None) -> None:
    ok = every >= 0 and every % 64 == 0
    need(ok, op, "checkpoint_every_n_tokens", "0 or a multiple of 64", every)
    for name, x in (("state_checkpoints", kept), ("checkpoint_cu_starts", starts)):
        if every:
            need(x is not None, op, name, "a tensor beside checkpoint_every_n_tokens", None)
        else:
            common.refuse(op, name, x, "None without checkpoint_every_n_tokens")


def _longest(op: str, most: int | None, cu_seqlens: Tensor) -> None:
    """Check ``max_seqlen`` where values are checked; sluice does not need it."""
    if most is not None and (cu_seqlens.device.type == "cpu" or validating()):
        longest = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
        need(most >= longest, op, "max_seqlen", f"at least {longest}", most)


def _log_of(op: str, alpha: Tensor, size: tuple[int, int]) -> Tensor:
    """The logarithm of a decay; refuses negative values, which must be a log decay."""
    ok = tuple(alpha.shape) == size
    need(ok, op, "g", f"shape {list(size)}", f"shape {list(alpha.shape)}")
    if alpha.device.type == "cpu" or validating():
        least = float(alpha.min()) if alpha.numel() else 0.0
        need(least >= 0, op, "g", "decays in linear space, 0 to 1 (exp of the log decay)", least)
    return alpha.to(common.wide(alpha)).clamp(min=SMALLEST_DECAY).log()


def _name(x: Tensor | None) -> str:
    return "None" if x is None else "a tensor"
