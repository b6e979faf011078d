"""Weights of a gated delta layer: the known transformers layers, and one rank's share of one.

Parameter names are those of transformers, so state dicts load unchanged. This module does not
import transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sluice.contract.errors import ContractError
from sluice.contract.names import Order
from sluice.layers.qwen import QwenShape

# transformers' layer classes, and the row order of their input projections
LAYERS: dict[str, Order] = {
    "Qwen3NextGatedDeltaNet": "interleaved",
    "Qwen3_5GatedDeltaNet": "split",
    "Qwen3_5MoeGatedDeltaNet": "split",
    "Qwen4ExpTextGatedDeltaNet": "split",
}

ACCELERATED_SHAPE = "_sluice_shape"
"""The attribute with which ``sluice.accelerate`` marks a layer: its shape."""

# how heads are divided over ranks: by rows, by the rows of Q, K and V each, by columns, or not
_BY_ROWS = ("in_proj_qkvz", "in_proj_ba", "in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias")
_BY_SECTIONS = ("in_proj_qkv", "conv1d")
_BY_COLUMNS = ("out_proj",)
_WHOLE = ("norm",)


def is_known(layer: object) -> bool:
    """Whether ``layer`` is a transformers layer that :func:`shape_of` can read."""
    return type(layer).__name__ in LAYERS


def shape_of(layer: Any) -> QwenShape:
    """The shape of a transformers layer, as :class:`QwenShape` (of a model with one layer).

    Raises ``ContractError`` for an unknown class, and for activations that no operator serves.
    """
    kind = type(layer).__name__
    if not is_known(layer):
        raise ContractError("from_transformers", "layer", f"one of {', '.join(LAYERS)}", kind)
    conv = _activation(layer, "layer")
    # older releases do not name the activation of the norm's gate; it is silu in all of them
    named = hasattr(layer.norm, "activation") or not _is_norm(layer.norm)
    gate = _activation(layer.norm, "layer.norm") if named else "silu"
    if conv != "silu":
        raise ContractError("from_transformers", "layer.activation", "'silu'", repr(conv))
    if gate not in ("silu", "sigmoid"):
        expected = "'silu' or 'sigmoid'"
        raise ContractError("from_transformers", "layer.norm.activation", expected, repr(gate))
    return QwenShape(
        name=kind,
        hidden=layer.hidden_size,
        num_k_heads=layer.num_k_heads,
        num_v_heads=layer.num_v_heads,
        layers=1,
        linear_layer_ids=(0,),
        head_k_dim=layer.head_k_dim,
        head_v_dim=layer.head_v_dim,
        conv_width=layer.conv_kernel_size,
        order=LAYERS[kind],
        gate_activation=gate,  # type: ignore[arg-type]
        norm_eps=layer.layer_norm_epsilon,
    )


def shard_weights(
    weights: Mapping[str, Tensor], shape: QwenShape, *, rank: int, tp: int
) -> dict[str, Tensor]:
    """One rank's share of a whole layer's state dict, for a layer of ``shape.shard(tp)``.

    The output projection is divided by columns: the sum of all ranks' outputs is the layer's.
    A contiguous slice of ``in_proj_qkv`` or ``conv1d`` is not a head shard: Q, K and V are divided
    one by one (:func:`shard_channels`).

    Args:
        weights: a whole layer's ``state_dict()``, in either order.
        shape: the whole layer's shape.
        rank: 0 to ``tp - 1``. tp: the number of ranks, which divides both head counts.

    Raises:
        ContractError: an unknown name, a size that does not fit ``shape``, a wrong rank.

    >>> from sluice.layers import GatedDeltaNet, QwenShape
    >>> shape = QwenShape("small", 32, 2, 4, 1, (0,), head_k_dim=8, head_v_dim=8)
    >>> half = GatedDeltaNet(shape.shard(2))
    >>> weights = GatedDeltaNet(shape).state_dict()
    >>> half.load_state_dict(shard_weights(weights, shape, rank=1, tp=2))
    <All keys matched successfully>
    """
    shape.shard(tp)  # refuses a tp that does not divide the heads
    if not 0 <= rank < tp:
        raise ContractError("shard_weights", "rank", f"0 to {tp - 1}", rank)
    share = {}
    for name, x in weights.items():
        kind = name.split(".")[0]
        if kind in _BY_ROWS:
            share[name] = _part(x, 0, rank, tp)
        elif kind in _BY_SECTIONS:
            share[name] = shard_channels(x, shape, rank=rank, tp=tp)
        elif kind in _BY_COLUMNS and x.dim() == 2:
            share[name] = _part(x, 1, rank, tp)
        elif kind in _WHOLE:
            share[name] = x
        else:
            known = (*_BY_ROWS, *_BY_SECTIONS, *_BY_COLUMNS, *_WHOLE)
            raise ContractError("shard_weights", "weights", f"names of {', '.join(known)}", name)
    return share


def shard_channels(x: Tensor, shape: QwenShape, *, rank: int, tp: int, dim: int = 0) -> Tensor:
    """One rank's conv channels of ``x``, which has D = 2 HK K + HV V of them in ``dim``.

    For the order ``[Q all | K all | V all]``: rows of ``in_proj_qkv``, conv weights, and conv
    states (``dim=1`` of [P, D, L]). Each of the three sections is divided by itself.

    >>> import torch
    >>> shape = QwenShape("tiny", 4, 2, 2, 1, (0,), head_k_dim=1, head_v_dim=1)
    >>> shard_channels(torch.arange(6), shape, rank=1, tp=2).tolist()
    [1, 3, 5]
    """
    if x.shape[dim] != shape.conv_channels:
        expected = f"{shape.conv_channels} channels in dimension {dim}"
        raise ContractError("shard_channels", "x", expected, f"shape {list(x.shape)}")
    sections = x.split([shape.key_dim, shape.key_dim, shape.value_dim], dim)
    return torch.cat([_part(section, dim, rank, tp) for section in sections], dim)


def split_interleaved(
    shape: QwenShape, qkvz: Tensor, ba: Tensor
) -> tuple[Sequence[Tensor], Tensor, Tensor, Tensor]:
    """Views of Qwen3-Next's projections: (q, k, v), z [.., HK, r, V], b and a [.., HK, r].

    ``qkvz`` [.., 2 HK K + 2 HV V] is ``[q | k | r v | r z]`` per key head, ``ba`` [.., 2 HV] is
    ``[r b | r a]``; q and k are [.., HK, K], v is [.., HK, r V].
    """
    HK, r, K, V = shape.num_k_heads, shape.r, shape.head_k_dim, shape.head_v_dim
    q, k, v, z = qkvz.unflatten(-1, (HK, -1)).split([K, K, r * V, r * V], dim=-1)
    b, a = ba.unflatten(-1, (HK, 2 * r)).split([r, r], dim=-1)
    return (q, k, v), z.unflatten(-1, (r, V)), b, a


def _part(x: Tensor, dim: int, rank: int, tp: int) -> Tensor:
    if x.shape[dim] % tp:
        expected = f"a dimension {dim} that {tp} ranks divide"
        raise ContractError("shard_weights", "weights", expected, f"shape {list(x.shape)}")
    return x.chunk(tp, dim)[rank]


def _is_norm(module: object) -> bool:
    """Whether ``module`` is the gated norm of a transformers model file."""
    kind = type(module)
    return kind.__name__.endswith("RMSNormGated") and kind.__module__.startswith("transformers.")


def _activation(module: object, name: str) -> str:
    found = getattr(module, "activation", None)
    if not isinstance(found, str):
        raise ContractError("from_transformers", f"{name}.activation", "a name", repr(found))
    return "silu" if found == "swish" else found
