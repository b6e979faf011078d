"""transformers models with random weights and gates that remember: small, or of a real shape."""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from sluice.testing.compare import assert_within, tolerance
from tests.suite import DEVICE

# family: prefix of its classes, its text config
FAMILIES = {
    "qwen3_next": ("Qwen3Next", "Qwen3NextConfig"),
    "qwen3_5": ("Qwen3_5", "Qwen3_5TextConfig"),
    "qwen3_5_moe": ("Qwen3_5Moe", "Qwen3_5MoeTextConfig"),
}
# Qwen3.5-35B-A3B's layers, for ``config``; a small vocabulary
LAYERS_35B: dict[str, Any] = {
    "HK": 16,
    "r": 2,
    "K": 128,
    "V": 128,
    "vocab_size": 1024,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
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


def stock_layer(family: str, *, seed: int = 0, device: str = "cpu", **sizes: Any) -> nn.Module:
    """One gated delta layer of transformers, float32, without gradients."""
    torch.manual_seed(seed)
    layer = getattr(file_of(family), f"{FAMILIES[family][0]}GatedDeltaNet")(
        config(family, **sizes), layer_idx=0
    )
    return randomise(layer).to(device).eval().requires_grad_(False)


def stock_model(
    family: str,
    *,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **sizes: Any,
) -> nn.Module:
    """A whole causal language model of transformers, built on its device in its dtype."""
    kind = getattr(file_of(family), f"{FAMILIES[family][0]}ForCausalLM")
    torch.manual_seed(seed)
    with default_dtype(dtype), torch.device(device):
        model = kind(config(family, **sizes))
    for module in model.modules():
        if type(module).__name__.endswith("GatedDeltaNet"):
            randomise(module)
        elif isinstance(module, nn.Linear | nn.Embedding):  # large enough for logits that differ
            module.weight.data.mul_(4)
    return model.eval()


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within this scope, floating-point tensors are made in ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def natural(model: nn.Module, router: float = 4.0) -> nn.Module:
    """Scale weights so that every product keeps its input's size, and no layer is lost in noise.

    Only the routers' logits are larger. Then the experts that are just barely chosen count for
    little, and different rounding does not lead to a different model.
    """
    for module in model.modules():
        kind = type(module).__name__
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_()
        elif isinstance(module, nn.Linear) or kind.endswith("Experts"):
            for p in module.parameters(recurse=False):
                p.data.normal_(std=p.shape[-1] ** -0.5)
        elif kind.endswith("TopKRouter"):
            module.weight.data.normal_(std=router * module.weight.shape[-1] ** -0.5)
    return model


def twin_of(model: nn.Module) -> nn.Module:
    """New modules that share the same parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


class _Widened:
    """Experts' weights, converted to float32 on access: a full copy would be twice their size."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        return self.weights[index].float()


def exact_of(model: nn.Module) -> nn.Module:
    """The same weights in float32, with transformers' plain loop over experts."""
    experts = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    kept = {id(p): p for m in experts for p in m.parameters(recurse=False)}
    exact = copy.deepcopy(model, kept)
    for module in exact.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if id(p) in kept:
                delattr(module, name)
                setattr(module, name, _Widened(p.data))
    if experts:
        exact.config._experts_implementation = "eager"
    return exact.float()


def randomise(layer: nn.Module) -> nn.Module:
    """Weights of usual size; decays per token from 0.45 to 0.999, so that states matter."""
    for name, p in layer.named_parameters():
        if "proj" in name:
            p.data.normal_(std=p.shape[1] ** -0.5)
    layer.conv1d.weight.data.normal_(std=0.5)
    layer.norm.weight.data.normal_(1.0, 0.1)
    layer.A_log.data.uniform_(0.05, 4.0).log_()
    layer.dt_bias.data.uniform_(0.02, 0.2).expm1_().log_()  # softplus of it is 0.02 to 0.2
    return layer


def own_cache(model: nn.Module) -> Any:
    """The model's own cache class, which transformers had until 5.4; None since then."""
    for name, kind in vars(sys.modules[type(model).__module__]).items():
        if name.endswith("DynamicCache") and name != "DynamicCache":
            return kind
    return None


def static(model: nn.Module, length: int = 64) -> Any:
    """A static cache, if transformers has one for the model."""
    from transformers import StaticCache

    if own_cache(model) is not None:
        pytest.skip("this transformers has no static cache for the model")
    return StaticCache(config=model.config, max_cache_len=length)


def compiled(model: nn.Module, stock: nn.Module) -> Any:
    """The compiled forward of the model; skips if stock does not compile either."""

    def whole(m: nn.Module) -> Any:
        return torch.compile(m.forward, backend="aot_eager", fullgraph=True)

    def call(ids: torch.Tensor, **options: Any) -> Any:
        try:
            return forward(ids, **options)
        except torch._dynamo.exc.Unsupported as reason:
            cache = static(stock)
            stock(ids, past_key_values=cache)
            try:
                whole(stock)(ids, **{**options, "past_key_values": cache})
            except torch._dynamo.exc.Unsupported:
                pytest.skip(f"this transformers does not compile: {str(reason)[:80]}")
            raise

    forward = whole(model)
    return call


def new_cache(model: nn.Module) -> Any:
    """An empty dynamic cache, of the class that this transformers has."""
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


def tokens(*size: int, seed: int = 0, device: str = DEVICE) -> torch.Tensor:
    """Random tokens for a small model."""
    return torch.randint(1, 90, size, generator=torch.Generator().manual_seed(seed)).to(device)


def ragged(lengths: Sequence[int], side: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of different lengths, and their mask, padded on one side."""
    T = max(lengths)
    at, n = torch.arange(T), torch.tensor(lengths).unsqueeze(1)
    mask = ((at >= T - n) if side == "left" else (at < n)).long().to(DEVICE)
    return tokens(len(lengths), T, seed=seed) * mask, mask


def packing(lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(position_ids, borders, seq_idx) of sequences in one row."""
    position = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return position.to(DEVICE), borders.to(DEVICE), numbers.unsqueeze(0).to(DEVICE)


def close(actual: torch.Tensor, exact: torch.Tensor, name: str = "logits") -> None:
    """Equal but for the rounding of float32 through four layers."""
    assert_within(actual, exact, 5 * tolerance(torch.float32, device=DEVICE), name=name)
