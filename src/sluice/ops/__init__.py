"""The public operators, docs/contract.md.

Each one lists its tensors and options in the order of its spec and hands over to ``calls.call``.
Beside it stands what brings its arguments into canonical form, once per combination of metadata.
"""

from sluice.ops.checkpoints import Checkpoints
from sluice.ops.conv import causal_conv1d, conv_qkv
from sluice.ops.delta import decode, prefill
from sluice.ops.drafts import Draft, DraftBuffers, commit, commit_layers, verify
from sluice.ops.layer import rms_norm_gated, step

__all__ = [
    "Checkpoints",
    "Draft",
    "DraftBuffers",
    "causal_conv1d",
    "commit",
    "commit_layers",
    "conv_qkv",
    "decode",
    "prefill",
    "rms_norm_gated",
    "step",
    "verify",
]
