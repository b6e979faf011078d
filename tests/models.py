"""Small transformers models with random weights and gates that remember."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from sluice.testing.compare import assert_within

# family: prefix of its classes, its text config
FAMILIES = {
    "qwen3_next": ("Qwen3Next", "Qwen3NextConfig"),
    "qwen3_5": ("Qwen3_5", "Qwen3_5TextConfig"),
    "qwen3_5_moe": ("Qwen3_5Moe", "Qwen3_5MoeTextConfig"),
}


def file_of(family: str) -> Any:
    """The family's modeling file."""
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def config(
    family: str, *, HK: int = 2, r: int = 2, K: int = 16, V: int = 16, layers: int = 4, **more: Any
) -> Any:
    """A text config; every fourth layer has full attention."""
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": HK,
        "linear_num_value_heads": HK * r,
        "linear_key_head_dim": K,
        "linear_value_head_dim": V,
        "pad_token_id": 0,
        "eos_token_id": 96,
    }
    if family != "qwen3_5":
        sizes |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        }
    package = importlib.import_module(f"transformers.models.{family}")
    return getattr(package, FAMILIES[family][1])(**{**sizes, **more})


def stock_layer(family: str, *, seed: int = 0, **sizes: Any) -> nn.Module:
    """One gated delta layer of transformers, float32, without gradients."""
    torch.manual_seed(seed)
    layer = getattr(file_of(family), f"{FAMILIES[family][0]}GatedDeltaNet")(
        config(family, **sizes), layer_idx=0
    )
    return randomise(layer).eval().requires_grad_(False)


def stock_model(family: str, *, seed: int = 0, **sizes: Any) -> nn.Module:
    """A whole causal language model of transformers, float32."""
    torch.manual_seed(seed)
    model = getattr(file_of(family), f"{FAMILIES[family][0]}ForCausalLM")(config(family, **sizes))
    for module in model.modules():
        if type(module).__name__.endswith("GatedDeltaNet"):
            randomise(module)
        elif isinstance(module, nn.Linear | nn.Embedding):  # far enough from a flat distribution
            module.weight.data.mul_(4)
    return model.eval()


def randomise(layer: nn.Module) -> nn.Module:
    """Weights of natural size; decays per token from 0.45 to 0.999, so that states matter."""
    for name, p in layer.named_parameters():
        if "proj" in name:
            p.data.normal_(std=p.shape[1] ** -0.5)
    layer.conv1d.weight.data.normal_(std=0.5)
    layer.norm.weight.data.normal_(1.0, 0.1)
    layer.A_log.data.uniform_(0.05, 4.0).log_()
    layer.dt_bias.data.uniform_(0.02, 0.2).expm1_().log_()  # softplus of it is 0.02 to 0.2
    return layer


def own_cache(model: nn.Module) -> Any:
    """The cache class of the model's own that transformers had until 5.4; None since."""
    for name, kind in vars(sys.modules[type(model).__module__]).items():
        if name.endswith("DynamicCache") and name != "DynamicCache":
            return kind
    return None


def new_cache(model: nn.Module) -> Any:
    """An empty cache that grows, of whatever class this transformers has."""
    from transformers import DynamicCache

    kind = own_cache(model)
    return DynamicCache(config=model.config) if kind is None else kind(model.config)


def states_of(cache: Any, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(conv [B, D, W], recurrent [B, HV, K, V]) of a transformers cache."""
    kept = cache if isinstance(getattr(cache, "conv_states", None), list) else cache.layers[layer]
    conv, state = kept.conv_states, kept.recurrent_states
    if isinstance(conv, dict):
        return conv[0], state[0]
    return (conv[layer], state[layer]) if isinstance(conv, list) else (conv, state)


def tokens(*size: int, seed: int = 0) -> torch.Tensor:
    """Words to feed a small model."""
    return torch.randint(1, 90, size, generator=torch.Generator().manual_seed(seed))


def close(actual: torch.Tensor, exact: torch.Tensor, name: str = "logits") -> None:
    """Equal but for the rounding of float32 through four layers."""
    assert_within(actual, exact, 5e-5, name=name)
