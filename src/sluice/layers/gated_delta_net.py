"""GatedDeltaNet: the layer as an ``nn.Module``, with transformers' parameter names.

``mix`` is the layer's computation, for any module with these parameters: this class and
transformers' own layers alike. The operators group heads, so q and k are never repeated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sluice import ops, torch_private
from sluice.contract import arguments
from sluice.contract.errors import ContractError
from sluice.contract.names import StateLayout
from sluice.contract.spec import MAX_DECODE_TOKENS
from sluice.layers.qwen import QwenShape, from_config, preset
from sluice.layers.rows import Rows, check_mask, pack, without_masked
from sluice.layers.weights import shape_of, split_interleaved
from sluice.settings import validating


class GatedNorm(nn.Module):
    """The weight of the gated RMSNorm; ``rms_norm_gated`` or ``step`` apply it."""

    def __init__(self, width: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, **factory))


class GatedDeltaNet(nn.Module):
    """A gated delta layer of Qwen3-Next (order "interleaved") or Qwen3.5 and later ("split").

    Projections, causal convolution, gated delta rule, gated norm, output projection. Parameter
    names and shapes are those of transformers, so its state dicts load unchanged.

    Args:
        shape: dimensions and order, whole or as one rank holds them (``layers.qwen``).
        device: of the parameters; torch's default device by default. dtype: likewise.

    >>> import torch, sluice
    >>> from sluice.layers import GatedDeltaNet, QwenShape
    >>> shape = QwenShape("small", 32, 2, 4, 1, (0,), head_k_dim=8, head_v_dim=8)
    >>> layer = GatedDeltaNet(shape).requires_grad_(False)
    >>> x = torch.randn(2, 10, 32)
    >>> conv_state, state = layer.zero_states(2)
    >>> y = layer(x[:, :9], conv_state=conv_state, state=state)
    >>> last = layer(x[:, 9:], conv_state=conv_state, state=state)  # one token, in place
    >>> torch.allclose(torch.cat([y, last], 1), layer(x), atol=1e-6)
    True
    """

    in_proj_qkvz: nn.Linear
    in_proj_ba: nn.Linear
    in_proj_qkv: nn.Linear
    in_proj_z: nn.Linear
    in_proj_b: nn.Linear
    in_proj_a: nn.Linear

    def __init__(
        self,
        shape: QwenShape,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        expected = "a QwenShape (from_preset takes a name)"
        arguments.instance("GatedDeltaNet", "shape", shape, QwenShape, expected)
        if dtype is not None:
            arguments.instance("GatedDeltaNet", "dtype", dtype, torch.dtype, "a torch.dtype")
        self.shape = shape
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        D, HV = shape.conv_channels, shape.num_v_heads

        def linear(columns: int, rows: int) -> nn.Linear:
            return nn.Linear(columns, rows, bias=False, **made)

        if shape.order == "interleaved":
            self.in_proj_qkvz = linear(shape.hidden, D + shape.value_dim)
            self.in_proj_ba = linear(shape.hidden, 2 * HV)
        else:
            self.in_proj_qkv = linear(shape.hidden, D)
            self.in_proj_z = linear(shape.hidden, shape.value_dim)
            self.in_proj_b = linear(shape.hidden, HV)
            self.in_proj_a = linear(shape.hidden, HV)
        self.conv1d = nn.Conv1d(D, D, shape.conv_width, groups=D, bias=False, **made)
        self.dt_bias = nn.Parameter(torch.ones(HV, **made))
        # not 0: log(0) is -inf
        self.A_log = nn.Parameter(torch.empty(HV, **made).uniform_(0.01, 16).log_())
        self.norm: nn.Module = GatedNorm(shape.head_v_dim, **made)
        self.out_proj = linear(shape.value_dim, shape.hidden)

    @classmethod
    def from_preset(cls, name: str, *, tp: int = 1, **factory: Any) -> GatedDeltaNet:
        """One of ``tp`` ranks' share of a named model's layer, with random weights.

        ``factory``: ``device`` and ``dtype``. ``layers.shard_weights`` divides a whole layer's
        weights; the sum of the ranks' outputs is the layer's output.

        >>> from sluice.layers import GatedDeltaNet
        >>> layer = GatedDeltaNet.from_preset("qwen3.5-27b", tp=2, device="meta")
        >>> layer.in_proj_qkv.weight.shape
        torch.Size([5120, 5120])
        """
        return cls(preset(name, tp), **factory)

    @classmethod
    def from_config(cls, config: Any, *, tp: int = 1, **factory: Any) -> GatedDeltaNet:
        """A layer of the model that a transformers config describes, with random weights."""
        return cls(from_config(config).shard(tp), **factory)

    @classmethod
    def from_transformers(cls, layer: nn.Module) -> GatedDeltaNet:
        """The same layer with the same parameters, shared and not copied.

        Args:
            layer: ``Qwen3NextGatedDeltaNet``, ``Qwen3_5GatedDeltaNet``,
                ``Qwen3_5MoeGatedDeltaNet`` or ``Qwen4ExpTextGatedDeltaNet``.

        Raises:
            ContractError: an unknown class of layer, or an activation that no operator serves.
        """
        net = cls(shape_of(layer), device="meta")
        for name, child in layer.named_children():
            setattr(net, name, child)
        net.A_log, net.dt_bias = layer.A_log, layer.dt_bias  # type: ignore[assignment]
        return net

    def zero_states(
        self,
        n: int,
        *,
        state_dtype: torch.dtype = torch.float32,
        state_layout: StateLayout = "vk",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``(conv_state, state)`` for ``n`` new sequences.

        ``conv_state`` [n, D, W - 1] in ``dtype``, ``state`` [n, HV, V, K] ("kv": [n, HV, K, V]) in
        ``state_dtype``; ``dtype`` and ``device`` default to those of the weights.
        """
        s, weight = self.shape, self.conv1d.weight
        device = weight.device if device is None else device
        tail = (s.head_v_dim, s.head_k_dim)
        tail = tail if state_layout == "vk" else tail[::-1]
        conv = torch.zeros(
            n, s.conv_channels, s.conv_width - 1, dtype=dtype or weight.dtype, device=device
        )
        return conv, torch.zeros(n, s.num_v_heads, *tail, dtype=state_dtype, device=device)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        conv_state: Tensor | None = None,
        state: Tensor | None = None,
        slots: Tensor | None = None,
        write_slots: Tensor | None = None,
        has_state: Tensor | None = None,
        pad_slot: int = -1,
        state_layout: StateLayout = "vk",
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        attention_mask: Tensor | None = None,
        checkpoints: ops.Checkpoints | None = None,
        batch_invariant: bool = False,
    ) -> Tensor:
        """The layer's output; states are continued and updated in place.

        A call with states and up to 8 tokens per row runs as one ``step``; every other call runs as
        ``conv_qkv``, ``prefill`` and ``rms_norm_gated``. Without states, parameters and hidden
        states have gradients (docs/training.md).

        Args:
            hidden_states: [B, T, hidden]; packed sequences as [T, hidden] or [1, T, hidden] with
                ``cu_seqlens``; [N, hidden] without it is one token of N sequences.
            conv_state: [P, D, L], L >= W - 1; ``state``: [P, HV, V, K] or [P, HV, K, V]. Both, as
                ``StatePool.layer(i)`` and ``zero_states`` give them, or neither: then every
                sequence starts from zero and no state is kept.
            slots: as in :func:`sluice.prefill`, for both states; so are ``write_slots``,
                ``has_state``, ``pad_slot``, ``state_layout``, ``cu_seqlens``, ``cu_seqlens_cpu``,
                ``checkpoints`` (of both states) and ``batch_invariant``.
            attention_mask: [B, T], 0 for padding. The tokens of a row must be contiguous. Padding
                before and after them has no effect: its output is zeros, and it changes no state.
                A row without tokens keeps its state.

        Returns:
            [B, T, hidden] (or the input's shape), in the dtype of the projections.

        Raises:
            ContractError: an argument does not keep the contract.
        """
        rows = Rows(
            conv_state,
            state,
            slots,
            write_slots,
            has_state,
            pad_slot,
            state_layout,
            cu_seqlens,
            cu_seqlens_cpu,
            checkpoints,
            batch_invariant,
        )
        return mix(self, self.shape, hidden_states, rows, attention_mask)

    def verify(
        self,
        hidden_states: Tensor,
        *,
        conv_state: Tensor,
        state: Tensor,
        slots: Tensor | None = None,
        write_slots: Tensor | None = None,
        has_state: Tensor | None = None,
        pad_slot: int = -1,
        state_layout: StateLayout = "vk",
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        buffers: ops.DraftBuffers | None = None,
        draft_slots: Tensor | None = None,
    ) -> tuple[Tensor, ops.Draft]:
        """The layer's output for up to 8 draft tokens per sequence, writing no state.

        Once the model has said how many of them are right, ``sluice.commit(draft, num_accepted)``
        brings both states to where decoding only those tokens would have left them. Rejecting every
        token needs no call. With ``buffers`` of all layers (``StatePool.draft_buffers``) one
        ``sluice.commit_layers`` does it for the whole model.

        Args:
            hidden_states: [N, T, hidden], T up to 8; packed as [T, hidden] with ``cu_seqlens``.
            conv_state: as in :meth:`forward`; so are all other arguments.
            buffers: this layer's buffers for the draft, as in :func:`sluice.verify`; so is
                ``draft_slots``.

        Returns:
            the output, as :meth:`forward` gives it, and the draft of this layer.

        Raises:
            ContractError: an argument does not keep the contract.

        >>> import torch, sluice
        >>> from sluice.layers import GatedDeltaNet, QwenShape
        >>> shape = QwenShape("small", 32, 2, 4, 1, (0,), head_k_dim=8, head_v_dim=8)
        >>> layer = GatedDeltaNet(shape).requires_grad_(False)
        >>> conv_state, state = layer.zero_states(2)
        >>> y, draft = layer.verify(torch.randn(2, 3, 32), conv_state=conv_state, state=state)
        >>> y.shape, bool(state.any())
        (torch.Size([2, 3, 32]), False)
        >>> _ = sluice.commit(draft, torch.tensor([0, 2]))  # none of one row, two of the other
        >>> bool(state[0].any()), bool(state[1].any())
        (False, True)
        """
        rows = Rows(
            conv_state,
            state,
            slots,
            write_slots,
            has_state,
            pad_slot,
            state_layout,
            cu_seqlens,
            cu_seqlens_cpu,
        )
        kept = {"buffers": buffers, "draft_slots": draft_slots}
        return _verify(self, self.shape, hidden_states, rows, kept)

    def extra_repr(self) -> str:
        s = self.shape
        heads = f"heads={s.num_k_heads}/{s.num_v_heads}, K={s.head_k_dim}, V={s.head_v_dim}"
        return f"{s.name!r}, {heads}, W={s.conv_width}, order={s.order!r}"


def mix(
    layer: Any, shape: QwenShape, x: Tensor, rows: Rows, attention_mask: Tensor | None = None
) -> Tensor:
    """The computation of :meth:`GatedDeltaNet.forward` with the parameters of ``layer``."""
    _check(shape, x, rows, attention_mask)
    exporting = torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export()
    if exporting and attention_mask is not None:
        expected = "None in an ONNX graph (its operators have no padding)"
        raise ContractError("GatedDeltaNet", "attention_mask", expected, "a mask")
    single = x.dim() == 2 and rows.cu_seqlens is None
    x = x.unsqueeze(1) if single else x
    T = x.shape[-2]
    if attention_mask is not None and rows.state is None and wants_gradient(layer, x):
        y = trained(layer, shape, x, rows, attention_mask).y
        return y.squeeze(1) if single else y
    if attention_mask is not None:
        if rows.state is None:
            rows = _with_states(shape, x, rows)
        if T == 1:
            rows = without_masked(x.shape[0], rows, attention_mask != 0)
            attention_mask = None
        else:
            rows = pack(attention_mask != 0, rows)
    kept = rows.state is not None and rows.cu_seqlens is None and rows.checkpoints is None
    # an ONNX graph serves any number of tokens, so it must not depend on the number
    if kept and not exporting and T <= MAX_DECODE_TOKENS:
        y = _step(layer, shape, x, rows)
    else:
        y = _prefill(layer, shape, x, rows, attention_mask is not None).y
    return y.squeeze(1) if single else y


class Trained(NamedTuple):
    """A layer's output, and what its states are made of."""

    y: Tensor
    inputs: Tensor  # [B, T, D] or packed: of the convolution
    state: Tensor  # final states of all sequences


def wants_gradient(layer: Any, x: Tensor) -> bool:
    """Whether autograd would follow a call of the layer."""
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or any(p.requires_grad for p in layer.parameters())


def trained(
    layer: Any, shape: QwenShape, x: Tensor, rows: Rows, attention_mask: Tensor | None = None
) -> Trained:
    """The layer with gradients: sequences start from zero, and nothing is written in place.

    ``rows`` has ``cu_seqlens`` at most. With a mask, each stretch of padding is a sequence of its
    own, and its output is zeros: there are 3 B final states, of which those of [1::3] are the
    rows'.
    """
    if attention_mask is None:
        return _prefill(layer, shape, x, rows, False)
    live = attention_mask != 0
    borders = pack(live, rows).cu_seqlens
    made = _prefill(layer, shape, x, rows._replace(cu_seqlens=borders), True)
    return made._replace(y=torch.where(live.unsqueeze(-1), made.y, 0))


def _step(layer: Any, shape: QwenShape, x: Tensor, rows: Rows) -> Tensor:
    """At most 8 tokens per row, with states."""
    part = getattr if torch.compiler.is_compiling() else torch_private.part
    qkvz: Any
    ba: Any
    if shape.order == "interleaved":
        qkvz, ba = part(layer, "in_proj_qkvz")(x), part(layer, "in_proj_ba")(x)
    else:
        qkvz = (part(layer, "in_proj_qkv")(x), part(layer, "in_proj_z")(x))
        ba = (part(layer, "in_proj_b")(x), part(layer, "in_proj_a")(x))
    conv1d = part(layer, "conv1d")
    assert rows.conv_state is not None
    assert rows.state is not None
    y = ops.step(
        qkvz,
        ba,
        conv_weight=part(conv1d, "weight"),
        conv_bias=part(conv1d, "bias"),
        A_log=part(layer, "A_log"),
        dt_bias=part(layer, "dt_bias"),
        norm_weight=part(part(layer, "norm"), "weight"),
        conv_state=rows.conv_state,
        state=rows.state,
        slots=rows.slots,
        write_slots=rows.write_slots,
        has_state=rows.has_state,
        pad_slot=rows.pad_slot,
        state_layout=rows.state_layout,
        order=shape.order,
        gate_activation=shape.gate_activation,
        eps=shape.norm_eps,
    )
    out: Tensor = part(layer, "out_proj")(y)
    return out


def _prefill(layer: Any, shape: QwenShape, x: Tensor, rows: Rows, masked: bool) -> Trained:
    """Any number of tokens; ``pack`` has made a masked batch into one packed row."""
    s, (B, T) = shape, (x.shape[0], x.shape[-2])
    qkv, z, b, a = _project(layer, s, x)
    if masked:
        qkv, z, b, a = (y.flatten(0, 1) for y in (qkv, z, b, a))
    where = {
        **rows.addressing(),
        "cu_seqlens": rows.cu_seqlens,
        "cu_seqlens_cpu": rows.cu_seqlens_cpu,
        "checkpoints": rows.checkpoints,
    }
    q, k, v, g, beta = ops.conv_qkv(
        qkv,
        layer.conv1d.weight,
        layer.conv1d.bias,
        **_heads(s),
        a=a,
        b=b,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        state=rows.conv_state,
        **where,
    )
    o, state = ops.prefill(
        q,
        k,
        v,
        g,
        beta,
        state=rows.state,
        state_layout=rows.state_layout,
        batch_invariant=rows.batch_invariant,
        **where,
    )
    o = o.unflatten(-2, (s.num_k_heads, s.r))
    o = ops.rms_norm_gated(
        o, z, layer.norm.weight, eps=s.norm_eps, activation=s.gate_activation
    ).flatten(-3)
    out: Tensor = layer.out_proj(o.unflatten(0, (B, T)) if masked else o)
    return Trained(out, qkv, state)


def _verify(
    layer: Any, shape: QwenShape, x: Tensor, rows: Rows, kept: dict[str, Any]
) -> tuple[Tensor, ops.Draft]:
    """Draft tokens: the conv window and the state are read, and stay as they are."""
    _check(shape, x, rows, None)
    if rows.conv_state is None or rows.state is None:
        raise _refusal("state", "a tensor: drafts continue from states", None)
    single = x.dim() == 2 and rows.cu_seqlens is None
    s, x = shape, x.unsqueeze(1) if single else x
    qkv, z, b, a = _project(layer, s, x)
    where = {
        **rows.addressing(),
        "cu_seqlens": rows.cu_seqlens,
        "cu_seqlens_cpu": rows.cu_seqlens_cpu,
    }
    reads = {name: value for name, value in where.items() if name != "write_slots"}
    q, k, v, g, beta = ops.conv_qkv(
        qkv,
        layer.conv1d.weight,
        layer.conv1d.bias,
        **_heads(s),
        a=a,
        b=b,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        state=rows.conv_state,
        freeze=True,
        **reads,
    )
    o, draft = ops.verify(
        q,
        k,
        v,
        g,
        beta,
        state=rows.state,
        state_layout=rows.state_layout,
        conv_inputs=qkv,
        conv_state=rows.conv_state,
        **where,
        **kept,
    )
    o = o.unflatten(-2, (s.num_k_heads, s.r))
    o = ops.rms_norm_gated(o, z, layer.norm.weight, eps=s.norm_eps, activation=s.gate_activation)
    y: Tensor = layer.out_proj(o.flatten(-3))
    return (y.squeeze(1) if single else y), draft


def _heads(s: QwenShape) -> dict[str, Any]:
    return {
        "num_k_heads": s.num_k_heads,
        "num_v_heads": s.num_v_heads,
        "head_k_dim": s.head_k_dim,
        "head_v_dim": s.head_v_dim,
    }


def _project(layer: Any, s: QwenShape, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv [.., D] as [Q | K | V], z [.., HK, r, V], b and a [.., HV]."""
    if s.order == "interleaved":
        parts, z, b, a = split_interleaved(s, layer.in_proj_qkvz(x), layer.in_proj_ba(x))
        qkv = torch.cat([y.flatten(-2) for y in parts], dim=-1)
        return qkv, z, b.flatten(-2), a.flatten(-2)
    z = layer.in_proj_z(x).unflatten(-1, (s.num_k_heads, s.r, s.head_v_dim))
    return layer.in_proj_qkv(x), z, layer.in_proj_b(x), layer.in_proj_a(x)


def _with_states(shape: QwenShape, x: Tensor, rows: Rows) -> Rows:
    """Temporary states: slots mark padding, and slots require a state."""
    s, B = shape, x.shape[0]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    tail = (s.head_v_dim, s.head_k_dim)
    tail = tail if rows.state_layout == "vk" else tail[::-1]
    return rows._replace(
        conv_state=x.new_zeros(B, s.conv_channels, s.conv_width - 1),
        state=x.new_zeros(B, s.num_v_heads, *tail, dtype=dtype),
    )


def _check(shape: QwenShape, x: Tensor, rows: Rows, mask: Tensor | None) -> None:
    """Check what the operators do not: hidden states, the pair of states, the mask."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout != torch.strided:
        got = f"{x.dtype}, {x.layout}" if isinstance(x, Tensor) else type(x).__name__
        raise _refusal("hidden_states", "a dense tensor of floats", got)
    if x.dim() not in (2, 3) or x.shape[-1] != shape.hidden:
        sizes = f"[B, T, {shape.hidden}], or packed or one token per row [.., {shape.hidden}]"
        raise _refusal("hidden_states", f"shape {sizes}", f"shape {list(x.shape)}")
    if (rows.state is None) != (rows.conv_state is None):
        name = "conv_state" if rows.conv_state is None else "state"
        raise _refusal(name, "a tensor, since the other state is", None)
    if rows.state is None:
        for name in ("slots", "write_slots", "has_state", "checkpoints"):
            if getattr(rows, name) is not None:
                raise _refusal(name, "states beside it", "state=None")
    if mask is not None:
        _check_mask(x, rows, mask)


def _check_mask(x: Tensor, rows: Rows, mask: Tensor) -> None:
    """Check a mask's shape and device, and its values where that needs no waiting."""
    if rows.cu_seqlens is not None:
        raise _refusal("attention_mask", "None beside cu_seqlens", "both")
    if rows.pad_slot != -1 and rows.slots is None:
        raise _refusal("pad_slot", "slots beside it", rows.pad_slot)
    padded = list(x.shape[:-1]) if x.dim() == 3 else [x.shape[0], 1]
    if list(mask.shape) != padded:
        raise _refusal("attention_mask", f"shape {padded}", list(mask.shape))
    if mask.device != x.device:
        raise _refusal("attention_mask", f"device {x.device}", mask.device)
    # reads values on the host, so not while torch traces
    traced = torch.compiler.is_compiling() or torch_private.dispatch_modes() > 0
    if mask.shape[1] > 1 and not traced and (mask.device.type == "cpu" or validating()):
        check_mask(mask)


def _refusal(argument: str, expected: str, got: object) -> ContractError:
    return ContractError("GatedDeltaNet", argument, expected, got)
