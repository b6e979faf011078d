"""A stand-in for CUDA graphs on a CPU: what is captured is recorded, and a replay repeats it.

A recording has the tensors themselves, as a graph has addresses. A replay therefore sees what is in
them by then, writes its results where the recorded call wrote them, and runs no Python of the
function that was captured. A tensor that was made while recording is made again in every replay, in
the same place: what should outlive a replay must be there before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# the host would wait for the device, or copy its own memory to it
NOT_CAPTURED = (
    "aten::_local_scalar_dense", "aten::lift_fresh", "aten::nonzero", "aten::masked_select",
    "aten::equal", "aten::_unique2", "aten::bincount",
)  # fmt: skip
INDEXED = ("aten::index", "aten::index_put", "aten::index_put_")
# the host would read what the device has written; of a CPU's tensor no operation tells
HOST_READS = ("tolist", "numpy", "cpu")
_recording: list[RecordedGraph] = []


class RecordedGraph:
    """Like ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.replays = 0

    def replay(self) -> None:
        assert self.work, "nothing was captured"
        self.replays += 1
        for work in self.work:
            work()


def launch(work: Callable[[], None]) -> None:
    """Do some work, and record it where a graph is being recorded, like a kernel's launch."""
    work()
    for graph in _recording:
        graph.work.append(work)


def capturing() -> bool:
    """Like ``torch.cuda.is_current_stream_capturing``."""
    return bool(_recording)


def _not_captured(what: str) -> NoReturn:
    raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


class _Recording(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph
        self.reads = {name: getattr(torch.Tensor, name) for name in HOST_READS}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func.name().partition(".")[0], kwargs or {}
        masks = [x for x in tree_leaves(args[1:2]) if getattr(x, "dtype", None) is torch.bool]
        if name in NOT_CAPTURED or (name in INDEXED and masks):
            _not_captured(func.name())
        with _reading(self.reads):
            results = func(*args, **options)

        def repeat() -> None:
            made = func(*args, **options)
            for old, new in zip(tree_leaves(results), tree_leaves(made), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.graph.work.append(repeat)
        return results


@contextlib.contextmanager
def recording(graph: RecordedGraph) -> Iterator[None]:
    """Like ``torch.cuda.graph``."""
    refused = {n: lambda *_, name=n, **__: _not_captured(f"Tensor.{name}") for n in HOST_READS}
    _recording.append(graph)
    try:
        with _Recording(graph), _reading(refused):
            yield
    finally:
        _recording.remove(graph)


def _reading(methods: dict[str, Any]) -> Any:
    """A scope in which the host reads tensors by these methods. An operation may, on a CPU."""
    return mock.patch.multiple(torch.Tensor, **methods)
