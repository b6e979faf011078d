"""Where states inside a sequence are kept: prefix caching."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sluice.contract.errors import ContractError


class Checkpoints(NamedTuple):
    """Which states inside each sequence are written, and to which slots of the same pool.

    Give exactly one of ``every`` and ``positions``:

    - ``every=n``: column j of ``slots`` receives the state after ``(j + 1) n`` tokens; every
      multiple of n up to a sequence's length needs a column.
    - ``positions`` [N, M] int32 or int64: column j receives the state after ``positions[i, j]``
      tokens of this call, 0 (the state it started from) to the sequence's length.

    slots: [N, M] int32 or int64; a padding slot (negative, or 0 with ``pad_slot=0``) is skipped.

    The recurrent state's checkpoints are written by ``prefill``, the conv window's by
    ``causal_conv1d`` and ``conv_qkv``: a prefix needs both.

    >>> import torch, sluice
    >>> sluice.Checkpoints(torch.tensor([[5, 6]]), every=64).every
    64
    """

    slots: Tensor
    every: int = 0
    positions: Tensor | None = None


def parts(op: str, c: Checkpoints | None) -> tuple[Tensor | None, Tensor | None, int]:
    """Slots, positions and interval, as operators take them."""
    if c is None:
        return None, None, 0
    if not isinstance(c, Checkpoints):
        raise ContractError(op, "checkpoints", "sluice.Checkpoints(slots, ...)", type(c).__name__)
    if isinstance(c.every, bool) or not isinstance(c.every, int):
        raise ContractError(op, "checkpoints.every", "an int", repr(c.every))
    if (c.every > 0) == (c.positions is not None):
        got = f"every={c.every}, positions={'None' if c.positions is None else 'a tensor'}"
        raise ContractError(op, "checkpoints", "either every >= 1 or positions", got)
    return c.slots, c.positions, c.every
