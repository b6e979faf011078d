"""What sluice uses of SGLang that SGLang does not promise, in one place.

Tried with SGLang 0.5.23 (its wheel, on a CPU). Read in the source of August 2026 (cce0a124).
``missing`` looks for what registration needs; if a name is gone, one line in the log says which,
and SGLang's command line does not know ``sluice``.

- ``add_linear_attn_kernel_backend_choices``: the names that the command line takes.
- ``HookRegistry`` around ``attn_backend_wrapper``: SGLang's own list of backends ends with an error
  for a name it does not know, so the class it builds is exchanged while it builds.
- ``GDNAttnBackend``: the base class. ``forward_decode`` and ``forward_extend`` are overridden.
- ``runner.linear_attn_backends``: while the base class is built, the backends that are sluice's
  read "triton", because the base class builds kernels by name. They serve what sluice does not.
- ``forward_metadata``: ``query_start_loc``, ``mamba_cache_indices``, ``has_mamba_track_mask``.
- ``forward_batch``: ``extend_prefix_lens``, ``mamba_track_mask``, ``mamba_track_indices`` and
  ``mamba_track_aligned_lens()`` (where the prefix cache wants a state).
- ``req_to_token_pool.mamba2_layer_cache(layer)``: ``conv[0]``, ``temporal``, and ``replayssm_d``,
  which is set if ReplaySSM is on. Then SGLang's own kernels run.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

_WRAPPER = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"
_HOME = "sglang.srt.layers.attention.linear.gdn_backend"
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


def asked(name: str) -> tuple[bool, bool]:
    """Whether decode and prefill are to be served by the backend of this name."""
    from sglang.srt.runtime_context import get_exec

    flags = get_exec().mamba
    base = flags.linear_attn_backend
    decode = flags.linear_attn_decode_backend or base
    prefill = flags.linear_attn_prefill_backend or base
    return decode == name, prefill == name


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
