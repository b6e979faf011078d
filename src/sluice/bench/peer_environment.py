"""The environment that peers read, set for the processes of a benchmark.

The library itself sets no environment variable and reads its own in ``settings.py``. Peers are
configured by nothing else, so this file writes ``os.environ``, and no other file does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

# Where compilers keep what they compiled: sluice's own (Triton, Numba), and those of the peers.
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
# Whether a tuner keeps its measurements on disk and chooses by them the next time.
_TUNING_RESULTS = ("FLA_CACHE_RESULTS", "TRITON_CACHE_AUTOTUNING")


def for_peers(caches: str | None = None, paths: Sequence[str] = ()) -> None:
    """Set what peers read from the environment, for this process, before they are imported.

    FLA hands its calls to FlashQLA where it finds it; a benchmark of FLA wants FLA. Kernels are
    tuned in the process that is timed: no tuning result is read or kept, whatever the environment
    said before. ``caches`` is an empty directory to compile into, so that a first call is a cold
    one (default: the usual caches). Processes that a peer starts look for modules in ``paths``
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
