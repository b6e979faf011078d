"""The chunked form in plain torch: matrix products over chunks of tokens, on any device.

It checks the derivations of docs/kernels/chunked.md and docs/kernels/backward.md, and serves
prefill and its backward where no kernel does.
"""

from __future__ import annotations

from sluice.backends import reference, torch_binder
from sluice.contract.spec import Spec

DEVICES = reference.DEVICES
OPS = {
    "prefill": "prefill",
    "transitions": "prefill",
    "prefill_backward": "prefill_backward",
}
bind = torch_binder(__name__, OPS)


def unavailable() -> str | None:
    """Plain torch runs wherever torch does."""
    return None


def refuse(spec: Spec) -> str | None:
    """The reference's limits, and no promise about bits: torch's products round by batch size."""
    if getattr(spec, "batch_invariant", False):
        return "matrix products of torch may round differently beside other rows or heads"
    return reference.refuse(spec)
