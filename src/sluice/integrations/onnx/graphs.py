"""What is traced: a layer or a whole language model as a function of its inputs and its states.

Every state is an input ``past.…`` and an output ``present.…`` of the same shape, so a runtime can
pass it from call to call; prefill and decode are the same graph. States of gated delta layers
are ``conv`` [B, D, W - 1] (the last raw inputs, oldest first) and ``recurrent`` [B, HV, K, V]
float32, as ONNX's operators have them; attention layers have ``key`` and ``value`` [B, H, S, D].
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sluice.contract.errors import ContractError
from sluice.integrations.transformers import accelerate, is_accelerated, known_layers, restore
from sluice.layers.gated_delta_net import GatedDeltaNet, mix
from sluice.layers.qwen import QwenShape
from sluice.layers.rows import Rows
from sluice.layers.weights import is_known, shape_of

# example sizes of the trace: all different, and not 0 or 1, which torch would make constants
BATCH, TOKENS, PAST = 2, 3, 5

# transformers' implementations that are plain operators at any length
_PLAIN = {"_attn_implementation": "eager", "_experts_implementation": "batched_mm"}


@dataclass(frozen=True)
class State:
    """One state: its name without "past." or "present.", and its dimensions (None: a length)."""

    name: str
    tail: tuple[int | None, ...]
    dtype: torch.dtype

    def zeros(self, batch: int, past: int = 0) -> Tensor:
        """The state of ``batch`` sequences; keys and values have ``past`` tokens."""
        return torch.zeros(batch, *(past if n is None else n for n in self.tail), dtype=self.dtype)

    @property
    def dynamic(self) -> dict[int, str]:
        lengths = {i + 1: "past" for i, n in enumerate(self.tail) if n is None}
        return {0: "batch", **lengths}


@dataclass(frozen=True)
class Traced:
    """A module ``f(x, states) -> (y, *states)``, and the names of its inputs and outputs."""

    module: nn.Module
    x: Tensor
    input: str
    output: str
    states: tuple[State, ...]

    @property
    def input_names(self) -> list[str]:
        return [self.input, *(f"past.{s.name}" for s in self.states)]

    @property
    def output_names(self) -> list[str]:
        return [self.output, *(f"present.{s.name}" for s in self.states)]

    def arguments(self) -> tuple[Any, ...]:
        """Example arguments for torch.onnx.export."""
        return self.x, [s.zeros(BATCH, PAST) for s in self.states]

    def dynamic_shapes(self) -> tuple[Any, ...]:
        return {0: "batch", 1: "tokens"}, [s.dynamic for s in self.states]


def linear_states(shape: QwenShape, dtype: torch.dtype, prefix: str = "") -> tuple[State, State]:
    """The two states of a gated delta layer."""
    s = shape
    return (
        State(f"{prefix}conv", (s.conv_channels, s.conv_width - 1), dtype),
        State(f"{prefix}recurrent", (s.num_v_heads, s.head_k_dim, s.head_v_dim), torch.float32),
    )


class LayerGraph(nn.Module):
    """A gated delta layer, sluice's own or transformers'."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.shape = layer.shape if isinstance(layer, GatedDeltaNet) else shape_of(layer)

    def forward(self, hidden_states: Tensor, states: list[Tensor]) -> tuple[Tensor, ...]:
        conv, recurrent = (x.clone() for x in states)  # a graph must not change its inputs
        rows = Rows(conv, recurrent, state_layout="kv")
        return mix(self.layer, self.shape, hidden_states, rows), conv, recurrent


class ModelGraph(nn.Module):
    """A causal language model of transformers whose layers are gated delta or full attention."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.kinds = model_layers(model)

    def forward(self, input_ids: Tensor, states: list[Tensor]) -> tuple[Tensor, ...]:
        cache, past = self._cache(states)
        T = input_ids.shape[1]
        at = past + torch.arange(T, device=input_ids.device)  # positions of these tokens
        seen = torch.arange(past + T, device=input_ids.device) <= at[:, None]
        dtype = next(self.model.parameters()).dtype
        hidden = torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)
        logits = self.model(
            input_ids,
            # one mask per kind of layer: transformers' own depends on the number of tokens
            attention_mask={"full_attention": hidden[None, None], "linear_attention": None},
            position_ids=at[None],
            past_key_values=cache,
            use_cache=True,
        ).logits
        return logits, *self._states(cache)

    def _cache(self, states: list[Tensor]) -> tuple[Any, Any]:
        """transformers' cache holding these states, and the number of tokens seen."""
        from transformers import DynamicCache

        cache, past = DynamicCache(config=self.model.config), 0
        for i, kind in enumerate(self.kinds):
            first, second = states[2 * i : 2 * i + 2]
            if kind == "linear_attention":
                width = first.shape[-1]
                cache.update_conv_state(first, i, conv_kernel_size=width)
                cache.update_recurrent_state(second, i)
            else:
                past = first.shape[2]
                cache.layers[i].lazy_initialization(first, second)
                cache.layers[i].keys, cache.layers[i].values = first, second
        return cache, past

    def _states(self, cache: Any) -> Iterator[Tensor]:
        for i, kind in enumerate(self.kinds):
            if kind == "linear_attention":
                yield from (cache.get_conv_state(i), cache.get_recurrent_state(i))
            else:
                yield from (cache.layers[i].keys, cache.layers[i].values)


def model_layers(model: nn.Module) -> list[str]:
    """The kinds of a model's layers, all of which a graph can hold."""
    config = getattr(model, "config", None)
    kinds = list(getattr(config, "layer_types", None) or ())
    others = sorted(set(kinds) - {"linear_attention", "full_attention"})
    if "linear_attention" not in kinds or others or not hasattr(model, "lm_head"):
        expected = "a layer, or a causal language model of gated delta and full attention layers"
        got = f"{type(model).__name__} with layers {others or kinds or 'of no declared type'}"
        raise ContractError("export", "model", expected, got)
    return kinds


def layer_graph(layer: nn.Module) -> Traced:
    """A gated delta layer alone."""
    graph = LayerGraph(layer)
    dtype = layer.out_proj.weight.dtype
    x = torch.zeros(BATCH, TOKENS, graph.shape.hidden, dtype=dtype)
    states = linear_states(graph.shape, dtype)
    return Traced(graph, x, "hidden_states", "output", states)


def model_graph(model: nn.Module) -> Traced:
    """A whole language model."""
    graph, config = ModelGraph(model), model.config
    dtype = next(model.parameters()).dtype
    shapes = iter([shape_of(layer) for layer in known_layers(model)])
    states: list[State] = []
    for i, kind in enumerate(graph.kinds):
        if kind == "linear_attention":
            states += linear_states(next(shapes), dtype, f"{i}.")
        else:
            tail = (config.num_key_value_heads, None, config.head_dim)
            states += [State(f"{i}.{name}", tail, dtype) for name in ("key", "value")]
    x = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    return Traced(graph, x, "input_ids", "logits", tuple(states))


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a gated delta layer by itself."""
    return isinstance(module, GatedDeltaNet) or is_known(module)


@contextlib.contextmanager
def traceable(module: nn.Module) -> Iterator[None]:
    """A scope in which a model is in evaluation mode, with its gated delta layers run by sluice and
    its attention as plain operators."""
    layers, training = known_layers(module), module.training
    ours = [layer for layer in layers if not is_accelerated(layer)]
    with contextlib.ExitStack() as undo:
        undo.callback(module.train, training)
        module.eval()
        if ours:
            accelerate(module)
            for layer in ours:
                undo.callback(restore, layer)
        config = getattr(module, "config", None)
        for name, plain in _PLAIN.items():
            kind = getattr(config, name, None)
            if kind is not None:
                undo.callback(setattr, config, name, kind)
                setattr(config, name, plain)
        yield
