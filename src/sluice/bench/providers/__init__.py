"""The providers that are measured: one small file per library, loaded by name on demand."""

from __future__ import annotations

import importlib

from sluice.bench.providers.base import Provider

MODULES = {
    "sluice": "own",
    "fla": "fla",
    "flashqla": "flashqla",
    "flashinfer": "flashinfer",
    "causal-conv1d": "causal_conv1d",
    "transformers": "transformers",
    "onnxruntime": "onnxruntime",
    "torch": "plain",
}
"""Every name that ``--peers`` takes, and its module; ``sluice:<backend>`` is one backend alone."""

VARIANTS = ("separate", "invariant")  # sluice:separate, sluice:invariant: other ways to call it
STANDING = (*VARIANTS, "triton")  # variants of sluice in a full run on a GPU

PEERS = tuple(name for name in MODULES if name != "sluice")
ALIASES = {"ort": "onnxruntime", "onnx": "onnxruntime", "hf": "transformers", "plain": "torch"}


def provider(name: str) -> Provider:
    """The provider of that name."""
    base, _, backend = name.partition(":")
    module = importlib.import_module(f"{__name__}.{MODULES[ALIASES.get(base, base)]}")
    return module.provider(backend) if backend else module.provider()
