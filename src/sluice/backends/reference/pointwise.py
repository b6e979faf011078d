"""sigmoid, silu and softplus whose bits do not depend on how many numbers stand beside one.

torch's own round differently in a vector register than in the tail of a loop, so that a row's bits
would change with its batch. exp, log1p and arithmetic do not.
"""

from __future__ import annotations

from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    return 1 / (1 + (-x).exp())


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x)."""
    return x / (1 + (-x).exp())


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), exact at both ends: e^-|x| is at most 1."""
    return x.clamp(min=0) + (-x.abs()).exp().log1p()
