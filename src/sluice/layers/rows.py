"""Where a layer's sequences are: states, slots, borders, and padding turned into borders.

A padded batch is one packed row in which padding has sequences of its own, without state. That
holds for padding on either side, and nothing is read back to the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice import ops
from sluice.contract.errors import ContractError


class Rows(NamedTuple):
    """States, where each sequence finds its own, and where sequences are."""

    conv_state: Tensor | None = None
    state: Tensor | None = None
    slots: Tensor | None = None
    write_slots: Tensor | None = None
    has_state: Tensor | None = None
    pad_slot: int = -1
    state_layout: str = "vk"
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    checkpoints: ops.Checkpoints | None = None
    batch_invariant: bool = False

    def addressing(self) -> dict[str, Any]:
        """What every operator takes, by keyword."""
        return dict(zip(self._fields[2:6], self[2:6], strict=True))


def pack(live: Tensor, rows: Rows) -> Rows:
    """Rows of a padded batch [B, T] as 3 B packed sequences: padding, tokens, padding.

    The padding gets slot -1, so that no state sees it, wherever it lies: nothing is read back to
    the host. ``rows`` addresses B sequences. Arguments are those of packed prompts of a pool, so
    that the same kernels serve both.
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


def without_masked(B: int, rows: Rows, live: Tensor) -> Rows:
    """One token a row: a masked one makes its row a padded one."""
    slots = torch.arange(B, device=live.device) if rows.slots is None else rows.slots
    return rows._replace(slots=torch.where(live.squeeze(1), slots, -1))


def check_mask(mask: Tensor) -> None:
    """Values, so on a CPU or inside ``validate()`` only: the tokens of a row are neighbours."""
    live = mask != 0
    begins = live[:, 0] + (live[:, 1:] & ~live[:, :-1]).sum(1)
    if bool((begins > 1).any()):
        row = int(begins.argmax())
        expected = "neighbouring tokens in each row (padding before and behind them only)"
        raise ContractError("GatedDeltaNet", "attention_mask", expected, f"a hole in row {row}")


def _between(x: Tensor, padding: float) -> Tensor:
    """[B, ..] -> [3 B, ..]: each row between two of padding."""
    beside = torch.full_like(x, padding)
    return torch.stack([beside, x, beside], dim=1).flatten(0, 1)
