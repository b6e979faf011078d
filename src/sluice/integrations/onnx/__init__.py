"""ONNX: export models and layers, run and check the files, and compute single nodes.

``torch.onnx.export(dynamo=True)`` of a module that calls sluice's operators needs nothing from this
package: the operators become ``com.microsoft::LinearAttention`` and ``CausalConvWithState`` nodes.
:func:`export` writes whole models and layers in one line, :class:`Runner` runs the result, and
:func:`run_node` computes an ONNX node with sluice. Importing this package imports none of onnx,
onnxscript and onnxruntime.
"""

from sluice.integrations.onnx.export import Exported, export
from sluice.integrations.onnx.nodes import run_node
from sluice.integrations.onnx.runtime import Runner

__all__ = ["Exported", "Runner", "export", "run_node"]
