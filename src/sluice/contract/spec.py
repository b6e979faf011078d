"""The frozen description of a call: what every tensor looks like, and every option; no tensors.

A spec is made once per new combination of metadata, from the caller's own arguments in canonical
form, and checked once (``checks.py``). Everything else is derived from its fields: the schema of
the torch operator, the choice of a backend, what the backend binds, warm-up and ``explain``. Two
calls with equal specs differ in addresses and values alone.

In canonical form, tokens are ``[B, T, heads, width]`` (packed sequences: B = 1, with
``cu_seqlens``), whatever layout the caller has.

Dimensions: B batch rows, T tokens per row (all tokens when packed), N sequences, P pool slots, HQ,
HK, HV query, key and value heads, K, V head widths, W conv width, D conv channels, L columns of
the conv state.
"""

from __future__ import annotations

import collections
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from sluice.contract.meta import Meta

MAX_DECODE_TOKENS = 8
"""The longest sequence ``decode``, ``verify`` and ``step`` take."""


@dataclass(frozen=True)
class Spec:
    """What every spec has: its tensors and its options are the fields of the subclass.

    A field of type ``Meta`` is a tensor of the call, ``Meta | None`` one that may be missing, and
    any other field an option. Tensors come first, in the order in which backends receive them.
    """

    op: str

    TENSORS: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors, in order."""
    OPTIONS: ClassVar[tuple[str, ...]] = ()
    """Names of the options, in order."""
    FIELDS: ClassVar[dict[str, str]] = {}
    """The type of each tensor and option, as it is written."""
    Tensors: ClassVar[Any] = None
    """A NamedTuple of the tensors."""

    def __init_subclass__(cls) -> None:
        kinds: dict[str, str] = {}
        for base in (b for b in reversed(cls.__mro__) if issubclass(b, Spec)):
            kinds |= {
                name: kind
                for name, kind in inspect.get_annotations(base).items()
                if not kind.startswith("ClassVar") and name != "op"
            }
        tensors = [name for name, kind in kinds.items() if kind.startswith("Meta")]
        cls.TENSORS = tuple(tensors)
        cls.OPTIONS = tuple(name for name in kinds if name not in tensors)
        cls.FIELDS = {name: kinds[name] for name in (*cls.TENSORS, *cls.OPTIONS)}
        cls.Tensors = collections.namedtuple(cls.__name__.replace("Spec", "Tensors"), tensors)  # type: ignore[misc]

    @classmethod
    def make(cls, op: str, metas: Sequence[Meta | None], options: Sequence[Any]) -> Any:
        """The spec of these tensors and options, in order. Nothing is checked."""
        names = zip((*cls.TENSORS, *cls.OPTIONS), (*metas, *options), strict=True)
        return cls(op=op, **dict(names))

    @property
    def metas(self) -> list[Meta | None]:
        """The tensors, in order."""
        return [getattr(self, name) for name in self.TENSORS]

    @property
    def device(self) -> torch.device:
        """The device of the call."""
        meta: Meta = getattr(self, self.TENSORS[0])
        return meta.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first tensor, which decides the arithmetic."""
        meta: Meta = getattr(self, self.TENSORS[0])
        return meta.dtype

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of activations and states: what decides whether a backend serves a call."""
        states = (getattr(self, name, None) for name in ("state", "conv_state"))
        return {self.dtype, *(x.dtype for x in states if x is not None)}

    def on(self, device: torch.device) -> Any:
        """The same call on another device."""
        host = "cu_seqlens_cpu"
        return replace(
            self,
            **{
                name: meta._replace(device=device)
                for name in self.TENSORS
                if (meta := getattr(self, name)) is not None and name != host
            },
        )

    def views(self, tensors: Sequence[Tensor | None]) -> Any:
        """The caller's tensors in canonical form, as a NamedTuple. Nothing is copied."""
        return self.Tensors(
            *(
                x
                if x is None or meta is None or (x.shape, x.stride()) == (meta.shape, meta.strides)
                else x.as_strided(meta.shape, meta.strides)
                for x, meta in zip(tensors, self.metas, strict=True)
            )
        )


class Rows:
    """What specs with sequences and a pool of states derive from their index tensors."""

    slots: Any
    write_slots: Any
    cu_seqlens: Any
    pad_slot: int

    @property
    def varlen(self) -> bool:
        """Whether sequences are packed."""
        return self.cu_seqlens is not None

    @property
    def pooled(self) -> bool:
        """Whether slots say which row of a pool belongs to which sequence."""
        return self.slots is not None or self.write_slots is not None


def sequences_of(batch: int, cu_seqlens: Meta | None) -> int:
    return batch if cu_seqlens is None else cu_seqlens.shape[0] - 1


def decay_of(g: Meta | None) -> str:
    return "none" if g is None else "key" if g.dim() == 4 else "head"


def _checkpoints(slots: Meta | None, positions: Meta | None) -> str:
    return "none" if slots is None else "every" if positions is None else "positions"


class DeltaSizes:
    """What calls of the recurrence and of its backward derive from tensors and options."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    A_log: Any
    state: Any
    cu_seqlens: Any
    scale: float | None
    neg_eigval: bool

    @property
    def B(self) -> int:
        return self.q.shape[0]

    @property
    def T(self) -> int:
        return self.q.shape[1]

    @property
    def N(self) -> int:
        return sequences_of(self.B, self.cu_seqlens)

    @property
    def P(self) -> int:
        return self.state.shape[0]

    @property
    def HQ(self) -> int:
        return self.q.shape[2]

    @property
    def HK(self) -> int:
        return self.k.shape[2]

    @property
    def HV(self) -> int:
        return self.v.shape[2]

    @property
    def HO(self) -> int:
        """Heads of the output: query heads may share a state (GQA) or states a query head."""
        return max(self.HQ, self.HV)

    @property
    def K(self) -> int:
        return self.q.shape[3]

    @property
    def V(self) -> int:
        return self.v.shape[3]

    @property
    def q_scale(self) -> float:
        """The factor on q: ``scale``, or its default."""
        return self.K**-0.5 if self.scale is None else float(self.scale)

    @property
    def beta_scale(self) -> float:
        """The factor on sigmoid(b)."""
        return 2.0 if self.neg_eigval else 1.0

    @property
    def decay(self) -> str:
        """ "none", "head" or "key"."""
        return decay_of(self.g)

    @property
    def delta(self) -> bool:
        """Whether the delta rule is meant: without beta, states accumulate."""
        return self.beta is not None

    @property
    def raw_gates(self) -> bool:
        """Whether g and beta are the raw a and b, which the operator activates."""
        return self.A_log is not None

    @property
    def rule(self) -> str:
        """The update rule's name in ONNX's LinearAttention."""
        gated = self.decay != "none"
        if self.delta:
            return "gated_delta" if gated else "delta"
        return "gated" if gated else "linear"

    @property
    def state_dtype(self) -> torch.dtype:
        return self.state.dtype


@dataclass(frozen=True)
class DeltaSpec(DeltaSizes, Rows, Spec):
    """``prefill``, ``decode`` and ``verify``: the recurrence of docs/contract.md, (C1) to (C4)."""

    q: Meta  # [B, T, HQ, K]
    k: Meta  # [B, T, HK, K]
    v: Meta  # [B, T, HV, V]
    g: Meta | None  # [B, T, HV] or [B, T, HV, K]; the raw a when A_log is given
    beta: Meta | None  # [B, T, HV]; the raw b when A_log is given
    A_log: Meta | None  # [HV]
    dt_bias: Meta | None  # [HV] or [HV, K]
    state: Meta  # [P, HV, V, K] or [P, HV, K, V], last three dimensions contiguous
    slots: Meta | None  # [N] int32 or int64
    write_slots: Meta | None  # [N]; decode: [N, M], one for each token
    has_state: Meta | None  # [N] bool
    cu_seqlens: Meta | None  # [N + 1]
    cu_seqlens_cpu: Meta | None  # [N + 1], the same values on the host
    checkpoint_slots: Meta | None  # [N, M]
    checkpoint_positions: Meta | None  # [N, M]
    out: Meta  # [B, T, max(HQ, HV), V]
    draft_k: Meta | None  # [B, T, HK, K] float32: verify's keys; only k dᵀ is promised
    draft_d: Meta | None  # [B, T, HV, V] float32: verify's corrections d
    draft_g: Meta | None  # as g, float32: verify's log decays
    scale: float | None
    normalize_qk: bool
    neg_eigval: bool
    pad_slot: int
    state_layout: str  # "vk" or "kv"
    checkpoint_every: int
    batch_invariant: bool

    @property
    def checkpoints(self) -> str:
        """ "none", "every" or "positions"."""
        return _checkpoints(self.checkpoint_slots, self.checkpoint_positions)

    @property
    def states(self) -> int:
        """Write slots of a sequence, where each token has its own; 0 where it has one for all."""
        x = self.write_slots
        return 0 if x is None or x.dim() < 2 else x.shape[1]


@dataclass(frozen=True)
class PassSpec(DeltaSpec):
    """A ``prefill`` in two passes: ``transitions``, before its state is known, then ``resume``.

    Sequences are rows, [B, T, ..]. Both passes have the same tensors, and so the same backend.
    Without ``out`` there is no second pass.
    """

    map: Meta | None  # [B, HV, K, V + K]: S_zero | M, which the first pass makes
    kept: Meta | None  # uint8: what the first pass leaves for the second, of a size it chooses
    segment: int  # tokens per segment

    @property
    def segments(self) -> int:
        """How many segments a row has."""
        return max(-(-self.T // self.segment), 1)

    def prefill(self, **changed: Any) -> DeltaSpec:
        """An ordinary prefill with the same tensors and options, except those ``changed``."""
        names = (*DeltaSpec.TENSORS, *DeltaSpec.OPTIONS)
        return DeltaSpec(op="prefill", **({n: getattr(self, n) for n in names} | changed))


@dataclass(frozen=True)
class _ConvSpec(Rows, Spec):
    """What both convolutions have."""

    x: Meta  # [B, T, D], any strides
    weight: Meta  # [D, W]
    bias: Meta | None  # [D]
    state: Meta | None  # [P, D, L], any strides
    slots: Meta | None
    write_slots: Meta | None
    has_state: Meta | None
    cu_seqlens: Meta | None
    cu_seqlens_cpu: Meta | None
    checkpoint_slots: Meta | None
    checkpoint_positions: Meta | None
    window_start: Meta | None  # [N]: windows are left-aligned, and read from this column on
    activation: str | None  # "silu", "none" or None
    pad_slot: int
    freeze: bool
    checkpoint_every: int

    @property
    def B(self) -> int:
        return self.x.shape[0]

    @property
    def T(self) -> int:
        return self.x.shape[1]

    @property
    def N(self) -> int:
        return sequences_of(self.B, self.cu_seqlens)

    @property
    def P(self) -> int:
        return 0 if self.state is None else self.state.shape[0]

    @property
    def D(self) -> int:
        return self.x.shape[2]

    @property
    def W(self) -> int:
        return self.weight.shape[1]

    @property
    def L(self) -> int:
        """Columns of the conv state; 0 without one."""
        return 0 if self.state is None else self.state.shape[2]

    @property
    def silu(self) -> bool:
        return self.activation == "silu"

    @property
    def checkpoints(self) -> str:
        """ "none", "every" or "positions"."""
        return _checkpoints(self.checkpoint_slots, self.checkpoint_positions)


@dataclass(frozen=True)
class ConvSpec(_ConvSpec):
    """``causal_conv1d``: depthwise causal convolution with a rolling window, (C5)."""

    out: Meta  # [B, T, D]


@dataclass(frozen=True)
class ConvQkvSpec(_ConvSpec):
    """``conv_qkv``: the convolution over channels [Q | K | V], then split, l2 norm and gates."""

    a: Meta | None  # [B, T, HV]
    b: Meta | None  # [B, T, HV]
    A_log: Meta | None  # [HV]
    dt_bias: Meta | None  # [HV]
    q: Meta  # [B, T, HK, K], output
    k: Meta  # [B, T, HK, K], output
    v: Meta  # [B, T, HV, V], output
    g: Meta | None  # [B, T, HV] float32, output
    beta: Meta | None  # [B, T, HV] float32, output
    normalize_qk: bool
    neg_eigval: bool

    @property
    def HK(self) -> int:
        return self.q.shape[2]

    @property
    def HV(self) -> int:
        return self.v.shape[2]

    @property
    def K(self) -> int:
        return self.q.shape[3]

    @property
    def V(self) -> int:
        return self.v.shape[3]

    @property
    def beta_scale(self) -> float:
        return 2.0 if self.neg_eigval else 1.0


@dataclass(frozen=True)
class NormSpec(Spec):
    """``rms_norm_gated`` over the last dimension, (C6)."""

    x: Meta  # [..., V]
    z: Meta  # [..., V]
    weight: Meta  # [V]
    out: Meta  # [..., V]
    eps: float
    activation: str  # "silu" or "sigmoid"

    @property
    def V(self) -> int:
        return self.x.shape[-1]

    @property
    def vectors(self) -> int:
        """How many vectors of V elements there are."""
        return self.x.numel() // self.V if self.V > 0 else 0


@dataclass(frozen=True)
class StepSpec(Spec):
    """``step``: a whole layer's decode after its input projections.

    Order "split": ``qkv`` [N, T, D] and ``z`` [N, T, HV V]; or ``qkv`` is the whole qkvz
    [N, T, D + HV V] and ``z`` is None. Likewise ``b`` and ``a`` [N, T, HV], or the whole ba.
    Order "interleaved": both are whole, interleaved per key head.
    """

    qkv: Meta
    z: Meta | None
    b: Meta
    a: Meta | None
    conv_weight: Meta  # [D, W]
    conv_bias: Meta | None  # [D]
    A_log: Meta  # [HV]
    dt_bias: Meta  # [HV]
    norm_weight: Meta  # [V]
    conv_state: Meta  # [P, D, L]
    state: Meta  # [P, HV, V, K] or [P, HV, K, V]
    slots: Meta | None
    write_slots: Meta | None
    has_state: Meta | None
    out: Meta  # [N, T, HV V]
    order: str  # "split" or "interleaved"
    conv_activation: str | None  # "silu", "none" or None
    gate_activation: str  # "silu" or "sigmoid"
    eps: float
    scale: float | None
    normalize_qk: bool
    neg_eigval: bool
    pad_slot: int
    state_layout: str

    varlen: ClassVar[bool] = False

    @property
    def N(self) -> int:
        return self.qkv.shape[0]

    @property
    def T(self) -> int:
        return self.qkv.shape[1]

    @property
    def P(self) -> int:
        return self.state.shape[0]

    @property
    def HV(self) -> int:
        return self.state.shape[1]

    @property
    def K(self) -> int:
        return self.state.shape[3 if self.state_layout == "vk" else 2]

    @property
    def V(self) -> int:
        return self.state.shape[2 if self.state_layout == "vk" else 3]

    @property
    def D(self) -> int:
        return self.conv_weight.shape[0]

    @property
    def W(self) -> int:
        return self.conv_weight.shape[1]

    @property
    def L(self) -> int:
        return self.conv_state.shape[2]

    @property
    def HK(self) -> int:
        return (self.D - self.HV * self.V) // (2 * self.K)

    @property
    def pooled(self) -> bool:
        return self.slots is not None or self.write_slots is not None

    @property
    def q_scale(self) -> float:
        return self.K**-0.5 if self.scale is None else float(self.scale)

    @property
    def beta_scale(self) -> float:
        return 2.0 if self.neg_eigval else 1.0

    @property
    def conv_silu(self) -> bool:
        return self.conv_activation == "silu"

    @property
    def z_offset(self) -> int:
        """Elements before z in qkvz, where that is one tensor."""
        r = self.HV // self.HK
        return self.D if self.order == "split" else 2 * self.K + r * self.V

    @property
    def a_offset(self) -> int:
        """Elements before a in ba, where that is one tensor, times its last stride."""
        heads = self.HV if self.order == "split" else self.HV // self.HK
        return heads * self.b.strides[2]

    @property
    def state_dtype(self) -> torch.dtype:
        return self.state.dtype
