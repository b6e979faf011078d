"""Options of each operator that are not tensors. Hashable, so a call's plan can be remembered."""

from __future__ import annotations

from typing import NamedTuple


class DeltaOptions(NamedTuple):
    """Options of ``prefill``, ``decode`` and ``verify`` that are not tensors."""

    scale: float | None = None
    normalize_qk: bool = False
    neg_eigval: bool = False
    pad_slot: int = -1
    state_layout: str = "vk"
    checkpoint_every: int = 0
    batch_invariant: bool = False


class CommitOptions(NamedTuple):
    """Options of ``commit``, taken from the draft."""

    pad_slot: int = -1
    state_layout: str = "vk"


class ConvOptions(NamedTuple):
    """Options of ``causal_conv1d`` and ``conv_qkv``."""

    activation: str | None = "silu"
    pad_slot: int = -1
    freeze: bool = False
    checkpoint_every: int = 0
    normalize_qk: bool = False
    neg_eigval: bool = False


class NormOptions(NamedTuple):
    """Options of ``rms_norm_gated``."""

    eps: float = 1e-6
    activation: str = "silu"


class StepOptions(NamedTuple):
    """Options of ``step``."""

    order: str = "split"
    conv_activation: str | None = "silu"
    gate_activation: str = "silu"
    eps: float = 1e-6
    scale: float | None = None
    normalize_qk: bool = True
    neg_eigval: bool = False
    pad_slot: int = -1
    state_layout: str = "vk"
