"""Speculative decoding as vLLM keeps it: one state for each draft token.

The recurrent state after token t goes to slot t of the sequence. The conv window lies in slot 0, at
a column that depends on how many tokens were accepted: it is read there, and afterwards the page
holds ``[window without its oldest column | this step's inputs]`` from its first column on. Both are
forms of the operators (docs/contract.md, ``write_slots`` [N, M] and ``window_start``).

No value is read on the host, so a graph can be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sluice.integrations.vllm.batch import PAD, Drafts

if TYPE_CHECKING:
    from sluice.integrations.vllm.serve import Layer


def run(ops: Any, layer: Layer, d: Drafts, qkv: Tensor, b: Tensor, a: Tensor, o: Tensor) -> None:
    """Outputs o [tokens, HV, V] of packed tokens; both states follow every draft token."""
    first = d.slots[:, 0]
    kept = (d.accepted.long() - 1).clamp(0, d.slots.shape[1] - 1)
    where: dict[str, Any] = {"cu_seqlens": d.cu_seqlens, "pad_slot": PAD}
    tokens = ops.conv_qkv(
        qkv,
        layer.conv_weight,
        a=a,
        b=b,
        state=layer.conv_state,
        slots=first,
        window_start=kept,
        **where,
        **layer.heads(),
    )
    read = d.slots.gather(1, kept[:, None]).squeeze(1)
    ops.decode(
        *tokens,
        state=layer.state,
        slots=torch.where(first > PAD, read, PAD),
        write_slots=d.slots,
        out=o,
        **where,
    )
