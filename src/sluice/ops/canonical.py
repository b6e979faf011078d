"""Canonical form: whatever layout the caller has, operators see ``[B, T, ...]`` strided views."""

from __future__ import annotations

from torch import Tensor

from sluice.contract.errors import ContractError
from sluice.contract.tensors import Rows


def tensor(op: str, x: object, name: str) -> Tensor:
    """``x``, which must be a tensor."""
    if not isinstance(x, Tensor):
        raise ContractError(op, name, "a tensor", type(x).__name__)
    return x


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
        if rows.cu_seqlens is not None:
            bounds = tensor(op, rows.cu_seqlens, "cu_seqlens")
            if bounds.dim() != 1 or bounds.shape[0] < 1:
                got = f"shape {list(bounds.shape)}"
                raise ContractError(op, "cu_seqlens", "shape [N + 1]", got)
        self.op, self.rows, self.packed = op, rows, packed
        self.swapped = layout != layouts[0]
        self.plain = not packed and not self.swapped

    def __call__(self, x: Tensor, name: str, *dims: int, layout: str | None = None) -> Tensor:
        """The canonical view of ``x``, which then has one of the numbers of dimensions ``dims``.

        ``layout`` is given where x does not have the call's.
        """
        if not isinstance(x, Tensor) or x.dim() + self.packed not in dims:
            tensor(self.op, x, name)  # which says so if it is none
            numbers = " or ".join(str(n - self.packed) for n in dims)
            expected = f"{numbers} dimensions{' (packed)' if self.packed else ''}"
            raise ContractError(self.op, name, expected, f"shape {list(x.shape)}")
        if self.plain:
            return x
        if self.packed:
            x = x.unsqueeze(0)
        return x.transpose(1, 2) if self.swapped and layout is None else x

    def restore(self, y: Tensor) -> Tensor:
        """A canonical output in the caller's layout."""
        if self.plain:
            return y
        y = y.transpose(1, 2) if self.swapped else y
        return y.squeeze(0) if self.packed else y

    def sequences(self, x: Tensor) -> int:
        """N."""
        cu_seqlens = self.rows.cu_seqlens
        return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def conv_taps(op: str, weight: Tensor, name: str = "weight") -> Tensor:
    """[D, W], also from the [D, 1, W] of ``torch.nn.Conv1d``."""
    tensor(op, weight, name)
    if weight.dim() == 3 and weight.shape[1] == 1:
        return weight[:, 0]
    if weight.dim() != 2:
        raise ContractError(op, name, "shape [D, W] or [D, 1, W]", f"shape {list(weight.shape)}")
    return weight
