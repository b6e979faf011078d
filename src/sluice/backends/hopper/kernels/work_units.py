"""Work units: which tokens of which sequence a program owns.

Both GPU backends number them alike. Sequence i owns the units from ``cu_seqlens[i] // size + i``
on, which is enough for any length, so the host never needs to know the lengths. Gluon cannot call
Triton's functions, so the search stands here once more (``triton/kernels/work_units.py``).
"""

# ruff: noqa: RET505 (constexpr branches stay if/else)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sluice.backends.hopper.kernels.constants import C


@gluon.jit
def find_sequence(unit, cu_seqlens_ptr, N, size):
    """The sequence that owns ``unit``, and the unit's number in it.

    Units of the tokens after the last sequence belong to "sequence" N.
    """
    low = unit * 0
    high = low + N
    while low < high:
        middle = (low + high + 1) // 2
        first = gl.load(cu_seqlens_ptr + middle).to(gl.int32) // size + middle
        if first <= unit:
            low = middle
        else:
            high = middle - 1
    return low, unit - (gl.load(cu_seqlens_ptr + low).to(gl.int32) // size + low)


@gluon.jit
def unit_span(unit, cu_seqlens_ptr, N, T, size):
    """The sequence of ``unit``, its first token, the unit's number in it, and its end.

    Tokens are numbered over all B * T.
    """
    if cu_seqlens_ptr is None:
        units = gl.maximum((T + size - 1) // size, 1)
        seq = unit // units
        number = unit % units
        start = seq * T
        end = start + T
    else:
        seq, number = find_sequence(unit, cu_seqlens_ptr, N, size)
        start = gl.load(cu_seqlens_ptr + seq).to(gl.int32)
        end = start * 0 + T
        if seq < N:
            end = gl.load(cu_seqlens_ptr + seq + 1).to(gl.int32)
    return seq, start, number, end


@gluon.jit
def counted_span(unit, cu_seqlens_ptr, N, T, size):
    """The same by one warp, which looks at 32 sequences at a time: few loads wait for others.

    For up to 31 sequences one load is enough.
    """
    if cu_seqlens_ptr is None:
        return unit_span(unit, None, N, T, size)
    else:
        i = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        low = unit * 0
        high = low + N
        start = low
        end = low
        step = low + 2
        while step > 1:
            step = (gl.minimum(high + 1, N) - low) // 32 + 1  # 1: the end is among them
            at = low + i * step
            token = gl.load(cu_seqlens_ptr + gl.minimum(at, N)).to(gl.int32)
            begun = (i == 0) | ((token // size + at <= unit) & (at <= N))
            low += (gl.sum(begun.to(gl.int32), axis=0) - 1) * step
            high = gl.minimum(high, low + step - 1)
            start = gl.max(gl.where(begun, token, 0), axis=0)
            end = gl.min(gl.where(begun | (at > N), T, token), axis=0)
        return low, start, unit - (start // size + low), end


@gluon.jit
def tail_span(tail, cu_seqlens_ptr, positions_ptr, every, T, M):
    """The sequence of a checkpoint's tail, its first token and its end.

    It is empty where the checkpoint lies between two chunks, or not in the sequence.
    """
    seq = tail // M
    start = seq * T
    length = start * 0 + T
    if cu_seqlens_ptr is not None:
        start = gl.load(cu_seqlens_ptr + seq).to(gl.int32)
        length = gl.load(cu_seqlens_ptr + seq + 1).to(gl.int32) - start
    if positions_ptr is None:
        position = (tail % M + 1) * every
    else:
        position = gl.load(positions_ptr + tail).to(gl.int32)
    count = gl.where((position > 0) & (position <= length), position % C, 0)
    row = start + position - count
    return seq, row, row + count
