"""A torchvision that engines can import on a machine without one: it is for images only."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType


class _Names(type):
    """Any name of such a class is a text."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Anything(ModuleType):
    """Any name of such a module is a class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})


def without_torchvision() -> None:
    """Put empty modules where torchvision would be, unless it is there."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # it remembers that there is none
    for name in (
        "torchvision",
        "torchvision.io",
        "torchvision.transforms",
        "torchvision.transforms.functional",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    ):
        made = _Anything(name)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        made.__path__ = []
        sys.modules[name] = made
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, made)
