"""The rest of a layer: ``rms_norm_gated``, and ``step``, the whole layer's decode."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sluice import library
from sluice.contract.errors import ContractError
from sluice.contract.options import NormOptions, StepOptions
from sluice.contract.tensors import NormTensors, Rows, StepTensors
from sluice.ops.canonical import conv_taps, tensor


def rms_norm_gated(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    activation: str = "silu",
    out: Tensor | None = None,
    backend: str | None = None,
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
        y [..., V] in the dtype of x, rounded once.

    >>> import torch, sluice
    >>> x = torch.tensor([[3.0, 4.0]])
    >>> y = sluice.rms_norm_gated(x, torch.zeros(1, 2), torch.ones(2), activation="sigmoid")
    >>> [round(v, 4) for v in y[0].tolist()]
    [0.4243, 0.5657]
    """
    tensor("rms_norm_gated", x, "x")
    y = x.new_empty(x.shape) if out is None else out
    tensors = NormTensors(x, z, weight, y)
    library.call(library.RMS_NORM_GATED, tensors, NormOptions(eps, activation), backend)
    return library.without_gradient("rms_norm_gated", y, x, z, weight)


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
    state_layout: str = "vk",
    order: str = "split",
    conv_activation: str | None = "silu",
    gate_activation: str = "silu",
    eps: float = 1e-6,
    scale: float | None = None,
    normalize_qk: bool = True,
    neg_eigval: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
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
    taps = conv_taps("step", conv_weight, "conv_weight")
    if tensor("step", state, "state").dim() != 4:
        expected = "4 dimensions [P, HV, V, K]"
        raise ContractError("step", "state", expected, f"shape {list(state.shape)}")
    _, HV, *tail = state.shape
    first, z = _parts(qkvz, "qkvz", taps.shape[0], order)
    b, a = _parts(ba, "ba", HV, order)
    width = HV * tail[0 if state_layout == "vk" else 1]
    y = first.new_empty(*first.shape[:-1], width) if out is None else out
    tokens: Any = (first, z, b, a, y)
    if first.dim() == 2:
        tokens = [x if x is None else x.unsqueeze(1) for x in tokens]
    tensors = StepTensors(
        tokens[0],
        tokens[1],
        tokens[2],
        tokens[3],
        taps,
        conv_bias,
        A_log,
        dt_bias,
        norm_weight,
        conv_state,
        state,
        Rows(slots, write_slots, has_state),
        tokens[4],
    )
    options = StepOptions(
        order,
        conv_activation,
        gate_activation,
        eps,
        scale,
        normalize_qk,
        neg_eigval,
        pad_slot,
        state_layout,
    )
    library.call(library.STEP, tensors, options, backend)
    weights = (conv_weight, conv_bias, A_log, dt_bias, norm_weight)
    return library.without_gradient("step", y, first, z, b, a, *weights, conv_state, state)


def _parts(x: Any, name: str, first: int, order: str) -> tuple[Tensor, Tensor | None]:
    """The two parts of a projection: a pair as given, one tensor cut behind ``first`` channels.

    Interleaved, a tensor stays whole.
    """
    if isinstance(x, Tensor):
        return (x[..., :first], x[..., first:]) if order == "split" and x.dim() > 0 else (x, None)
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        got = f"{len(x)} parts" if isinstance(x, (tuple, list)) else type(x).__name__
        raise ContractError("step", name, "a tensor or a pair of them", got)
    return tensor("step", x[0], name), x[1]
