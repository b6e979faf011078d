"""Checks of values: always on a CPU, on a GPU only inside ``sluice.validate()``.

They read tensors back to the host, so they are kept apart from the metadata checks.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from sluice.contract.errors import ContractError
from sluice.contract.problem import (
    MAX_DECODE_TOKENS,
    CommitProblem,
    ConvProblem,
    DeltaProblem,
    StateAddressing,
    StepProblem,
)
from sluice.contract.tensors import (
    CommitTensors,
    ConvQkvTensors,
    ConvTensors,
    DeltaTensors,
    Rows,
    StepTensors,
)


def delta(p: DeltaProblem, t: DeltaTensors) -> None:
    """Check the values of a ``prefill``, ``decode`` or ``verify`` call."""
    lengths = _lengths(p.op, t.rows, p.T)
    if p.op != "prefill" and lengths is not None:
        longest = max(lengths, default=0)
        if longest > MAX_DECODE_TOKENS:
            expected = f"at most {MAX_DECODE_TOKENS} tokens a sequence"
            raise ContractError(p.op, "cu_seqlens", expected, longest)
    for x, name in ((t.g, "g"), (t.beta, "beta")):
        _finite(p.op, x, name, p, t.rows)
    for x, name in ((t.A_log, "A_log"), (t.dt_bias, "dt_bias")):
        _finite(p.op, x, name)
    writes = _slots(p.op, p.rows, t.rows, p.N)
    _checkpoints(p, t, lengths, writes)


def commit(p: CommitProblem, t: CommitTensors) -> None:
    """Check the values of a ``commit`` call."""
    lengths = _lengths(p.op, t.rows, p.T) or [p.T] * p.N
    _slots(p.op, p.rows, t.rows, p.N)
    for i, (n, most) in enumerate(zip(t.num_accepted.tolist(), lengths, strict=True)):
        if not 0 <= n <= most:
            raise ContractError(p.op, f"num_accepted[{i}]", f"0 to {most} tokens", n)


def conv(p: ConvProblem, t: ConvTensors | ConvQkvTensors) -> None:
    """Check the values of a ``causal_conv1d`` or ``conv_qkv`` call."""
    lengths = _lengths(p.op, t.rows, p.T)
    if isinstance(t, ConvQkvTensors):
        for x, name in ((t.a, "a"), (t.b, "b")):
            _finite(p.op, x, name, p, t.rows)
        for x, name in ((t.A_log, "A_log"), (t.dt_bias, "dt_bias")):
            _finite(p.op, x, name)
    if t.state is not None:
        writes = _slots(p.op, p.rows, t.rows, p.N, frozen=p.freeze)
        _checkpoints(p, t, lengths, writes)


def step(p: StepProblem, t: StepTensors) -> None:
    """Check the values of a ``step`` call."""
    b = "b" if p.order == "split" else "ba"
    for x, name in ((t.b, b), (t.a, "a")):
        _finite(p.op, x, name, p, t.rows)
    for x, name in ((t.A_log, "A_log"), (t.dt_bias, "dt_bias")):
        _finite(p.op, x, name)
    _slots(p.op, p.rows, t.rows, p.N)


def _lengths(op: str, rows: Rows, T: int) -> list[int] | None:
    if rows.cu_seqlens is None:
        return None
    bounds = rows.cu_seqlens.tolist()
    if rows.cu_seqlens_cpu is not None and rows.cu_seqlens_cpu.tolist() != bounds:
        raise ContractError(op, "cu_seqlens_cpu", f"cu_seqlens' values {bounds}", "others")
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    if bounds[0] != 0 or min(lengths, default=0) < 0 or bounds[-1] > T:
        raise ContractError(op, "cu_seqlens", f"0 rising to at most {T} tokens", bounds)
    return lengths


def _finite(
    op: str,
    x: Tensor | None,
    name: str,
    p: DeltaProblem | ConvProblem | StepProblem | None = None,
    rows: Rows | None = None,
) -> None:
    """Require finite values; with a problem, only of tokens that are not padding."""
    # a sum shows any NaN or infinity, in one cheap pass; only then is it worth a closer look
    if x is None or math.isfinite(x.sum().item()):
        return
    bad = ~torch.isfinite(x)
    if p is not None and rows is not None:
        bad &= _live(p, rows, x).view(*x.shape[:2], *[1] * (x.dim() - 2))
    if bool(bad.any()):
        first = bad.nonzero()[0].tolist()
        got = f"{x[tuple(first)].item()} at {first}"
        raise ContractError(op, name, "finite values", got)


def _live(p: DeltaProblem | ConvProblem | StepProblem, rows: Rows, x: Tensor) -> Tensor:
    """[B, T] bool: tokens of rows that are not padding, and of no packed tail."""
    real = torch.ones(p.N, dtype=torch.bool, device=x.device)
    if rows.slots is not None:
        real = rows.slots > p.rows.pad_slot
    if rows.cu_seqlens is None:
        return real.unsqueeze(1).expand(x.shape[:2])
    live = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    for i, (start, stop) in enumerate(itertools.pairwise(rows.cu_seqlens.tolist())):
        live[:, start:stop] = real[i]
    return live


def _slots(op: str, a: StateAddressing, rows: Rows, N: int, frozen: bool = False) -> set[int]:
    """Check read and write slots; return the slots this call writes."""
    if rows.slots is None and rows.write_slots is None:
        return set(range(N))  # row i is sequence i
    reads = list(range(N)) if rows.slots is None else rows.slots.tolist()
    writes = reads if rows.write_slots is None else rows.write_slots.tolist()
    for values, name in ((reads, "slots"), (writes, "write_slots")):
        for i, slot in enumerate(values):
            if slot >= a.P:
                raise ContractError(op, f"{name}[{i}]", f"less than {a.P} slots", slot)
    if frozen or op == "verify":
        return set()
    pooled = a.slots or a.write_slots
    owner: dict[int, int] = {}
    for i, (read, write) in enumerate(zip(reads, writes, strict=True)):
        if (a.slots and read <= a.pad_slot) or (pooled and write <= a.pad_slot):
            continue
        if write in owner:
            expected = "no slot twice among those written"
            raise ContractError(op, "write_slots", expected, f"{write} in rows {owner[write]}, {i}")
        owner[write] = i
    known = [True] * N if rows.has_state is None else rows.has_state.tolist()
    for i, read in enumerate(reads):
        if known[i] and owner.get(read, i) != i and not (a.slots and read <= a.pad_slot):
            expected = f"no slot that another row reads (row {i} reads {read})"
            raise ContractError(op, f"write_slots[{owner[read]}]", expected, read)
    return set(owner)


def _checkpoints(
    p: DeltaProblem | ConvProblem,
    t: DeltaTensors | ConvTensors | ConvQkvTensors,
    lengths: list[int] | None,
    written: set[int],
) -> None:
    if t.checkpoint_slots is None:
        return
    op, slots = p.op, t.checkpoint_slots.tolist()
    positions = None if t.checkpoint_positions is None else t.checkpoint_positions.tolist()
    reads = list(range(p.N)) if t.rows.slots is None else t.rows.slots.tolist()
    for i, row in enumerate(slots):
        if p.rows.slots and reads[i] <= p.rows.pad_slot:
            continue  # a padded row writes nothing
        length = p.T if lengths is None else lengths[i]
        if positions is None and length // p.checkpoint_every > len(row):
            expected = f"{length // p.checkpoint_every} columns for the {length} tokens of row {i}"
            raise ContractError(op, "checkpoints.slots", expected, f"{len(row)} columns")
        for j, slot in enumerate(row):
            if slot <= p.rows.pad_slot:
                continue
            name = f"checkpoints.slots[{i}, {j}]"
            if slot >= p.rows.P:
                raise ContractError(op, name, f"less than {p.rows.P} slots", slot)
            if positions is not None and not 0 <= positions[i][j] <= length:
                where = f"checkpoints.positions[{i}, {j}]"
                raise ContractError(op, where, f"0 to {length} tokens", positions[i][j])
            if positions is None and (j + 1) * p.checkpoint_every > length:
                continue  # this sequence ends before: nothing is written there
            if slot in written or slot in reads:
                raise ContractError(op, name, "a slot nothing else uses in this call", slot)
            written.add(slot)
