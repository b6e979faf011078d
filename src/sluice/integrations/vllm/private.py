"""What sluice uses of vLLM that vLLM does not promise, in one place.

Tried with vLLM 0.32.0 (its CPU build) and the Python of 0.33.0 on the same compiled part. Read in
the source of August 2026 (commit a014e35f).
``missing`` looks for everything when the plug-in is loaded; if a name is gone, one line in the log
says which, and vLLM's own layers run. ``tests/engines`` fail then.

- ``QwenGatedDeltaNetAttention``: its registry of replaced layers goes by this name. sluice's layer
  is a subclass, because vLLM calls ``__init__`` only of those.
- ``forward_cuda``, ``forward_cpu``: the methods vLLM chooses by platform, which take hidden states
  and return the output. Overridden. Until 0.25 the output's tensor was a second argument.
- The custom op ``qwen_gdn_attention_core_fused_norm_packed`` and the method it calls. vLLM cuts its
  graphs at this op by name, so a new op would be captured with the rest. Releases before August
  2026 lack it. There ``qwen_gdn_attention_core`` and its method ``_forward_core`` take its place:
  the projections travel as its first two tensors, and an empty tensor as its third.
- ``_warmup_prefill_kernels``: vLLM calls it while it measures memory, before requests.
- ``bind_kv_cache``: a CPU build without compilation calls the layer only with requests, so kernels
  are compiled here. Without the name they are compiled by the first request.
- ``kv_cache``: the pair (conv, recurrent) of the layer's pages.
- ``conv1d._cpu_unpacked_conv_weight``: on some CPUs vLLM packs the weight and keeps the original
  under this name. Without it the weight is as it was loaded.
- ``GDNAttentionMetadata``: the fields in ``NEEDED``; those in ``KNOWN`` are understood. A field of
  another name that is set sends the batch to vLLM's own method.
- ``num_prefill_checkpoint_blocks``, ``prefill_checkpoint_alignment`` of the cache spec: vLLM then
  asks prefill for a state inside the prompt. Without them it cuts the prompt there.
- ``get_mamba_prefill_checkpoint_alignment``, ``get_mamba_prefill_checkpoint_grid`` (since 0.33):
  the one distance that all layers' specs must name. Before that it is any token.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from typing import Any

import torch

LAYER = "QwenGatedDeltaNetAttention"
OP = "qwen_gdn_attention_core_fused_norm_packed"
METHOD = "_forward_core_fused_norm_packed"
OLDER_OP, OLDER_METHOD = "qwen_gdn_attention_core", "_forward_core"
_HOME = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"

NEEDED = (
    "num_prefills",
    "num_decodes",
    "num_decode_tokens",
    "num_spec_decodes",
    "num_actual_tokens",
    "has_initial_state",
    "spec_query_start_loc",
    "non_spec_query_start_loc",
    "spec_state_indices_tensor",
    "non_spec_state_indices_tensor",
    "spec_sequence_masks",
    "spec_token_indx",
    "non_spec_token_indx",
    "num_accepted_tokens",
)
KEPT = "_sluice_batch"
"""The name under which ``batch`` leaves what it read in the metadata."""
KNOWN = {
    *NEEDED,
    KEPT,
    "num_prefill_tokens",
    "num_spec_decode_tokens",
    "checkpoint",
    "spec_sequence_masks_cpu",
    "uniform_spec_sequence_length",
    # the prefill part once more, which follows from the fields above
    "prefill_query_start_loc",
    "prefill_state_indices",
    "prefill_has_initial_state",
    # how vLLM's own kernels divide their work
    "chunk_indices",
    "chunk_offsets",
    "aiter_prefill_metadata",
    "flashinfer_checkpoint_plan",
    "nums_dict",
    "batch_ptr",
    "token_chunk_offset_ptr",
}
CHECKPOINTS = ("num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment")
"""Of the cache spec: how many states inside a prompt, and after a multiple of how many tokens."""
_PAGES = 64
"""Pages of an imagined pool: their number is no part of a kernel."""


def missing() -> str | None:
    """What this vLLM lacks, in words; None if nothing."""
    try:
        home = importlib.import_module(_HOME)
        custom_op = importlib.import_module("vllm.model_executor.custom_op")
        kind = getattr(home, LAYER)
        registry = custom_op.op_registry_oot, custom_op.PluggableLayer.register_oot
    except Exception as gone:  # a broken install raises anything
        return f"this vLLM has no {LAYER} that a plug-in may replace ({gone})"
    del registry
    names = ("forward_cuda", OLDER_METHOD, "_warmup_prefill_kernels")
    for name in (*names, "get_state_shape", "get_state_dtype"):
        if not hasattr(kind, name):
            return f"{LAYER} of this vLLM has no {name}"
    if len(inspect.signature(kind.forward).parameters) != 2:
        return f"{LAYER}.forward of this vLLM takes more than hidden_states"
    if not (_packed(kind) or hasattr(torch.ops.vllm, OLDER_OP)):
        return f"this vLLM has neither op {OP} nor {OLDER_OP}"
    fields = {field.name for field in dataclasses.fields(home.GDNAttentionMetadata)}
    gone = [name for name in NEEDED if name not in fields]
    return f"its metadata has no {', '.join(gone)}" if gone else None


def base() -> type:
    """vLLM's own layer."""
    found: type = getattr(importlib.import_module(_HOME), LAYER)
    return found


def offer(kind: type) -> str | None:
    """Register the layer. Where another plug-in has done so before, its name."""
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    found = op_registry_oot.get(LAYER)
    if found is None:
        PluggableLayer.register_oot(name=LAYER)(kind)
        return None
    return None if found is kind else f"{found.__module__}.{found.__qualname__}"


def config() -> Any:
    """The engine's configuration, while it builds its model."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()


def platform() -> str:
    """ "cuda", "cpu", or the name of another platform."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        return "cuda"
    return "cpu" if current_platform.is_cpu() else str(current_platform.device_name)


def batch_invariant() -> bool:
    """Whether the user asked for results that do not depend on the batch."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))


@functools.cache
def invariant_backend() -> type:
    """vLLM's attention backend of these layers, made to say that they are batch-invariant.

    vLLM's own lookup raises in that mode, so the class is taken from where it is defined. Its
    metadata builder stays the same class: vLLM asks for it by identity.
    """
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend

    return type(
        GDNAttentionBackend.__name__,
        (GDNAttentionBackend,),
        {"supports_batch_invariance": classmethod(lambda cls: True)},
    )


def metadata(prefix: str) -> Any:
    """The metadata of the current batch for a layer; None while vLLM measures memory."""
    from vllm.forward_context import get_forward_context

    found = get_forward_context().attn_metadata
    return found.get(prefix) if isinstance(found, dict) else None


def unknown_fields(metadata: Any) -> list[str]:
    """Names of fields that are set and that this plug-in does not know."""
    return [
        name
        for name, value in vars(metadata).items()
        if name not in KNOWN and value is not None and value is not False
    ]


def new_fields() -> list[str]:
    """Names of the metadata's fields that this plug-in does not know, set or not."""
    kind = importlib.import_module(_HOME).GDNAttentionMetadata
    return [field.name for field in dataclasses.fields(kind) if field.name not in KNOWN]


def _packed(kind: type) -> bool:
    return hasattr(torch.ops.vllm, OP) and hasattr(kind, METHOD)


def op() -> Any:
    """The op at which vLLM cuts its graphs: (qkvz, ba, out, layer_name).

    It calls the layer's ``_forward_core_fused_norm_packed(qkvz, ba, out)``; in a release without
    that, ``_forward_core(qkvz, ba, empty, out)``.
    """
    if _packed(base()):
        return getattr(torch.ops.vllm, OP)
    core = getattr(torch.ops.vllm, OLDER_OP)

    def older(qkvz: torch.Tensor, ba: torch.Tensor, out: torch.Tensor, layer_name: Any) -> None:
        core(qkvz, ba, ba.new_empty(0), out, layer_name=layer_name)

    return older


def name_encoder() -> Any:
    """What vLLM makes of a layer's name before it goes into an op."""
    return getattr(importlib.import_module("vllm.utils.torch_utils"), "_encode_layer_name", str)


def conv_weight(layer: Any) -> torch.Tensor:
    """[D, W], as it was loaded."""
    weight = _loaded_conv_weight(layer)
    return weight.squeeze(1) if weight.dim() == 3 else weight


def weight_places(layer: Any) -> tuple[int, ...]:
    """Addresses, of which one changes when vLLM loads or packs a weight elsewhere."""
    weights = (_loaded_conv_weight(layer), layer.A_log, layer.dt_bias, layer.norm.weight)
    return tuple(weight.data_ptr() for weight in weights)


def _loaded_conv_weight(layer: Any) -> torch.Tensor:
    found = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", None)
    weight: torch.Tensor = layer.conv1d.weight if found is None else found
    return weight


def choose_forward(layer: Any) -> None:
    """Let a layer that has become vLLM's own choose its forward again."""
    layer._forward_method = getattr(layer, layer._forward_method.__name__)


def device(layer: Any) -> torch.device:
    """Where a layer's parameters are."""
    found: torch.device = layer.A_log.device
    return found


def pages(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's pools (conv, recurrent)."""
    conv, state = layer.kv_cache
    return conv, state


def imagined_pages(spec: Any) -> tuple[torch.Tensor, ...]:
    """Pools with the shapes and strides that vLLM will allocate, without memory."""
    made = []
    for size, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        inner = torch.empty(size, dtype=dtype, device="meta").stride()
        page = spec.page_size_bytes // dtype.itemsize
        shape = (_PAGES, *size)
        made.append(torch.empty_strided(shape, (page, *inner), dtype=dtype, device="meta"))
    return tuple(made)


def conv_dim_first() -> bool:
    """Whether conv pages are [D, L] (``VLLM_SSM_CONV_STATE_LAYOUT=DS``) or [L, D]."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())


def with_checkpoints(spec: Any, config: Any) -> Any:
    """The cache spec, asking for states inside prompts where this vLLM offers that.

    Not where the metadata have fields that this plug-in does not know: vLLM's own kernels may then
    serve a batch, and would leave a state unwritten that the cache counts on.
    """
    offered = {field.name for field in dataclasses.fields(spec)}.issuperset(CHECKPOINTS)
    distance = None if new_fields() or not offered else _checkpoint_distance(config)
    if distance is None:
        return spec
    return dataclasses.replace(spec, **dict(zip(CHECKPOINTS, (1, distance), strict=True)))


def has_checkpoints(spec: Any) -> bool:
    """Whether vLLM will ask prefill for states inside prompts."""
    return getattr(spec, CHECKPOINTS[0], 0) > 0


def _checkpoint_distance(config: Any) -> int | None:
    """Tokens between states inside prompts; None if a layer of the model cannot keep them."""
    home = importlib.import_module("vllm.model_executor.layers.mamba.abstract")
    alignment = getattr(home, "get_mamba_prefill_checkpoint_alignment", None)
    if alignment is None:
        return 1
    found: int | None = alignment(config) and home.get_mamba_prefill_checkpoint_grid(config)
    return found


def logger() -> Any:
    """A logger whose lines appear among vLLM's."""
    from vllm.logger import init_logger

    return init_logger("vllm.plugins.sluice")
