"""Compile what a layer will call, before the first request. Nothing runs, nothing is allocated.

The layer's own code (``serve``) goes over batches on the "meta" device with a recorder in place of
the operators, so the kernels are exactly those it will use: its dtypes, strides and options.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sluice.integrations.vllm import serve
from sluice.integrations.vllm.batch import Batch, Drafts, Rows
from sluice.integrations.vllm.serve import Layer
from sluice.model_calls import ModelCall
from sluice.ops import Checkpoints
from sluice.warmup import LONG_PROMPT, PROMPT, SHORT_PROMPTS, STATES, run


class Recorder:
    """Takes the place of ``sluice.ops``: keeps each call, returns outputs on the "meta" device."""

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []

    def __getattr__(self, op: str) -> Any:
        return lambda *args, **options: self._note(op, args, options)

    def _note(self, op: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        self.calls.append(ModelCall(f"vllm {op} {len(self.calls)}", op, lambda: (args, options)))
        if op != "conv_qkv":
            return None  # the others write to ``out``
        x, (HK, HV, K, V) = args[0], (options[name] for name in _HEADS)
        lead = x.shape[:-1]
        q, k, v = x.new_empty(*lead, HK, K), x.new_empty(*lead, HK, K), x.new_empty(*lead, HV, V)
        return q, k, v, *(x.new_empty(*lead, HV, dtype=torch.float32) for _ in "gb")


_HEADS = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")


def plan(
    layer: Layer, dtype: torch.dtype, drafts: int, checkpoints: bool, cuda: bool
) -> list[ModelCall]:
    """Every call of this layer that compiles a kernel of its own.

    ``drafts``: how many draft tokens at most; ``checkpoints``: whether prompts keep states.
    """
    ops, meta = Recorder(), _meta(layer)
    for batch in _batches(meta, drafts, checkpoints, cuda):
        s, n = meta.shape, batch.length
        qkvz = torch.empty(n, s.conv_channels + s.value_dim, dtype=dtype, device="meta")
        ba = torch.empty(n, 2 * s.num_v_heads, dtype=dtype, device="meta")
        out = torch.empty(n, s.num_v_heads, s.head_v_dim, dtype=dtype, device="meta")
        serve.run(ops, meta, batch, qkvz, ba, out)
    return ops.calls


def served(calls: list[ModelCall], device: torch.device) -> list[tuple[str, str]]:
    """Compile the kernels of these calls: each call's operator, and the backend that serves it."""
    found = run(calls, device, None)
    return [(call.op, backend) for call, (_, backend) in zip(calls, found, strict=True)]


def check(calls: list[ModelCall], device: torch.device) -> None:
    """Raise the contract's error if an operator does not take one of these calls."""
    for call in calls:
        call.spec(device)


def _meta(layer: Layer) -> Layer:
    """The same layer without memory."""
    return layer._replace(
        **{name: like(x) for name, x in layer._asdict().items() if isinstance(x, Tensor)}
    )


def like(x: Tensor) -> Tensor:
    """A tensor of the same shape, strides and dtype, without memory."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _batches(layer: Layer, drafts: int, checkpoints: bool, cuda: bool) -> Iterator[Batch]:
    """Kernels are chosen by sizes, so: decode steps from few states to many, prompts short and
    long, with a decode step beside them; drafts of each number of states."""
    few = sorted({max(1, states // layer.shape.num_v_heads) for states in STATES})
    for N in few:
        yield Batch(N, Rows(_slots(N), N), None)
    lengths = (*SHORT_PROMPTS, PROMPT, *((LONG_PROMPT,) if cuda else ()))
    for T in lengths:
        yield from (_prompts(T, 0, kept) for kept in {False, checkpoints})
    for N in few:
        yield _prompts(PROMPT, N, False)
    for N in few if drafts else ():
        T = drafts + 1
        borders = torch.empty(N + 1, dtype=torch.int32, device="meta")
        yield Batch(N * T, None, Drafts(_slots(N, T), _slots(N), borders))


def _prompts(T: int, decodes: int, kept: bool) -> Batch:
    """Two prompts of T tokens behind sequences with one."""
    N = decodes + 2
    borders = torch.empty(N + 1, dtype=torch.int32, device="meta")
    known = torch.empty(N, dtype=torch.bool, device="meta")
    checkpoints = Checkpoints(_slots(N, 1), positions=_slots(N, 1)) if kept else None
    prompts = borders[decodes:]
    rows = Rows(_slots(N), decodes, borders, known, prompts, checkpoints)
    return Batch(decodes + 2 * T, rows, None)


def _slots(*size: int) -> Tensor:
    return torch.empty(*size, dtype=torch.int32, device="meta")
