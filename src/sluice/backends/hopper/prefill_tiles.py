"""What the Gluon kernels of prefill share: where a program's tokens and a state's elements lie."""

# ruff: noqa: RET505 (what a kernel may not say, and constants decide)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # of one partition


@gluon.jit
def find_sequence(unit, cu_seqlens_ptr, N, size):
    """The sequence that owns work unit ``unit``, as Triton's prefill counts them; N: the tail.

    Sequence i owns the units from cu_seqlens[i] // size + i on.
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
    """Sequence, its first token (of all B * T), the unit's number in it, and the sequence's end."""
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
def state_offsets(
    first_row, layout: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    STATE_KV: gl.constexpr,
):  # fmt: skip
    """Where the elements of Sᵀ [ROWS, K] lie in a state [V, K], or [K, V] with STATE_KV."""
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, K, gl.SliceLayout(0, layout))
    if STATE_KV:
        return gl.expand_dims(rows, 1) + gl.expand_dims(columns, 0) * V
    else:
        return gl.expand_dims(rows, 1) * K + gl.expand_dims(columns, 0)
