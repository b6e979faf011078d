"""More than one device, on ``torch.distributed``: heads over ranks, sequences over ranks, states.

``parallelize`` divides a layer's heads; ``prefill``, ``conv_qkv``, ``causal_conv1d`` and
``forward`` run sequences that lie on several ranks; ``move`` and ``reshard`` bring state from one
set of ranks to another. ``Ranks`` is the group of processes, and ``Split`` says which tokens each
one holds. docs/distributed.md describes what is exchanged.
"""

from sluice.distributed.conv import causal_conv1d, conv_qkv
from sluice.distributed.heads import HeadParallel, gather_weights, parallelize, plan, whole_shape
from sluice.distributed.layer import forward
from sluice.distributed.prefill import prefill, prefill_segments
from sluice.distributed.ranks import Cost, Exchange, RankError, Ranks
from sluice.distributed.split import Part, Split
from sluice.distributed.states import move, reshard
from sluice.distributed.weights import join_channels, join_weights

__all__ = [
    "Cost",
    "Exchange",
    "HeadParallel",
    "Part",
    "RankError",
    "Ranks",
    "Split",
    "causal_conv1d",
    "conv_qkv",
    "forward",
    "gather_weights",
    "join_channels",
    "join_weights",
    "move",
    "parallelize",
    "plan",
    "prefill",
    "prefill_segments",
    "reshard",
    "whole_shape",
]
