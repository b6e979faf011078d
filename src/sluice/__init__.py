"""Gated delta networks: exact, fast and safe operators on CPU and GPU.

``prefill``, ``decode``, ``verify`` and ``commit`` run the recurrence; ``causal_conv1d``,
``conv_qkv``, ``rms_norm_gated`` and ``step`` the rest of a layer. ``StatePool`` holds the states
of a model, ``GatedDeltaNet`` is the layer. ``explain`` and ``doctor`` tell who serves a call.
"""

from sluice.contract.errors import BackendError, ContractError, SlowPathWarning, SluiceError
from sluice.dispatch import use_backend
from sluice.doctor import doctor, explain
from sluice.ops import (
    Checkpoints,
    Draft,
    causal_conv1d,
    commit,
    conv_qkv,
    decode,
    prefill,
    rms_norm_gated,
    step,
    verify,
)
from sluice.settings import validate
from sluice.state_pool import PoolGeometry, StatePool, StateSnapshot

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "Checkpoints",
    "ContractError",
    "Draft",
    "PoolGeometry",
    "SlowPathWarning",
    "SluiceError",
    "StatePool",
    "StateSnapshot",
    "__version__",
    "causal_conv1d",
    "commit",
    "conv_qkv",
    "decode",
    "doctor",
    "explain",
    "prefill",
    "rms_norm_gated",
    "step",
    "use_backend",
    "validate",
    "verify",
]
