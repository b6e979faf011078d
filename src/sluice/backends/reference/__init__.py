"""The reference: plain torch, one token after another, any float dtype, written to be read."""

from __future__ import annotations

from sluice.backends import torch_binder
from sluice.contract.spec import Spec

DEVICES = ("cpu", "cuda")
OPS = {
    "prefill": "prefill",
    "transitions": "prefill",
    "decode": "decode",
    "verify": "verify",
    "commit": "verify",
    "causal_conv1d": "conv",
    "conv_qkv": "conv_qkv",
    "rms_norm_gated": "norm",
    "step": "step",
    "prefill_backward": "prefill_backward",
    "causal_conv1d_backward": "conv_backward",
    "conv_qkv_backward": "conv_backward",
    "rms_norm_gated_backward": "norm_backward",
}
bind = torch_binder(__name__, OPS)


def unavailable() -> str | None:
    """Plain torch runs wherever torch does."""
    return None


def refuse(spec: Spec) -> str | None:
    """Everything is served, but packed lengths must be known without waiting for a device."""
    if spec.device.type == "cpu" or spec.op.endswith("_backward"):
        return None  # a backward pass may wait for the borders of packed sequences
    if getattr(spec, "varlen", False) and not getattr(spec, "cu_seqlens_cpu", False):
        return "loops over packed sequences on the host: pass cu_seqlens_cpu"
    if getattr(spec, "checkpoints", "none") == "positions":
        return "reads checkpoint positions on the host: pass Checkpoints(every=...)"
    return None
