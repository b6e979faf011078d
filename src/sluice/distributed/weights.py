"""Join shares of a layer's weights: the inverse of ``layers.shard_weights``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sluice.contract.errors import ContractError
from sluice.layers import weights as layout
from sluice.layers.qwen import QwenShape


def join_weights(shares: Sequence[Mapping[str, Tensor]], shape: QwenShape) -> dict[str, Tensor]:
    """A whole layer's state dict from the shares of all ranks, in order of rank; exact.

    Args:
        shares: one state dict for each rank, as ``shard_weights`` divides them.
        shape: the whole layer's.

    Raises:
        ContractError: names that differ between shares, or sizes that do not fit ``shape``.

    >>> from sluice.layers import GatedDeltaNet, QwenShape, shard_weights
    >>> shape = QwenShape("small", 32, 2, 4, 1, (0,), head_k_dim=8, head_v_dim=8)
    >>> weights = GatedDeltaNet(shape).state_dict()
    >>> shares = [shard_weights(weights, shape, rank=r, tp=2) for r in range(2)]
    >>> all(torch.equal(x, weights[name]) for name, x in join_weights(shares, shape).items())
    True
    """
    local = shape.shard(len(shares))
    for rank, share in enumerate(shares):
        if share.keys() != shares[0].keys():
            got = f"{sorted(share)} on rank {rank}"
            raise ContractError("join_weights", "shares", f"names {sorted(shares[0])}", got)
    whole = {}
    for name in shares[0]:
        parts, kind = [share[name] for share in shares], name.split(".")[0]
        if kind in layout._BY_ROWS:
            whole[name] = torch.cat(parts, 0)
        elif kind in layout._BY_SECTIONS:
            whole[name] = join_channels(parts, local)
        elif kind in layout._BY_COLUMNS and parts[0].dim() == 2:
            whole[name] = torch.cat(parts, 1)
        elif kind in layout._WHOLE:
            whole[name] = parts[0]
        else:
            raise ContractError("join_weights", "shares", "names of a gated delta layer", name)
    return whole


def join_channels(parts: Sequence[Tensor], local: QwenShape, dim: int = 0) -> Tensor:
    """Join ranks' conv channels ``[Q | K | V]`` to the whole's; ``local`` is a rank's shape."""
    for part in parts:
        if part.shape[dim] != local.conv_channels:
            expected = f"{local.conv_channels} channels in dimension {dim}"
            raise ContractError("join_weights", "shares", expected, f"shape {list(part.shape)}")
    sizes = [local.key_dim, local.key_dim, local.value_dim]
    sections = [part.split(sizes, dim) for part in parts]
    return torch.cat([section for kind in zip(*sections, strict=True) for section in kind], dim)
