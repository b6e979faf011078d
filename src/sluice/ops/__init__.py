"""The public operators, docs/contract.md.

Each one brings its arguments into canonical form, allocates what the caller did not, and hands over
to ``library.call``: checks, choice of backend, kernel.
"""

from sluice.ops.checkpoints import Checkpoints
from sluice.ops.conv import causal_conv1d, conv_qkv
from sluice.ops.delta import Draft, commit, decode, prefill, verify
from sluice.ops.layer import rms_norm_gated, step

__all__ = [
    "Checkpoints",
    "Draft",
    "causal_conv1d",
    "commit",
    "conv_qkv",
    "decode",
    "prefill",
    "rms_norm_gated",
    "step",
    "verify",
]
