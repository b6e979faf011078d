"""Canonical form: whatever layout the caller has, operators see ``[B, T, ...]`` strided views."""

from __future__ import annotations

from torch import Tensor

from sluice.contract.errors import ContractError
from sluice.contract.tensors import Rows


class Tokens:
    """Turns one call's token tensors into canonical views, and outputs back. Nothing is copied."""

    def __init__(
        self, op: str, rows: Rows, layout: str, layouts: tuple[str, ...], *, packed: bool
    ) -> None:
        if layout not in layouts:
            raise ContractError(op, "layout", f"one of {list(layouts)}", repr(layout))
        if packed and rows.cu_seqlens is None:
            expected = "cu_seqlens beside packed input (no batch dimension)"
            raise ContractError(op, "cu_seqlens", expected, None)
        self.op, self.rows, self.packed = op, rows, packed
        self.swapped = layout != layouts[0]

    def __call__(self, x: Tensor, name: str, layout: str | None = None) -> Tensor:
        """The canonical view of ``x``; ``layout`` is given where x does not have the call's."""
        least = 2 if self.packed else 3
        if x.dim() < least:
            expected = f"at least {least} dimensions beside the others"
            raise ContractError(self.op, name, expected, f"shape {list(x.shape)}")
        x = x.unsqueeze(0) if self.packed else x
        return x.transpose(1, 2) if self.swapped and layout is None else x

    def restore(self, y: Tensor) -> Tensor:
        """A canonical output in the caller's layout."""
        y = y.transpose(1, 2) if self.swapped else y
        return y.squeeze(0) if self.packed else y

    def sequences(self, x: Tensor) -> int:
        """N."""
        cu_seqlens = self.rows.cu_seqlens
        return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def conv_taps(op: str, weight: Tensor, name: str = "weight") -> Tensor:
    """[D, W], also from the [D, 1, W] of ``torch.nn.Conv1d``."""
    if weight.dim() == 3 and weight.shape[1] == 1:
        return weight[:, 0]
    if weight.dim() != 2:
        raise ContractError(op, name, "shape [D, W] or [D, 1, W]", f"shape {list(weight.shape)}")
    return weight
