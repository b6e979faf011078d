"""The states, slots and borders of a layer's sequences; padding becomes packed sequences.

A padded batch is turned into one packed row, in which each stretch of padding is a sequence without
state. This handles padding on either side, and the host reads nothing from the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice import ops
from sluice.contract.errors import ContractError
from sluice.contract.names import StateLayout


class Rows(NamedTuple):
    """States, the slots that address them, and the borders of the sequences."""

    conv_state: Tensor | None = None
    state: Tensor | None = None
    slots: Tensor | None = None
    write_slots: Tensor | None = None
    has_state: Tensor | None = None
    pad_slot: int = -1
    state_layout: StateLayout = "vk"
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    checkpoints: ops.Checkpoints | None = None
    batch_invariant: bool = False

    def addressing(self) -> dict[str, Any]:
        """The keyword arguments that every operator takes."""
        return dict(zip(self._fields[2:6], self[2:6], strict=True))


def pack(live: Tensor, rows: Rows) -> Rows:
    """A padded batch [B, T] as 3 B packed sequences: padding, tokens, padding for each row.

    Padding gets slot -1, so it changes no state, and the host need not read where it lies. ``rows``
    addresses B sequences. The arguments have the form of packed prompts of a pool, so the same
    kernels serve both.
    """
    B, T = live.shape
    known = live.new_ones(B) if rows.has_state is None else rows.has_state
    start = torch.arange(B, device=live.device) * T
    first = live.int().argmax(1)
    bounds = torch.stack([start, start + first, start + first + live.sum(1)], dim=1).flatten()
    end = torch.full((1,), B * T, device=live.device)
    slots = torch.arange(B, device=live.device) if rows.slots is None else rows.slots
    kept = rows.checkpoints
    if kept is not None:
        at = None if kept.positions is None else _between(kept.positions, 0)
        kept = ops.Checkpoints(_between(kept.slots, -1), kept.every, at)
    return rows._replace(
        slots=_between(slots, -1),
        write_slots=None if rows.write_slots is None else _between(rows.write_slots, -1),
        has_state=_between(known, False),
        cu_seqlens=torch.cat([bounds, end]).int(),
        checkpoints=kept,
    )


def last_inputs(x: Tensor, borders: Tensor | None, L: int) -> Tensor:
    """[N, D, L]: the last L inputs of each sequence of x [B, T, D] or packed, zeros before them.

    What a convolution's window holds after sequences that started from zero, (C11).
    """
    if borders is None:
        borders = torch.arange(x.shape[0] + 1, device=x.device) * x.shape[1]
    x = x.reshape(-1, x.shape[-1])
    starts, ends = borders[:-1, None].long(), borders[1:, None].long()
    at = ends + torch.arange(-L, 0, device=x.device)
    if x.shape[0] == 0:
        return x.new_zeros(at.shape[0], x.shape[1], L)
    return torch.where((at >= starts).unsqueeze(-1), x[at.clamp(min=0)], 0).transpose(1, 2)


def without_masked(B: int, rows: Rows, live: Tensor) -> Rows:
    """For one token per row: a row whose token is masked becomes a padded row."""
    slots = torch.arange(B, device=live.device) if rows.slots is None else rows.slots
    return rows._replace(slots=torch.where(live.squeeze(1), slots, -1))


def check_mask(mask: Tensor) -> None:
    """Require each row's tokens to be contiguous. Reads values: for a CPU or ``validate()``."""
    live = mask != 0
    begins = live[:, 0] + (live[:, 1:] & ~live[:, :-1]).sum(1)
    if bool((begins > 1).any()):
        row = int(begins.argmax())
        expected = "contiguous tokens in each row (padding only before and after them)"
        raise ContractError("GatedDeltaNet", "attention_mask", expected, f"a hole in row {row}")


def _between(x: Tensor, padding: float) -> Tensor:
    """[B, ..] -> [3 B, ..]: each row between two rows of padding."""
    beside = torch.full_like(x, padding)
    return torch.stack([beside, x, beside], dim=1).flatten(0, 1)
