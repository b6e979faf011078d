"""The canonical tensors of a call, as backends receive them beside the problem.

Sequences are always ``[B, T, heads, width]`` strided views (``[1, T, ...]`` with ``cu_seqlens``
when packed), whatever layout the caller has; the innermost stride is 1. Backends write ``out`` and
the states in place and return nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """Index tensors that say which state row belongs to which sequence."""

    slots: Tensor | None = None  # [N] int32 or int64
    write_slots: Tensor | None = None  # [N]
    has_state: Tensor | None = None  # [N] bool
    cu_seqlens: Tensor | None = None  # [N + 1]
    cu_seqlens_cpu: Tensor | None = None  # [N + 1], the same values on the host


class DeltaTensors(NamedTuple):
    """Tensors of ``prefill``, ``decode`` and ``verify``."""

    q: Tensor  # [B, T, HQ, K]
    k: Tensor  # [B, T, HK, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor | None  # [B, T, HV] or [B, T, HV, K]; the raw a when A_log is given
    beta: Tensor | None  # [B, T, HV]; the raw b when A_log is given
    A_log: Tensor | None  # [HV]
    dt_bias: Tensor | None  # [HV] or [HV, K]
    state: Tensor  # [P, HV, V, K] or [P, HV, K, V], last three dimensions contiguous
    rows: Rows
    checkpoint_slots: Tensor | None  # [N, M]
    checkpoint_positions: Tensor | None  # [N, M]
    out: Tensor  # [B, T, max(HQ, HV), V]
    draft_k: Tensor | None = None  # [B, T, HK, K] float32: verify's keys; only k dᵀ is promised
    draft_d: Tensor | None = None  # [B, T, HV, V] float32: verify's corrections d
    draft_g: Tensor | None = None  # as g, float32: verify's log decays


class CommitTensors(NamedTuple):
    """Tensors of ``commit``."""

    draft_k: Tensor
    draft_d: Tensor
    draft_g: Tensor | None
    num_accepted: Tensor  # [N]
    state: Tensor
    rows: Rows
    conv_inputs: Tensor | None  # [B, T, D]
    conv_state: Tensor | None  # [P, D, L]


class ConvTensors(NamedTuple):
    """Tensors of ``causal_conv1d``."""

    x: Tensor  # [B, T, D], any strides
    weight: Tensor  # [D, W]
    bias: Tensor | None  # [D]
    state: Tensor | None  # [P, D, L], any strides
    rows: Rows
    checkpoint_slots: Tensor | None
    checkpoint_positions: Tensor | None
    out: Tensor  # [B, T, D]


class ConvQkvTensors(NamedTuple):
    """Tensors of ``conv_qkv``."""

    x: Tensor  # [B, T, D] with D = 2 HK K + HV V, channels [Q | K | V]
    weight: Tensor  # [D, W]
    bias: Tensor | None
    state: Tensor | None
    rows: Rows
    checkpoint_slots: Tensor | None
    checkpoint_positions: Tensor | None
    a: Tensor | None  # [B, T, HV]
    b: Tensor | None  # [B, T, HV]
    A_log: Tensor | None  # [HV]
    dt_bias: Tensor | None  # [HV]
    q: Tensor  # [B, T, HK, K]
    k: Tensor  # [B, T, HK, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor | None  # [B, T, HV] float32
    beta: Tensor | None  # [B, T, HV] float32


class NormTensors(NamedTuple):
    """Tensors of ``rms_norm_gated``."""

    x: Tensor  # [..., V]
    z: Tensor  # [..., V]
    weight: Tensor  # [V]
    out: Tensor  # [..., V]


class StepTensors(NamedTuple):
    """Tensors of ``step``.

    Order "split": ``qkv`` [N, T, D], ``z`` [N, T, HV V], ``b`` and ``a`` [N, T, HV].
    Order "interleaved": ``qkv`` is the whole qkvz [N, T, D + HV V] and ``b`` the whole ba
    [N, T, 2 HV], each interleaved per key head; ``z`` and ``a`` are None.
    """

    qkv: Tensor
    z: Tensor | None
    b: Tensor
    a: Tensor | None
    conv_weight: Tensor  # [D, W]
    conv_bias: Tensor | None  # [D]
    A_log: Tensor  # [HV]
    dt_bias: Tensor  # [HV]
    norm_weight: Tensor  # [V]
    conv_state: Tensor  # [P, D, L]
    state: Tensor  # [P, HV, V, K] or [P, HV, K, V]
    rows: Rows
    out: Tensor  # [N, T, HV V]
