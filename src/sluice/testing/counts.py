"""The least cost of a workload: bytes moved, and operations of the recurrence.

Bytes count every tensor of the call once, even if an implementation reads it twice, so bytes over
time cannot exceed the memory bandwidth. Index tensors are left out. Operations are those of the
token recurrence, and a multiply-add counts as two; the extra work of a chunked form does not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sluice.testing.case import Case

NORM_FLOPS = 6  # per element: square, sum, two scalings, the gate and its product


def live_tokens(case: Case) -> int:
    """Tokens of the rows that are not padding."""
    return sum(n for i, n in enumerate(case.sequence_lengths) if i not in case.padded)


def pool_rows(case: Case) -> int:
    """Pool rows read, plus pool rows written, checkpoints included."""
    if case.state == "none":
        return 0
    live = [i for i in range(case.N) if i not in case.padded]
    read = sum(i not in case.new for i in live)
    if case.freeze:
        return read
    written = sum(i not in case.unkept for i in live)
    if case.positions is not None:
        written += sum(p >= 0 for i in live for p in case.positions[i])
    elif case.every:
        written += sum(case.sequence_lengths[i] // case.every for i in live)
    return read + written


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest bytes that the call reads and writes, for inputs of ``dtype``."""
    c, size = case, dtype.itemsize
    wide = max(size, 4)
    live, (B, T) = live_tokens(c), c.grid
    value, key = c.Hv * c.V, c.Hk * c.K
    gates = c.has_g * c.Hv * (c.K if c.per_key else 1) + c.has_beta * c.Hv
    rows = pool_rows(c)
    state = rows * c.Hv * c.K * c.V * (size if size == 8 else c.state_dtype.itemsize)
    window = rows * c.channels * c.window * size
    weights = c.channels * (c.W + c.bias) * size

    if c.op == "rms_norm_gated":
        return (3 * B * T * value + c.V) * size
    if c.op == "causal_conv1d":
        return (live + B * T) * c.channels * size + weights + window
    if c.op == "conv_qkv":
        moved = live * (c.channels + gates) * size + B * T * (c.channels * size + gates * wide)
        return moved + weights + window
    if c.op == "step":
        projections = live * (c.channels + value + 2 * c.Hv) * size
        parameters = weights + 2 * c.Hv * wide + c.V * size
        return projections + B * T * value * size + parameters + window + state
    tokens = live * (c.query_heads * c.K + key + value) * size
    outputs = B * T * max(c.query_heads, c.Hv) * c.V * size
    moved = tokens + live * gates * (size if c.raw else wide) + outputs + state
    return moved + (live * c.channels * size + window if c.with_conv else 0)


def flops(case: Case) -> int:
    """Operations of the operator's parts: recurrence, convolution, norm."""
    c, live = case, live_tokens(case)
    convolution = 2 * c.W * c.channels * live
    norm = NORM_FLOPS * c.Hv * c.V * live
    square = c.K * c.V
    update = c.Hv * square * (c.has_g + 2 * c.has_beta + 2)  # decay, Sᵀk, k dᵀ
    recurrence = live * (update + 2 * square * max(c.query_heads, c.Hv))
    if c.op == "rms_norm_gated":
        return norm
    if c.op in ("causal_conv1d", "conv_qkv"):
        return convolution
    return convolution + recurrence + norm if c.op == "step" else recurrence
