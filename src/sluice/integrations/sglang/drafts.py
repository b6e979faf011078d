"""Draft tokens (SGLang's target verify): no state is written until it is known how many count.

SGLang's own kernels write the state after each draft token to a buffer, and its commit copies one
of them into the pool. ``decode`` can write such states too, but only into the pool it reads: each
state would have to be copied to the buffer first. So ``verify`` keeps what the state can be made
from, and ``commit_layers`` takes the place of SGLang's copies: each state is read or written three
times a step, in place of T + 3 times.

The drafts lie in the memory of that buffer, so nothing is allocated. They are addressed by slot, so
rows may be committed in another order, or after another batch was verified, and they are committed
twice where the prefix cache wants a state from among the accepted tokens. No value is read on the
host: a graph of the forward pass can be captured.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice.integrations.engine_calls import Recorder, like
from sluice.integrations.sglang.serve import Layer, numbers_of_rows, without_memory
from sluice.model_calls import ModelCall
from sluice.ops import DraftBuffers

MOST = 8
"""Tokens of a row that ``verify`` takes: one that is certain and seven drafts."""
_ALIGNED = 256


class Drafts(NamedTuple):
    """Drafts of all layers, and the pools they are for: state [layers, P, HV, V, K], conv_state
    [layers, P, D, W - 1]."""

    buffers: DraftBuffers
    state: Tensor
    conv_state: Tensor
    pad_slot: int


def buffers_within(space: Tensor, layer: Layer, dtype: torch.dtype) -> DraftBuffers | None:
    """Buffers for drafts in the memory of ``space`` [layers, rows, T, HV, V, K]; None: too small.

    There is a row for each slot of the layer's pools. ``dtype`` is that of the raw inputs.
    """
    HK, HV, K, V = layer.heads
    lead = (space.shape[0], layer.state.shape[0], space.shape[2])
    kinds = [((HK, K), torch.float32), ((HV, V), torch.float32), ((HV,), torch.float32)]
    free = space.view(-1).view(torch.uint8)
    made = []
    for tail, kind in (*kinds, ((layer.conv_weight.shape[0],), dtype)):
        shape = (*lead, *tail)
        size = math.prod(shape) * kind.itemsize
        taken = -(-size // _ALIGNED) * _ALIGNED
        if taken > free.shape[0]:
            return None
        made.append(free[:size].view(kind).view(shape))
        free = free[taken:]
    return DraftBuffers(*made)


def verify(
    ops: Any,
    layer: Layer,
    buffers: DraftBuffers,
    x: Tensor,
    b: Tensor,
    a: Tensor,
    slots: Tensor,
) -> Tensor:
    """Draft tokens of N rows: x [N, T, D], b and a [N, T, HV]. Returns [N, T, HV, V].

    ``buffers`` are this layer's. The pools stay as they are.
    """
    _, HV, _, V = layer.heads
    out = x.new_empty(*x.shape[:2], HV, V)
    tokens = ops.conv_qkv(
        x, layer.conv_weight, layer.bias, a=a, b=b, slots=slots, freeze=True, **layer.conv()
    )
    ops.verify(
        *tokens,
        state=layer.state,
        slots=slots,
        pad_slot=layer.pad_slot,
        conv_inputs=x,
        conv_state=layer.conv_state,
        buffers=buffers,
        out=out,
    )
    return out


def commit(
    ops: Any,
    drafts: Drafts,
    slots: Tensor,
    steps: Tensor,
    kept_slots: Tensor | None = None,
    kept_steps: Tensor | None = None,
) -> None:
    """Fold tokens 0 to ``steps`` [N] of the drafts of ``slots`` [N] into the pools.

    A negative step leaves its row out. First the same goes for states that the prefix cache keeps:
    those after tokens 0 to ``kept_steps``, in ``kept_slots``.
    """
    if kept_slots is not None and kept_steps is not None:
        _fold(ops, drafts, slots, kept_steps, kept_slots)
    _fold(ops, drafts, slots, steps, slots)


def _fold(ops: Any, drafts: Drafts, slots: Tensor, steps: Tensor, to: Tensor) -> None:
    chosen = (steps >= 0) & (steps < drafts.buffers.k.shape[2])
    ops.commit_layers(
        drafts.buffers,
        torch.where(chosen, steps + 1, 0),
        state=drafts.state,
        conv_state=drafts.conv_state,
        slots=slots,
        write_slots=torch.where(chosen, to, -1),
        pad_slot=drafts.pad_slot,
    )


def plan(
    layer: Layer, drafts: Drafts, dtype: torch.dtype, slots_dtype: torch.dtype
) -> list[ModelCall]:
    """Every call for draft tokens that compiles a kernel of its own."""
    ops, meta = Recorder("sglang"), without_memory(layer)
    buffers = DraftBuffers(*(like(x) for x in drafts.buffers if x is not None))
    pools = {"state": like(drafts.state), "conv_state": like(drafts.conv_state)}
    T, HV, D = buffers.k.shape[2], layer.heads[1], layer.conv_weight.shape[0]

    def rows(*size: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*size, dtype=kind, device="meta")

    for N in numbers_of_rows(layer):
        slots, steps = rows(N, kind=slots_dtype), rows(N, kind=torch.int64)
        x, b, a = rows(N, T, D), rows(N, T, HV), rows(N, T, HV)
        verify(ops, meta, buffers.layer(0), x, b, a, slots)
        commit(ops, drafts._replace(buffers=buffers, **pools), slots, steps, steps, steps)
    return ops.calls
