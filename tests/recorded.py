"""A stand-in for CUDA graphs on a CPU: what is captured is recorded, and a replay repeats it.

A recording has the tensors themselves, as a graph has addresses. A replay therefore sees what is in
them by then, writes its results where the recorded call wrote them, and runs no Python of the
function that was captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# the host would wait for the device, or copy its own memory to it
NOT_CAPTURED = ("aten::_local_scalar_dense", "aten::lift_fresh", "aten::nonzero")


class RecordedGraph:
    """Like ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def replay(self) -> None:
        assert self.calls, "nothing was captured"
        self.replays += 1
        for function, args, options, results in self.calls:
            made = function(*args, **options)
            for old, new in zip(tree_leaves(results), tree_leaves(made), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class _Recording(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0] in NOT_CAPTURED:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.name()}")
        results = func(*args, **(kwargs or {}))
        self.graph.calls.append((func, args, kwargs or {}, results))
        return results


@contextlib.contextmanager
def recording(graph: RecordedGraph) -> Iterator[None]:
    """Like ``torch.cuda.graph``."""
    with _Recording(graph):
        yield
