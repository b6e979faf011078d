"""Layers built on the operators, and the shapes of the models that use them."""

from sluice.layers.gated_delta_net import GatedDeltaNet
from sluice.layers.qwen import PRESETS, QwenShape, from_config, preset
from sluice.layers.weights import shard_channels, shard_weights

__all__ = [
    "PRESETS",
    "GatedDeltaNet",
    "QwenShape",
    "from_config",
    "preset",
    "shard_channels",
    "shard_weights",
]
