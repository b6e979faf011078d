"""The operators that serve a batch of one layer, straight on vLLM's pages.

``ops`` is ``sluice.ops``, or what records its calls (``warm``): kernels are compiled for exactly
the calls made here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice.integrations.vllm import drafts
from sluice.integrations.vllm.batch import PAD, Batch, Rows
from sluice.layers.qwen import QwenShape
from sluice.layers.weights import split_interleaved
from sluice.ops import Checkpoints


class Layer(NamedTuple):
    """One layer's weights and pages.

    conv_state [P, D, L]: with drafts configured L is W - 1 plus their number, and sequences without
    drafts use the first W - 1 columns. state [P, HV, V, K].
    """

    shape: QwenShape
    conv_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    conv_state: Tensor
    state: Tensor
    batch_invariant: bool

    @property
    def window(self) -> Tensor:
        """The columns of the conv state that sequences without drafts use."""
        columns = self.shape.conv_width - 1
        whole = self.conv_state.shape[2] == columns
        return self.conv_state if whole else self.conv_state[:, :, :columns]

    def heads(self) -> dict[str, Any]:
        """What ``conv_qkv`` has to know of the layer."""
        s = self.shape
        return {
            "num_k_heads": s.num_k_heads,
            "num_v_heads": s.num_v_heads,
            "head_k_dim": s.head_k_dim,
            "head_v_dim": s.head_v_dim,
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
        }


def run(ops: Any, layer: Layer, batch: Batch, qkvz: Tensor, ba: Any, out: Tensor) -> str:
    """From the projections to what the output projection takes: out [tokens, HV, V].

    ``ba`` is a tensor, or the pair (b, a). Returns the kind of the batch in a word.

    A decode step alone is one kernel. It rounds less in between than the kernels of a decode step
    beside prompts, so in batch-invariant mode those serve it.
    """
    n = batch.length
    decode = batch.drafts is None and batch.rows is not None and batch.rows.cu_seqlens is None
    if decode and not layer.batch_invariant:
        _step(ops, layer, batch.rows, qkvz[:n], _first(ba, n), out[:n])
        return "decode"
    qkv, z, b, a = split(layer.shape, qkvz[:n], _first(ba, n))
    o = torch.empty_like(out[:n])
    kind = []
    if batch.rows is not None:
        at = batch.rows.tokens
        if at is None:
            rows(ops, layer, batch.rows, qkv, b, a, o)
        else:
            part = torch.empty_like(o[: at.shape[0]])
            rows(ops, layer, batch.rows, qkv[at], b[at], a[at], part)
            o[at] = part
        kind.append("prefill" if batch.rows.checkpoints is None else "prefill with checkpoints")
    if batch.drafts is not None:
        at = batch.drafts.tokens
        if at is None:
            drafts.run(ops, layer, batch.drafts, qkv, b, a, o)
        else:
            part = torch.empty_like(o[: at.shape[0]])
            drafts.run(ops, layer, batch.drafts, qkv[at], b[at], a[at], part)
            o[at] = part
        kind.append("drafts")
    norm(ops, layer, o, z, out[:n])
    return "decode" if decode else " and ".join(kind)


def norm(ops: Any, layer: Layer, o: Tensor, z: Tensor, out: Tensor) -> None:
    """The gated norm."""
    s = layer.shape
    heads = (s.num_k_heads, s.r)
    ops.rms_norm_gated(
        o.unflatten(1, heads),
        z,
        layer.norm_weight,
        eps=s.norm_eps,
        activation=s.gate_activation,
        out=out.unflatten(1, heads),
    )


def split(shape: QwenShape, qkvz: Tensor, ba: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv [T, D] as [Q | K | V], z [T, HK, r, V], b and a [T, HV]."""
    s = shape
    if s.order == "interleaved":
        parts, z, b, a = split_interleaved(s, qkvz, ba)
        return torch.cat([y.flatten(1) for y in parts], dim=1), z, b.flatten(1), a.flatten(1)
    qkv, z = qkvz.split([s.conv_channels, s.value_dim], dim=-1)
    b, a = ba if isinstance(ba, tuple) else ba.chunk(2, dim=-1)
    return qkv, z.unflatten(-1, (s.num_k_heads, s.r, s.head_v_dim)), b, a


def rows(ops: Any, layer: Layer, r: Rows, qkv: Tensor, b: Tensor, a: Tensor, o: Tensor) -> None:
    """Prompts, and sequences with one token beside them; or these alone."""
    n = r.decodes
    where: dict[str, Any] = {"slots": r.slots, "has_state": r.has_state, "pad_slot": PAD}
    alone = r.cu_seqlens is None
    if alone:  # [N, 1, ..]
        qkv, b, a = (x.unsqueeze(1) for x in (qkv, b, a))
    tokens = ops.conv_qkv(
        qkv,
        layer.conv_weight,
        a=a,
        b=b,
        state=layer.window,
        cu_seqlens=r.cu_seqlens,
        checkpoints=r.checkpoints,
        **layer.heads(),
        **where,
    )
    if n > 0:
        one = tokens if alone else (x[:n].unsqueeze(1) for x in tokens)
        ops.decode(*one, state=layer.state, slots=r.slots[:n], pad_slot=PAD, out=o[:n].unsqueeze(1))
    if n < r.slots.shape[0]:
        ops.prefill(
            *(x[n:] for x in tokens),
            state=layer.state,
            slots=r.slots[n:],
            has_state=None if r.has_state is None else r.has_state[n:],
            pad_slot=PAD,
            cu_seqlens=r.prompt_borders,
            checkpoints=_tail(r.checkpoints, n),
            batch_invariant=layer.batch_invariant,
            out=o[n:],
        )


def _step(ops: Any, layer: Layer, r: Rows, qkvz: Tensor, ba: Any, out: Tensor) -> None:
    """One token for each sequence: everything between the projections in one kernel."""
    s = layer.shape
    ops.step(
        qkvz,
        ba,
        conv_weight=layer.conv_weight,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        norm_weight=layer.norm_weight,
        conv_state=layer.window,
        state=layer.state,
        slots=r.slots,
        pad_slot=PAD,
        order=s.order,
        gate_activation=s.gate_activation,
        eps=s.norm_eps,
        out=out.flatten(1),
    )


def _first(ba: Any, n: int) -> Any:
    return (ba[0][:n], ba[1][:n]) if isinstance(ba, tuple) else ba[:n]


def _tail(c: Checkpoints | None, n: int) -> Checkpoints | None:
    if c is None or c.positions is None:
        return c
    return Checkpoints(c.slots[n:], positions=c.positions[n:])
