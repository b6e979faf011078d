"""What sluice uses of SGLang that SGLang does not promise, in one place.

Tried with SGLang 0.5.20, 0.5.22 and 0.5.23 (their wheels, on a CPU). Read in the source of August
2026 (cce0a124).
``missing`` looks for what registration needs; if a name is gone, one line in the log says which,
and SGLang's command line does not know ``sluice``.

- ``add_linear_attn_kernel_backend_choices``: the names that the command line takes.
- ``HookRegistry`` around ``attn_backend_wrapper``: SGLang's own list of backends ends with an error
  for a name it does not know, so the class it builds is exchanged while it builds.
- ``GDNAttnBackend``: the base class. ``forward_decode`` and ``forward_extend`` are overridden.
- ``runner.linear_attn_backends``: while the base class is built, the backends that are sluice's
  read "triton", because the base class builds kernels by name. They serve what sluice does not.
- ``runner.model``: its modules with ``layer_id`` and ``conv_weights``, for which kernels are
  compiled before requests. Without them the first forward pass compiles.
- ``forward_metadata``: ``query_start_loc``, ``mamba_cache_indices``, ``has_mamba_track_mask``.
- ``forward_batch``: ``extend_prefix_lens``, ``mamba_track_mask``, ``mamba_track_indices`` and
  ``mamba_track_aligned_lens()`` (where the prefix cache wants a state).
- ``register_resolution_hook`` around ``handle_page_major_kv_layout``: with unified memory, SGLang
  refuses backends that are not on its list of those whose kernels follow a pool's strides. While it
  looks, sluice's read "triton". A release without the hook refuses sluice there.
- ``req_to_token_pool.mamba2_layer_cache(layer)``: ``conv[0]``, ``temporal``, and ``replayssm_d``,
  which is set if ReplaySSM is on. Then SGLang's own kernels run.

For draft tokens also these:

- ``linear_attn_verify_backend``; ``backend.topk`` (without it, SGLang's own kernels serve them),
  ``backend.enable_unified_memory``, ``read_ragged_verify_mode``: forms that sluice does not serve.
- ``forward_batch.spec_info``: ``draft_token_num`` and ``ragged_verify_layout``.
- ``mamba_pool.mamba_cache``: the pools of all layers, with ``intermediate_ssm`` [layers, rows, T,
  HV, V, K], whose memory holds the drafts; ``mamba_map``: a layer's place in them.
- ``scatter_mamba_states_after_mtp_verify``, which copies states of draft tokens into the pools:
  ``update_mamba_state_after_mtp_verify`` calls it by this name of its module, and sluice's commit
  is put there. If it has other arguments or is not called, SGLang's own kernels serve them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

_WRAPPER = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"
_HOME = "sglang.srt.layers.attention.linear.gdn_backend"
_COMMIT = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
_SCATTER = "scatter_mamba_states_after_mtp_verify"
_SCATTERED = (
    "mamba_caches",
    "state_indices_tensor",
    "last_correct_step_indices",
    "mamba_track_indices",
    "mamba_steps_to_track",
    "src_indices_raw",
)
_LAYOUT = "handle_page_major_kv_layout"
_FLAGS = ("linear_attn_backend", "linear_attn_decode_backend", "linear_attn_prefill_backend")
_USED = 5  # older releases do not have the last one: where SGLang's own kernels keep a row
_KEPT = "sluice_drafts"
_log = logging.getLogger("sglang.srt.plugins.sluice")
_said: set[str] = set()
_offered: list[str] = []


def say_once(text: str, level: int = logging.INFO) -> None:
    """One line in SGLang's log, once per process."""
    if text not in _said:
        _said.add(text)
        _log.log(level, "sluice: %s", text)


def warn_once(text: str) -> None:
    """The same as a warning: something that sluice was asked for stays with SGLang, or is slow."""
    say_once(text, logging.WARNING)


def missing() -> str | None:
    """What this SGLang lacks, in words; None if nothing."""
    for module, name in (
        ("sglang.srt.server_args", "add_linear_attn_kernel_backend_choices"),
        ("sglang.srt.plugins.hook_registry", "HookRegistry"),
        ("sglang.srt.plugins.hook_registry", "HookType"),
        ("sglang.srt.layers.attention.linear.utils", "LinearAttnKernelBackend"),
        ("sglang.srt.layers.attention.linear.utils", "LinearAttnBackends"),
        ("sglang.srt.runtime_context", "get_exec"),
    ):
        try:
            getattr(importlib.import_module(module), name)
        except Exception as gone:  # a broken install raises anything
            return f"this SGLang has no {module}.{name} ({gone})"
    return None


def offer(name: str, around: Callable[..., Any]) -> None:
    """Let the command line take ``name``, and call ``around`` where backends are built."""
    if name in _offered:
        return
    _offered.append(name)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_linear_attn_kernel_backend_choices

    add_linear_attn_kernel_backend_choices([name])
    HookRegistry.register(_WRAPPER, around, HookType.AROUND)
    _offer_for_strided_pools(name)


def _offer_for_strided_pools(name: str) -> None:
    """Unified memory strides pools between slots, which the operators take."""
    try:
        hooks = importlib.import_module("sglang.srt.arg_groups.resolution_hooks")
        declare = importlib.import_module("sglang.srt.arg_groups.overrides").declare_resolution
        view = importlib.import_module("sglang.srt.arg_groups.model_override_base").resolving_view
        register = hooks.register_resolution_hook(_LAYOUT)
    except (ImportError, AttributeError, ValueError):
        return

    def look(server_args: Any, previous: Callable[[Any], None]) -> None:
        given = {flag: getattr(view(server_args), flag, None) for flag in _FLAGS}
        ours = [flag for flag, value in given.items() if value == name]
        if not ours:
            previous(server_args)
            return
        declare(server_args, name, **dict.fromkeys(ours, "triton"))
        try:
            previous(server_args)
        finally:
            declare(server_args, name, **dict.fromkeys(ours, name))

    register(look)


def asked(name: str) -> tuple[bool, bool, bool]:
    """Whether decode, prefill and draft tokens are to be served by the backend of this name.

    As in SGLang, draft tokens follow decode unless ``--linear-attn-verify-backend`` is given.
    """
    from sglang.srt.runtime_context import get_exec

    flags = get_exec().mamba
    base = flags.linear_attn_backend
    decode = flags.linear_attn_decode_backend or base
    prefill = flags.linear_attn_prefill_backend or base
    verify = getattr(flags, "linear_attn_verify_backend", None) or decode
    return decode == name, prefill == name, verify == name


def deterministic() -> bool:
    """``--enable-deterministic-inference``."""
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)


def base() -> type:
    """SGLang's own backend."""
    found: type = importlib.import_module(_HOME).GDNAttnBackend
    return found


@contextlib.contextmanager
def in_place_of_own(kind: type) -> Iterator[None]:
    """Within this scope SGLang finds ``kind`` under the name of its own backend."""
    home = importlib.import_module(_HOME)
    kept = home.GDNAttnBackend
    home.GDNAttnBackend = kind
    try:
        yield
    finally:
        home.GDNAttnBackend = kept


@contextlib.contextmanager
def triton_instead(runner: Any, decode: bool, prefill: bool) -> Iterator[None]:
    """Within this scope the runner's backends that are sluice's read "triton"."""
    from sglang.srt.layers.attention.linear.utils import LinearAttnBackends, LinearAttnKernelBackend

    kept, triton = runner.linear_attn_backends, LinearAttnKernelBackend.TRITON
    runner.linear_attn_backends = LinearAttnBackends(
        decode=triton if decode else kept.decode,
        prefill=triton if prefill else kept.prefill,
        verify=kept.verify,
    )
    try:
        yield
    finally:
        runner.linear_attn_backends = kept


def pad_slot(pool: Any) -> int:
    """0 where slot 0 is reserved for padded rows, else -1."""
    for owner in (getattr(pool, "mamba_allocator", None), getattr(pool, "mamba_pool", None)):
        free = getattr(owner, "free_slots", None)
        if free is not None and len(free):
            return 0 if min(int(slot) for slot in free) >= 1 else -1
    return -1


def pools(pool: Any) -> Any:
    """The states and conv windows of all layers."""
    return pool.mamba_pool.mamba_cache


def layers(runner: Any) -> Iterator[Any]:
    """The gated delta layers of a runner's model whose states are in its pools.

    None where the model is not there yet: they are found with their first call then.
    """
    model = getattr(runner, "model", None)
    known = getattr(runner.req_to_token_pool, "mamba_map", ())
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        if getattr(module, "layer_id", None) in known and isinstance(
            getattr(module, "conv_weights", None), torch.Tensor
        ):
            yield module


def layer_index(pool: Any, layer_id: int) -> int:
    """The place of a layer in them."""
    return int(pool.mamba_map[layer_id])


def refuses_drafts(backend: Any, caches: Any, most: int) -> str | None:
    """Why drafts of this configuration stay with SGLang, in words; None if they need not.

    "": there are none.
    """
    if not hasattr(caches, "intermediate_ssm"):
        return ""
    space = caches.intermediate_ssm
    if space is None:
        return "ReplaySSM"
    if getattr(backend, "topk", 2) > 1:
        return "trees of drafts"
    if space.shape[2] > most:
        return f"more than {most} tokens of a request"
    if getattr(backend, "enable_unified_memory", False):
        return "unified memory"
    if _ragged():
        return "drafts of different lengths"
    if len(caches.conv) != 1 or not space.is_contiguous():
        return "pools of another layout"
    return None


def _ragged() -> bool:
    try:
        home = importlib.import_module("sglang.srt.speculative.ragged_verify")
    except ImportError:
        return False
    return bool(home.read_ragged_verify_mode().value != "static")


def commit_with(commit: Callable[..., None]) -> str | None:
    """Let ``commit(drafts, slots, steps, kept_slots, kept_steps)`` serve pools that have drafts.

    Pools without them are SGLang's own function's. Returns what this SGLang lacks for it, in words.
    """
    try:
        home = importlib.import_module(_COMMIT)
        own = getattr(home, _SCATTER)
        caller = inspect.unwrap(home.HybridLinearAttnBackend.update_mamba_state_after_mtp_verify)
    except (ImportError, AttributeError) as gone:
        return f"a commit that this SGLang does not have ({gone})"
    arguments = tuple(inspect.signature(own).parameters)
    if arguments not in (_SCATTERED, _SCATTERED[:_USED]):
        return f"other arguments of {_SCATTER}"
    if _SCATTER not in caller.__code__.co_names:
        return f"a commit without {_SCATTER}"
    if hasattr(own, _KEPT):
        return None

    @functools.wraps(own)
    def scatter(*args: Any, **options: Any) -> None:
        given = dict(zip(_SCATTERED, args, strict=False)) | options
        drafts = kept_drafts(given["mamba_caches"])
        if drafts is None:
            own(*args, **options)
        else:
            commit(drafts, *(given[name] for name in _SCATTERED[1:_USED]))

    setattr(scatter, _KEPT, True)
    setattr(home, _SCATTER, scatter)
    return None


def keep_drafts(caches: Any, drafts: Any) -> None:
    """These pools' drafts are sluice's from now on."""
    setattr(caches.intermediate_ssm, _KEPT, drafts)


def kept_drafts(caches: Any) -> Any:
    """The drafts of these pools, or None."""
    return getattr(getattr(caches, "intermediate_ssm", None), _KEPT, None)
