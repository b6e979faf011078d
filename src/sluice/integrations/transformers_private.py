"""What sluice uses of transformers and accelerate that they do not promise.

Tried with transformers 5.2 to 5.23 and accelerate 1.15. ``tests/integrations/test_transformers_*``
fail if one of these is gone.

- A layer's own ``forward``, replaced on the instance: transformers has no hook around a layer that
  sees the cache. accelerate's hooks wrap ``forward`` and keep the wrapped one as ``_old_forward``:
  then that one is replaced, so that the hooks still run. Without the name, ``forward`` is.
- ``_hf_hook``: accelerate moves a submodule's weights to the device when it is called. sluice reads
  the weights of ``conv1d`` and ``norm`` without calling them, so it fires these hooks itself.
  Without the name there are no such hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

from torch import nn

from sluice import torch_private


def forward_slot(layer: nn.Module) -> str:
    """The attribute of a layer that holds its forward."""
    return "_old_forward" if "_old_forward" in layer.__dict__ else "forward"


def class_forward(layer: nn.Module) -> MethodType:
    """The forward of a layer's class."""
    return MethodType(type(layer).forward, layer)


def fire_hooks(layer: nn.Module, children: Sequence[str]) -> list[tuple[nn.Module, Any]]:
    """Let accelerate bring the weights of these children; returns what ``end_hooks`` needs."""
    hooked = []
    for name in children:
        child = torch_private.part(layer, name)
        if hook := child.__dict__.get("_hf_hook"):
            hook.pre_forward(child)
            hooked.append((child, hook))
    return hooked


def end_hooks(hooked: list[tuple[nn.Module, Any]]) -> None:
    """Let accelerate take the weights away again."""
    for child, hook in reversed(hooked):
        hook.post_forward(child, ())
