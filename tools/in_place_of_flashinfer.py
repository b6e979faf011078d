"""A pytest plugin that gives FlashInfer's test files sluice's functions in place of FlashInfer's.

    PYTHONPATH=src:tools python -m pytest -p in_place_of_flashinfer --import-mode=importlib \\
        --confcutdir DIR/tests/gdn DIR/tests/gdn

DIR is a checkout of FlashInfer's repository; the package need not be installed. A test that reaches
one of upstream's own kernels is skipped. docs/compat.md has the counts. Without a GPU, first

    sed -i 's/"cuda"/"cpu"/g; s/torch.cuda.is_available()/True/g' DIR/tests/gdn/*.py
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sluice.compat.flashinfer as ours

UPSTREAM = ("flashinfer", "cutlass")
HERE, _capability = torch.cuda.is_available(), torch.cuda.get_device_capability


class Kernel:
    """Whatever upstream's own modules hold: a test that calls it is skipped."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Kernel:
        return Kernel(f"{self.name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> None:
        pytest.skip(f"{self.name} is upstream's own")


class Module(types.ModuleType):
    """A module of upstream's: what sluice does not have in it is upstream's own."""

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return Kernel(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of upstream's, with sluice's functions where it has them."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        mine = name.split(".")[0] in UPSTREAM
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if mine else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(REPLACED.get(module.__name__, {}))


def capability(device: Any = None) -> tuple[int, int]:
    """Compute capability; on a CPU that of Hopper, so that tests do not skip themselves."""
    return _capability(device) if HERE else (9, 0)


def major(*known: int) -> Callable[[Any], bool]:
    """Whether a device is of one of these generations."""
    return lambda device: capability(device)[0] in known


def without_norm(function: Callable[..., Any]) -> Callable[..., Any]:
    """The version of these tests ignored ``use_qk_l2norm_in_kernel``; 0.7.2 honours it."""

    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        told = signature.bind(*args, **kwargs)
        told.arguments["use_qk_l2norm_in_kernel"] = False
        return function(*told.args, **told.kwargs)

    return call


REPLACED: dict[str, dict[str, Any]] = {
    "flashinfer.gdn_prefill": {"chunk_gated_delta_rule": without_norm(ours.chunk_gated_delta_rule)},
    "flashinfer.gdn_decode": {
        name: getattr(ours, name) for name in ours.__all__ if name.startswith("gated_delta_rule")
    },
    "flashinfer.utils": {
        "get_compute_capability": capability,
        "is_sm90a_supported": major(9),
        "is_sm100a_supported": major(10),
        "is_sm12x_supported": major(12),
    },
    "flashinfer.cute_dsl.utils": {"is_cute_dsl_arch_supported": lambda *_: True},
}
sys.meta_path.insert(0, Finder())
if not HERE:
    torch.cuda.get_device_capability = capability
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.mem_get_info = lambda *_: (0, 0)  # tests of pools of many GB skip themselves
