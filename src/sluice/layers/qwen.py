"""Every Qwen shape with gated delta layers, by name and tensor parallel size, as data.

A row describes the linear layers of one model. This module builds and runs nothing and does not
need torch. After :meth:`QwenShape.shard`, head counts are those of one rank.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sluice.contract import arguments
from sluice.contract.errors import ContractError
from sluice.contract.names import GateActivation, Order

# transformers' model types with known linear layers, and the row order of their weights
ORDERS: dict[str, Order] = {
    "qwen3_next": "interleaved",
    "qwen3_5": "split",
    "qwen3_5_text": "split",
    "qwen3_5_moe": "split",
    "qwen3_5_moe_text": "split",
    "qwen4_exp": "split",
    "qwen4_exp_text": "split",
}
# the only family whose config chooses the activation of the output gate; elsewhere it is silu
_GATE_IN_CONFIG = ("qwen4_exp", "qwen4_exp_text")


@dataclass(frozen=True)
class QwenShape:
    """Shape of the gated delta layers of one model, whole or as one rank holds them.

    ``order`` is the row order of the input projections: ``"interleaved"`` (one ``in_proj_qkvz``,
    ``[q | k | r·v | r·z]`` per key head, and ``in_proj_ba``; Qwen3-Next) or ``"split"``
    (``in_proj_qkv`` as ``[Q | K | V]``; separate z, b and a; Qwen3.5 and later). Conv channels are
    ``[Q all | K all | V all]`` in both. Value head ``h`` uses key head ``h // r``.

    Raises :class:`~sluice.contract.errors.ContractError` for impossible counts: a dimension below
    1, value heads that are not a multiple of the key heads, a linear layer out of range.

    >>> shape = preset("Qwen3.5-27B")
    >>> shape.num_k_heads, shape.num_v_heads, shape.r, shape.conv_channels
    (16, 48, 3, 10240)
    >>> shape.shard(4).num_v_heads, shape.shard(4).conv_channels
    (12, 2560)
    """

    name: str
    hidden: int
    num_k_heads: int
    num_v_heads: int
    layers: int  # all layers, including those with full attention
    linear_layer_ids: tuple[int, ...] = field(repr=False)  # which of them are gated delta layers
    head_k_dim: int = 128
    head_v_dim: int = 128
    conv_width: int = 4
    order: Order = "split"
    gate_activation: GateActivation = "silu"
    norm_eps: float = 1e-6
    tp: int = 1  # number of ranks that share the heads

    def __post_init__(self) -> None:
        dims = ("hidden", "num_k_heads", "num_v_heads", "layers", "head_k_dim", "head_v_dim", "tp")
        for name in dims:
            if getattr(self, name) < 1:
                raise ContractError("QwenShape", name, "at least 1", getattr(self, name))
        if self.num_v_heads % self.num_k_heads:
            expected = f"a multiple of num_k_heads = {self.num_k_heads}"
            raise ContractError("QwenShape", "num_v_heads", expected, self.num_v_heads)
        if self.conv_width < 2:
            raise ContractError("QwenShape", "conv_width", "at least 2", self.conv_width)
        for name, allowed in (
            ("order", ("interleaved", "split")),
            ("gate_activation", ("silu", "sigmoid")),
        ):
            if getattr(self, name) not in allowed:
                expected = " or ".join(map(repr, allowed))
                raise ContractError("QwenShape", name, expected, repr(getattr(self, name)))
        ids = self.linear_layer_ids
        if list(ids) != sorted(set(ids)) or any(not 0 <= i < self.layers for i in ids):
            expected = f"ascending layer numbers in 0..{self.layers - 1}"
            raise ContractError("QwenShape", "linear_layer_ids", expected, ids)

    @property
    def r(self) -> int:
        """Value heads per key head: 1, 2, 3, 4 or 8 in the models known here."""
        return self.num_v_heads // self.num_k_heads

    @property
    def key_dim(self) -> int:
        """``HK · K``, the width of Q and of K."""
        return self.num_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        """``HV · V``, the width of V, of the gate z and of the layer's output."""
        return self.num_v_heads * self.head_v_dim

    @property
    def conv_channels(self) -> int:
        """``D = 2·HK·K + HV·V``, laid out ``[Q all | K all | V all]``."""
        return 2 * self.key_dim + self.value_dim

    @property
    def linear_layers(self) -> int:
        """The number of gated delta layers, which have conv and recurrent state."""
        return len(self.linear_layer_ids)

    def linear_index(self, layer: int) -> int:
        """Position of model layer ``layer`` among the linear layers: the row of a state pool.

        Raises ``ContractError`` for a layer with full attention, which has no such state.

        >>> preset("qwen3.5-0.8b").linear_index(4)  # layer 3 is full attention
        3
        """
        try:
            return self.linear_layer_ids.index(layer)
        except ValueError:
            expected = f"a linear layer of {self.name} (0..{self.layers - 1}, every fourth is not)"
            raise ContractError("linear_index", "layer", expected, layer) from None

    def shard(self, tp: int) -> QwenShape:
        """One rank's shape when heads are divided over ``tp`` ranks.

        Both head counts are divided, so ``r`` and ``hidden`` stay. A shard may be sharded again.
        Raises ``ContractError`` when ``tp`` does not divide both.

        >>> preset("qwen3.5-397b-a17b").shard(16).num_k_heads
        1
        """
        whole = isinstance(tp, int) and not isinstance(tp, bool) and tp > 0
        if not whole or self.num_k_heads % tp or self.num_v_heads % tp:
            heads = f"{self.num_k_heads} key heads and {self.num_v_heads} value heads"
            expected = f"a divisor of {heads} of {self.name}"
            raise ContractError("shard", "tp", expected, arguments.shown(tp))
        return replace(
            self,
            num_k_heads=self.num_k_heads // tp,
            num_v_heads=self.num_v_heads // tp,
            tp=self.tp * tp,
        )


def linear_layers_of(layers: int, interval: int = 4) -> tuple[int, ...]:
    """The numbers of the linear layers, if every ``interval``-th layer has full attention.

    >>> linear_layers_of(8)
    (0, 1, 2, 4, 5, 6)
    """
    return tuple(i for i in range(layers) if (i + 1) % interval)


def _row(name: str, hidden: int, hk: int, hv: int, layers: int, **other: Any) -> QwenShape:
    return QwenShape(name, hidden, hk, hv, layers, linear_layers_of(layers), **other)


PRESETS: dict[str, QwenShape] = {
    shape.name: shape
    for shape in (
        _row("Qwen3-Next-80B-A3B", 2048, 16, 32, 48, order="interleaved"),
        _row("Qwen3.5-0.8B", 1024, 16, 16, 24),
        _row("Qwen3.5-2B", 2048, 16, 16, 24),
        _row("Qwen3.5-4B", 2560, 16, 32, 32),
        _row("Qwen3.5-9B", 4096, 16, 32, 32),
        _row("Qwen3.5-27B", 5120, 16, 48, 64),
        _row("Qwen3.5-35B-A3B", 2048, 16, 32, 40),
        _row("Qwen3.5-122B-A10B", 3072, 16, 64, 48),
        _row("Qwen3.5-397B-A17B", 4096, 16, 64, 60),
        _row("Qwen3.6-27B", 5120, 16, 48, 64),
        _row("Qwen3.6-35B-A3B", 2048, 16, 32, 40),
        _row("Qwen3.8-27B", 5120, 16, 48, 64),
        _row("Qwen3.8-2.4T", 8192, 16, 128, 92),
        _row("Qwen3.8-Flash-Next", 2560, 16, 48, 48, gate_activation="sigmoid"),
    )
}
# other names of the same shapes
ALIASES: dict[str, str] = {
    "Qwen3-Coder-Next": "Qwen3-Next-80B-A3B",
    "Qwen3-Next": "Qwen3-Next-80B-A3B",
    "Qwen3.8-2.4T-A95B": "Qwen3.8-2.4T",
}
# endings of checkpoint names that do not change a shape
_ENDINGS = re.compile(r"(instruct|thinking|base|fp8)+$")


def _key(name: str) -> str:
    """``Qwen/Qwen3_5-27B-FP8`` → ``qwen3527b``: the name without its spelling variants."""
    return _ENDINGS.sub("", re.sub(r"[^a-z0-9]", "", name.rsplit("/", 1)[-1].lower()))


def _nearest(key: str, names: dict[str, str]) -> str | None:
    """The known name that begins with ``key``, else the most similar one, else None."""
    longer = [known for known in names if key and known.startswith(key)]
    near = longer or difflib.get_close_matches(key, names, n=1)
    return names[near[0]] if near else None


def preset(name: str, tp: int = 1) -> QwenShape:
    """The shape of a model by name, as one of ``tp`` ranks holds it (default: whole).

    Case, ``-``, ``_``, ``.``, an owner (``Qwen/``) and endings such as ``-Instruct`` or ``-FP8``
    are ignored. Raises ``ContractError`` with the nearest name for an unknown one.

    >>> preset("qwen3_5_27b") == preset("Qwen/Qwen3.5-27B-FP8") == PRESETS["Qwen3.5-27B"]
    True
    >>> preset("Qwen3-Coder-Next", tp=8).num_v_heads
    4
    >>> preset("qwen3.5-35b")
    Traceback (most recent call last):
        ...
    sluice.contract.errors.ContractError: preset: name: expected a known model \
(did you mean 'Qwen3.5-35B-A3B'?), got 'qwen3.5-35b'
    """
    return named("preset", "name", name).shard(tp)


def named(op: str, argument: str, name: str) -> QwenShape:
    """``preset(name)`` for an argument of another function, which the error names."""
    if not isinstance(name, str):
        raise ContractError(op, argument, "a model's name", repr(name))
    names = {_key(known): known for known in (*PRESETS, *ALIASES)}
    known = names.get(_key(name))
    if known is None:
        hint = f"one of {', '.join(PRESETS)}"
        if near := _nearest(_key(name), names):
            hint = f"did you mean {near!r}?"
        raise ContractError(op, argument, f"a known model ({hint})", repr(name))
    return PRESETS[ALIASES.get(known, known)]


def from_config(config: Any) -> QwenShape:
    """Read a shape from a transformers config of Qwen3-Next, Qwen3.5(-MoE) or Qwen4-Exp.

    ``config`` is the config object or the mapping of its ``config.json``; of a multimodal config,
    ``text_config`` is read. transformers is not imported. Raises ``ContractError`` naming the
    attribute that is missing, or whose value no operator serves.

    >>> from_config({
    ...     "model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 8,
    ...     "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32,
    ...     "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "hidden_act": "silu",
    ... }).linear_layers
    6
    """
    config = _get(config, "text_config") or config
    model_type = _get(config, "model_type")
    if model_type not in ORDERS:
        expected = f"one of {', '.join(ORDERS)}"
        raise ContractError("from_config", "model_type", expected, repr(model_type))

    def need(name: str) -> Any:
        value = _get(config, name)
        if value is None:
            raise ContractError("from_config", f"config.{name}", "a value", "none")
        return value

    act = need("hidden_act")
    if act not in ("silu", "swish"):
        raise ContractError("from_config", "config.hidden_act", "'silu' (of the conv)", repr(act))
    gate = "silu"
    if model_type in _GATE_IN_CONFIG:
        gate = _get(config, "output_gate_type") or "silu"
        if gate not in ("silu", "swish", "sigmoid"):
            expected = "'silu' or 'sigmoid'"
            raise ContractError("from_config", "config.output_gate_type", expected, repr(gate))
    layers = need("num_hidden_layers")
    kinds = _get(config, "layer_types")
    if kinds is None:
        linear = linear_layers_of(layers, _get(config, "full_attention_interval") or 4)
    else:
        linear = tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    return QwenShape(
        name=_get(config, "_name_or_path") or model_type,
        hidden=need("hidden_size"),
        num_k_heads=need("linear_num_key_heads"),
        num_v_heads=need("linear_num_value_heads"),
        layers=layers,
        linear_layer_ids=linear,
        head_k_dim=need("linear_key_head_dim"),
        head_v_dim=need("linear_value_head_dim"),
        conv_width=need("linear_conv_kernel_dim"),
        order=ORDERS[model_type],
        gate_activation="sigmoid" if gate == "sigmoid" else "silu",
        norm_eps=_get(config, "rms_norm_eps") or 1e-6,
    )


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
