"""Checks of values: always on a CPU, on a GPU only inside ``sluice.validate()``.

They read tensors back to the host, so they are kept apart from the metadata checks.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from sluice.contract.draft_spec import CommitSpec, VerifySpec
from sluice.contract.errors import ContractError
from sluice.contract.spec import (
    MAX_DECODE_TOKENS,
    ConvQkvSpec,
    ConvSpec,
    DeltaSpec,
    StepSpec,
)


def delta(p: DeltaSpec, t: Any) -> None:
    """Check the values of a ``prefill``, ``decode`` or ``verify`` call."""
    lengths = _lengths(p, t)
    if p.op != "prefill" and lengths is not None:
        longest = max(lengths, default=0)
        if longest > MAX_DECODE_TOKENS:
            expected = f"at most {MAX_DECODE_TOKENS} tokens per sequence"
            raise ContractError(p.op, "cu_seqlens", expected, longest)
    for x, name in ((t.g, "g"), (t.beta, "beta")):
        finite(p.op, x, name, p, t)
    for x, name in ((t.A_log, "A_log"), (t.dt_bias, "dt_bias")):
        finite(p.op, x, name)
    if p.states > 0 and lengths is not None and max(lengths, default=0) > p.states:
        expected = f"{max(lengths)} columns or more, one for each token"
        raise ContractError(p.op, "write_slots", expected, f"{p.states} columns")
    writes = _slots(p, t, lengths=lengths)
    _checkpoints(p, t, lengths, writes)


def verify(p: VerifySpec, t: Any) -> None:
    """Check the values of a ``verify`` call."""
    delta(p, t)
    if not p.buffered:
        return
    longest = max(_lengths(p, t) or [0])
    if longest > p.draft_tokens:
        expected = f"room for {longest} tokens of a row"
        raise ContractError(p.op, "buffers.k", expected, f"{p.draft_tokens} tokens")
    assert p.draft_k is not None
    _draft_slots(p, t, p.draft_k.shape[0])


def commit(p: CommitSpec, t: Any) -> None:
    """Check the values of a ``commit`` call."""
    lengths = _lengths(p, t) or [p.T] * p.N
    _slots(p, t)
    if p.stacked:
        _draft_slots(p, t, p.S)
    for i, (n, most) in enumerate(zip(t.num_accepted.tolist(), lengths, strict=True)):
        if not 0 <= n <= most:
            raise ContractError(p.op, f"num_accepted[{i}]", f"0 to {most} tokens", n)


def conv(p: ConvSpec | ConvQkvSpec, t: Any) -> None:
    """Check the values of a ``causal_conv1d`` or ``conv_qkv`` call."""
    lengths = _lengths(p, t)
    if isinstance(p, ConvQkvSpec):
        for x, name in ((t.a, "a"), (t.b, "b")):
            finite(p.op, x, name, p, t)
        for x, name in ((t.A_log, "A_log"), (t.dt_bias, "dt_bias")):
            finite(p.op, x, name)
    if t.state is not None:
        writes = _slots(p, t, frozen=p.freeze)
        _checkpoints(p, t, lengths, writes)
    if t.window_start is not None:
        _windows(p, t, lengths)


def step(p: StepSpec, t: Any) -> None:
    """Check the values of a ``step`` call."""
    b = "b" if p.order == "split" else "ba"
    for x, name in ((t.b, b), (t.a, "a")):
        finite(p.op, x, name, p, t)
    for x, name in ((t.A_log, "A_log"), (t.dt_bias, "dt_bias")):
        finite(p.op, x, name)
    _slots(p, t)


def written(p: DeltaSpec | CommitSpec | StepSpec, t: Any) -> set[int]:
    """The slots of the recurrent state that a call writes, whose values are right."""
    if isinstance(p, StepSpec):
        return _slots(p, t)
    lengths = _lengths(p, t)
    if isinstance(p, DeltaSpec):
        found = _slots(p, t, lengths=lengths)
        _checkpoints(p, t, lengths, found)
        return found
    found = _slots(p, t)
    if t.draft_slots is not None:  # a row without a draft is left out
        own = list(range(p.N)) if t.slots is None else t.slots.tolist()
        writes = own if t.write_slots is None else t.write_slots.tolist()
        drafts = t.draft_slots.tolist()
        found -= {slot for slot, draft in zip(writes, drafts, strict=True) if draft <= p.pad_slot}
    return found


def _lengths(p: Any, t: Any) -> list[int] | None:
    if t.cu_seqlens is None:
        return None
    op, T, bounds = p.op, p.T, t.cu_seqlens.tolist()
    if t.cu_seqlens_cpu is not None and t.cu_seqlens_cpu.tolist() != bounds:
        raise ContractError(op, "cu_seqlens_cpu", f"cu_seqlens' values {bounds}", "others")
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    if bounds[0] != 0 or min(lengths, default=0) < 0 or bounds[-1] > T:
        raise ContractError(op, "cu_seqlens", f"0 rising to at most {T} tokens", bounds)
    return lengths


def finite(
    op: str,
    x: Tensor | None,
    name: str,
    p: Any = None,
    t: Any = None,
) -> None:
    """Require finite values; with a spec, only of tokens that are not padding."""
    # a sum shows any NaN or infinity, in one cheap pass; only then is it worth a closer look
    if x is None or math.isfinite(x.sum().item()):
        return
    bad = ~torch.isfinite(x)
    if p is not None:
        bad &= _live(p, t, x).view(*x.shape[:2], *[1] * (x.dim() - 2))
    if bool(bad.any()):
        first = bad.nonzero()[0].tolist()
        got = f"{x[tuple(first)].item()} at {first}"
        raise ContractError(op, name, "finite values", got)


def _live(p: Any, t: Any, x: Tensor) -> Tensor:
    """[B, T] bool: tokens of rows that are not padding, and of no packed tail."""
    real = torch.ones(p.N, dtype=torch.bool, device=x.device)
    if t.slots is not None:
        real = t.slots > p.pad_slot
    if not p.varlen:
        return real.unsqueeze(1).expand(x.shape[:2])
    live = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    for i, (start, stop) in enumerate(itertools.pairwise(t.cu_seqlens.tolist())):
        live[:, start:stop] = real[i]
    return live


def _windows(p: ConvSpec | ConvQkvSpec, t: Any, lengths: list[int] | None) -> None:
    """Windows lie inside of the conv state, before and after the call."""
    most = p.L - p.W + 1
    real = _slots_read(p, t)
    for i, start in enumerate(t.window_start.tolist()):
        if real[i] and not 0 <= start <= most:
            raise ContractError(p.op, f"window_start[{i}]", f"columns 0 to {most}", start)
    longest = max(lengths or [0])
    if not p.freeze and p.W - 2 + longest > p.L:
        expected = f"at least {p.W - 2 + longest} columns, W - 2 + T, beside window_start"
        raise ContractError(p.op, "state", expected, f"{p.L} columns")


def _slots_read(p: Any, t: Any) -> list[bool]:
    """Which rows read a state: not padding, and not new."""
    real = [True] * p.N if t.slots is None else (t.slots > p.pad_slot).tolist()
    known = [True] * p.N if t.has_state is None else t.has_state.tolist()
    return [a and b for a, b in zip(real, known, strict=True)]


def _draft_slots(p: Any, t: Any, S: int) -> None:
    """Rows of draft buffers: in range, and none for two sequences."""
    given = t.draft_slots if t.draft_slots is not None else t.slots
    name = "slots" if t.draft_slots is None else "draft_slots"
    if given is None:
        return
    padding = [False] * p.N if t.slots is None else (t.slots <= p.pad_slot).tolist()
    owner: dict[int, int] = {}
    for i, slot in enumerate(given.tolist()):
        if slot >= S:
            raise ContractError(p.op, f"{name}[{i}]", f"one of the {S} rows of the buffers", slot)
        if slot <= p.pad_slot or padding[i]:
            continue
        if slot in owner:
            expected = "no row of the buffers twice"
            raise ContractError(p.op, name, expected, f"{slot} in rows {owner[slot]}, {i}")
        owner[slot] = i


def _slots(p: Any, t: Any, frozen: bool = False, lengths: list[int] | None = None) -> set[int]:
    """Check read and write slots; return the slots this call writes.

    ``lengths`` are needed where each token has a write slot.
    """
    op, N = p.op, p.N
    if t.slots is None and t.write_slots is None:
        return set(range(N))  # row i is sequence i
    reads = list(range(N)) if t.slots is None else t.slots.tolist()
    writes = [[slot] for slot in reads] if t.write_slots is None else t.write_slots.tolist()
    each = t.write_slots is not None and t.write_slots.dim() == 2
    if each:
        lengths = [p.T] * N if lengths is None else lengths
        writes = [row[:n] for row, n in zip(writes, lengths, strict=True)]
    elif t.write_slots is not None:
        writes = [[slot] for slot in writes]
    for i, slot in enumerate(reads):
        if slot >= p.P:
            raise ContractError(op, f"slots[{i}]", f"a slot below {p.P}", slot)
    for i, row in enumerate(writes):
        for j, slot in enumerate(row):
            if slot >= p.P:
                where = f"write_slots[{i}, {j}]" if each else f"write_slots[{i}]"
                raise ContractError(op, where, f"a slot below {p.P}", slot)
    if frozen or op == "verify":
        return set()
    owner: dict[int, int] = {}
    for i, row in enumerate(writes):
        for write in row:
            padding = p.slots is not None and reads[i] <= p.pad_slot
            if padding or (p.pooled and write <= p.pad_slot):
                continue
            if write in owner:
                expected = "no slot twice among those written"
                name = "slots" if t.write_slots is None else "write_slots"
                raise ContractError(op, name, expected, f"{write} in rows {owner[write]}, {i}")
            owner[write] = i
    known = [True] * N if t.has_state is None else t.has_state.tolist()
    for i, read in enumerate(reads):
        padding = p.slots is not None and read <= p.pad_slot
        if known[i] and owner.get(read, i) != i and not padding:
            expected = f"no slot that another row reads (row {i} reads {read})"
            raise ContractError(op, f"write_slots[{owner[read]}]", expected, read)
    return set(owner)


def _checkpoints(
    p: DeltaSpec | ConvSpec | ConvQkvSpec,
    t: Any,
    lengths: list[int] | None,
    written: set[int],
) -> None:
    if t.checkpoint_slots is None:
        return
    op, slots = p.op, t.checkpoint_slots.tolist()
    positions = None if t.checkpoint_positions is None else t.checkpoint_positions.tolist()
    reads = list(range(p.N)) if t.slots is None else t.slots.tolist()
    for i, row in enumerate(slots):
        if p.slots is not None and reads[i] <= p.pad_slot:
            continue  # a padded row writes nothing
        length = p.T if lengths is None else lengths[i]
        if positions is None and length // p.checkpoint_every > len(row):
            expected = f"{length // p.checkpoint_every} columns for the {length} tokens of row {i}"
            raise ContractError(op, "checkpoints.slots", expected, f"{len(row)} columns")
        for j, slot in enumerate(row):
            if slot <= p.pad_slot:
                continue
            name = f"checkpoints.slots[{i}, {j}]"
            if slot >= p.P:
                raise ContractError(op, name, f"a slot below {p.P}", slot)
            if positions is not None and not 0 <= positions[i][j] <= length:
                where = f"checkpoints.positions[{i}, {j}]"
                raise ContractError(op, where, f"0 to {length} tokens", positions[i][j])
            if positions is None and (j + 1) * p.checkpoint_every > length:
                continue  # this sequence ends before: nothing is written there
            if slot in written or slot in reads:
                raise ContractError(op, name, "a slot nothing else uses in this call", slot)
            written.add(slot)
