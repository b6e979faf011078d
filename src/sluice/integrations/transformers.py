"""transformers models made fast in place: ``accelerate(model)``, undone by ``restore(model)``.

``install()`` does the same for models that transformers builds later, ``uninstall()`` undoes it.

Each gated delta layer keeps its class, parameters and submodules. Only the ``forward`` of the
instance is replaced, by one with the same signature that uses transformers' own cache. Importing
this module does not import transformers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import threading
import warnings
from collections.abc import Iterator
from types import MethodType
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from sluice.contract.errors import ContractError, SluiceError
from sluice.integrations import transformers_cache as states
from sluice.integrations import transformers_private as private
from sluice.integrations.transformers_packing import borders_given, borders_of_positions
from sluice.layers.gated_delta_net import mix, trained, wants_gradient
from sluice.layers.rows import Rows, last_inputs, pack
from sluice.layers.weights import ACCELERATED_SHAPE as _SHAPE
from sluice.layers.weights import LAYERS, is_known, shape_of

# attributes of an accelerated layer
_KEPT, _BORDERS, _HOOK = (f"_sluice_{x}" for x in ("kept", "borders", "hook"))
_choosing = threading.RLock()  # the choice is a global of a model's file
_warned: set[str] = set()
_installed: dict[str, type[nn.Module]] = {}  # by their names in transformers
_watching: list[RemovableHandle] = []  # while installed: what watches the parents of new layers

_FILES = {
    "Qwen3NextGatedDeltaNet": "qwen3_next",
    "Qwen3_5GatedDeltaNet": "qwen3_5",
    "Qwen3_5MoeGatedDeltaNet": "qwen3_5_moe",
    "Qwen4ExpTextGatedDeltaNet": "qwen4_exp",
}


def accelerate(model: nn.Module) -> nn.Module:
    """Run every gated delta layer of a transformers model through sluice, in place.

    Outputs, cache objects, ``generate()``, state dicts and submodules stay as they were. Padding on
    either side is exact, and so are packed sequences: ``cu_seq_lens_q``, or else ``seq_idx`` or
    ``position_ids`` that begin anew, from which the host reads the borders. Layers of other classes
    are left alone. Training works the same way: gradients are exact, also of packed sequences and
    with gradient checkpointing. A layer's stock forward runs, with one warning, while a cache
    records its past, and with gradients from a cache that holds tokens.

    Args:
        model: a Qwen3-Next, Qwen3.5, Qwen3.5-MoE or Qwen4-Exp model, or any module that holds its
            layers. Accelerating twice has no further effect.

    Returns:
        ``model`` itself.

    Raises:
        ContractError: the model has no layer of a known class, or one with an activation that no
            operator serves. Nothing is changed then.
    """
    layers = known_layers(_module("accelerate", model))
    if not layers:
        expected = f"a module with layers of {', '.join(LAYERS)}"
        raise ContractError("accelerate", "model", expected, type(model).__name__)
    shapes = [shape_of(layer) for layer in layers]  # before any change, because it may refuse
    for layer, shape in zip(layers, shapes, strict=True):
        if not is_accelerated(layer):
            name = private.forward_slot(layer)
            layer.__dict__[_SHAPE], layer.__dict__[_KEPT] = shape, layer.__dict__.get(name)
            # a partial and not a method: pickle finds a method by its name in the class
            layer.__dict__[name] = functools.partial(_forward, layer)
    for parent in model.modules():
        for name, child in parent.named_children():
            if is_known(child):
                _watch(parent, name, child)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Give every accelerated layer its own forward back; returns ``model``.

    Raises:
        ContractError: not a module. A module without accelerated layers is left as it is.
    """
    for layer in known_layers(_module("restore", model)):
        if is_accelerated(layer):
            name, stock = private.forward_slot(layer), _stock(layer)
            if name == "forward" and layer.__dict__[_KEPT] is None:
                del layer.__dict__[name]  # the class's own shows again
            else:
                layer.__dict__[name] = stock
            del layer.__dict__[_SHAPE], layer.__dict__[_KEPT]
            layer.__dict__.pop(_BORDERS, None)
            if hook := layer.__dict__.pop(_HOOK, None):
                hook.remove()
    return model


def _module(op: str, model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        got = repr(model) if isinstance(model, str) else type(model).__name__
        raise ContractError(op, "model", "a loaded model (torch.nn.Module)", got)
    return model


def install() -> None:
    """Accelerate the gated delta layers of every model that transformers builds from now on.

    It uses ``transformers.monkey_patching``: ``from_pretrained`` and ``from_config`` then build a
    subclass of each known layer, whose instances are accelerated from the start. Existing models
    stay as they are, and ``restore(model)`` works as usual. A layer that no operator serves stays
    stock, with a warning that says why. Installing twice has no further effect.

    Raises:
        SluiceError: this release of transformers has no such registry, its registry fails, or it
            does not pass the borders of packed sequences to its layers (``accelerate(model)`` works
            in these cases); or another library has registered one of the classes.
    """
    patching = _registration()
    kinds = {name: kind for name, kind in _known_classes().items() if name not in _installed}
    for name, kind in kinds.items():
        if name in patching.get_patch_mapping():
            raise SluiceError(f"install: {name} is registered already, by another library")
        if not _takes_borders(kind):
            text = "install: this transformers drops borders of packed sequences on the way to its "
            raise SluiceError(text + "layers; use sluice.accelerate(model)")
    made = {name: _accelerated_class(kind) for name, kind in kinds.items()}
    patching.register_patch_mapping(made)
    _installed.update(made)
    if not _watching:
        _watching.append(register_module_module_registration_hook(_watch_new))
    try:  # some releases fail here if an optional package of another model is missing
        with patching.apply_patches():
            pass
    except Exception as error:
        uninstall()
        _put_back(kinds, made)
        text = f"install: the registration of this transformers fails here ({error})"
        raise SluiceError(f"{text}; use sluice.accelerate(model)") from error


def uninstall() -> None:
    """Undo ``install`` for models built from now on; existing models stay accelerated."""
    if _installed:
        _registration().unregister_patch_mapping(list(_installed))
        _installed.clear()
        _watching.pop().remove()


def known_layers(model: nn.Module) -> list[nn.Module]:
    """The gated delta layers of a model, in order."""
    return [module for module in model.modules() if is_known(module)]


def is_accelerated(layer: nn.Module) -> bool:
    """Whether a layer runs through sluice."""
    return _SHAPE in layer.__dict__


@contextlib.contextmanager
def plain_torch(model: nn.Module) -> Iterator[None]:
    """Within this scope, stock layers use their own torch functions even if FLA is installed.

    transformers chooses FLA when a model file is imported, whatever the device; on a CPU Triton
    then raises. The choice is a global of the model file, so use this in tests and measurements,
    not in several threads.
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
    noted = self.__dict__.get(_BORDERS)  # noted by the decoder layer, if it does not pass them
    if noted is not None:
        setattr(self, _BORDERS, None)  # for this call only; Dynamo does not support dict.pop
    borders = borders_given(hidden_states, {**noted, **kwargs} if noted else kwargs)
    training = _wants_gradients(self, hidden_states)
    reason = _why_stock(self, cache_params, training)
    if reason is not None:
        _warn_once(reason)
        if borders is not None:
            expected = f"None: {reason}"
            raise ContractError("accelerate", "cu_seq_lens_q", expected, "packed sequences")
        given = {"cache_params": cache_params, "attention_mask": attention_mask, **kwargs}
        if hidden_states.device.type != "cpu" or torch.compiler.is_compiling():
            return _stock(self)(hidden_states, **given)
        with _choosing, plain_torch(self):  # transformers may have chosen FLA's functions
            return _stock(self)(hidden_states, **given)
    if attention_mask is not None:  # some releases pass the mask of earlier tokens too
        attention_mask = attention_mask[:, -hidden_states.shape[1] :]
    run = _train if training else _infer
    return run(self, hidden_states, cache_params, attention_mask, borders)


def _infer(layer: nn.Module, x: Tensor, cache, mask: Tensor | None, borders: Tensor | None):
    """Run the operators on the cache's states, in place."""
    shape, window, state, kept = layer.__dict__[_SHAPE], None, None, True
    if cache is not None:
        found = states.states(cache, layer.layer_idx)
        kept = found is not None
        n = x.shape[0] if borders is None else borders.shape[0] - 1
        window, state = _zero_states(shape, x, n) if found is None else found
    rows = Rows(window, state, state_layout="kv", cu_seqlens=borders)
    hooked = private.fire_hooks(layer, ("conv1d", "norm"))
    if borders is not None and x.shape[0] > 1:  # packed rows, made into one row
        out = mix(layer, shape, x.flatten(0, 1).unsqueeze(0), rows).view(x.shape)
    else:
        out = mix(layer, shape, x, rows, mask)
    private.end_hooks(hooked)
    if not kept:
        states.keep(cache, layer.layer_idx, window, state, shape.conv_width)
    return out


def _train(layer: nn.Module, x: Tensor, cache, mask: Tensor | None, borders: Tensor | None):
    """The operators with gradients, from zero; a new cache keeps the final states."""
    if mask is not None and borders is not None:
        raise ContractError("accelerate", "attention_mask", "None beside cu_seq_lens_q", "both")
    shape = layer.__dict__[_SHAPE]
    hooked = private.fire_hooks(layer, ("conv1d", "norm"))
    rows = Rows(state_layout="kv", cu_seqlens=borders)
    flat = x.flatten(0, 1).unsqueeze(0) if borders is not None else x
    made = trained(layer, shape, flat, rows, mask)
    private.end_hooks(hooked)
    if cache is not None:
        with torch.no_grad():
            inputs, finals = made.inputs.detach(), made.state.detach()
            if mask is not None:
                borders = pack(mask != 0, rows).cu_seqlens
            windows = last_inputs(inputs, borders, shape.conv_width)
            if mask is not None:
                windows, finals = windows[1::3], finals[1::3]
            windows, finals = windows.contiguous(), finals.contiguous()
            states.keep(cache, layer.layer_idx, windows, finals, shape.conv_width)
    return made.y.view(x.shape)


def _is_start(layer: nn.Module, cache) -> bool:
    """Whether a call begins its sequences."""
    return cache is None or states.states(cache, layer.layer_idx) is None


def _zero_states(shape, x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """States as transformers keeps them: W columns of the window, and [B, HV, K, V] float32."""
    s = shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    window = x.new_zeros(n, s.conv_channels, s.conv_width)
    return window, x.new_zeros(n, s.num_v_heads, s.head_k_dim, s.head_v_dim, dtype=dtype)


def _wants_gradients(layer: nn.Module, x: Tensor) -> bool:
    if torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export():
        return False  # a graph has no gradients; the stock layer's loop would fix its length
    return wants_gradient(layer, x)


def _why_stock(layer: nn.Module, cache, training: bool) -> str | None:
    """Why transformers runs this call; None if sluice does."""
    if cache is None:
        return None
    if states.records_past(cache, layer.layer_idx):
        return "the cache records its past, which only transformers' own forward does"
    if training and not _is_start(layer, cache):
        return (
            "gradients from a cache that holds tokens: transformers' own forward runs; call the "
            "model under torch.no_grad() or torch.inference_mode() to use sluice"
        )
    return None


def _warn_once(reason: str) -> None:
    if reason not in _warned and not torch.compiler.is_compiling():
        _warned.add(reason)
        warnings.warn(f"sluice.accelerate: {reason}", UserWarning, stacklevel=3)


def _registration():
    """transformers' registry of replaced classes."""
    try:
        return importlib.import_module("transformers.monkey_patching")
    except ModuleNotFoundError as missing:
        text = "install: transformers 5.9 or newer, whose monkey_patching replaces classes"
        raise SluiceError(f"{text}, is not there; use sluice.accelerate(model)") from missing
    except Exception as broken:  # a broken install raises anything
        raise SluiceError(f"install: transformers cannot be imported: {broken!r}") from broken


def _known_classes() -> dict[str, type[nn.Module]]:
    """The known layer classes of this release of transformers."""
    found = {}
    for name, family in _FILES.items():
        path = f"transformers.models.{family}.modeling_{family}"
        with contextlib.suppress(ModuleNotFoundError):
            found[name] = getattr(importlib.import_module(path), name)
    return found


def _put_back(kinds: dict[str, type[nn.Module]], made: dict[str, type[nn.Module]]) -> None:
    """Restore the classes: a registration that fails half-way leaves some replaced."""
    for module in list(sys.modules.values()):
        for name, kind in kinds.items():
            if getattr(module, "__dict__", {}).get(name) is made[name]:
                setattr(module, name, kind)


def _accelerated_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the same name whose instances are accelerated from the start."""

    def init(self: nn.Module, *args, **kwargs) -> None:
        kind.__init__(self, *args, **kwargs)
        try:
            accelerate(self)
        except ContractError as refusal:
            _warn_once(f"a layer stays as transformers has it: {refusal}")

    def reduce(self: nn.Module, protocol: SupportsIndex) -> Any:
        """Pickled as the stock class; the accelerated forward is an attribute, and goes along."""
        return _blank, (kind,), self.__dict__

    body = {"__init__": init, "__module__": kind.__module__, "__doc__": kind.__doc__}
    body["__reduce_ex__"] = reduce
    return type(kind.__name__, (kind,), body)


def _blank(kind: type[nn.Module]) -> nn.Module:
    """An instance that pickle or copy fills."""
    return kind.__new__(kind)


def _takes_borders(kind: type) -> bool:
    """Whether this release passes the borders of packed sequences to its gated delta layers."""
    parameters = inspect.signature(inspect.unwrap(kind.forward)).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def _watch(parent: nn.Module, name: str, layer: nn.Module) -> None:
    """Let a decoder layer give its gated delta layer what it would keep for itself."""
    if _HOOK not in layer.__dict__:
        give = functools.partial(_give_borders, name, _takes_borders(type(layer)))
        layer.__dict__[_HOOK] = parent.register_forward_pre_hook(give, with_kwargs=True)


def _watch_new(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """The same for a layer that ``install`` accelerated, when it gets its parent."""
    if child is not None and is_known(child) and is_accelerated(child):
        _watch(parent, name, child)


def _give_borders(name: str, passed_on: bool, parent: nn.Module, args, kwargs):
    """Before a decoder layer runs: borders as one of its arguments, which it passes on.

    So they are also there when a checkpoint calls it again. Before 5.9 it passes nothing on, and
    they are noted at the gated delta layer.
    """
    layer, x = getattr(parent, name), args[0] if args else kwargs["hidden_states"]
    names = ("cu_seq_lens_q", "seq_idx")
    found = {key: kwargs[key] for key in names if kwargs.get(key) is not None}
    begins = x.shape[1] > 1 and _is_start(layer, kwargs.get("past_key_values"))
    if begins and not found and kwargs.get("attention_mask") is None:
        borders = borders_of_positions(x, kwargs.get("position_ids"))
        found = {} if borders is None else {"cu_seq_lens_q": borders}
    if not passed_on:
        layer.__dict__[_BORDERS] = found
    return args, {**kwargs, **found}


def _stock(layer: nn.Module) -> MethodType:
    """The forward that an accelerated layer had before."""
    return layer.__dict__[_KEPT] or private.class_forward(layer)
