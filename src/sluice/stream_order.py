"""A slot that one CUDA stream frees and another gets: the second waits for the first.

The host frees a slot as soon as the last call that uses it is in its stream's queue, long before
the GPU is done. In the same stream the next owner comes later by itself; another stream has to be
told. Only the GPU waits, never the host.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Freed:
    """For each free row of a pool, the stream that freed it and how far that stream was."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by: dict[int, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}

    def leave(self, rows: Iterable[int]) -> None:
        """The current stream is done with these rows, once it has done what is queued so far."""
        if self._orders():
            stream = torch.cuda.current_stream(self._device)
            mark = stream, stream.record_event()
            self._by.update((int(row), mark) for row in rows)

    def take(self, row: int) -> None:
        """The current stream gets a row: let it wait for another one that freed it."""
        if not self._by or not self._orders():
            return
        stream, event = self._by.pop(int(row), (None, None))
        here = torch.cuda.current_stream(self._device)
        if event is not None and stream != here:
            here.wait_event(event)

    def _orders(self) -> bool:
        """Not on a CPU, and not while a graph is captured: a graph has no events from outside."""
        return self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
