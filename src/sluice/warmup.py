"""Compile everything now, so that no request waits."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import cast

import torch

from sluice import dispatch
from sluice.contract import arguments
from sluice.contract.chunk_length import CHUNK
from sluice.contract.errors import SluiceError
from sluice.contract.names import StateLayout
from sluice.layers.qwen import QwenShape, named
from sluice.model_calls import Kinds, ModelCall, ModelCalls

Models = str | QwenShape | Sequence[str | QwenShape]

STATES = (32, 256, 1024, 4096)
"""States of a decode step: kernels are configured by how many there are, rows times value heads."""
PROMPT, LONG_PROMPT = 130, 2048
"""Tokens; on a GPU, where prompts are cut up, prefill has the long one."""
SHORT_PROMPTS = (1, 3)
"""Tokens of packed sequences so short that kernels are cut for them: prompts beside decode."""
PROCESSES, CORES, PATIENCE = 8, 2, 120
"""Of `sluice warmup`, at most, which share the kernels out: one makes the intermediate code of one
kernel at a time, however many cores there are. Cores for each; seconds to wait for another."""


def warmup(
    models: Models,
    *,
    tp: int = 1,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    gate_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype = torch.float32,
    state_layout: StateLayout = "vk",
    slots_dtype: torch.dtype = torch.int64,
    drafts: int = 0,
    checkpoints: bool = False,
    progress: Callable[[str], None] | None = None,
) -> list[tuple[str, str]]:
    """Compile every kernel that a model of these shapes needs. Nothing runs.

    Calls of any size are covered, of these kinds: packed prompts of a state pool (``slots``,
    ``has_state``, ``cu_seqlens`` in int32) and dense ones whose states are their own, rows less
    than 2**31 elements apart; ``step`` in both ways; ``decode``, ``verify``, ``commit`` and
    ``causal_conv1d`` with ``slots``. Indices and gates may be slices. Other arguments and dtypes
    are other kernels, compiled when they come.

    Compiled kernels are kept on disk by their compilers: a later process finds them. On a GPU all
    cores compile.

    Args:
        models: names (``sluice.layers.qwen``) or shapes; ``tp`` divides named ones.
        device: the GPU where there is one by default. dtype: of activations and weights.
            gate_dtype: of ``A_log`` and ``dt_bias``, by default ``dtype``. state_dtype and
            state_layout: of the recurrent state. slots_dtype: of ``slots``.
        drafts: also compile what engines with this many tokens per row (one and its drafts) need:
            ``decode`` with a state for each token, ``conv_qkv`` with ``window_start``, ``verify``
            into buffers and ``commit_layers``. 0, the default: none of it.
        checkpoints: also compile what prefix caching needs: packed ``prefill`` and ``conv_qkv``
            with checkpoints after every so many chunks, and at positions in int32.
        progress: called with each kernel's name as it is ready.

    Returns:
        for each call of the model, its name and the backend that serves it.

    Raises:
        ContractError: an unknown model, device or dtype.

    >>> import sluice
    >>> from sluice.layers import QwenShape
    >>> tiny = QwenShape("tiny", 32, 1, 2, 4, (0, 1, 2), head_k_dim=8, head_v_dim=8)
    >>> served = sluice.warmup(tiny, device="cpu", dtype=torch.float32)
    >>> len(served) > 8
    True
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = arguments.device("warmup", device)
    kinds = Kinds(dtype, gate_dtype or dtype, state_dtype, state_layout, slots_dtype)
    for name, value in kinds._asdict().items():
        if name != "state_layout":
            arguments.instance("warmup", name, value, torch.dtype, "a torch.dtype")
    told = None if progress is None else lambda name, done, total: progress(name)
    return run(list(forms(models, tp, device, kinds, drafts, checkpoints)), device, told)


def run(
    todo: list[ModelCall],
    device: torch.device,
    progress: dispatch.Progress | None,
    others: Sequence[BaseProcess] = (),
) -> list[tuple[str, str]]:
    """Compile what these calls need: their names, and the backends that serve them.

    ``others`` (``compile_aside``) compile a share each, and are waited for; whatever they leave,
    because they cannot begin or fail, is compiled here.
    """
    n = 1 + len(others)
    specs = [form.spec(device) for form in todo]
    if others:
        dispatch.compile(specs, (0, n), progress)
    for other in others:
        other.join(PATIENCE)
        other.kill()
    dispatch.compile(specs, progress=progress)
    return [
        (form.name, dispatch.explain(spec).chosen or "-")
        for form, spec in zip(todo, specs, strict=True)
    ]


def refused(todo: list[ModelCall], device: torch.device) -> str | None:
    """Why one of these calls cannot be made on a device, in words; None if all can."""
    for form in todo:
        try:
            spec = form.spec(device)
        except SluiceError as error:
            return str(error)
        found = dispatch.explain(spec)
        if found.chosen is None:
            return f"{form.op}: " + "; ".join(f"{name} {reason}" for name, reason in found.refusals)
    return None


def compile_aside(make: Callable[[], tuple[list[ModelCall], torch.device]]) -> list[BaseProcess]:
    """Other processes that begin to compile what ``make`` lists, a share each.

    They are forks of this one, which has imported everything, and must not know a GPU yet: a fork
    of a process that does cannot have one.
    """
    forks = "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()
    n = min(PROCESSES, (os.cpu_count() or 1) // CORES) if forks else 1
    others: list[BaseProcess] = []
    for i in range(1, n):
        process = multiprocessing.get_context("fork").Process
        others.append(process(target=_compile, args=(make, (i, n)), daemon=True))
        others[-1].start()
    return others


def _compile(
    make: Callable[[], tuple[list[ModelCall], torch.device]], share: tuple[int, int]
) -> None:
    """In one of the other processes: compile its share, run nothing, say nothing."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    todo, device = make()
    if device.type == "cuda":
        dispatch.compile([form.spec(device) for form in todo], share)


def forms(
    models: Models,
    tp: int,
    device: torch.device,
    kinds: Kinds,
    drafts: int = 0,
    checkpoints: bool = False,
) -> Iterator[ModelCall]:
    """Every call that compiles a kernel of its own, for each model."""
    several = isinstance(models, Sequence) and not isinstance(models, str)
    for model in cast(Sequence[str | QwenShape], models if several else (models,)):
        if isinstance(model, QwenShape):
            shape = model
        else:
            shape = named("warmup", "models", model).shard(tp)
        yield from _forms(ModelCalls(shape, kinds), device)
        if drafts > 0:
            yield from _draft_forms(ModelCalls(shape, kinds), drafts)
        if checkpoints:
            yield from _checkpoint_forms(ModelCalls(shape, kinds), device)


def _forms(m: ModelCalls, device: torch.device) -> Iterator[ModelCall]:
    for N in sorted({max(1, states // m.shape.num_v_heads) for states in STATES}):
        yield m.call("decode", f"{N} x 1", N, 1)
        yield m.call("decode", f"{N} x 4", N, 4)
        yield m.call("verify", f"{N} x 4", N, 4)
        yield m.call("commit", f"{N} x 4", N, 4)
    for T in (1, 4):
        yield m.call("step", f"pooled 2 x {T}", 2, T, True)
        yield m.call("step", f"dense 2 x {T}", 2, T, False)
    for T in (1, 4, 8):
        yield m.call("causal_conv1d", f"pooled 2 x {T}", 2, T, None)
    long = _long_prompt(device)
    for packed, name in ((True, "packed"), (False, "dense")):
        yield m.call("prefill", f"{name} 2 x {long}", 2, long, packed)
        for T in (*(SHORT_PROMPTS if packed else ()), PROMPT):
            what = f"{name} 2 x {T}"
            yield m.call("causal_conv1d", what, 2, T, packed)
            yield m.call("conv_qkv", what, 2, T, packed)
        yield m.call("conv_qkv", f"{name} 2 x {PROMPT} beside z", 2, PROMPT, packed, True)
    yield m.call("rms_norm_gated", "", PROMPT)


def _draft_forms(m: ModelCalls, T: int) -> Iterator[ModelCall]:
    """What engines with drafts of their own layout call."""
    for N in sorted({max(1, states // m.shape.num_v_heads) for states in STATES}):
        for op in ("decode_each", "verify_buffered", "commit_layers"):
            yield m.call(op, f"{N} x {T}", N, T)
    yield m.call("conv_qkv_start", f"2 x {T}", 2, T)


def _checkpoint_forms(m: ModelCalls, device: torch.device) -> Iterator[ModelCall]:
    """What prefix caching calls."""
    long = _long_prompt(device)
    for every, where in ((CHUNK, "at chunks"), (None, "at positions")):
        yield m.call("prefill_kept", f"packed 2 x {long}, {where}", 2, long, every)
        for T in (*SHORT_PROMPTS, PROMPT):
            yield m.call("conv_qkv_kept", f"packed 2 x {T}, {where}", 2, T, every)
        what = f"packed 2 x {PROMPT} beside z, {where}"
        yield m.call("conv_qkv_kept", what, 2, PROMPT, every, True)


def _long_prompt(device: torch.device) -> int:
    return LONG_PROMPT if device.type == "cuda" else PROMPT
