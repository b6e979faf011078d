"""Compile everything now, so that no request waits."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice import dispatch, library, ops
from sluice.layers.qwen import QwenShape, preset

Models = str | QwenShape | Sequence[str | QwenShape]
Call = tuple[tuple[Any, ...], dict[str, Any]]

STATES = (32, 256, 1024, 4096)
"""States of a decode step: kernels are configured by how many there are, rows times value heads."""
PROMPT, LONG_PROMPT = 130, 2048
"""Tokens; on a GPU, where prompts are cut up, prefill has the long one."""
SHORT_PROMPTS = (1, 3)
"""Tokens of packed sequences so short that kernels are cut for them: prompts beside decode."""
PROCESSES, CORES, PATIENCE = 8, 2, 120
"""Of `sluice warmup`, at most, which share the kernels out: one makes the intermediate code of one
kernel at a time, however many cores there are. Cores for each; seconds to wait for another."""


class Kinds(NamedTuple):
    """What a model's tensors are."""

    dtype: torch.dtype = torch.bfloat16
    gate_dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    state_layout: str = "vk"
    slots_dtype: torch.dtype = torch.int64


class Form(NamedTuple):
    """One way in which an operator is called. Its tensors live while it runs."""

    name: str
    op: str
    make: Callable[[], Call]

    def run(self) -> str:
        """Make the call; the name of the backend that served it."""
        arguments, options = self.make()
        with library.probing() as problems:
            getattr(ops, self.op)(*arguments, **options)
        getattr(ops, self.op)(*arguments, **options)
        return dispatch.explain_problem(problems[0]).chosen or "-"


def warmup(
    models: Models,
    *,
    tp: int = 1,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    gate_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype = torch.float32,
    state_layout: str = "vk",
    slots_dtype: torch.dtype = torch.int64,
    progress: Callable[[str], None] | None = None,
) -> list[tuple[str, str]]:
    """Run every operator once in each form that a model of these shapes calls it in.

    Calls of any size are covered, of these kinds: packed prompts of a state pool (``slots``,
    ``has_state``, ``cu_seqlens`` in int32) and dense ones whose states are their own, rows less
    than 2**31 elements apart; ``step`` in both ways; ``decode``, ``verify``, ``commit`` and
    ``causal_conv1d`` with ``slots``. Indices and gates may be slices. Other arguments and dtypes
    are other kernels, compiled when they come.

    Rows are padding, so that this takes the compiler's time, not the kernels'. Compiled kernels are
    kept on disk by their compilers: a later process finds them. On a GPU all cores compile.

    Args:
        models: names (``sluice.layers.qwen``) or shapes; ``tp`` divides named ones.
        device: the GPU where there is one by default. dtype: of activations and weights.
            gate_dtype: of ``A_log`` and ``dt_bias``, by default ``dtype``. state_dtype and
            state_layout: of the recurrent state. slots_dtype: of ``slots``.
        progress: called with each form's name as it begins.

    Returns:
        for each form, its name and the backend that served it.

    >>> import sluice
    >>> from sluice.layers import QwenShape
    >>> tiny = QwenShape("tiny", 32, 1, 2, 4, (0, 1, 2), head_k_dim=8, head_v_dim=8)
    >>> served = sluice.warmup(tiny, device="cpu", dtype=torch.float32)
    >>> len(served) > 8
    True
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kinds = Kinds(dtype, gate_dtype or dtype, state_dtype, state_layout, slots_dtype)
    return run(list(forms(models, tp, device, kinds)), device, progress)


def run(
    todo: list[Form],
    device: torch.device,
    progress: Callable[[str], None] | None,
    others: Sequence[BaseProcess] = (),
) -> list[tuple[str, str]]:
    """Compile and run these forms: their names, and the backends that served them.

    ``others`` (``compile_aside``) compile a share each, and are waited for; whatever they leave,
    because they cannot begin or fail, is compiled here. With others, each process is a step more
    of the progress.
    """
    progress = progress or (lambda _: None)
    calls, n = [form.run for form in todo], 1 + len(others)
    if others:
        progress(f"compiling, process 1 of {n}")
        with dispatch.compiling(device.type, calls, (0, n)):
            pass
    for i, other in enumerate(others, 2):
        progress(f"compiling, process {i} of {n}")
        other.join(PATIENCE)
        other.kill()
    served = []
    with dispatch.compiling(device.type, calls):
        for form in todo:
            progress(form.name)
            served.append((form.name, form.run()))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return served


def compile_aside(make: Callable[[], tuple[list[Form], torch.device]]) -> list[BaseProcess]:
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


def _compile(make: Callable[[], tuple[list[Form], torch.device]], share: tuple[int, int]) -> None:
    """In one of the other processes: compile its share, run nothing, say nothing."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    todo, device = make()
    if device.type == "cuda":
        with dispatch.compiling("cuda", [form.run for form in todo], share):
            pass


def forms(models: Models, tp: int, device: torch.device, kinds: Kinds) -> Iterator[Form]:
    """Every form, for each model."""
    if isinstance(models, (str, QwenShape)):
        models = (models,)
    for model in models:
        shape = preset(model, tp) if isinstance(model, str) else model
        yield from Forms(shape, device, kinds).all()


class Forms:
    """The calls of one model's layers. Rows with slots are padding."""

    def __init__(self, shape: QwenShape, device: torch.device, kinds: Kinds) -> None:
        self.shape, self.device, self.kinds = shape, device, kinds

    @functools.cached_property
    def state(self) -> dict[str, Any]:
        s, layout = self.shape, self.kinds.state_layout
        tail = (s.head_v_dim, s.head_k_dim)
        tail = tail if layout == "vk" else tail[::-1]
        pool = self.zeros(2, s.num_v_heads, *tail, dtype=self.kinds.state_dtype)
        return {"state": pool, "state_layout": layout}

    @functools.cached_property
    def window(self) -> Tensor:
        return self.zeros(2, self.shape.conv_channels, self.shape.conv_width - 1)

    @functools.cached_property
    def weights(self) -> dict[str, Tensor]:
        s, gates = self.shape, self.kinds.gate_dtype
        return {
            "conv_weight": self.zeros(s.conv_channels, s.conv_width),
            "A_log": self.zeros(s.num_v_heads, dtype=gates),
            "dt_bias": self.zeros(s.num_v_heads, dtype=gates),
            "norm_weight": self.zeros(s.head_v_dim),
        }

    def zeros(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(*size, dtype=dtype or self.kinds.dtype, device=self.device)

    def rows(self, N: int) -> dict[str, Any]:
        """Slots of N padded rows."""
        return {"slots": torch.full((N,), -1, dtype=self.kinds.slots_dtype, device=self.device)}

    def packed(self, N: int, T: int) -> dict[str, Any]:
        """N packed sequences of T tokens that begin anew, in padded rows."""
        bounds = torch.arange(0, N * T + 1, T, dtype=torch.int32)
        known = torch.zeros(N, dtype=torch.bool, device=self.device)
        cu_seqlens = {"cu_seqlens": bounds.to(self.device), "cu_seqlens_cpu": bounds}
        return {**self.rows(N), **cu_seqlens, "has_state": known}

    def tokens(self, B: int, T: int) -> tuple[Tensor, ...]:
        s = self.shape
        q, k = (self.zeros(B, T, s.num_k_heads, s.head_k_dim) for _ in "qk")
        v = self.zeros(B, T, s.num_v_heads, s.head_v_dim)
        g, beta = (self.zeros(B, T, s.num_v_heads, dtype=torch.float32) for _ in "gb")
        return q, k, v, g, beta

    def all(self) -> Iterator[Form]:
        for N in sorted({max(1, states // self.shape.num_v_heads) for states in STATES}):
            yield self.form("decode", f"{N} x 1", self.decode, N, 1)
            yield self.form("decode", f"{N} x 4", self.decode, N, 4)
            yield self.form("verify", f"{N} x 4", self.verify, N, 4)
            yield self.form("commit", f"{N} x 4", self.commit, N, 4)
        for T in (1, 4):
            yield self.form("step", f"pooled 2 x {T}", self.step, 2, T, True)
            yield self.form("step", f"dense 2 x {T}", self.step, 2, T, False)
        for T in (1, 4, 8):
            yield self.form("causal_conv1d", f"pooled 2 x {T}", self.causal_conv1d, 2, T, None)
        long = LONG_PROMPT if self.device.type == "cuda" else PROMPT
        for packed, name in ((True, "packed"), (False, "dense")):
            yield self.form("prefill", f"{name} 2 x {long}", self.prefill, 2, long, packed)
            for T in (*(SHORT_PROMPTS if packed else ()), PROMPT):
                what = f"{name} 2 x {T}"
                yield self.form("causal_conv1d", what, self.causal_conv1d, 2, T, packed)
                yield self.form("conv_qkv", what, self.conv_qkv, 2, T, packed)
            what = f"{name} 2 x {PROMPT} beside z"
            yield self.form("conv_qkv", what, self.conv_qkv, 2, PROMPT, packed, True)
        yield self.form("rms_norm_gated", "", self.rms_norm_gated, PROMPT)

    def form(self, op: str, what: str, make: Callable[..., Call], *sizes: int | None) -> Form:
        return Form(f"{self.shape.name} {op} {what}".rstrip(), op, lambda: make(*sizes))

    def decode(self, N: int, T: int) -> Call:
        return self.tokens(N, T), {**self.state, **self.rows(N)}

    def step(self, N: int, T: int, pooled: bool) -> Call:
        s = self.shape
        qkvz = self.zeros(N, T, s.conv_channels + s.value_dim)
        options = {
            **self.weights,
            **self.state,
            "conv_state": self.window,
            "order": s.order,
            "gate_activation": s.gate_activation,
            **(self.rows(N) if pooled else {}),
        }
        return (qkvz, self.zeros(N, T, 2 * s.num_v_heads)), options

    def verify(self, N: int, T: int) -> Call:
        tokens, options = self.decode(N, T)
        inputs = self.zeros(N, T, self.shape.conv_channels)
        return tokens, {**options, "conv_inputs": inputs, "conv_state": self.window}

    def commit(self, N: int, T: int) -> Call:
        tokens, options = self.verify(N, T)
        accepted = torch.zeros(N, dtype=torch.int64, device=self.device)
        return (ops.verify(*tokens, **options)[1], accepted), {}

    def prefill(self, N: int, T: int, packed: bool) -> Call:
        if packed:
            return self.tokens(1, N * T), {**self.state, **self.packed(N, T)}
        return self.tokens(N, T), self.state

    def causal_conv1d(self, N: int, T: int, packed: bool | None, beside: bool = False) -> Call:
        """``packed`` None: dense, with slots. ``beside``: x is a part of one projection with z."""
        D = self.shape.conv_channels
        rows = self.packed(N, T) if packed else self.rows(N) if packed is None else {}
        x = self.zeros(*((1, N * T) if packed else (N, T)), D + beside * self.shape.value_dim)
        return (x[..., :D], self.weights["conv_weight"]), {"state": self.window, **rows}

    def conv_qkv(self, N: int, T: int, packed: bool, beside: bool = False) -> Call:
        s = self.shape
        (x, weight), options = self.causal_conv1d(N, T, packed, beside)
        raw = self.zeros(*x.shape[:2], s.num_v_heads)
        heads = {"num_k_heads": s.num_k_heads, "num_v_heads": s.num_v_heads}
        widths = {"head_k_dim": s.head_k_dim, "head_v_dim": s.head_v_dim}
        gates = {"a": raw, "b": raw, **{n: self.weights[n] for n in ("A_log", "dt_bias")}}
        return (x, weight), {**heads, **widths, **gates, **options}

    def rms_norm_gated(self, T: int) -> Call:
        x = self.zeros(T, self.shape.num_v_heads, self.shape.head_v_dim)
        options = {"activation": self.shape.gate_activation}
        return (x, x, self.weights["norm_weight"]), options
