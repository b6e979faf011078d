"""The frozen descriptions of backward calls (docs/contract.md, Gradients).

A backward call takes the inputs of a functional call and the gradients of its outputs, and makes
the gradients of the inputs. Names: ``dx`` is the gradient of the loss by ``x``. Nothing is checked
again: shapes, strides and options are those of the call that autograd followed.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice.contract.meta import Meta
from sluice.contract.spec import DeltaSizes, Spec


class _Packed:
    cu_seqlens: Meta | None

    @property
    def varlen(self) -> bool:
        """Whether sequences are packed."""
        return self.cu_seqlens is not None


@dataclass(frozen=True)
class DeltaBackwardSpec(DeltaSizes, _Packed, Spec):
    """Of ``prefill``."""

    q: Meta  # [B, T, HQ, K]
    k: Meta  # [B, T, HK, K]
    v: Meta  # [B, T, HV, V]
    g: Meta | None
    beta: Meta | None
    A_log: Meta | None
    dt_bias: Meta | None
    state: Meta | None  # [N, HV, V, K] or [N, HV, K, V], the initial states; any strides
    cu_seqlens: Meta | None
    cu_seqlens_cpu: Meta | None
    do: Meta | None  # [B, T, max(HQ, HV), V]; None is zeros
    dfinal: Meta | None  # as state, in the arithmetic's dtype; None is zeros
    dq: Meta  # outputs, each like the input it belongs to
    dk: Meta
    dv: Meta
    dg: Meta | None
    dbeta: Meta | None
    dA_log: Meta | None
    ddt_bias: Meta | None
    dstate: Meta | None
    scale: float | None
    normalize_qk: bool
    neg_eigval: bool
    state_layout: str


class _ConvSizes(_Packed):
    x: Meta
    weight: Meta
    state: Meta | None
    cu_seqlens: Meta | None
    activation: str | None

    @property
    def B(self) -> int:
        return self.x.shape[0]

    @property
    def T(self) -> int:
        return self.x.shape[1]

    @property
    def N(self) -> int:
        return self.B if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def D(self) -> int:
        return self.x.shape[2]

    @property
    def W(self) -> int:
        return self.weight.shape[1]

    @property
    def L(self) -> int:
        """Columns of the window: W - 1 without one."""
        return self.W - 1 if self.state is None else self.state.shape[2]

    @property
    def silu(self) -> bool:
        return self.activation == "silu"


@dataclass(frozen=True)
class ConvBackwardSpec(_ConvSizes, Spec):
    """Of ``causal_conv1d``."""

    x: Meta  # [B, T, D]
    weight: Meta  # [D, W]
    bias: Meta | None  # [D]
    state: Meta | None  # [N, D, L], the initial windows
    cu_seqlens: Meta | None
    cu_seqlens_cpu: Meta | None
    dy: Meta | None  # [B, T, D]; None is zeros
    dwindow: Meta | None  # [N, D, L], of the final windows; None is zeros
    dx: Meta
    dweight: Meta
    dbias: Meta | None
    dstate: Meta | None
    activation: str | None


@dataclass(frozen=True)
class ConvQkvBackwardSpec(_ConvSizes, Spec):
    """Of ``conv_qkv``."""

    x: Meta
    weight: Meta
    bias: Meta | None
    state: Meta | None
    cu_seqlens: Meta | None
    cu_seqlens_cpu: Meta | None
    a: Meta | None  # [B, T, HV]
    b: Meta | None
    A_log: Meta | None
    dt_bias: Meta | None
    dq: Meta  # [B, T, HK, K], of the outputs
    dk: Meta
    dv: Meta  # [B, T, HV, V]
    dg: Meta | None  # [B, T, HV]
    dbeta: Meta | None
    dx: Meta
    dweight: Meta
    dbias: Meta | None
    dstate: Meta | None
    da: Meta | None
    db: Meta | None
    dA_log: Meta | None
    ddt_bias: Meta | None
    activation: str | None
    normalize_qk: bool
    neg_eigval: bool

    @property
    def HK(self) -> int:
        return self.dq.shape[2]

    @property
    def HV(self) -> int:
        return self.dv.shape[2]

    @property
    def K(self) -> int:
        return self.dq.shape[3]

    @property
    def V(self) -> int:
        return self.dv.shape[3]


@dataclass(frozen=True)
class NormBackwardSpec(Spec):
    """Of ``rms_norm_gated``."""

    x: Meta  # [..., V]
    z: Meta
    weight: Meta  # [V]
    dy: Meta
    dx: Meta
    dz: Meta
    dweight: Meta
    eps: float
    activation: str

    @property
    def V(self) -> int:
        return self.x.shape[-1]

    @property
    def vectors(self) -> int:
        """How many vectors of V elements there are."""
        return self.x.numel() // self.V if self.V > 0 else 0
