"""Where transformers keeps a gated delta layer's states, release by release.

In 5.0 to 5.4 each model has its own cache class, with lists. From 5.5 on each layer has a cache
object: with two tensors until 5.13, with dictionaries of tensors since then. Every release keeps
the window ``[B, D, W]`` and the recurrent state ``[B, HV, K, V]``. The state is float32, except in
5.5 to 5.13, which round it to the model's dtype.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def states(cache: Any, index: int) -> tuple[Tensor, Tensor] | None:
    """(window, state) of a layer, to update in place; None before its first token."""
    if _is_lists(cache):
        if cache.conv_states[index] is None:
            return None
        return cache.conv_states[index], cache.recurrent_states[index]
    if index >= len(cache.layers):
        return None
    layer = cache.layers[index]
    if not _first(layer.has_previous_state):
        return None
    return _first(layer.conv_states), _first(layer.recurrent_states)


def keep(cache: Any, index: int, window: Tensor, state: Tensor, width: int) -> None:
    """Put a layer's first states into the cache."""
    if _is_lists(cache):
        cache.conv_states[index], cache.recurrent_states[index] = window, state
        return
    cache.update_conv_state(window, index, conv_kernel_size=width)
    cache.update_recurrent_state(state, index)


def records_past(cache: Any, index: int) -> bool:
    """Whether the cache keeps every input, so that it can be cut back later."""
    if _is_lists(cache) or index >= len(cache.layers):
        return False
    return bool(getattr(cache.layers[index], "record_past", False))


def _is_lists(cache: Any) -> bool:
    return isinstance(getattr(cache, "conv_states", None), list)


def _first(x: Any) -> Any:
    """The first of a layer's states, which may be several."""
    return x[0] if isinstance(x, dict) else x
