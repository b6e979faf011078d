"""Specs of speculative decoding: ``verify`` and ``commit``. See ``spec.py``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sluice.contract.meta import Meta
from sluice.contract.spec import DeltaSpec, Rows, Spec, decay_of, sequences_of


@dataclass(frozen=True)
class VerifySpec(DeltaSpec):
    """``verify``: the recurrence with the state frozen, and the conv window of its draft tokens.

    Nothing of the window is read: it is checked here so that ``commit`` can roll it. The draft is
    made by row, or with ``buffered`` written into buffers of S rows by slot: ``draft_k``
    [S, M, HK, K], ``draft_d`` [S, M, HV, V], ``draft_g`` [S, M, HV(, K)] and ``draft_x``.
    """

    conv_inputs: Meta | None  # [B, T, D]
    conv_state: Meta | None  # [P, D, L]
    draft_x: Meta | None  # [S, M, D]: a copy of conv_inputs; only where buffered
    draft_slots: Meta | None  # [N]: rows of the buffers; slots by default
    buffered: bool

    @property
    def draft_tokens(self) -> int:
        """Tokens of a row of the draft."""
        assert self.draft_k is not None
        return self.draft_k.shape[1]


@dataclass(frozen=True)
class CommitSpec(Rows, Spec):
    """``commit``: fold the accepted draft tokens into the state and the conv window.

    ``dtype`` is the draft's: float32, or float64. A draft in buffers is ``stacked``: all of its
    tensors and both pools have layers as their first dimension, tokens are [layers, S, M, ..], and
    rows of the buffers are found by slot.
    """

    draft_k: Meta  # [B, T, HK, K]
    draft_d: Meta  # [B, T, HV, V]
    draft_g: Meta | None  # [B, T, HV] or [B, T, HV, K]
    num_accepted: Meta  # [N]
    state: Meta
    slots: Meta | None
    write_slots: Meta | None
    has_state: Meta | None
    cu_seqlens: Meta | None
    cu_seqlens_cpu: Meta | None
    conv_inputs: Meta | None  # [B, T, D]
    conv_state: Meta | None  # [P, D, L]
    draft_slots: Meta | None  # [N]; slots by default
    pad_slot: int
    state_layout: str

    @property
    def stacked(self) -> bool:
        """Whether the draft lies in buffers, by layer and slot."""
        return self.draft_k.dim() == 5

    @property
    def layers(self) -> int:
        return self.draft_k.shape[0] if self.stacked else 1

    @property
    def S(self) -> int:
        """Rows of the draft: B, or of the buffers."""
        return self.draft_k.shape[-4]

    @property
    def T(self) -> int:
        return self.draft_k.shape[-3]

    @property
    def N(self) -> int:
        if self.stacked:
            return self.num_accepted.shape[0]
        return sequences_of(self.S, self.cu_seqlens)

    @property
    def P(self) -> int:
        return self.state.shape[-4]

    @property
    def HK(self) -> int:
        return self.draft_k.shape[-2]

    @property
    def HV(self) -> int:
        return self.draft_d.shape[-2]

    @property
    def K(self) -> int:
        return self.draft_k.shape[-1]

    @property
    def V(self) -> int:
        return self.draft_d.shape[-1]

    @property
    def D(self) -> int:
        """0 without a conv window."""
        return 0 if self.conv_state is None else self.conv_state.shape[-2]

    @property
    def L(self) -> int:
        """0 without a conv window."""
        return 0 if self.conv_state is None else self.conv_state.shape[-1]

    @property
    def decay(self) -> str:
        g = self.draft_g
        return decay_of(g if g is None or not self.stacked else g.squeeze(0))

    @property
    def state_dtype(self) -> torch.dtype:
        return self.state.dtype

    def layer(self, x: Meta | None) -> Meta | None:
        """A draft's tensor or a pool as one layer has it."""
        return x if x is None or not self.stacked else x.squeeze(0)
