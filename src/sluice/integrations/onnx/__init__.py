"""ONNX: models and layers exported, the exported files run and checked, and single nodes evaluated.

``torch.onnx.export(dynamo=True)`` of anything that calls sluice's operators needs nothing from
here: they become ``com.microsoft::LinearAttention`` and ``CausalConvWithState`` nodes by
themselves. :func:`export` is the one-line entry for whole models and layers, :class:`Runner` calls
what it wrote, and :func:`run_node` computes an ONNX node with sluice. Importing this imports none
of onnx, onnxscript and onnxruntime.
"""

from sluice.integrations.onnx.export import Exported, export
from sluice.integrations.onnx.nodes import run_node
from sluice.integrations.onnx.runtime import Runner

__all__ = ["Exported", "Runner", "export", "run_node"]
