"""What sluice uses of torch that torch does not promise, each with what happens without it.

Tried with torch 2.9 to 2.13. ``tests/test_private.py`` fails if one of them is gone.

- Whether something follows a call (a dispatch mode, ``torch.func``, ``torch.jit.trace``): torch has
  no public question for these. Without one of them the answer is no, and what follows the call sees
  nothing of it.
- The file of torch's extension module: it leads to the OpenMP runtime where the process does not
  show one. Without it, the CPU backend uses Python's threads there.
- The current stream's handle: the public way makes a Python object per call (1 µs). Without it,
  that way is taken.
- A module's dictionaries of children and parameters: ``getattr`` looks there last, and a layer
  makes a dozen look-ups per decode step. Without them, ``getattr`` is used.
- ``tree_flatten`` and the exporter's logger, for ONNX: torch flattens arguments in this order when
  it exports, and remarks on packages that an export does not need. Without the one there is no
  check of an exported graph (it raises); without the other there are more remarks.
- A pause of the device, for benchmarks: without it, calls are timed without one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch


def _missing(value: Any) -> Callable[..., Any]:
    return lambda *_: value


def _find(path: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    found: Any = torch._C
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if callable(found) else otherwise


dispatch_modes: Callable[[], int] = _find("_len_torch_dispatch_stack", _missing(0))
"""How many dispatch modes are active."""
transform: Callable[[], object | None] = _find("_functorch.peek_interpreter_stack", _missing(None))
"""The innermost ``torch.func`` transform, or None."""
jit_trace: Callable[[], object | None] = _find("_get_tracing_state", _missing(None))
"""The state of ``torch.jit.trace``, or None."""
current_stream: Callable[[int], int] = _find(
    "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
"""The handle of the current stream of a CUDA device."""


def extension_file() -> str | None:
    """The file of torch's own extension module: linked with the OpenMP runtime torch brings."""
    return getattr(torch._C, "__file__", None)


def _part(module: Any, name: str) -> Any:
    found = module._modules.get(name)
    if found is None:
        found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


_has_dictionaries = all(hasattr(torch.nn.Module(), x) for x in ("_modules", "_parameters"))
part: Callable[[Any, str], Any] = _part if _has_dictionaries else getattr
"""A child or a parameter of a module: ``getattr``, faster."""


def tree_leaves(x: Any) -> list[Any]:
    """The leaves of nested containers, in the order in which torch exports them."""
    leaves: list[Any] = torch.utils._pytree.tree_flatten(x)[0]
    return leaves


def exporter_logger() -> logging.Logger:
    """The logger of ``torch.onnx.export``."""
    return logging.getLogger("torch.onnx._internal.exporter._registration")


def pause_device(cycles: int) -> None:
    """Let the current CUDA stream wait for so many clock cycles."""
    getattr(torch.cuda, "_sleep", _missing(None))(cycles)
