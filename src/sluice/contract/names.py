"""The values of string options, as types: a misspelt one is found before the program runs."""

from __future__ import annotations

from typing import Literal

StateLayout = Literal["vk", "kv"]
"""The last two dimensions of a recurrent state."""
HeadLayout = Literal["bthd", "bhtd"]
"""Tokens before heads, or heads before tokens."""
ChannelLayout = Literal["btd", "bdt"]
"""Tokens before channels, or channels before tokens."""
ConvOrder = Literal["dl", "ld"]
"""Which of channels and columns is contiguous in a pool's conv state."""
ConvActivation = Literal["silu", "none"]
"""After the convolution; None is "none", too."""
GateActivation = Literal["silu", "sigmoid"]
"""Of the gate of the norm."""
Order = Literal["split", "interleaved"]
"""The row order of input projections."""
BackendName = Literal["hopper", "triton", "cpu", "chunked", "reference"]
"""Every backend, fastest first."""
OperatorName = Literal[
    "prefill",
    "decode",
    "verify",
    "commit",
    "commit_layers",
    "causal_conv1d",
    "conv_qkv",
    "rms_norm_gated",
    "step",
]
"""Every operator; ``commit_layers`` is a form of ``commit``."""
