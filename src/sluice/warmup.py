"""Compile everything now, so that no request waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice import dispatch, library, ops
from sluice.layers.qwen import QwenShape, preset

BATCHES = (1, 8, 64, 512)
"""Rows of a decode step; kernels are configured by how many states there are."""


class Form(NamedTuple):
    """One way in which an operator is called."""

    name: str
    op: str
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> Any:
        return getattr(ops, self.op)(*self.args, **self.options)


def warmup(
    models: str | QwenShape | Sequence[str | QwenShape],
    *,
    tp: int = 1,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    state_layout: str = "vk",
    progress: Callable[[str], None] | None = None,
) -> list[tuple[str, str]]:
    """Run every operator once in each form that a model of these shapes calls it in.

    Rows are padding and sequences short, so that this takes the compiler's time, not the kernels'.
    Compiled kernels are kept on disk by their compilers: a later process finds them.

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
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    served = []
    dispatch.compile_all(torch.device(device).type)
    for form in forms(models, tp, torch.device(device), dtype, state_dtype, state_layout):
        if progress is not None:
            progress(form.name)
        with library.probing() as problems:
            form.run()
        form.run()
        served.append((form.name, dispatch.explain_problem(problems[0]).chosen or "-"))
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return served


def forms(
    models: str | QwenShape | Sequence[str | QwenShape],
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
        tail = (shape.head_v_dim, shape.head_k_dim)
        tail = tail if state_layout == "vk" else tail[::-1]
        self.state_layout = state_layout
        self.state = self.zeros(2, shape.num_v_heads, *tail, dtype=state_dtype)
        self.window = self.zeros(2, shape.conv_channels, shape.conv_width - 1)
        self.weights = {
            "conv_weight": self.zeros(shape.conv_channels, shape.conv_width),
            "A_log": self.zeros(shape.num_v_heads),
            "dt_bias": self.zeros(shape.num_v_heads),
            "norm_weight": self.zeros(shape.head_v_dim),
        }

    def zeros(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(*size, dtype=dtype or self.dtype, device=self.device)

    def rows(self, N: int) -> dict[str, Any]:
        """Slots of N padded rows."""
        return {"slots": torch.full((N,), -1, dtype=torch.int64, device=self.device)}

    def packed(self, T: int) -> dict[str, Any]:
        """One packed sequence of T tokens that begins anew, in a padded row."""
        bounds = torch.tensor([0, T], dtype=torch.int32)
        known = torch.zeros(1, dtype=torch.bool, device=self.device)
        cu_seqlens = {"cu_seqlens": bounds.to(self.device), "cu_seqlens_cpu": bounds}
        return {**self.rows(1), **cu_seqlens, "has_state": known}

    def tokens(self, B: int, T: int) -> tuple[Tensor, ...]:
        s = self.shape
        q, k = (self.zeros(B, T, s.num_k_heads, s.head_k_dim) for _ in "qk")
        v = self.zeros(B, T, s.num_v_heads, s.head_v_dim)
        g, beta = (self.zeros(B, T, s.num_v_heads, dtype=torch.float32) for _ in "gb")
        return q, k, v, g, beta

    def all(self) -> Iterator[Form]:
        state = {"state": self.state, "state_layout": self.state_layout}
        for N in BATCHES:
            for T in (1, 4):
                options = {**state, **self.rows(N)}
                yield self.form("decode", f"{N} x {T}", self.tokens(N, T), options)
                yield self.step(N, T)
        yield from self.draft(8, 4, state)
        for name, rows in (("packed", self.packed(130)), ("dense", self.rows(1))):
            yield self.form("prefill", name, self.tokens(1, 130), {**state, **rows})
            yield from self.convolutions(name, 130, {"state": self.window, **rows})
        x = self.zeros(130, self.shape.num_v_heads, self.shape.head_v_dim)
        gate = {"activation": self.shape.gate_activation}
        yield self.form("rms_norm_gated", "", (x, x, self.weights["norm_weight"]), gate)

    def form(self, op: str, what: str, args: tuple[Any, ...], options: dict[str, Any]) -> Form:
        return Form(f"{self.shape.name} {op} {what}".rstrip(), op, args, options)

    def step(self, N: int, T: int) -> Form:
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
        arguments = (qkvz, self.zeros(N, T, 2 * s.num_v_heads))
        return self.form("step", f"{N} x {T}", arguments, options)

    def convolutions(self, name: str, T: int, options: dict[str, Any]) -> Iterator[Form]:
        s = self.shape
        x, raw = self.zeros(1, T, s.conv_channels), self.zeros(1, T, s.num_v_heads)
        heads = {"num_k_heads": s.num_k_heads, "num_v_heads": s.num_v_heads}
        widths = {"head_k_dim": s.head_k_dim, "head_v_dim": s.head_v_dim}
        gates = {"a": raw, "b": raw, **{n: self.weights[n] for n in ("A_log", "dt_bias")}}
        arguments = (x, self.weights["conv_weight"])
        yield self.form("causal_conv1d", name, arguments, options)
        yield self.form("conv_qkv", name, arguments, {**heads, **widths, **gates, **options})

    def draft(self, N: int, T: int, state: dict[str, Any]) -> Iterator[Form]:
        inputs = self.zeros(N, T, self.shape.conv_channels)
        window = {"conv_inputs": inputs, "conv_state": self.window}
        verify = self.form("verify", f"{N} x {T}", self.tokens(N, T), state | self.rows(N) | window)
        yield verify
        accepted = torch.zeros(N, dtype=torch.int64, device=self.device)
        yield self.form("commit", f"{N} x {T}", (verify.run()[1], accepted), {})
