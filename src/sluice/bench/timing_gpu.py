"""Timing on a GPU: a CUDA graph of the calls replayed between two events, or events alone.

Every call of a graph takes another set of inputs, and all sets together are larger than the L2
cache, so no call finds its inputs in the cache. A graph holds so many calls that the cost of
launching it does not show. Providers that cannot be captured are timed by events around each call.
These calls are queued after a pause of the device, which hides the host's time if it can. The row
says which method was used.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from sluice import torch_private
from sluice.bench import timing_eager
from sluice.bench.providers.base import Call

DEFAULT_L2 = 64 << 20
LEAST_GRAPH_SECONDS = 5e-4  # enough work that a graph's launch is below one percent
MOST_CALLS = 512
LONG_SECONDS = 0.02  # a graph that takes longer is warm after one replay
EVENT_CALLS = 8  # calls queued after one pause
PAUSE_CYCLES = 2_000_000  # about a millisecond


def l2_bytes(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "L2_cache_size", 0)) or DEFAULT_L2


class Timer:
    """Times the calls of one workload; ``block`` is called once per round."""

    def __init__(self, calls: list[Call], graphs: bool = True) -> None:
        self.calls = calls
        self.graph: torch.cuda.CUDAGraph | None = None
        self.kept: list[Any] = []
        self.per_graph = 0
        self.first: torch.cuda.CUDAGraph | None = None
        self.why_not = "" if graphs else "graphs are off"
        self.next = 0
        self.eager = timing_eager.Timer(calls)

    @property
    def method(self) -> str:
        return "graph" if self.graph is not None else "events"

    def warm_up(self) -> None:
        for _ in range(2):
            for call in self.calls:
                call.run()
        torch.cuda.synchronize()
        if self.why_not:
            return
        try:
            self._capture(len(self.calls))
            seconds = statistics.median(self._replays(5)) * self.per_graph
            if seconds < LEAST_GRAPH_SECONDS:
                rounds = int(LEAST_GRAPH_SECONDS / max(seconds, 1e-6)) + 1
                most = max(1, MOST_CALLS // len(self.calls))
                self._capture(len(self.calls) * min(rounds, most))
        except Exception as error:  # a library may raise anything during capture
            self.graph, self.kept = None, []
            self.why_not = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
            torch.cuda.synchronize()  # raises if the failed capture broke the context

    def _capture(self, count: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        sets = len(self.calls)
        kept: list[Any] = []
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for n in range(count):
                result = self.calls[n % sets].run()
                # keep the outputs of the last round, so that each set writes its own memory
                kept = [*kept, result][-sets:]
        torch.cuda.synchronize()
        self.graph, self.kept, self.per_graph = graph, kept, count

    def replayed(self, before: list[torch.Tensor]) -> Any:
        """The result of set 0, replayed from the state ``before``; None without a graph.

        A capture that recorded nothing would be very fast, so this result is checked too. Before
        the replay the call's outputs are filled with NaN: only the replay can have written them.
        """
        if self.graph is None:
            return None
        call = self.calls[0]
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            result = call.run()
        _erase(call, result)
        _restore(call, before)
        graph.replay()
        torch.cuda.synchronize()
        self.first = graph  # its memory holds the result
        return result

    def repeated(self, before: list[torch.Tensor]) -> Any:
        """The result of set 0, called once more from the state ``before``.

        A later call takes another way than the first: it finds what earlier calls prepared, for
        this set and for others. Eager timing times later calls, so one of them is checked too. It
        is likely to get the memory of the result before it, which is therefore filled with NaN.
        """
        call = self.calls[0]
        _erase(call, call.run())
        _restore(call, before)
        result = call.run()
        torch.cuda.synchronize()
        return result

    def use_events(self, why: str) -> None:
        """Use events instead of the graph, and note why."""
        self.graph, self.first, self.kept, self.why_not = None, None, [], why

    def block(self, seconds: float, least: int, most_seconds: float) -> list[float]:
        """Seconds per call: of each replay, or of each call with events."""
        if self.graph is None:
            return self._events(seconds, least, most_seconds)
        first = self._replays(1)[0] * self.per_graph
        if first < LONG_SECONDS:  # warm the clocks up again
            first = statistics.median(self._replays(3)) * self.per_graph
        count = max(least, int(seconds / max(first, 1e-6)))
        count = max(1, min(count, int(most_seconds / max(first, 1e-6)) or 1, 2000))
        return self._replays(count)

    def _replays(self, count: int) -> list[float]:
        assert self.graph is not None
        pairs = [_events() for _ in range(count)]
        for start, end in pairs:
            start.record()
            self.graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 / self.per_graph for start, end in pairs]

    def _events(self, seconds: float, least: int, most_seconds: float) -> list[float]:
        samples: list[float] = []
        spent = 0.0
        while (spent < seconds or len(samples) < least) and spent < most_seconds:
            whole = _events()
            whole[0].record()
            torch_private.pause_device(PAUSE_CYCLES)
            pairs = []
            for _ in range(EVENT_CALLS):
                pair = _events()
                pair[0].record()
                self.calls[self.next % len(self.calls)].run()
                pair[1].record()
                pairs.append(pair)
                self.next += 1
            whole[1].record()
            torch.cuda.synchronize()
            # drop the first, which follows the pause: its launch may have come late
            samples += [start.elapsed_time(end) * 1e-3 for start, end in pairs[1:]]
            spent += whole[0].elapsed_time(whole[1]) * 1e-3
        return samples

    def close(self) -> None:
        self.graph, self.first, self.kept, self.calls = None, None, [], []
        self.eager.calls = []


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _erase(call: Call, result: Any) -> None:
    """Fill a result with NaN, except for tensors that the call updates in place."""
    updated = {x.data_ptr() for x in call.mutable}
    for x in _floats(result):
        if x.data_ptr() not in updated:
            x.fill_(float("nan"))


def _restore(call: Call, before: list[torch.Tensor]) -> None:
    """Give a call the state that it started from."""
    for x, old in zip(call.mutable, before, strict=True):
        x.copy_(old)


def _floats(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    return [x for part in value for x in _floats(part)] if isinstance(value, (tuple, list)) else []
