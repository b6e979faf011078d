"""Checks of values: always on a CPU, on a GPU only inside ``sluice.validate()``.

They read tensors back to the host, so they are kept apart from the metadata checks.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from sluice.contract.errors import ContractError
from sluice.contract.spec import (
    MAX_DECODE_TOKENS,
    CommitSpec,
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
            expected = f"at most {MAX_DECODE_TOKENS} tokens a sequence"
            raise ContractError(p.op, "cu_seqlens", expected, longest)
    for x, name in ((t.g, "g"), (t.beta, "beta")):
        _finite(p.op, x, name, p, t)
    for x, name in ((t.A_log, "A_log"), (t.dt_bias, "dt_bias")):
        _finite(p.op, x, name)
    writes = _slots(p, t)
    _checkpoints(p, t, lengths, writes)


def commit(p: CommitSpec, t: Any) -> None:
    """Check the values of a ``commit`` call."""
    lengths = _lengths(p, t) or [p.T] * p.N
    _slots(p, t)
    for i, (n, most) in enumerate(zip(t.num_accepted.tolist(), lengths, strict=True)):
        if not 0 <= n <= most:
            raise ContractError(p.op, f"num_accepted[{i}]", f"0 to {most} tokens", n)


def conv(p: ConvSpec | ConvQkvSpec, t: Any) -> None:
    """Check the values of a ``causal_conv1d`` or ``conv_qkv`` call."""
    lengths = _lengths(p, t)
    if isinstance(p, ConvQkvSpec):
        for x, name in ((t.a, "a"), (t.b, "b")):
            _finite(p.op, x, name, p, t)
        for x, name in ((t.A_log, "A_log"), (t.dt_bias, "dt_bias")):
            _finite(p.op, x, name)
    if t.state is not None:
        writes = _slots(p, t, frozen=p.freeze)
        _checkpoints(p, t, lengths, writes)


def step(p: StepSpec, t: Any) -> None:
    """Check the values of a ``step`` call."""
    b = "b" if p.order == "split" else "ba"
    for x, name in ((t.b, b), (t.a, "a")):
        _finite(p.op, x, name, p, t)
    for x, name in ((t.A_log, "A_log"), (t.dt_bias, "dt_bias")):
        _finite(p.op, x, name)
    _slots(p, t)


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


def _finite(
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


def _slots(p: Any, t: Any, frozen: bool = False) -> set[int]:
    """Check read and write slots; return the slots this call writes."""
    op, N = p.op, p.N
    if t.slots is None and t.write_slots is None:
        return set(range(N))  # row i is sequence i
    reads = list(range(N)) if t.slots is None else t.slots.tolist()
    writes = reads if t.write_slots is None else t.write_slots.tolist()
    for values, name in ((reads, "slots"), (writes, "write_slots")):
        for i, slot in enumerate(values):
            if slot >= p.P:
                raise ContractError(op, f"{name}[{i}]", f"less than {p.P} slots", slot)
    if frozen or op == "verify":
        return set()
    owner: dict[int, int] = {}
    for i, (read, write) in enumerate(zip(reads, writes, strict=True)):
        if (p.slots is not None and read <= p.pad_slot) or (p.pooled and write <= p.pad_slot):
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
                raise ContractError(op, name, f"less than {p.P} slots", slot)
            if positions is not None and not 0 <= positions[i][j] <= length:
                where = f"checkpoints.positions[{i}, {j}]"
                raise ContractError(op, where, f"0 to {length} tokens", positions[i][j])
            if positions is None and (j + 1) * p.checkpoint_every > length:
                continue  # this sequence ends before: nothing is written there
            if slot in written or slot in reads:
                raise ContractError(op, name, "a slot nothing else uses in this call", slot)
            written.add(slot)
