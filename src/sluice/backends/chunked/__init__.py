"""The chunked form in plain torch: matrix products over chunks of tokens, on any device.

It checks the derivation of docs/kernels/chunked.md, and serves prefill where no kernel does.
"""

from __future__ import annotations

from sluice.backends import loader, reference
from sluice.contract.problem import Problem

DEVICES = reference.DEVICES
OPS = {"prefill": "prefill"}
kernel = loader(__name__, OPS)


def unavailable() -> str | None:
    """Plain torch runs wherever torch does."""
    return None


def refuse(problem: Problem) -> str | None:
    """The reference's limits, and no promise about bits: torch's products round by batch size."""
    if getattr(problem, "batch_invariant", False):
        return "matrix products of torch may round differently beside other rows or heads"
    return reference.refuse(problem)
