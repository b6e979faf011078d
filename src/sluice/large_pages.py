"""Large pages for the large results of a CPU call.

Fresh memory is handed out page by page, when it is first written: 16,384 times for 64 MB, which
takes ten times as long as the writing. Linux hands out 2 MB at a time where it is asked to. What it
answers does not matter: without large pages a call only takes longer.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from typing import Any

from torch import Tensor

LEAST = 4 << 20
"""Bytes of a result that is worth the asking."""


def _find() -> Callable[[int, int], object] | None:
    """Linux's ``madvise`` of an address and a size, None elsewhere."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    function = getattr(ctypes.CDLL(None), "madvise", None) if advice is not None else None
    if function is None:
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return lambda address, size: function(address, size, advice)


_madvise = _find()


def serves(made: Any) -> bool:
    """Whether an output (``calls.Output``) is worth the asking."""
    size = math.prod(made.shape) * made.dtype.itemsize
    return made.device.type == "cpu" and not made.zeros and size >= LEAST


def ask(x: Tensor) -> None:
    """Ask for large pages under a tensor that nothing was written to yet."""
    if _madvise is not None:
        first, end = x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()
        begin = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        _madvise(begin, (end - begin) // mmap.PAGESIZE * mmap.PAGESIZE)
