"""The only reader of environment variables. None of them changes a number."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

_validate: ContextVar[bool] = ContextVar(
    "sluice_validate", default=os.environ.get("SLUICE_VALIDATE", "0") not in ("", "0")
)


@contextlib.contextmanager
def validate(enabled: bool = True) -> Iterator[None]:
    """Check values too (slot range, duplicates, ``cu_seqlens``, finite gates), on a GPU as well.

    On a CPU values are always checked. On a GPU each check waits for the device, so there they are
    made only inside this scope (or with ``SLUICE_VALIDATE=1``): for debugging and tests, not for
    serving.

    >>> import sluice
    >>> with sluice.validate():
    ...     pass
    """
    token = _validate.set(enabled)
    try:
        yield
    finally:
        _validate.reset(token)


def validating() -> bool:
    """Whether a ``validate()`` scope (or ``SLUICE_VALIDATE=1``) is active."""
    return _validate.get()


# Where compilers keep what they compiled: sluice's own (Triton, Numba), and those of the peers that
# `sluice bench` measures beside it.
_CACHES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "NUMBA_CACHE_DIR",
    "TILELANG_CACHE_DIR",
    "TILELANG_TMP_DIR",
    "CUTE_DSL_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "CUDA_CACHE_PATH",
)
# Whether times of a kernel's forms are kept on disk, to choose by them the next time.
_TUNING_RESULTS = ("FLA_CACHE_RESULTS", "TRITON_CACHE_AUTOTUNING")


def for_peers(caches: str | None = None, paths: Sequence[str] = ()) -> None:
    """Set what peers read from the environment, for this process, before they are imported.

    FLA hands its calls to FlashQLA where it finds it; a benchmark of FLA wants FLA, tuned in the
    process that is timed: what others measured, or did not, is neither read nor kept, whatever the
    environment said. ``caches`` is an empty directory to compile into, so that a first call is a
    cold one (default: as usual). ``paths`` are where processes that a peer starts look for modules
    first.
    """
    for name in _TUNING_RESULTS:
        os.environ[name] = "0"
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if paths:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([before] if before else [])])
    for name in _CACHES if caches else ():
        os.environ[name] = f"{caches}/{name.lower()}"
