"""transformers models made fast in place: ``accelerate(model)``, undone by ``restore(model)``.

Each gated delta layer keeps its class, parameters and submodules; only its instance's ``forward``
is replaced, by one with the same signature that uses transformers' own cache. Importing this module
does not import transformers.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Iterator
from types import MethodType

import torch
from torch import Tensor, nn

from sluice.contract.errors import ContractError
from sluice.layers.gated_delta_net import mix
from sluice.layers.rows import Rows
from sluice.layers.weights import LAYERS, is_known, shape_of

_SHAPE, _KEPT = "_sluice_shape", "_sluice_kept"  # attributes of an accelerated layer
_warned: set[str] = set()


def accelerate(model: nn.Module) -> nn.Module:
    """Run every gated delta layer of a transformers model through sluice, in place.

    Outputs, cache objects, ``generate()``, state dicts and submodules stay what they were. Padding
    on either side is exact, and so are packed sequences (``cu_seq_lens_q``). Layers of other
    classes are left alone. With gradients (grad mode on, and parameters or inputs that require
    them) a layer's own forward runs, and one warning says so; the same holds while a cache records
    its past.

    Args:
        model: a Qwen3-Next, Qwen3.5, Qwen3.5-MoE or Qwen4-Exp model, or any module that holds its
            layers. Accelerating twice is the same as once.

    Returns:
        ``model`` itself.

    Raises:
        ContractError: no layer of a known class in it, or one with an activation no operator
            serves. Nothing is changed then.
    """
    layers = known_layers(model)
    if not layers:
        expected = f"a module with layers of {', '.join(LAYERS)}"
        raise ContractError("accelerate", "model", expected, type(model).__name__)
    shapes = [shape_of(layer) for layer in layers]  # all of them first: it may refuse
    for layer, shape in zip(layers, shapes, strict=True):
        if not is_accelerated(layer):
            name = _slot(layer)
            layer.__dict__[_SHAPE], layer.__dict__[_KEPT] = shape, layer.__dict__.get(name)
            layer.__dict__[name] = MethodType(_forward, layer)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Give every accelerated layer its own forward back; returns ``model``."""
    for layer in known_layers(model):
        if is_accelerated(layer):
            name, stock = _slot(layer), _stock(layer)
            if name == "forward" and layer.__dict__[_KEPT] is None:
                del layer.__dict__[name]  # the class has it
            else:
                layer.__dict__[name] = stock
            del layer.__dict__[_SHAPE], layer.__dict__[_KEPT]
    return model


def known_layers(model: nn.Module) -> list[nn.Module]:
    """The gated delta layers of a model, in order."""
    return [module for module in model.modules() if is_known(module)]


def is_accelerated(layer: nn.Module) -> bool:
    """Whether a layer runs through sluice."""
    return _SHAPE in layer.__dict__


@contextlib.contextmanager
def plain_torch(model: nn.Module) -> Iterator[None]:
    """Within this scope, stock layers use their own torch functions even if FLA is installed.

    transformers chooses FLA when a model file is imported, whatever the device; on a CPU that ends
    in an error of Triton. The choice is a global of the model file, so this is for tests and
    measurements, not for threads.
    """
    names = ("chunk_gated_delta_rule", "recurrent_gated_delta_rule")
    names = (*(f"torch_{name}" for name in names), "causal_conv1d_fn", "causal_conv1d_update")
    files = {sys.modules[type(layer).__module__] for layer in known_layers(model)}
    with contextlib.ExitStack() as undo:
        for file in files:
            for name in names:
                if found := getattr(file, name, None):
                    setattr(file, name, inspect.unwrap(found))
                    undo.callback(setattr, file, name, found)
        yield


def _forward(
    self: nn.Module,
    hidden_states: Tensor,
    cache_params=None,
    attention_mask: Tensor | None = None,
    **kwargs,
) -> Tensor:
    """A layer's forward with transformers' signature."""
    reason = _why_stock(self, hidden_states, cache_params)
    if reason is not None:
        _warn_once(reason)
        return _stock(self)(
            hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs
        )
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if kwargs.get("seq_idx") is not None and cu_seqlens is None:
        raise ContractError("accelerate", "cu_seq_lens_q", "a tensor beside seq_idx", None)
    shape = self.__dict__[_SHAPE]
    if cache_params is None:
        rows, fresh = Rows(), False
    else:
        rows = Rows(
            cache_params.get_conv_state(self.layer_idx),
            cache_params.get_recurrent_state(self.layer_idx),
        )
        fresh = rows.state is None
        if fresh:
            n = hidden_states.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            rows = _zero_states(shape, hidden_states, n)
    rows = rows._replace(state_layout="kv", cu_seqlens=cu_seqlens)
    with _child_hooks(self):
        out = mix(self, shape, hidden_states, rows, attention_mask)
    if fresh:
        width = shape.conv_width
        cache_params.update_conv_state(rows.conv_state, self.layer_idx, conv_kernel_size=width)
        cache_params.update_recurrent_state(rows.state, self.layer_idx)
    return out


def _zero_states(shape, x: Tensor, n: int) -> Rows:
    """States as transformers keeps them: W columns of the window, and [B, HV, K, V] float32."""
    s = shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    return Rows(
        x.new_zeros(n, s.conv_channels, s.conv_width),
        x.new_zeros(n, s.num_v_heads, s.head_k_dim, s.head_v_dim, dtype=dtype),
    )


def _why_stock(layer: nn.Module, x: Tensor, cache) -> str | None:
    """Why this call is left to transformers; None when it is not."""
    if torch.is_grad_enabled() and (
        x.requires_grad or any(p.requires_grad for p in layer.parameters())
    ):
        return (
            "gradients are on, so transformers' own forward runs; call the model under "
            "torch.no_grad() or torch.inference_mode() to use sluice"
        )
    if cache is not None and cache.is_recording_past(layer.layer_idx):
        return "the cache records its past, which only transformers' own forward does"
    return None


def _warn_once(reason: str) -> None:
    if reason not in _warned and not torch.compiler.is_compiling():
        _warned.add(reason)
        warnings.warn(f"sluice.accelerate: {reason}", UserWarning, stacklevel=3)


def _stock(layer: nn.Module) -> MethodType:
    """The forward an accelerated layer had before."""
    return layer.__dict__[_KEPT] or MethodType(type(layer).forward, layer)


def _slot(layer: nn.Module) -> str:
    """Which attribute holds the forward: accelerate's hooks wrap it and keep it elsewhere."""
    return "_old_forward" if "_old_forward" in layer.__dict__ else "forward"


@contextlib.contextmanager
def _child_hooks(layer: nn.Module) -> Iterator[None]:
    """Fire accelerate's hooks of submodules whose weights are used without calling them."""
    hooked = [(child, child._hf_hook) for child in (layer.conv1d, layer.norm) if _hook(child)]
    for child, hook in hooked:
        hook.pre_forward(child)
    yield
    for child, hook in reversed(hooked):
        hook.post_forward(child, ())


def _hook(module: nn.Module):
    return getattr(module, "_hf_hook", None)
