"""Adapters for other libraries and engines, each for a host that is installed already."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.integrations import fla as fla
    from sluice.integrations import onnx as onnx
    from sluice.integrations import sglang as sglang
    from sluice.integrations import tokenspeed as tokenspeed
    from sluice.integrations import transformers as transformers
    from sluice.integrations import vllm as vllm
else:

    def __getattr__(name: str) -> Any:
        """An adapter, imported when it is first asked for."""
        if name in ("fla", "onnx", "sglang", "tokenspeed", "transformers", "vllm"):
            return importlib.import_module(f"sluice.integrations.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
