"""Send final states from the ranks where sequences end to the ranks that asked for them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sluice.contract.errors import ContractError
from sluice.distributed.ranks import Ranks
from sluice.distributed.split import Split

Deliver = Literal["end", "all"] | int


def check_deliver(op: str, deliver: Deliver, ranks: int) -> None:
    """Refuse a ``deliver`` that is neither a rank nor "end" or "all"."""
    if deliver in ("end", "all"):
        return
    if isinstance(deliver, bool) or not isinstance(deliver, int) or not 0 <= deliver < ranks:
        raise ContractError(op, "deliver", f"'end', 'all' or a rank below {ranks}", repr(deliver))


def delivered(
    ranks: Ranks,
    name: str,
    split: Split,
    finals: dict[int, Tensor],
    like: Tensor,
    rows: int,
    deliver: Deliver,
) -> dict[int, Tensor]:
    """The final states that this rank keeps, by sequence, with the bits of the rank that made them.

    ``finals`` are the states made here; ``like`` has the shape, dtype and device of one. All
    ``rows`` of a batch end on the same rank.
    """
    if deliver == "end":
        return finals
    every = [
        list(part.ends) if split.packed else list(range(rows * len(part.ends)))
        for part in split.parts
    ]
    to = range(ranks.size) if deliver == "all" else [int(deliver)]
    asked = ranks.rank in to
    sends: dict[int, Tensor] = {}
    if every[ranks.rank]:
        made = torch.stack([finals[i] for i in every[ranks.rank]])
        sends = {rank: made for rank in to if rank != ranks.rank}
    came = {
        rank: like.new_empty(len(every[rank]), *like.shape)
        for rank in range(ranks.size)
        if asked and every[rank] and rank != ranks.rank
    }
    ranks.swap(name, sends, came)
    kept = dict(finals) if asked else {}
    for rank, states in came.items():
        kept.update(zip(every[rank], states, strict=True))
    return kept
