"""The frozen description of a call that backends receive: dimensions, dtypes, options, no tensors.

A problem is made once, by ``checks.py``, from metadata alone. It is hashable, so that choosing a
backend for it is remembered, and a backend may key its configuration on it.

Dimensions: B batch rows, T tokens in a row (all tokens, when packed), N sequences, P pool slots,
HQ, HK, HV query, key and value heads, K, V head widths, W conv width, D conv channels, L conv
state columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_DECODE_TOKENS = 8
"""The longest sequence ``decode``, ``verify`` and ``step`` take."""


@dataclass(frozen=True)
class Problem:
    """What every problem has."""

    op: str
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class StateAddressing:
    """How sequences find their state rows: the same for recurrent and conv state."""

    P: int
    slots: bool
    write_slots: bool
    has_state: bool
    pad_slot: int


@dataclass(frozen=True)
class DeltaProblem(Problem):
    """``prefill``, ``decode`` and ``verify``: the recurrence of docs/contract.md, equation (C1)."""

    B: int
    T: int
    N: int
    HQ: int
    HK: int
    HV: int
    K: int
    V: int
    varlen: bool
    cu_seqlens_cpu: bool
    token_rows: bool  # q, k, v and out are [B T, heads width] matrices as they lie
    decay: str  # "none", "head" or "key"
    delta: bool  # beta given: the delta rule, otherwise plain accumulation
    raw_gates: bool
    neg_eigval: bool
    normalize_qk: bool
    scale: float
    state_dtype: torch.dtype
    state_layout: str  # "vk" or "kv"
    rows: StateAddressing
    checkpoints: str  # "none", "every" or "positions"
    checkpoint_every: int
    batch_invariant: bool

    @property
    def rule(self) -> str:
        """The update rule's name in ONNX's LinearAttention."""
        gated = self.decay != "none"
        if self.delta:
            return "gated_delta" if gated else "delta"
        return "gated" if gated else "linear"

    @property
    def HO(self) -> int:  # noqa: N802
        """Heads of the output: query heads may share a state (GQA) or states a query head."""
        return max(self.HQ, self.HV)


@dataclass(frozen=True)
class CommitProblem(Problem):
    """``commit``: fold the accepted draft tokens into the state and the conv window.

    ``dtype`` is the draft's (float32 arithmetic, or float64); D, L and ``conv_dtype`` are 0 and
    ``None`` when the draft carries no conv inputs.
    """

    B: int
    T: int
    N: int
    HK: int
    HV: int
    K: int
    V: int
    varlen: bool
    cu_seqlens_cpu: bool
    decay: str
    state_dtype: torch.dtype
    state_layout: str
    rows: StateAddressing
    D: int
    L: int
    conv_dtype: torch.dtype | None


@dataclass(frozen=True)
class ConvProblem(Problem):
    """``causal_conv1d``: depthwise causal convolution with a rolling window, equation (C5)."""

    B: int
    T: int
    N: int
    D: int
    W: int
    varlen: bool
    cu_seqlens_cpu: bool
    bias: bool
    activation: str  # "silu" or "none"
    L: int  # columns of the state, 0 without one
    state_dtype: torch.dtype | None
    rows: StateAddressing
    freeze: bool
    checkpoints: str
    checkpoint_every: int


@dataclass(frozen=True)
class ConvQkvProblem(ConvProblem):
    """``conv_qkv``: the convolution, then split, l2 norm and gates."""

    HK: int
    HV: int
    K: int
    V: int
    normalize_qk: bool
    gate: bool  # a given: g is made
    beta: bool  # b given: beta is made
    neg_eigval: bool


@dataclass(frozen=True)
class NormProblem(Problem):
    """``rms_norm_gated`` over the last dimension, equation (C6)."""

    rows: int
    V: int
    eps: float
    activation: str  # "silu" or "sigmoid"


@dataclass(frozen=True)
class StepProblem(Problem):
    """``step``: a whole layer's decode after its input projections."""

    N: int
    T: int
    HK: int
    HV: int
    K: int
    V: int
    W: int
    D: int
    L: int
    order: str  # "split" or "interleaved"
    bias: bool
    conv_activation: str
    gate_activation: str
    eps: float
    scale: float
    normalize_qk: bool
    neg_eigval: bool
    state_dtype: torch.dtype
    conv_dtype: torch.dtype
    state_layout: str
    rows: StateAddressing
