"""Where packed sequences begin and end, from what transformers' collators say of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sluice.contract.errors import ContractError

_KNOWN = "_sluice_borders"  # an attribute of position_ids


def borders_given(x: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Borders of packed sequences: ``cu_seq_lens_q``, or from ``seq_idx`` [B, T]."""
    borders, numbers = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
    if borders is not None or numbers is None:
        return borders
    if tuple(numbers.shape) != tuple(x.shape[:2]):
        expected, got = f"shape {list(x.shape[:2])}", f"shape {list(numbers.shape)}"
        raise ContractError("accelerate", "seq_idx", expected, got)
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return _ends(begins)


def borders_of_positions(x: Tensor, position: Tensor | None) -> Tensor | None:
    """Borders where ``position_ids`` do not rise, as they do inside a sequence; None if they do.

    The host waits, once per ``position_ids``: they keep the answer for a batch size until they are
    written to. While a graph records the call, nothing may depend on values: then positions are not
    looked at.
    """
    B, T = x.shape[:2]
    if position is None or T == 1 or position.shape not in ((B, T), (1, T)) or _is_recorded(x):
        return None
    asked = None if position.is_inference() else (position._version, B)
    known = getattr(position, _KNOWN, None)
    if known is not None and asked is not None and known[0] == asked:
        return known[1]
    begins = torch.ones((B, T), dtype=torch.bool, device=position.device)
    begins[:, 1:] = position[:, 1:] <= position[:, :-1]
    found = _ends(begins) if bool(begins[:, 1:].any()) else None
    setattr(position, _KNOWN, (asked, found))
    return found


def _ends(begins: Tensor) -> Tensor:
    """Borders of sequences, of which each begins where ``begins`` [B, T] says."""
    starts = begins.flatten().nonzero().squeeze(1)  # the host waits: it does not know N
    return torch.cat([starts, starts.new_full((1,), begins.numel())])


def _is_recorded(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())
