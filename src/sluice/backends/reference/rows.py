"""State rows: which sequence reads and writes which, without ever waiting for a device."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from sluice.contract.spec import ConvQkvSpec


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Arithmetic is float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def spans(t: Any) -> list[tuple[int, int]]:
    """Start and end of each packed sequence, from the host copy where there is one."""
    source = t.cu_seqlens if t.cu_seqlens_cpu is None else t.cu_seqlens_cpu
    bounds = source.tolist()
    return list(itertools.pairwise(bounds))


def padded(p: Any, t: Any) -> Tensor:
    """[N] bool: rows that are padding. Nothing of theirs is read or written; their output is 0."""
    if t.slots is None:
        return torch.zeros(p.N, dtype=torch.bool, device=p.device)
    return t.slots <= p.pad_slot


def live_tokens(p: ConvQkvSpec, t: Any) -> Tensor:
    """[B, T, 1] bool: tokens of real rows, not of padded ones nor after the last sequence."""
    alive = ~padded(p, t)
    if not p.varlen:
        return alive.view(-1, 1, 1).expand(p.B, p.T, 1)
    live = torch.zeros(1, p.T, 1, dtype=torch.bool, device=p.device)
    for i, (start, stop) in enumerate(spans(t)):
        live[:, start:stop] = alive[i]
    return live


def read_rows(pool: Tensor, p: Any, t: Any, dtype: torch.dtype) -> Tensor:
    """Each sequence's row of the pool, or zeros where it starts anew (docs/contract.md, State).

    Zeros are selected, not multiplied in: 0 · NaN would let a recycled row leak.
    """
    fresh = padded(p, t)
    if t.has_state is not None:
        fresh = fresh | ~t.has_state
    if pool.shape[0] == 0:
        return torch.zeros(p.N, *pool.shape[1:], dtype=dtype, device=pool.device)
    index = torch.arange(p.N, device=pool.device) if t.slots is None else t.slots.clamp(min=0)
    values = pool.index_select(0, index).to(dtype)
    return torch.where(_per_row(fresh, values), values.new_zeros(()), values)


def write_rows(
    pool: Tensor, p: Any, t: Any, values: Tensor, first: int = 0, kept: Tensor | None = None
) -> None:
    """Write rows ``first`` and on to their write slots, skipping padding and rows not ``kept``."""
    rows = slice(first, first + values.shape[0])
    own = torch.arange(p.N, device=pool.device) if t.slots is None else t.slots
    index = (own if t.write_slots is None else t.write_slots)[rows]
    live = ~padded(p, t)[rows]
    live = live if kept is None else live & kept[rows]
    if p.pooled:
        live = live & (index > p.pad_slot)
    scatter(pool, index, live, values)


def scatter(pool: Tensor, index: Tensor, live: Tensor, values: Tensor) -> None:
    """``pool[index[i]] = values[i]`` for live rows, with no mask read back to the host.

    A row that is not live repeats the first live row's write; if none is live, slot 0 is written
    with what it holds.
    """
    if values.shape[0] == 0 or pool.shape[0] == 0:
        return
    first = live.int().argmax()
    anything = live.any()
    index = torch.where(live, index, torch.where(anything, index[first], 0)).long()
    kept = torch.where(anything, values[first].to(pool.dtype), pool[0])
    values = torch.where(_per_row(live, values), values.to(pool.dtype), kept)
    pool[index] = values


def _per_row(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (like.dim() - 1))
