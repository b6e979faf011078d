"""Heads over ranks (tensor parallel): each rank has some key heads, their value heads and states.

Everything between the input projections and the output projection is per head and needs no other
rank. The output projection is divided by columns, and one all-reduce per layer sums the partial
results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from sluice.contract.errors import ContractError
from sluice.distributed import gradients
from sluice.distributed.ranks import Group, Ranks, group_of
from sluice.distributed.weights import join_weights
from sluice.layers import GatedDeltaNet, QwenShape, shard_weights
from sluice.layers.weights import ACCELERATED_SHAPE, LAYERS, is_known, shape_of
from sluice.settings import validating

# attributes of a divided layer; the last is the norm's weight whose gradient is summed
_WHOLE, _RANKS, _SUMMED = "_sluice_whole", "_sluice_ranks", "_sluice_summed"


class SummedLinear(nn.Linear):
    """A rank's columns of a linear layer, and the sum over ranks."""

    def __init__(self, linear: nn.Linear, ranks: Ranks) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = linear.weight, None  # type: ignore[assignment]
        self.out_features, self.in_features = linear.weight.shape
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        """The whole layer's output, on every rank.

        On a CPU, and inside ``sluice.validate()``, the ranks first agree on shape and dtype.
        """
        y = nn.functional.linear(x, self.weight)
        if y.device.type == "cpu" or validating():
            self.ranks.agree("heads", {"output": list(y.shape), "dtype": y.dtype})
        if torch.is_grad_enabled() and y.requires_grad:
            return gradients.summed(y, self.ranks)
        return self.ranks.all_reduce("heads.output", y)


def parallelize(
    layer: nn.Module, mesh: Group, *, ranks: Ranks | None = None, timeout: float = 60.0
) -> nn.Module:
    """Divide a gated delta layer's heads over the ranks of ``mesh``, in place.

    Rank i keeps the i-th share of the key heads with their value heads: the rows of each projection
    (of Q, K and V each, in either order), conv channels, ``A_log``, ``dt_bias``, and the columns of
    the output projection. All heads share the norm's weight, so it stays whole. States then have
    the heads of the share: use ``layer.zero_states``, or a pool for ``layer.shape``. Input and
    output hidden states are the same on every rank. Afterwards ``load_state_dict`` takes the
    weights of a whole layer or of a share.

    Args:
        layer: a :class:`GatedDeltaNet`, or a transformers layer that ``accelerate`` knows (divide
            it first, then accelerate it); with the same weights on every rank, or on "meta".
        mesh: a ``DeviceMesh`` of one dimension (``mesh["tp"]``), a process group, or None for all.
        ranks: a :class:`Ranks` to use; by default one is made. timeout: of that one.

    Returns:
        ``layer`` itself.

    Raises:
        ContractError: an unknown kind of layer, one already divided or accelerated, a number of
            ranks that does not divide the key heads. RankError: the ranks' layers differ.
    """
    ranks = Ranks(mesh, timeout=timeout) if ranks is None else ranks
    with ranks.agreement("parallelize") as facts:
        whole = _whole_shape(layer)
        tp = ranks.size
        local = whole.shard(tp)
        parameters = dict(layer.named_parameters())
        facts.update(shape=whole, kind=type(layer).__name__)
        facts["dtypes"] = {str(p.dtype) for p in parameters.values()}
        share = shard_weights(layer.state_dict(), whole, rank=ranks.rank, tp=tp)
    for name, part in share.items():
        owner, _, leaf = name.rpartition(".")
        wants = parameters[name].requires_grad
        copy = part.clone(memory_format=torch.contiguous_format)
        setattr(layer.get_submodule(owner), leaf, nn.Parameter(copy, requires_grad=wants))
    _resize(layer, local)
    layer.out_proj = SummedLinear(layer.out_proj, ranks)  # type: ignore[arg-type]
    layer.__dict__[_WHOLE], layer.__dict__[_RANKS] = whole, ranks
    layer.register_load_state_dict_pre_hook(_divide_loaded)
    layer.register_forward_pre_hook(_share_gradients, with_kwargs=True)
    return layer


class HeadParallel(ParallelStyle):
    """:func:`parallelize` as a style for ``torch.distributed.tensor.parallel``.

    ``parallelize_module(model, mesh["tp"], {"layers.0.linear_attn": HeadParallel(), ..})``; all
    layers of one style share their :class:`Ranks`. :func:`plan` makes the mapping for a model.
    """

    def __init__(self, *, timeout: float = 60.0) -> None:
        super().__init__()
        self.timeout = timeout
        self._ranks: dict[Any, Ranks] = {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = group_of(device_mesh, "HeadParallel")
        if group not in self._ranks:
            self._ranks[group] = Ranks(group, timeout=self.timeout)
        return parallelize(module, device_mesh, ranks=self._ranks[group])


def plan(model: nn.Module, *, timeout: float = 60.0) -> dict[str, ParallelStyle]:
    """A plan for ``parallelize_module`` with every gated delta layer of ``model``.

    Merge it with a plan for the other layers. Raises ContractError if the model has no such layer.
    """
    style = HeadParallel(timeout=timeout)
    found: dict[str, ParallelStyle] = {
        name: style
        for name, module in model.named_modules()
        if name and (isinstance(module, GatedDeltaNet) or is_known(module))
    }
    if not found:
        expected = f"a module with layers of GatedDeltaNet, {', '.join(LAYERS)}"
        raise ContractError("plan", "model", expected, type(model).__name__)
    return found


def whole_shape(layer: nn.Module) -> QwenShape:
    """The shape of a divided layer before it was divided."""
    shape = layer.__dict__.get(_WHOLE)
    if not isinstance(shape, QwenShape):
        expected = "a layer that parallelize has divided"
        raise ContractError("whole_shape", "layer", expected, type(layer).__name__)
    return shape


def gather_weights(layer: nn.Module) -> dict[str, Tensor]:
    """The whole layer's state dict on every rank, bit for bit as before the division."""
    whole, ranks = whole_shape(layer), layer.__dict__[_RANKS]
    mine = layer.state_dict()
    with ranks.agreement("gather_weights") as facts:
        facts.update({name: f"{list(x.shape)} {x.dtype}" for name, x in mine.items()})
    shares: Sequence[dict[str, Tensor]] = [{} for _ in range(ranks.size)]
    for name, x in mine.items():
        for share, part in zip(shares, ranks.all_gather("heads.weights", x), strict=True):
            share[name] = part
    return join_weights(shares, whole)


def _whole_shape(layer: nn.Module) -> QwenShape:
    if not isinstance(layer, GatedDeltaNet) and not is_known(layer):
        expected = f"GatedDeltaNet, or one of {', '.join(LAYERS)}"
        raise ContractError("parallelize", "layer", expected, type(layer).__name__)
    for attribute, done in ((_WHOLE, "divided"), (ACCELERATED_SHAPE, "accelerated")):
        if attribute in layer.__dict__:
            raise ContractError("parallelize", "layer", f"one not yet {done}", "one that is")
    shape = layer.shape if isinstance(layer, GatedDeltaNet) else shape_of(layer)
    if shape.tp != 1:
        raise ContractError("parallelize", "layer", "a whole layer", f"a share of {shape.tp}")
    for name, parameter in layer.named_parameters():
        if isinstance(parameter, DTensor):
            raise ContractError("parallelize", name, "a plain parameter", "a DTensor")
    return shape


def _resize(layer: nn.Module, local: QwenShape) -> None:
    """Update the sizes that modules store as attributes."""
    for child in layer.children():
        if isinstance(child, nn.Linear):
            child.out_features, child.in_features = child.weight.shape
    conv: Any = layer.conv1d
    conv.in_channels = conv.out_channels = conv.groups = local.conv_channels
    if isinstance(layer, GatedDeltaNet):
        layer.shape = local
        return
    stock: Any = layer
    stock.num_k_heads, stock.num_v_heads = local.num_k_heads, local.num_v_heads
    stock.key_dim, stock.value_dim = local.key_dim, local.value_dim
    stock.conv_dim = local.conv_channels


def _share_gradients(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    """Hook before forward: every rank has a part of the input's and the norm's gradient."""
    if not torch.is_grad_enabled():
        return None
    ranks, weight = layer.__dict__[_RANKS], layer.get_parameter("norm.weight")
    if weight.requires_grad and layer.__dict__.get(_SUMMED) is not weight:
        weight.register_hook(lambda d: ranks.all_reduce("heads.norm", d.clone()))
        layer.__dict__[_SUMMED] = weight
    name = "hidden_states"
    x = args[0] if args else kwargs[name]
    if not x.requires_grad:
        return None
    x = gradients.shared(x, ranks, "heads.input")
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, name: x})


def _divide_loaded(layer: nn.Module, weights: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Hook before loading: cut a whole layer's weights to this rank's share."""
    whole, ranks = whole_shape(layer), layer.__dict__[_RANKS]
    found = weights.get(f"{prefix}A_log")
    if found is None or found.shape[0] != whole.num_v_heads or ranks.size == 1:
        return
    own = layer.state_dict().keys()
    mine = {name: weights[prefix + name] for name in own if prefix + name in weights}
    for name, part in shard_weights(mine, whole, rank=ranks.rank, tp=ranks.size).items():
        weights[prefix + name] = part
