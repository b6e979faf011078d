"""FlashInfer's gated delta functions (0.7.2), served by sluice, on CPU and GPU.

States are ``[.., HV, V, K]``, K last. Prefill takes the decay itself ("linear space": alpha in
(0, 1], not its logarithm); decode takes raw gates. Padded rows (negative indices) follow sluice's
rule: the output is zeros, and no state is read or written, whatever the state's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sluice import ops
from sluice.compat import common
from sluice.compat.common import need
from sluice.compat.flashinfer_decode import (
    choose,
    dense,
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
)
from sluice.compat.flashinfer_step import gdn_fused_decode_step
from sluice.settings import validating

__all__ = [
    "chunk_gated_delta_rule",
    "gated_delta_rule_decode",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
    "gdn_fused_decode_step",
]

SMALLEST_DECAY = 1e-30
"""A smaller decay counts as this one, so that its logarithm stays finite."""

CHUNK = 64
"""Upstream's chunk: checkpoints and parts of a split lie at its multiples."""

STATES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
"""State dtypes that the operators take, and those that are converted before and after a call."""


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
    the start of each sequence. With ``use_cp=False`` or a ``_cp_chunk_len`` no sequence is split,
    and its bits do not depend on the others (``batch_invariant``); True and "auto" leave the plan
    to sluice. States of other strides or of float8 are copied before and after the call. Refused:
    ``backend`` other than "auto" and "flashinfer". No gradient, as upstream.
    """
    op = "chunk_gated_delta_rule"
    common.tensors(op, q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens, output=output)
    choose(op, backend)
    need(use_cp in ("auto", True, False), op, "use_cp", "'auto', True or False", repr(use_cp))
    cut = _cp_chunk_len
    ok = cut is None or (cut > 0 and cut % CHUNK == 0)
    need(ok, op, "_cp_chunk_len", f"None or a multiple of the chunk size ({CHUNK})", cut)
    every = checkpoint_every_n_tokens
    _checkpoint_arguments(op, every, state_checkpoints, checkpoint_cu_starts)
    need(cu_seqlens is not None, op, "cu_seqlens", "a tensor", None)
    assert cu_seqlens is not None
    need(q.dim() == 3, op, "q", "[T, HQ, K]", f"shape {list(q.shape)}")
    T, N, H = q.shape[0], cu_seqlens.shape[0] - 1, max(q.shape[1], v.shape[1])
    _longest(op, max_seqlen, T, cu_seqlens)
    if q.shape[1] > v.shape[1]:  # one state per query head
        k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    g = None if g is None else _log_of(op, g, (T, H))
    if beta is None:
        beta = torch.ones(T, H, device=q.device)
    need(beta.shape == (T, H), op, "beta", f"shape {[T, H]}", f"shape {list(beta.shape)}")
    tail = (H, v.shape[2], q.shape[2])
    states = (initial_state, output_state if output_final_state else None)
    _check_states(op, states, tail, N, state_indices)
    if state_indices is not None and output_final_state:
        expected = "an explicit output_state pool beside state_indices"
        need(output_state is not None, op, "output_state", expected, None)
    pool, slots = _prefill_pool(states, N, tail, state_indices, v, copied=every > 0)
    kept = None
    if every:
        assert state_checkpoints is not None
        assert checkpoint_cu_starts is not None
        _check_checkpoints(op, state_checkpoints, checkpoint_cu_starts, tail, N)
        pool, slots, kept = _with_checkpoints(
            pool, N, T, every, len(state_checkpoints), checkpoint_cu_starts
        )
    ours = output is None or (output.dtype == v.dtype and output.stride(-1) == 1)
    size = [T, H, v.shape[2]]
    if output is not None:
        need(list(output.shape) == size, op, "output", f"shape {size}", list(output.shape))
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
        batch_invariant=use_cp is False or cut is not None,
        out=output if ours else None,
    )
    if not ours:
        assert output is not None
        o = output.copy_(o)
    if every:
        assert state_checkpoints is not None
        state_checkpoints.copy_(pool[N:])
    if not output_final_state:
        return o
    if output_state is None:
        return o, pool[:N]
    _store(output_state, pool, state_indices, cu_seqlens)
    return o, output_state


def _check_states(
    op: str,
    states: tuple[Tensor | None, Tensor | None],
    tail: tuple[int, int, int],
    N: int,
    indices: Tensor | None,
) -> None:
    """Shapes and dtypes of ``initial_state`` and ``output_state``, packed or pools."""
    if indices is not None:
        need(indices.shape == (N,), op, "state_indices", f"shape {[N]}", list(indices.shape))
    for name, x in zip(("initial_state", "output_state"), states, strict=True):
        if x is not None:
            ok = x.dim() == 4 and tuple(x.shape[1:]) == tail
            expected = f"shape [{'P' if indices is not None else N}, {', '.join(map(str, tail))}]"
            ok = ok and (indices is not None or len(x) == N)
            need(ok, op, name, expected, f"shape {list(x.shape)}")
            dtypes = (*STATES, *NARROW, torch.float64)
            need(x.dtype in dtypes, op, name, "a float dtype", x.dtype)


def _prefill_pool(
    states: tuple[Tensor | None, Tensor | None],
    N: int,
    tail: tuple[int, int, int],
    indices: Tensor | None,
    v: Tensor,
    copied: bool,
) -> tuple[Tensor, Tensor | None]:
    """The states to update, and their slots; the caller's pool if input and output are the same."""
    initial, out = states
    dtype = common.wide(v)
    if initial is None:
        return v.new_zeros(N, *tail, dtype=dtype), None
    direct = dense(initial) and initial.dtype not in NARROW and not copied
    if direct and out is not None and _same(initial, out):
        return initial, indices
    rows = initial if indices is None else _pick(initial, indices)
    return rows.to(dtype, copy=True, memory_format=torch.contiguous_format), None


def _same(x: Tensor, y: Tensor) -> bool:
    layout = x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype
    return layout and x.data_ptr() == y.data_ptr()


def _store(out: Tensor, pool: Tensor, indices: Tensor | None, cu_seqlens: Tensor) -> None:
    """Copy final states to the caller's buffer, except rows of empty sequences."""
    if _same(pool, out):
        return
    N = cu_seqlens.shape[0] - 1
    some = (cu_seqlens.diff() > 0).view(-1, 1, 1, 1)
    before = out if indices is None else _pick(out, indices)
    final = torch.where(some, pool[:N], before.to(pool.dtype)).to(out.dtype)
    if indices is None:
        out.copy_(final)
    else:
        _as_bytes(out).index_copy_(0, indices.long(), _as_bytes(final))


def _pick(pool: Tensor, indices: Tensor) -> Tensor:
    return _as_bytes(pool).index_select(0, indices.long()).view(pool.dtype)


def _as_bytes(x: Tensor) -> Tensor:
    """float8 as bytes, since torch copies no rows of float8 by index; other dtypes as they are."""
    return x.view(torch.uint8) if x.dtype in NARROW else x


def _with_checkpoints(
    pool: Tensor, N: int, T: int, every: int, count: int, starts: Tensor
) -> tuple[Tensor, Tensor, ops.Checkpoints]:
    """A pool with room for ``count`` checkpoints after the states, and the slot of each."""
    room = pool.new_zeros(count, *pool.shape[1:])
    column = torch.arange(max(T // every, 1), device=pool.device)
    counts = starts.diff().unsqueeze(1)
    at = torch.where(column < counts, N + starts[:-1].unsqueeze(1) + column, -1)
    own = torch.arange(N, device=pool.device)
    return torch.cat([pool, room]), own, ops.Checkpoints(at, every=every)


def _checkpoint_arguments(op: str, every: int, kept: Tensor | None, starts: Tensor | None) -> None:
    """Which arguments come together; looks at no tensor."""
    expected = f"a non-negative multiple of the chunk size ({CHUNK})"
    need(every >= 0 and every % CHUNK == 0, op, "checkpoint_every_n_tokens", expected, every)
    both = "state_checkpoints and checkpoint_cu_starts must both be provided"
    for name, x in (("state_checkpoints", kept), ("checkpoint_cu_starts", starts)):
        if every:
            need(x is not None, op, name, f"a tensor ({both})", None)
        else:
            alone = "None (it must be None without checkpoint_every_n_tokens)"
            common.refuse(op, name, x, alone)


def _check_checkpoints(
    op: str, kept: Tensor, starts: Tensor, tail: tuple[int, int, int], N: int
) -> None:
    name = "state_checkpoints"
    names = ", ".join(str(x).removeprefix("torch.") for x in (*STATES, *NARROW))
    expected = f"another dtype: {name} must have dtype {names}"
    need(kept.dtype in (*STATES, *NARROW, torch.float64), op, name, expected, kept.dtype)
    ok = kept.dim() == 4 and tuple(kept.shape[1:]) == tail
    need(ok, op, name, f"shape [.., {', '.join(map(str, tail))}]", f"shape {list(kept.shape)}")
    ok = tuple(starts.shape) == (N + 1,)
    expected, got = f"{N + 1} elements, one more than sequences", f"shape {list(starts.shape)}"
    need(ok, op, "checkpoint_cu_starts", expected, got)


def _longest(op: str, most: int | None, T: int, cu_seqlens: Tensor) -> None:
    """Check ``max_seqlen`` as far as it can be seen; sluice does not need it."""
    if most is None:
        return
    N = cu_seqlens.shape[0] - 1
    least = -(-T // N) if N > 0 else 0
    if cu_seqlens.device.type == "cpu" or validating():
        least = max(least, int(cu_seqlens.diff().max()) if N > 0 else 0)
    need(least <= most <= T, op, "max_seqlen", f"from {least} to {T}", most)


def _log_of(op: str, alpha: Tensor, size: tuple[int, int]) -> Tensor:
    """The logarithm of a decay; refuses negative values, which must be a log decay."""
    ok = tuple(alpha.shape) == size
    need(ok, op, "g", f"shape {list(size)}", f"shape {list(alpha.shape)}")
    if alpha.device.type == "cpu" or validating():
        least = float(alpha.min()) if alpha.numel() else 0.0
        need(least >= 0, op, "g", "decays in linear space, 0 to 1 (exp of the log decay)", least)
    return alpha.to(common.wide(alpha)).clamp(min=SMALLEST_DECAY).log()
