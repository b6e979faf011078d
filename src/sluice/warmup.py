"""Compile everything now, so that no request waits."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice import dispatch, library, ops
from sluice.layers.qwen import QwenShape, preset

Models = str | QwenShape | Sequence[str | QwenShape]
Call = tuple[tuple[Any, ...], dict[str, Any]]

BATCHES = (1, 8, 64, 512)
"""Rows of a decode step; kernels are configured by how many states there are."""
PROMPT = (1, 130)
LONG_PROMPTS = ((1, 2048), (8, 1024), (1, 16384), (1, 65536))
"""Sequences and their tokens: on a GPU a prompt is cut up by its length and number of heads."""
BESIDE = ("prefill packed", "prefill dense", "conv")
"""Forms, by what their names contain, that `sluice warmup` has other processes compile meanwhile:
one process makes the intermediate code of one kernel at a time, however many cores there are."""
COLD_SECONDS, CORES, PATIENCE = 0.7, 8, 120
"""A form that takes longer was not on disk; fewer cores have enough to do with one process; seconds
to wait for another."""


class Form(NamedTuple):
    """One way in which an operator is called. Its tensors live while it runs."""

    name: str
    op: str
    make: Callable[[], Call]

    def part(self) -> str | None:
        """Which of BESIDE it belongs to."""
        return next((part for part in BESIDE if part in self.name), None)

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
    state_dtype: torch.dtype = torch.float32,
    state_layout: str = "vk",
    progress: Callable[[str], None] | None = None,
) -> list[tuple[str, str]]:
    """Run every operator once in each form that a model of these shapes calls it in.

    Rows are padding, so that this takes the compiler's time, not the kernels'. Compiled kernels are
    kept on disk by their compilers: a later process finds them. On a GPU all cores compile, and a
    long prompt takes some memory for a moment.

    Args:
        models: names (``sluice.layers.qwen``) or shapes; ``tp`` divides named ones.
        device: the GPU where there is one by default. dtype: of activations. state_dtype and
            state_layout: of the recurrent state.
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
    return run(list(forms(models, tp, device, dtype, state_dtype, state_layout)), device, progress)


def run(
    todo: list[Form], device: torch.device, progress: Callable[[str], None] | None
) -> list[tuple[str, str]]:
    """Compile and run these forms: their names, and the backends that served them."""
    served = []
    with dispatch.compiling(device.type, [form.run for form in todo]):
        for form in todo:
            if progress is not None:
                progress(form.name)
            served.append((form.name, form.run()))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return served


def run_with_others(
    todo: list[Form], device: torch.device, progress: Callable[[str], None] | None, argv: list[str]
) -> list[tuple[str, str]]:
    """``run``, where nothing is on disk yet with other processes that compile a part each.

    ``argv``: the arguments of a `sluice warmup` of these forms. Whatever the others leave, because
    they cannot start or fail, is compiled here.
    """
    run([], device, progress)  # what is imported and begun once
    begin = time.perf_counter()
    served = run(todo[:1], device, progress)
    others = []
    if time.perf_counter() - begin > COLD_SECONDS and (os.cpu_count() or 1) >= CORES:
        others = [_beside(part, argv) for part in BESIDE]
    theirs = [form for form in todo[1:] if others and form.part() is not None]
    served += run([form for form in todo[1:] if form not in theirs], device, progress)
    for other in others:
        if other is not None:
            _wait(other)
    return served + run(theirs, device, progress)


def compile_part(todo: list[Form], device: torch.device, part: str) -> None:
    """In one of the other processes: compile its forms, run nothing."""
    calls = [form.run for form in todo if form.part() == part]
    with dispatch.compiling(device.type, calls):
        pass


def _beside(part: str, argv: list[str]) -> subprocess.Popen[bytes] | None:
    command = [sys.executable, "-c", _OTHER, json.dumps(sys.path), "warmup", *argv, "--part", part]
    quiet = subprocess.DEVNULL
    try:
        return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
    except OSError:  # no interpreter to start
        return None


def _wait(other: subprocess.Popen[bytes]) -> None:
    try:
        other.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        other.kill()


_OTHER = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from sluice.cli import main
sys.exit(main(sys.argv[1:]))
"""


def forms(
    models: Models,
    tp: int,
    device: torch.device,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    state_layout: str,
) -> Iterator[Form]:
    """Every form, for each model."""
    if isinstance(models, (str, QwenShape)):
        models = (models,)
    for model in models:
        shape = preset(model, tp) if isinstance(model, str) else model
        yield from _Forms(shape, device, dtype, state_dtype, state_layout).all()


class _Forms:
    """The calls of one model's layers. Every state row is padding but where a form has no slots."""

    def __init__(
        self,
        shape: QwenShape,
        device: torch.device,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        state_layout: str,
    ) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self.state_dtype, self.state_layout = state_dtype, state_layout

    @functools.cached_property
    def state(self) -> Tensor:
        s = self.shape
        tail = (s.head_v_dim, s.head_k_dim)
        tail = tail if self.state_layout == "vk" else tail[::-1]
        return self.zeros(2, s.num_v_heads, *tail, dtype=self.state_dtype)

    @functools.cached_property
    def window(self) -> Tensor:
        return self.zeros(2, self.shape.conv_channels, self.shape.conv_width - 1)

    @functools.cached_property
    def weights(self) -> dict[str, Tensor]:
        s = self.shape
        return {
            "conv_weight": self.zeros(s.conv_channels, s.conv_width),
            "A_log": self.zeros(s.num_v_heads),
            "dt_bias": self.zeros(s.num_v_heads),
            "norm_weight": self.zeros(s.head_v_dim),
        }

    def zeros(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(*size, dtype=dtype or self.dtype, device=self.device)

    def rows(self, N: int) -> dict[str, Any]:
        """Slots of N padded rows."""
        return {"slots": torch.full((N,), -1, dtype=torch.int64, device=self.device)}

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
        for N in BATCHES:
            for T in (1, 4):
                yield self.form("decode", f"{N} x {T}", self.decode, N, T)
                yield self.form("step", f"{N} x {T}", self.step, N, T)
        yield self.form("verify", "8 x 4", self.verify, 8, 4)
        yield self.form("commit", "8 x 4", self.commit, 8, 4)
        prompts = (PROMPT, *LONG_PROMPTS) if self.device.type == "cuda" else (PROMPT,)
        for packed, name in ((True, "packed"), (False, "dense")):
            for N, T in prompts:
                yield self.form("prefill", f"{name} {N} x {T}", self.prefill, N, T, packed)
            yield self.form("causal_conv1d", name, self.causal_conv1d, *PROMPT, packed)
            yield self.form("conv_qkv", name, self.conv_qkv, *PROMPT, packed)
        yield self.form("causal_conv1d", "8 x 1", self.causal_conv1d, 8, 1, False)
        yield self.form("rms_norm_gated", "", self.rms_norm_gated, PROMPT[1])

    def form(self, op: str, what: str, make: Callable[..., Call], *sizes: int) -> Form:
        return Form(f"{self.shape.name} {op} {what}".rstrip(), op, lambda: make(*sizes))

    def decode(self, N: int, T: int) -> Call:
        state = {"state": self.state, "state_layout": self.state_layout}
        return self.tokens(N, T), {**state, **self.rows(N)}

    def step(self, N: int, T: int) -> Call:
        s = self.shape
        qkvz = self.zeros(N, T, s.conv_channels + s.value_dim)
        options = {
            **self.weights,
            "conv_state": self.window,
            "state": self.state,
            "state_layout": self.state_layout,
            "order": s.order,
            "gate_activation": s.gate_activation,
            **self.rows(N),
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
        state = {"state": self.state, "state_layout": self.state_layout}
        if packed:
            return self.tokens(1, N * T), {**state, **self.packed(N, T)}
        return self.tokens(N, T), {**state, **self.rows(N)}

    def causal_conv1d(self, N: int, T: int, packed: bool) -> Call:
        rows = self.packed(N, T) if packed else self.rows(N)
        x = self.zeros(N, T, self.shape.conv_channels)
        return (x, self.weights["conv_weight"]), {"state": self.window, **rows}

    def conv_qkv(self, N: int, T: int, packed: bool) -> Call:
        s = self.shape
        arguments, options = self.causal_conv1d(N, T, packed)
        raw = self.zeros(N, T, s.num_v_heads)
        heads = {"num_k_heads": s.num_k_heads, "num_v_heads": s.num_v_heads}
        widths = {"head_k_dim": s.head_k_dim, "head_v_dim": s.head_v_dim}
        gates = {"a": raw, "b": raw, **{n: self.weights[n] for n in ("A_log", "dt_bias")}}
        return arguments, {**heads, **widths, **gates, **options}

    def rms_norm_gated(self, T: int) -> Call:
        x = self.zeros(T, self.shape.num_v_heads, self.shape.head_v_dim)
        options = {"activation": self.shape.gate_activation}
        return (x, x, self.weights["norm_weight"]), options
