"""The operators that serve a layer of SGLang, straight on its pools."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice.integrations.engine_calls import Recorder, like
from sluice.model_calls import ModelCall
from sluice.ops import Checkpoints
from sluice.warmup import LONG_PROMPT, PROMPT, SHORT_PROMPTS, STATES


class Layer(NamedTuple):
    """One layer's weights and pools: conv_state [P, D, W - 1], state [P, HV, V, K]."""

    heads: tuple[int, int, int, int]  # HK, HV, K, V
    conv_weight: Tensor
    bias: Tensor | None
    activation: str | None
    A_log: Tensor
    dt_bias: Tensor
    conv_state: Tensor
    state: Tensor
    pad_slot: int

    def conv(self) -> dict[str, Any]:
        """What ``conv_qkv`` has to know of the layer."""
        HK, HV, K, V = self.heads
        return {
            "num_k_heads": HK,
            "num_v_heads": HV,
            "head_k_dim": K,
            "head_v_dim": V,
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "activation": self.activation,
            "state": self.conv_state,
            "pad_slot": self.pad_slot,
        }


def decode(ops: Any, layer: Layer, x: Tensor, b: Tensor, a: Tensor, slots: Tensor) -> Tensor:
    """One token for each row: x [N, D], b and a [N, HV]. Returns [N, 1, HV, V]."""
    _, HV, _, V = layer.heads
    out = x.new_empty(x.shape[0], 1, HV, V)
    tokens = ops.conv_qkv(
        x.unsqueeze(1),
        layer.conv_weight,
        layer.bias,
        a=a.unsqueeze(1),
        b=b.unsqueeze(1),
        slots=slots,
        **layer.conv(),
    )
    ops.decode(*tokens, state=layer.state, slots=slots, pad_slot=layer.pad_slot, out=out)
    return out


class Prompts(NamedTuple):
    """N packed sequences: slots [N], cu_seqlens [N + 1], has_state [N] (False begins anew)."""

    slots: Tensor
    cu_seqlens: Tensor
    has_state: Tensor
    checkpoints: Checkpoints | None = None
    batch_invariant: bool = False


def extend(
    ops: Any, layer: Layer, x: Tensor, b: Tensor, a: Tensor, p: Prompts, out: Tensor | None = None
) -> Tensor:
    """Prompts, or parts of them: x [T, D], b and a [T, HV]. Returns [T, HV, V]."""
    _, HV, _, V = layer.heads
    out = x.new_empty(x.shape[0], HV, V) if out is None else out
    where = {
        "slots": p.slots,
        "has_state": p.has_state,
        "cu_seqlens": p.cu_seqlens,
        "checkpoints": p.checkpoints,
    }
    tokens = ops.conv_qkv(x, layer.conv_weight, layer.bias, a=a, b=b, **where, **layer.conv())
    ops.prefill(
        *tokens,
        state=layer.state,
        pad_slot=layer.pad_slot,
        batch_invariant=p.batch_invariant,
        out=out,
        **where,
    )
    return out


def checkpoints(mask: Tensor, slots: Tensor, lengths: Tensor, pad_slot: int) -> Checkpoints:
    """Where the prefix cache keeps a state: rows of ``mask``, after ``lengths`` tokens [N].

    Of rows that are not in the mask, slots and lengths hold anything. SGLang's are int64, or int32
    where pools are unified: kernels get, and are compiled for, int32.
    """
    kept = torch.where(mask, slots, pad_slot), torch.where(mask, lengths, 0)
    slots, lengths = (x.to(torch.int32).unsqueeze(1) for x in kept)
    return Checkpoints(slots, positions=lengths)


def plan(
    layer: Layer, dtype: torch.dtype, slots: torch.dtype, batch_invariant: bool, cuda: bool
) -> list[ModelCall]:
    """Every call of this layer that compiles a kernel of its own."""
    ops, meta = Recorder("sglang"), without_memory(layer)
    _, HV, _, _ = layer.heads
    D = layer.conv_weight.shape[0]

    def rows(*size: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*size, dtype=kind, device="meta")

    for N in numbers_of_rows(layer):
        decode(ops, meta, rows(N, D), rows(N, HV), rows(N, HV), rows(N, kind=slots))
    for T in (*SHORT_PROMPTS, PROMPT, *((LONG_PROMPT,) if cuda else ())):
        for kept in (False, True):
            two = rows(2, 1, kind=torch.int32)
            some = Checkpoints(two, positions=two)
            p = Prompts(
                rows(2, kind=slots),
                rows(3, kind=torch.int32),
                rows(2, kind=torch.bool),
                some if kept else None,
                batch_invariant,
            )
            n = 2 * T
            extend(ops, meta, rows(n, D), rows(n, HV), rows(n, HV), p)
    return ops.calls


def without_memory(layer: Layer) -> Layer:
    """The same layer on the "meta" device."""
    return layer._replace(
        **{name: like(x) for name, x in layer._asdict().items() if isinstance(x, Tensor)}
    )


def numbers_of_rows(layer: Layer) -> list[int]:
    """Batches of a token or a few each for which kernels are configured differently."""
    return sorted({max(1, states // layer.heads[1]) for states in STATES})
