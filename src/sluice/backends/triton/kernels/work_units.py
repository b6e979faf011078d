"""Work units: which tokens of which sequence a program owns.

A work unit is ``size`` tokens of one sequence: a chunk, a segment, or UNIT_T tokens of a
convolution. Sequence i owns the units from cu_seqlens[i] // size + i on. That leaves it enough
units for its tokens and, even if it is empty, one unit. So no unit holds tokens of two sequences,
T // size + N + 1 units cover T tokens, and no list is made beforehand. "Sequence" N is the tail:
tokens that no sequence owns.

There are two searches. Prefill's programs run long: ``find_sequence`` is a plain binary search. The
convolution's programs run for a few microseconds: ``probe_sequence`` looks at 32 bounds per step.
The Hopper backend has its own copy of the first (hopper/work_units.py), because Gluon cannot call
Triton functions.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_sequence(unit, cu_seqlens_ptr, N, size):
    """The sequence that owns ``unit``, and the unit's number in it."""
    low = unit * 0
    high = low + N
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(cu_seqlens_ptr + middle).to(tl.int64) // size + middle
        if first <= unit:
            low = middle
        else:
            high = middle - 1
    return low, unit - (tl.load(cu_seqlens_ptr + low).to(tl.int64) // size + low)


@triton.jit
def unit_span(unit, cu_seqlens_ptr, N, T, size):
    """The sequence of ``unit``, its batch row and first token, the unit's number in it, its end.

    Without ``cu_seqlens`` each of N batch rows is a sequence of T tokens.
    """
    if cu_seqlens_ptr is None:
        units = tl.maximum((T + size - 1) // size, 1)
        seq = unit // units
        number = unit % units
        batch = seq
        start = seq * 0
        end = start + T
    else:
        seq, number = find_sequence(unit, cu_seqlens_ptr, N, size)
        batch = seq * 0
        start = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
        end = batch + T
        if seq < N:
            end = tl.load(cu_seqlens_ptr + seq + 1).to(tl.int64)
    return seq, batch, start, number, end


@triton.jit
def probe_sequence(unit, cu_seqlens_ptr, N, T, SIZE: tl.constexpr):
    """The sequence that owns ``unit``: its index, the unit's number in it, its first token and its
    length.

    One load of 32 probes finds the sequence among 30, two among 900. In the last step the probes
    stand side by side and see both bounds of the sequence.
    """
    seq = 0
    start = 0
    inner = unit
    length = T
    size = N + 1
    probes = tl.arange(0, 32)
    while size > 0:
        step = size // 32 + 1
        end = seq + size
        at = seq + probes * step
        bounds = tl.load(cu_seqlens_ptr + at, mask=at <= N, other=0).to(tl.int32)
        found = tl.sum(((at < end) & (bounds // SIZE + at <= unit)).to(tl.int32), axis=0)
        seq += (found - 1) * step
        start = tl.sum(tl.where(at == seq, bounds, 0), axis=0)
        after = tl.sum(tl.where(at == seq + 1, bounds, 0), axis=0)
        inner = unit - (start // SIZE + seq)
        length = tl.where(seq < N, after, T) - start
        size = tl.where(step > 1, tl.minimum(step, end - seq), 0)
    return seq, inner, start, length
