"""Counters with which the programs of one ``step`` find out who is last, one for each key head.

They belong to a conv state pool and are numbered by the row that is written: two calls in flight
that wrote the same row would race on the state itself, so two streams never share a counter. The
last program of a group sets its counter back to zero, so a counter is zero between launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

_counters: dict[tuple[int, int, int], tuple[Tensor, torch.cuda.Event | None]] = {}


def arrivals_of(conv_state: Tensor, HK: int) -> Tensor:
    """The counters [P, HK] of a pool, made at the first call and kept.

    A pool is known by where it lies. A later pool in the same place may have the same counters. If
    the first call is being captured in a graph, it gets counters that belong to the graph, which
    sets them to zero in each replay, and nothing is kept.
    """
    P, device = conv_state.shape[0], conv_state.device
    key = (device.index or 0, conv_state.data_ptr(), HK)
    found = _counters.get(key)
    if found is None or found[0].shape[0] < P:
        if device.type != "cuda":
            found = torch.zeros(P, HK, dtype=torch.int32), None
        else:
            if torch.cuda.is_current_stream_capturing():
                return torch.zeros(P, HK, dtype=torch.int32, device=device)
            with torch.cuda.device(device):
                made = torch.zeros(P, HK, dtype=torch.int32, device=device)
                ready = torch.cuda.Event()
                ready.record()
                found = made, ready
        _counters[key] = found
    counters, ready = found
    if ready is not None and not torch.cuda.is_current_stream_capturing():
        if ready.query():  # zeroed: from here on any stream may use them
            _counters[key] = counters, None
        else:
            torch.cuda.current_stream(device).wait_event(ready)
    return counters
