"""Canonical form: whatever layout the caller has, operators see ``[B, T, ...]`` strided views.

Everything here takes tensors and their descriptions (``Meta``) alike: a call that torch traces has
the one, a call that is bound the other.
"""

from __future__ import annotations

import functools
from typing import Any

from sluice.calls import Canonical, Operator
from sluice.contract.errors import ContractError
from sluice.contract.spec import Spec


class Tokens:
    """Brings one call's token tensors into canonical form, and outputs back. Nothing is copied."""

    def __init__(
        self, op: str, cu_seqlens: Any, layout: str, layouts: tuple[str, ...], *, packed: bool
    ) -> None:
        if layout not in layouts:
            raise ContractError(op, "layout", f"one of {list(layouts)}", repr(layout))
        if packed and cu_seqlens is None:
            expected = "cu_seqlens beside packed input (no batch dimension)"
            raise ContractError(op, "cu_seqlens", expected, None)
        if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1):
            got = f"shape {list(cu_seqlens.shape)}"
            raise ContractError(op, "cu_seqlens", "shape [N + 1]", got)
        self.op, self.cu_seqlens, self.packed = op, cu_seqlens, packed
        self.swapped = layout != layouts[0]
        self.plain = not packed and not self.swapped

    def __call__(self, x: Any, name: str, *dims: int, layout: str | None = None) -> Any:
        """The canonical view of ``x``, which then has one of the numbers of dimensions ``dims``.

        ``layout`` is given where x does not have the call's. None stays None.
        """
        if x is None:
            return None
        if x.dim() + self.packed not in dims:
            numbers = " or ".join(str(n - self.packed) for n in dims)
            expected = f"{numbers} dimensions{' (packed)' if self.packed else ''}"
            raise ContractError(self.op, name, expected, f"shape {list(x.shape)}")
        if self.plain:
            return x
        if self.packed:
            x = x.unsqueeze(0)
        return x.transpose(1, 2) if self.swapped and layout is None else x

    def restore(self, y: Any) -> Any:
        """A canonical output in the caller's layout."""
        if self.plain:
            return y
        y = y.transpose(1, 2) if self.swapped else y
        return y.squeeze(0) if self.packed else y

    def sequences(self, x: Any) -> int:
        """N."""
        size: int = x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return size


def conv_taps(op: str, weight: Any, name: str = "weight") -> Any:
    """[D, W], also from the [D, 1, W] of ``torch.nn.Conv1d``."""
    if weight.dim() == 3 and weight.shape[1] == 1:
        return weight.squeeze(1)
    if weight.dim() != 2:
        raise ContractError(op, name, "shape [D, W] or [D, 1, W]", f"shape {list(weight.shape)}")
    return weight


def backward_of(op: str, spec: type[Spec], inputs: tuple[str, ...]) -> Operator:
    """The backward of an operator, which makes the gradients of ``inputs``."""
    made = tuple(f"d{name}" for name in inputs)
    canonical = functools.partial(_gradients, inputs)
    return Operator(f"{op}_backward", spec, canonical, lambda spec: None, None, made)


def _gradients(inputs: tuple[str, ...], t: Any, options: tuple[Any, ...], form: None) -> Canonical:
    """Gradients, each dense and with the shape and dtype of its input."""
    given = {name: getattr(t, name) for name in inputs}
    found = {f"d{name}": x.new_empty(*x.shape) for name, x in given.items() if x is not None}
    return Canonical(t._replace(**found))
