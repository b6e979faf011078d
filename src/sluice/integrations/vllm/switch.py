"""Whether sluice serves the layers of this engine, decided once, when a layer is built."""

from __future__ import annotations

from typing import Any

from sluice.contract.spec import MAX_DECODE_TOKENS
from sluice.integrations.vllm import NAME, private

MAX_DRAFTS = MAX_DECODE_TOKENS - 1
"""A step has one certain token before them."""
WIDEST = 256
"""Of a head on a GPU: the Triton kernels' limit."""


def asked(config: Any) -> bool:
    """Whether ``--additional-config`` has ``"sluice"``, with anything but false or null."""
    return _value(config) not in (None, False)


def why_not(config: Any, layer_config: Any) -> str | None:
    """Why vLLM's own layer runs although sluice was asked for; None if sluice serves it."""
    value = _value(config)
    if value is not True:
        return f'"{NAME}" in additional_config is {value!r}; true switches it on'
    platform = private.platform()
    if platform not in ("cuda", "cpu"):
        return f"the platform {platform} was never tried"
    if getattr(config, "lora_config", None) is not None:
        return "LoRA replaces the layer's projections"
    if getattr(config.cache_config, "use_replayssm", False):
        return "ReplaySSM keeps other states"
    mode = getattr(config.cache_config, "mamba_cache_mode", "none")
    if mode not in ("none", "align"):
        return f"mamba_cache_mode {mode!r}"
    if layer_config.hidden_act not in ("silu", "swish"):
        return f"the activation {layer_config.hidden_act!r}"
    widths = (layer_config.linear_key_head_dim, layer_config.linear_value_head_dim)
    if platform == "cuda" and max(widths) > WIDEST:
        return f"heads wider than {WIDEST}: {widths}"
    return _why_no_drafts(getattr(config, "speculative_config", None))


def _value(config: Any) -> Any:
    more = getattr(config, "additional_config", None)
    return more.get(NAME) if isinstance(more, dict) else None


def _why_no_drafts(speculative: Any) -> str | None:
    if speculative is None:
        return None
    drafts = speculative.num_speculative_tokens or 0
    if drafts > MAX_DRAFTS:
        return f"{drafts} draft tokens, more than {MAX_DRAFTS}"
    tree = getattr(speculative, "speculative_token_tree", None)
    if tree and _branches(tree, drafts):
        return "drafts that form a tree"
    return None


def _branches(tree: str, drafts: int) -> bool:
    """Whether a tree, as text, is more than one chain: ``[(0,), (0, 0), (0, 0, 0)]``."""
    chain = str([(0,) * (n + 1) for n in range(drafts)])
    return str(tree).replace(" ", "") != chain.replace(" ", "")
