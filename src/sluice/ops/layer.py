"""The rest of a layer: ``rms_norm_gated``, and ``step``, the whole layer's decode."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sluice import calls
from sluice.calls import Canonical, Operator
from sluice.contract import checks, values
from sluice.contract.backward import NormBackwardSpec
from sluice.contract.errors import ContractError
from sluice.contract.names import BackendName, ConvActivation, GateActivation, Order, StateLayout
from sluice.contract.spec import NormSpec, StepSpec
from sluice.ops.canonical import backward_of, conv_taps
from sluice.torch_ops import Functional, register, register_functional


def rms_norm_gated(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    activation: GateActivation = "silu",
    out: Tensor | None = None,
    backend: BackendName | None = None,
) -> Tensor:
    """Root-mean-square norm of x over its last dimension, then a gate.

    ::

        y = weight x / sqrt(mean x^2 + eps) act(z)                                   (C6)

    Args:
        x: [..., V] float32, bfloat16 or float16; any strides but the last, which is 1.
        z: [..., V], any float dtype.
        weight: [V], used as it is (not 1 + weight).
        eps: inside the root. activation: "silu" (default) or "sigmoid".
        out: buffer of x's shape and dtype.

    Returns:
        y [..., V] in the dtype of x, rounded once. Without ``out`` it has gradients, if an input
        requires one.

    >>> import torch, sluice
    >>> x = torch.tensor([[3.0, 4.0]])
    >>> y = sluice.rms_norm_gated(x, torch.zeros(1, 2), torch.ones(2), activation="sigmoid")
    >>> [round(v, 4) for v in y[0].tolist()]
    [0.4243, 0.5657]
    """
    tensors: list[Any] = [x, z, weight, out]
    if out is None and calls.wants_gradient(x, z, weight):
        y: Tensor = FUNCTIONAL(tensors, (eps, activation), None, backend)[0]
        return y
    y = calls.call(RMS_NORM_GATED, tensors, (eps, activation), None, backend)[3]
    return calls.without_gradient("rms_norm_gated", y, x, z, weight)


def step(
    qkvz: Tensor | tuple[Tensor, Tensor],
    ba: Tensor | tuple[Tensor, Tensor],
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None = None,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor | None = None,
    write_slots: Tensor | None = None,
    has_state: Tensor | None = None,
    pad_slot: int = -1,
    state_layout: StateLayout = "vk",
    order: Order = "split",
    conv_activation: ConvActivation | None = "silu",
    gate_activation: GateActivation = "silu",
    eps: float = 1e-6,
    scale: float | None = None,
    normalize_qk: bool = True,
    neg_eigval: bool = False,
    out: Tensor | None = None,
    backend: BackendName | None = None,
) -> Tensor:
    """A whole layer's decode: from its input projections to what its output projection takes.

    Convolution, split, l2 norm, gates, delta rule and gated norm, (C1) to (C6), with nothing
    rounded in between; both states are updated in place.

    Args:
        qkvz: [N, channels] or [N, T, channels], T up to 8, channels = 2 HK K + 2 HV V: in order
            "split" [Q | K | V | z], in order "interleaved" (Qwen3-Next) per key head
            [q | k | r v | r z]. Or a pair (qkv, z), as Qwen3.5 projects them.
        ba: [N, (T,) 2 HV]: "split" [b | a], "interleaved" per key head [r b | r a]. Or a pair.
        conv_weight: [D, W] or [D, 1, W]. conv_bias: [D] or None.
        A_log: [HV]. dt_bias: [HV]. norm_weight: [V].
        conv_state: [P, D, L]. state: [P, HV, V, K] or [P, HV, K, V]; head sizes are taken from it.
        slots: as in :func:`prefill`, for both states; so are the options that follow.
        gate_activation: "silu" (default) or "sigmoid", of the gated norm.
        out: buffer for y.

    Returns:
        y [N, (T,) HV V] in the dtype of qkvz. Padded rows are zeros.

    >>> import torch, sluice
    >>> conv, pool = torch.zeros(3, 32, 3), torch.zeros(3, 2, 8, 8)  # HK = 1, HV = 2, K = V = 8
    >>> y = sluice.step(
    ...     torch.randn(2, 48), torch.randn(2, 4), conv_weight=torch.randn(32, 4),
    ...     A_log=torch.zeros(2), dt_bias=torch.zeros(2), norm_weight=torch.ones(8),
    ...     conv_state=conv, state=pool, slots=torch.tensor([2, 0]))
    >>> y.shape, bool((pool[1] == 0).all())
    (torch.Size([2, 16]), True)
    """
    first, z = _parts(qkvz, "qkvz")
    b, a = _parts(ba, "ba")
    tensors = [
        first, z, b, a, conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state, state,
        slots, write_slots, has_state, out,
    ]  # fmt: skip
    options = (
        order, conv_activation, gate_activation, eps, scale, normalize_qk, neg_eigval, pad_slot,
        state_layout,
    )  # fmt: skip
    made = calls.call(STEP, tensors, options, None, backend)
    y: Tensor = made[-1]
    if calls.wants_gradient(*tensors):
        return calls.without_gradient("step", y, *tensors[:11])
    return y


def _parts(x: Any, name: str) -> tuple[Any, Any]:
    """The two parts of a projection: a pair as given, or one tensor and None."""
    if isinstance(x, Tensor):
        return x, None
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        got = f"{len(x)} parts" if isinstance(x, (tuple, list)) else type(x).__name__
        raise ContractError("step", name, "a tensor or a pair of them", got)
    return x[0], x[1]


def _norm_canonical(t: Any, options: tuple[Any, ...], form: None) -> Canonical:
    """``rms_norm_gated`` takes any shape as it is."""
    return Canonical(t if t.out is not None else t._replace(out=t.x.new_empty(*t.x.shape)))


def _step_canonical(t: Any, options: tuple[Any, ...], form: None) -> Canonical:
    """Canonical tensors of ``step``: [N, T, channels], weights [D, W]."""
    for name in ("conv_state", "state"):
        if getattr(t, name) is None:
            raise ContractError("step", name, "a tensor", "NoneType")
    taps = conv_taps("step", t.conv_weight, "conv_weight")
    if t.state.dim() != 4:
        expected = "4 dimensions [P, HV, V, K]"
        raise ContractError("step", "state", expected, f"shape {list(t.state.shape)}")
    flat = t.qkv.dim() == 2
    qkv, z, b, a, out = (
        y.unsqueeze(1) if y is not None and y.dim() == 2 and flat else y
        for y in (t.qkv, t.z, t.b, t.a, t.out)
    )
    if out is None and qkv.dim() == 3:
        state_layout = options[StepSpec.OPTIONS.index("state_layout")]
        width = t.state.shape[1] * t.state.shape[2 if state_layout == "vk" else 3]
        out = qkv.new_empty(*qkv.shape[:2], width)
    canonical = t._replace(qkv=qkv, z=z, b=b, a=a, conv_weight=taps, out=out)
    return Canonical(canonical, (lambda y: y.squeeze(1)) if flat else None, ("out",))


RMS_NORM_GATED = Operator("rms_norm_gated", NormSpec, _norm_canonical, checks.norm, None, ("out",))
STEP = Operator(
    "step",
    StepSpec,
    _step_canonical,
    checks.step,
    values.step,
    ("conv_state", "state", "out"),
    (("qkv", "qkvz"), ("b", "ba")),
)
for _op in (RMS_NORM_GATED, STEP):
    register(_op)
_INPUTS = ("x", "z", "weight")
FUNCTIONAL = Functional(
    RMS_NORM_GATED,
    backward_of("rms_norm_gated", NormBackwardSpec, _INPUTS),
    _INPUTS,
    ("out",),
    ("dy",),
)
register_functional(FUNCTIONAL)
