"""A whole gated delta layer over sequences that lie on several ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sluice import ops
from sluice.contract.errors import ContractError
from sluice.contract.names import StateLayout
from sluice.distributed.conv import conv_qkv
from sluice.distributed.deliver import Deliver
from sluice.distributed.prefill import prefill
from sluice.distributed.ranks import Ranks
from sluice.distributed.rows import Slots
from sluice.distributed.scan import Exchanging
from sluice.distributed.split import Split
from sluice.layers.gated_delta_net import GatedDeltaNet, _project


def forward(
    layer: GatedDeltaNet,
    hidden_states: Tensor,
    *,
    ranks: Ranks,
    split: Split,
    conv_state: Tensor | None = None,
    state: Tensor | None = None,
    slots: Slots | None = None,
    write_slots: Slots | None = None,
    has_state: Sequence[bool] | Tensor | None = None,
    pad_slot: int = -1,
    state_layout: StateLayout = "vk",
    deliver: Deliver = "end",
    exchange: Exchanging = "auto",
    batch_invariant: bool = False,
) -> Tensor:
    """``layer(hidden_states)`` for this rank's tokens of sequences that lie on several ranks.

    It makes two exchanges: conv tails, and transitions. Every rank holds the whole layer, or its
    own heads (:func:`sluice.distributed.parallelize` over another dimension of the mesh).

    Args:
        hidden_states: [B, T, hidden], this rank's tokens; packed [T, hidden] or [1, T, hidden].
        conv_state: [P, D, L]. state: [P, HV, V, K]. Both or neither, as in the layer's forward;
            without them, sequences start from zero and no state is kept.
        ranks: this and all other options as in :func:`sluice.distributed.prefill`.

    Returns:
        the layer's output for this rank's tokens.
    """
    s = layer.shape
    if (conv_state is None) != (state is None):
        name = "conv_state" if conv_state is None else "state"
        raise ContractError("distributed.forward", name, "a tensor, since the other state is", None)
    qkv, z, b, a = _project(layer, s, hidden_states)
    where = {
        "ranks": ranks,
        "split": split,
        "slots": slots,
        "write_slots": write_slots,
        "has_state": has_state,
        "pad_slot": pad_slot,
        "deliver": deliver if state is not None else "end",
    }
    q, k, v, g, beta = conv_qkv(
        qkv,
        layer.conv1d.weight,
        layer.conv1d.bias,
        num_k_heads=s.num_k_heads,
        num_v_heads=s.num_v_heads,
        head_k_dim=s.head_k_dim,
        head_v_dim=s.head_v_dim,
        a=a,
        b=b,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        state=conv_state,
        **where,
    )
    o, _ = prefill(
        q,
        k,
        v,
        g,
        beta,
        state=state,
        state_layout=state_layout,
        exchange=exchange,
        batch_invariant=batch_invariant,
        **where,  # type: ignore[arg-type]
    )
    o = o.unflatten(-2, (s.num_k_heads, s.r))
    weight: Tensor = layer.norm.weight  # type: ignore[assignment]
    y = ops.rms_norm_gated(o, z, weight, eps=s.norm_eps, activation=s.gate_activation)
    out: Tensor = layer.out_proj(y.flatten(-3))
    return out
