"""``export``: a model or a layer as an ONNX file, checked against PyTorch before it returns."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sluice import torch_private
from sluice.contract.errors import ContractError, SluiceError
from sluice.integrations.onnx import graphs
from sluice.integrations.onnx.check import compare
from sluice.integrations.onnx.standard import to_standard

TARGETS = ("ort", "onnx")
STEPS = 3  # calls of progress
EXTERNAL_ABOVE = 2**31 - 2**24  # protobuf's limit of 2 GB, less room for the graph
_NODES = ("LinearAttention", "CausalConvWithState")


@dataclass(frozen=True)
class Exported:
    """What was written: ``nodes`` counts operators, ``error`` is the largest relative error of the
    check against PyTorch (None when there was none)."""

    path: Path
    target: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: dict[str, int]
    bytes: int
    external_data: bool
    error: float | None


def export(
    model: nn.Module,
    path: str | Path,
    *,
    target: str = "ort",
    args: tuple[Any, ...] | None = None,
    dynamic_shapes: Any = None,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    external_data: bool | None = None,
    check: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Exported:
    """Write a model or a layer as one ONNX graph for prefill and decode, any batch and length.

    Args:
        model: a causal language model of transformers (Qwen3-Next, Qwen3.5), a gated delta layer
            (``GatedDeltaNet`` or transformers' own), or, with ``args``, any module that uses
            sluice's operators. Float32 or float16. It is not changed.
        path: the file to write; weights above 2 GB go to ``<path>.data``.
        target: "ort": nodes ``com.microsoft::LinearAttention`` and ``CausalConvWithState``, for
            which ONNX Runtime has kernels since 1.26. "onnx": standard operators only (opset 20;
            the recurrence is a ``Scan``), which any runtime can load.
        args: example arguments of a module of your own, as ``torch.onnx.export`` takes them; so are
            ``dynamic_shapes``, ``input_names`` and ``output_names``.
        external_data: put weights into a file of their own; above 2 GB they always are.
        check: compare the file in ONNX Runtime with PyTorch, at lengths that were not traced, over
            calls that continue from each other (a module of your own: with ``args``).
        progress: called with the name of each of the three steps when it begins.

    Returns:
        :class:`Exported`.

    Raises:
        ContractError: an unknown model, or an option that no ONNX operator expresses.
        SluiceError: torch cannot export the model, or the check failed (the file is then removed).
    """
    if target not in TARGETS:
        raise ContractError("export", "target", f"one of {list(TARGETS)}", repr(target))
    need("onnx", "onnxscript", *(("onnxruntime",) if check else ()))
    path, begin = Path(path), progress or (lambda step: None)
    if not path.parent.is_dir():
        raise ContractError("export", "path", "a file in a directory that exists", path)
    if args is None:
        for name, given in (
            ("dynamic_shapes", dynamic_shapes),
            ("input_names", input_names),
            ("output_names", output_names),
        ):
            if given is not None:
                raise ContractError("export", name, "args beside it (a module of your own)", given)
        traced = _known(model)
        args, dynamic_shapes = traced.arguments(), traced.dynamic_shapes()
        input_names, output_names = traced.input_names, traced.output_names
    else:
        traced = None
    _dtypes(model)
    begin("tracing the model")
    module = model if traced is None else traced.module
    program = _program(model, module, args, dynamic_shapes, input_names, output_names)
    nodes = _count(program.model)
    if traced is not None:
        _complete(nodes, traced)
    begin("writing the graph")
    if target == "onnx":
        to_standard(program.model)
    size = sum(x.const_value.nbytes for x in program.model.graph.initializers.values())
    external = size > EXTERNAL_ABOVE or bool(external_data)
    _save(program, path, external)
    begin("comparing with PyTorch" if check else "not compared")
    try:
        error = compare(path, model, traced, args) if check else None
    except Exception:
        for file in (path, path.with_name(f"{path.name}.data")):
            file.unlink(missing_ok=True)  # leave no wrong file behind
        raise
    return Exported(
        path,
        target,
        tuple(x.name for x in program.model.graph.inputs),
        tuple(x.name for x in program.model.graph.outputs),
        nodes,
        size,
        external,
        error,
    )


def _known(model: nn.Module) -> graphs.Traced:
    if graphs.is_layer(model):
        return graphs.layer_graph(model)
    return graphs.model_graph(model)


def _dtypes(model: nn.Module) -> None:
    """Refuse dtypes for which ONNX Runtime has no kernels."""
    for name, p in model.named_parameters():
        if p.dtype in (torch.bfloat16, torch.float64):
            expected = "float32 or float16 parameters (model.to(torch.float16))"
            raise ContractError("export", name, expected, p.dtype)
        if p.device.type != "cpu":
            raise ContractError("export", name, "parameters on the CPU", p.device)


def _program(
    model: nn.Module, module: nn.Module, args: Any, dynamic_shapes: Any, inputs: Any, outputs: Any
) -> Any:
    """torch's ONNX program."""
    with torch.no_grad(), graphs.traceable(model), _quiet():
        try:
            return torch.onnx.export(
                module,
                args,
                dynamo=True,
                dynamic_shapes=dynamic_shapes,
                input_names=inputs,
                output_names=outputs,
                verbose=False,
            )
        except Exception as error:
            raise _reason(error) from error


def _reason(error: BaseException) -> SluiceError:
    """The refusal inside torch's error, or its first line."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, SluiceError):
            return cause
        last, cause = cause, cause.__cause__
    return SluiceError(f"export: torch.onnx cannot export this model: {str(last).strip()}")


def _count(model: Any) -> dict[str, int]:
    """How often a graph contains each of the two operators."""
    names = [node.op_type for node in model.graph.all_nodes()]
    return {name: names.count(name) for name in _NODES}


def _complete(nodes: dict[str, int], traced: graphs.Traced) -> None:
    """Require one node per gated delta layer: any other graph may be silently wrong."""
    layers = sum(state.name.endswith("recurrent") for state in traced.states)
    if any(count != layers for count in nodes.values()):
        raise SluiceError(f"export: expected {layers} nodes of each operator, got {nodes}")


def _save(program: Any, path: Path, external: bool) -> None:
    try:
        program.save(str(path), external_data=external)
    except OSError as error:
        raise SluiceError(f"export: cannot write {path}: {error.strerror}") from error


def need(*packages: str) -> None:
    """Refuse, with what to install, before the work starts."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            extras = "onnx,transformers" if package == "transformers" else "onnx"
            raise SluiceError(f'export needs {package}: pip install "sluice-gdn[{extras}]"')
        try:
            importlib.import_module(package)
        except Exception as error:  # a broken install raises anything
            text = f"export needs {package}, which cannot be imported: {error!r}"
            raise SluiceError(text) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's remarks about packages that this export does not need."""
    logger = torch_private.exporter_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
