"""The batches for which a layer's kernels are compiled, before the first request."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from sluice.integrations.engine_calls import Recorder, like
from sluice.integrations.vllm import serve
from sluice.integrations.vllm.batch import Batch, Drafts, Rows
from sluice.integrations.vllm.serve import Layer
from sluice.model_calls import ModelCall
from sluice.ops import Checkpoints
from sluice.warmup import LONG_PROMPT, PROMPT, SHORT_PROMPTS, STATES


def plan(
    layer: Layer, dtype: torch.dtype, drafts: int, checkpoints: bool, cuda: bool
) -> list[ModelCall]:
    """Every call of this layer that compiles a kernel of its own.

    ``drafts``: how many draft tokens at most; ``checkpoints``: whether prompts keep states.
    """
    ops, meta = Recorder("vllm"), _meta(layer)
    for batch in _batches(meta, drafts, checkpoints, cuda):
        s, n = meta.shape, batch.length
        qkvz = torch.empty(n, s.conv_channels + s.value_dim, dtype=dtype, device="meta")
        ba = torch.empty(n, 2 * s.num_v_heads, dtype=dtype, device="meta")
        out = torch.empty(n, s.num_v_heads, s.head_v_dim, dtype=dtype, device="meta")
        serve.run(ops, meta, batch, qkvz, ba, out)
    return ops.calls


def _meta(layer: Layer) -> Layer:
    """The same layer without memory."""
    return layer._replace(
        **{name: like(x) for name, x in layer._asdict().items() if isinstance(x, Tensor)}
    )


def _batches(layer: Layer, drafts: int, checkpoints: bool, cuda: bool) -> Iterator[Batch]:
    """Kernels are chosen by sizes, so: decode steps from few states to many, prompts short and
    long, with a decode step beside them; drafts of each number of states, steps for which fewer or
    none were drafted, and drafts beside prompts, whose tokens are gathered."""
    few = sorted({max(1, states // layer.shape.num_v_heads) for states in STATES})
    for N in few:
        yield Batch(N, Rows(_slots(N), N), None)
    lengths = (*SHORT_PROMPTS, PROMPT, *((LONG_PROMPT,) if cuda else ()))
    for T in lengths:
        yield from (_prompts(T, 0, kept) for kept in {False, checkpoints})
    for N in few:
        yield _prompts(PROMPT, N, False)
    if drafts:
        for N, T in itertools.product(few, sorted({*SHORT_PROMPTS, drafts + 1})):
            yield Batch(N * T, None, _drafts(N, T, drafts))
        for T, kept in itertools.product(lengths, {False, checkpoints}):
            prompts = _prompts(T, 0, kept)
            n, more = prompts.length, _drafts(few[0], drafts + 1, drafts)
            rows = cast(Rows, prompts.rows)._replace(tokens=_slots(n))
            tokens = _slots(few[0] * (drafts + 1))
            yield Batch(n + len(tokens), rows, more._replace(tokens=tokens))


def _prompts(T: int, decodes: int, kept: bool) -> Batch:
    """Two prompts of T tokens after sequences with one."""
    N = decodes + 2
    borders = torch.empty(N + 1, dtype=torch.int32, device="meta")
    known = torch.empty(N, dtype=torch.bool, device="meta")
    checkpoints = Checkpoints(_slots(N, 1), positions=_slots(N, 1)) if kept else None
    prompts = borders[decodes:]
    rows = Rows(_slots(N), decodes, borders, known, prompts, checkpoints)
    return Batch(decodes + 2 * T, rows, None)


def _drafts(N: int, T: int, drafts: int) -> Drafts:
    """N sequences with T tokens each."""
    borders = torch.empty(N + 1, dtype=torch.int32, device="meta")
    return Drafts(_slots(N, drafts + 1), _slots(N), borders)


def _slots(*size: int) -> Tensor:
    return torch.empty(*size, dtype=torch.int32, device="meta")
