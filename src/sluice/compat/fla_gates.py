"""The gates of flash-linear-attention's functions: which are raw, and where they are activated.

The operators activate both gates or none. Where upstream activates only one, or bounds the decay,
this module does so, in float32.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sluice import gradients
from sluice.compat import common
from sluice.compat.common import need


def gate_options(op: str, options: dict[str, Any]) -> tuple[Tensor, Tensor | None] | None:
    """(A_log, dt_bias) if the gate is raw; both are removed from the options."""
    on = options.pop("use_gate_in_kernel", False)
    A_log, dt_bias = options.pop("A_log", None), options.pop("dt_bias", None)
    if on:
        need(A_log is not None, op, "A_log", "a tensor beside use_gate_in_kernel", None)
        return A_log, dt_bias
    expected = "None without use_gate_in_kernel"
    common.refuse(op, "A_log", A_log, expected)
    common.refuse(op, "dt_bias", dt_bias, expected)
    return None


def gates(
    op: str,
    g: Tensor | None,
    beta: Tensor,
    gate: tuple[Tensor, Tensor | None] | None,
    logits: bool,
    neg_eigval: bool,
) -> tuple[Tensor | None, Tensor, dict[str, Any]]:
    """g and beta, and the arguments to activate both; a single raw gate is activated here."""
    need(logits or not neg_eigval, op, "allow_neg_eigval", "use_beta_sigmoid_in_kernel", neg_eigval)
    if gate is not None and logits:
        return g, beta, {"A_log": gate[0], "dt_bias": gate[1], "neg_eigval": neg_eigval}
    if gate is not None and g is not None:
        g = gradients.log_decay(g, *gate)
    return g, gradients.strength(beta, neg_eigval) if logits else beta, {}


def kda_gate(
    op: str, on: bool, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> tuple[Tensor | None, Tensor | None, float | None] | None:
    """(A_log, dt_bias, lower_bound) if the gate is raw."""
    if not on:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound)):
            common.refuse(op, name, value, "None without use_gate_in_kernel")
        return None
    ok = A_log is not None or lower_bound is not None
    need(ok, op, "A_log", "a tensor beside use_gate_in_kernel without lower_bound", None)
    return A_log, dt_bias, lower_bound


def kda_gates(
    op: str,
    g: Tensor,
    beta: Tensor,
    gate: tuple[Tensor | None, Tensor | None, float | None] | None,
    logits: bool,
    neg_eigval: bool,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """As ``gates``; a bounded gate is always activated here."""
    if gate is not None:
        A_log, dt_bias, bound = gate
        dt_bias = None if dt_bias is None else dt_bias.reshape(g.shape[2], g.shape[3])
        A_log = None if A_log is None else A_log.reshape(g.shape[2])  # upstream reads it flat
        if bound is None:
            assert A_log is not None
            return gates(op, g, beta, (A_log, dt_bias), logits, neg_eigval)  # type: ignore[return-value]
        g = g.to(common.wide(g))
        g = g if dt_bias is None else g + dt_bias.to(g.dtype)
        g = g if A_log is None else A_log.to(g.dtype).exp().unsqueeze(-1) * g
        g = bound * g.sigmoid()
    return gates(op, g, beta, None, logits, neg_eigval)  # type: ignore[return-value]


def bounded(op: str, g: Tensor, bound: float) -> None:
    """Check, on a CPU, the caller's promise that activated gates keep the bound."""
    if g.device.type == "cpu" and g.numel():
        least = float(g.detach().min())
        need(least >= bound * 1.01, op, "g", f"gates of at least lower_bound={bound}", least)
