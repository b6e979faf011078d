"""The state before each rank's part, from all ranks' messages: gathered at once, or in log R steps.

A message is the map of (X1), and maps compose. Where the outgoing sequence begins on a rank, the
transition of its map is zero, which cuts off everything before it. So one scan over all ranks
serves every sequence.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sluice.distributed.ranks import Ranks
from sluice.distributed.share import Share
from sluice.distributed.transition import after, join

Exchanging = Literal["auto", "gather", "scan"]
GATHERED = 8  # up to so many ranks, one all-gather costs less than log R messages in a row
NAME = "prefill.transitions"


def joined(ranks: Ranks, share: Share, message: Tensor, exchange: Exchanging) -> Tensor | None:
    """The state before this rank's head, [n, HV, V, K]; None without an incoming sequence."""
    if not share.split.crossing:
        return None
    if exchange == "gather" or (exchange == "auto" and ranks.size <= GATHERED):
        messages = ranks.all_gather(NAME, message)
        return join(messages, share.part.chain, share.V, share.call.delta) if share.head else None
    return scanned(ranks, message, share.V, share.call.delta)


def scanned(ranks: Ranks, message: Tensor, V: int, delta: bool) -> Tensor:
    """The state after all earlier ranks: ceil(log2 R) messages, and half of one.

    After step i a rank has the map of itself and the 2^i - 1 ranks before it. Products are in
    float64, rounded to the message's dtype once per step.
    """
    here, reach = message.contiguous(), 1
    while reach < ranks.size:
        before, behind = ranks.rank - reach, ranks.rank + reach
        came = {before: torch.empty_like(here)} if before >= 0 else {}
        ranks.swap(NAME, {behind: here} if behind < ranks.size else {}, came)
        if came:
            here = after(came[before].double(), here.double(), V, delta).to(here.dtype)
        reach *= 2
    state = here[:, :, :V].contiguous()
    came = {ranks.rank - 1: torch.zeros_like(state)} if ranks.rank else {}
    ranks.swap(NAME, {ranks.rank + 1: state} if ranks.rank + 1 < ranks.size else {}, came)
    return came[ranks.rank - 1] if came else torch.zeros_like(state)
