"""Gated delta networks: exact, fast and safe operators on CPU and GPU.

``prefill``, ``decode``, ``verify``, ``commit`` and ``commit_layers`` run the recurrence;
``causal_conv1d``, ``conv_qkv``, ``rms_norm_gated`` and ``step`` the rest of a layer. ``StatePool``
holds the states of a model, ``GatedDeltaNet`` is the layer. ``explain`` and ``doctor`` tell who
serves a call.
"""

import importlib
from typing import TYPE_CHECKING, Any

from sluice.contract.errors import BackendError, ContractError, SlowPathWarning, SluiceError
from sluice.dispatch import use_backend
from sluice.doctor import doctor, explain
from sluice.layers import GatedDeltaNet
from sluice.ops import (
    Checkpoints,
    Draft,
    DraftBuffers,
    causal_conv1d,
    commit,
    commit_layers,
    conv_qkv,
    decode,
    prefill,
    rms_norm_gated,
    step,
    verify,
)
from sluice.settings import validate
from sluice.state_pool import (
    DoubleFreeError,
    GeometryError,
    MissingDependencyError,
    PoolError,
    PoolExhaustedError,
    PoolGeometry,
    Slot,
    StatePool,
    StateSnapshot,
    UseAfterFreeError,
)
from sluice.version import __version__
from sluice.warmup import warmup

if TYPE_CHECKING:
    from sluice import compat as compat
    from sluice import distributed as distributed
    from sluice import integrations as integrations
    from sluice.integrations.transformers import accelerate, restore

__all__ = [
    "BackendError",
    "Checkpoints",
    "ContractError",
    "DoubleFreeError",
    "Draft",
    "DraftBuffers",
    "GatedDeltaNet",
    "GeometryError",
    "MissingDependencyError",
    "PoolError",
    "PoolExhaustedError",
    "PoolGeometry",
    "Slot",
    "SlowPathWarning",
    "SluiceError",
    "StatePool",
    "StateSnapshot",
    "UseAfterFreeError",
    "__version__",
    "accelerate",
    "causal_conv1d",
    "commit",
    "commit_layers",
    "conv_qkv",
    "decode",
    "doctor",
    "explain",
    "prefill",
    "restore",
    "rms_norm_gated",
    "step",
    "use_backend",
    "validate",
    "verify",
    "warmup",
]


if not TYPE_CHECKING:  # to a type checker, a module with __getattr__ has every name

    def __getattr__(name: str) -> Any:
        """What is imported when it is first asked for."""
        if name in ("accelerate", "restore"):
            return getattr(importlib.import_module("sluice.integrations.transformers"), name)
        if name in ("compat", "distributed", "integrations"):
            return importlib.import_module(f"sluice.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
