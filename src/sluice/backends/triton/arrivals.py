"""Counters with which the programs of one ``step`` find the last of them, per row and key head.

The r value heads of a key head read the same conv window. The last of their programs to arrive
writes it, and sets the counter back to zero, so a counter is zero between launches.

Counters belong to the storage of a conv state pool and live as long as it: whatever addresses the
pool, a captured CUDA graph for example, may address them. There are as many as the storage has rows
from the pool's first one on, so no view of it ever needs more, and none is ever replaced. They are
numbered by the row that is written: two calls in flight that wrote the same row would race on the
state itself, so two streams never share a counter.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

Key = tuple[int, int, int]
_counters: weakref.WeakKeyDictionary[
    torch.UntypedStorage, dict[Key, tuple[Tensor, torch.cuda.Event | None]]
] = weakref.WeakKeyDictionary()


def arrivals_of(conv_state: Tensor, HK: int) -> Tensor:
    """The counters of a pool, made at the first call: one per row and key head.

    If the first call is being captured in a graph, it gets counters that belong to the graph, which
    sets them to zero in each replay, and nothing is kept.
    """
    storage, device = conv_state.untyped_storage(), conv_state.device
    known = _counters.get(storage)
    if known is None:
        known = _counters.setdefault(storage, {})
    key = conv_state.storage_offset(), conv_state.stride(0), HK
    found = known.get(key)
    if found is None:
        if device.type != "cuda":
            found = _zeros(conv_state, HK), None
        else:
            if torch.cuda.is_current_stream_capturing():
                return _zeros(conv_state, HK)
            with torch.cuda.device(device):
                made = _zeros(conv_state, HK)
                ready = torch.cuda.Event()
                ready.record()
                found = made, ready
        known[key] = found
    counters, ready = found
    if ready is not None and not torch.cuda.is_current_stream_capturing():
        if ready.query():  # zeroed: from here on any stream may use them
            known[key] = counters, None
        else:
            torch.cuda.current_stream(device).wait_event(ready)
    return counters


def _zeros(pool: Tensor, HK: int) -> Tensor:
    elements = pool.untyped_storage().nbytes() // pool.element_size() - pool.storage_offset()
    rows = max(pool.shape[0], -(-elements // max(pool.stride(0), 1)))
    return torch.zeros(rows * HK, dtype=torch.int32, device=pool.device)
