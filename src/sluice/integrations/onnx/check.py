"""Compare an exported file with PyTorch: the same calls, at lengths that were not traced."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sluice import torch_private
from sluice.contract.errors import SluiceError
from sluice.integrations.onnx.graphs import ModelGraph, Traced
from sluice.integrations.onnx.runtime import Runner
from sluice.integrations.transformers import is_accelerated, known_layers, plain_torch

# relative error of the whole output; a lost or stale state makes it about 1
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-2}
CALLS = (70, 1, 1, 2, 1, 9, 1)  # tokens of each call; each continues from the last one's states
BATCH = 1


def compare(path: Path, model: nn.Module, traced: Traced | None, args: Any) -> float:
    """The largest relative error of a file's outputs; raises when it is too large."""
    with torch.no_grad():
        if traced is None:
            pairs = _once(path, model, args)
        elif isinstance(traced.module, ModelGraph):
            pairs = _model(path, model)
        else:
            pairs = _layer(path, traced)
        worst, allowed = 0.0, TOLERANCE[_narrowest(model, args)]
        for name, actual, exact in pairs:
            error = relative_error(actual, exact)
            if not error <= allowed:
                raise SluiceError(
                    f"export: {path} gives another result than PyTorch: {name}: relative error "
                    f"{error:.1e}, allowed {allowed:.0e}"
                )
            worst = max(worst, error)
        return worst


def _narrowest(model: nn.Module, args: Any) -> torch.dtype:
    """float16 if any input or weight is: it rounds everything after it."""
    flat = torch_private.tree_leaves(args)
    found = {x.dtype for x in (*model.parameters(), *flat) if isinstance(x, Tensor)}
    return torch.float16 if torch.float16 in found else torch.float32


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """‖actual − exact‖ / ‖exact‖; inf for a different shape or a value that is not finite."""
    if actual.shape != exact.shape:
        return float("inf")
    actual, exact = actual.double(), exact.double()
    if bool(torch.isfinite(exact).all()) and not bool(torch.isfinite(actual).all()):
        return float("inf")
    size = exact.norm().item()
    distance = (actual - exact).norm().item()
    return distance / size if size else distance


def _model(path: Path, model: nn.Module) -> Any:
    """Logits of a prompt and of the calls after it; PyTorch runs the model's own layers."""
    from transformers import DynamicCache

    run, cache = Runner(path, BATCH), DynamicCache(config=model.config)
    generator = torch.Generator().manual_seed(0)
    stock = not any(is_accelerated(layer) for layer in known_layers(model))
    for i, T in enumerate(CALLS):
        ids = torch.randint(model.config.vocab_size, (BATCH, T), generator=generator)
        if stock:
            with plain_torch(model):
                exact = model(ids, past_key_values=cache, use_cache=True).logits
        else:
            exact = model(ids, past_key_values=cache, use_cache=True).logits
        yield f"logits of call {i}, {T} tokens", run(ids), exact


def _layer(path: Path, traced: Traced) -> Any:
    """Outputs and states of a layer, call after call."""
    run = Runner(path, BATCH)
    generator = torch.Generator().manual_seed(0)
    states = [state.zeros(BATCH) for state in traced.states]
    for i, T in enumerate(CALLS):
        x = torch.randn(BATCH, T, traced.x.shape[2], generator=generator).to(traced.x.dtype)
        exact, *states = traced.module(x, states)
        yield f"output of call {i}, {T} tokens", run(x), exact
        for state, new in zip(traced.states, states, strict=True):
            yield f"{state.name} after call {i}", run.states[state.name], new


def _once(path: Path, module: nn.Module, args: Any) -> Any:
    """One call with the example arguments."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    flat = torch_private.tree_leaves(args)
    tensors = [x for x in flat if isinstance(x, Tensor)]
    names = [x.name for x in session.get_inputs()]
    if len(names) != len(tensors):
        raise SluiceError(
            f"export: check: expected a graph input for each of {len(tensors)} tensors, got {names}"
        )
    feeds = {name: x.detach().numpy() for name, x in zip(names, tensors, strict=True)}
    found = session.run(None, {name: x.copy() for name, x in feeds.items()})
    outputs = torch_private.tree_leaves(module(*copy.deepcopy(args)))
    exact = [x for x in outputs if isinstance(x, Tensor)]
    for made, one, info in zip(found, exact, session.get_outputs(), strict=True):
        yield info.name, torch.from_numpy(made), one
