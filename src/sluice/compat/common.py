"""Helpers of the three interfaces: refusals, renamed options, upstream's own checks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sluice.contract.errors import ContractError


def need(ok: bool, op: str, argument: str, expected: str, got: object) -> None:
    """Raise unless ``ok``, naming the argument."""
    if not ok:
        raise ContractError(op, argument, expected, got)


def tensors(op: str, **given: object) -> None:
    """Require tensors, or None where an argument is not given: upstream takes no lists either."""
    for name, value in given.items():
        need(value is None or isinstance(value, Tensor), op, name, "a tensor", _shown(value))


def refuse(op: str, argument: str, value: object, expected: str = "None") -> None:
    """Raise if an option is used that has no counterpart here."""
    need(value is None, op, argument, expected, _shown(value))


def no_more(op: str, options: Mapping[str, Any]) -> None:
    """Raise for unknown options, which upstream would ignore silently."""
    for name, value in options.items():
        raise ContractError(op, name, "no such option", _shown(value))


def silu_or_none(op: str, activation: object) -> str | None:
    """SiLU by either of its names, or None."""
    known = activation in (None, "silu", "swish")
    need(known, op, "activation", "None, 'silu' or 'swish'", repr(activation))
    return "silu" if activation else None


def rename(op: str, options: dict[str, Any], old: str, new: str, value: bool) -> bool:
    """The value of ``new``, also from its deprecated name ``old``."""
    if old not in options:
        return value
    need(not value, op, old, f"nothing, since {new} is given", options[old])
    warnings.warn(f"{op}: `{old}` is now `{new}`", DeprecationWarning, stacklevel=3)
    return bool(options.pop(old))


def unit_stride(x: Tensor) -> Tensor:
    """``x``, copied only if its last dimension is not contiguous, as upstream does."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def fresh(state: Tensor | None, like: Tensor) -> Tensor | None:
    """A copy of the initial states to update: upstream never writes the caller's."""
    if state is None:
        return None
    return state.detach().to(wide(like), copy=True, memory_format=torch.contiguous_format)


def wide(x: Tensor) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def packed_rows(op: str, q: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Upstream's two checks of packed sequences."""
    if cu_seqlens is None:
        return
    need(q.shape[0] == 1, op, "q", "a batch of 1 beside cu_seqlens", f"shape {list(q.shape)}")
    N = cu_seqlens.shape[0] - 1
    if state is not None:
        got = f"{state.shape[0]} states"
        need(state.shape[0] == N, op, "initial_state", f"{N} states, one per sequence", got)


def _shown(value: object) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
