"""The state before each rank's part, from all ranks' messages: gathered at once, or in steps.

A message is the map of (X1), and maps compose. Where the outgoing sequence begins on a rank, the
transition of its map is zero, which cuts off everything before it. So one scan over all ranks
serves every sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from sluice.distributed.ranks import Ranks
from sluice.distributed.split import Split
from sluice.distributed.transition import after, join

Exchanging = Literal["auto", "gather", "scan"]
GATHERED = 8  # up to so many ranks, one all-gather costs no more than two steps of a scan
FAN = 4  # ranks that a step of a scan joins
NAME = "prefill.transitions"


def joined(
    ranks: Ranks,
    split: Split,
    message: Tensor,
    V: int,
    delta: bool,
    exchange: Exchanging,
    meanwhile: Callable[[], None] = lambda: None,
) -> Tensor | None:
    """The state before this rank's head, [n, HV, V, K]; None without an incoming sequence.

    ``meanwhile`` is run while messages travel.
    """
    if not split.crossing:
        meanwhile()
        return None
    if exchange == "gather" or (exchange == "auto" and ranks.size <= GATHERED):
        messages = ranks.all_gather(NAME, message, meanwhile)
        chain = split.part(ranks.rank).chain
        return join(messages, chain, V, delta) if chain else None
    X = scanned(ranks, message, V, delta)
    meanwhile()
    return X


def scanned(ranks: Ranks, message: Tensor, V: int, delta: bool) -> Tensor:
    """The state after all earlier ranks, in ⌈log4 R⌉ steps of at most three messages each.

    After a step a rank has the map of four times as many ranks, itself the last, and the map of
    those before it. Products are in float64, rounded to the message's dtype once per step.
    """
    here, before, reach = message.contiguous(), None, 1
    X = torch.zeros_like(here[:, :, :V])
    while reach < ranks.size:
        steps = [i * reach for i in range(FAN - 1, 0, -1)]
        sources = [r for i in steps if (r := ranks.rank - i) >= 0]
        came = here.new_empty(len(sources), *here.shape)
        to = {r: here for i in steps if (r := ranks.rank + i) < ranks.size}
        ranks.swap(NAME, to, dict(zip(sources, came, strict=True)))
        reach *= FAN
        last = reach >= ranks.size
        if sources:
            first, *maps = came.double()
            rows = first[:, :, :V] if last else first  # in the end only a state is wanted
            for later in [*maps, *([] if before is None else [before])]:
                rows = after(rows, later, V, delta)
            X = rows[:, :, :V].to(here.dtype)
            if not last:
                before = rows
                here = after(rows, here.double(), V, delta).to(here.dtype)
    return X
