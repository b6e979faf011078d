"""The units of the parallel half: what its programs work on, one after another.

A unit is a chunk of C tokens of one or two key heads, or the tail of a checkpoint (state_
checkpoints.py). A program looks its next unit up while it works on the one before.

Few sequences are numbered without gaps: from their lengths, by one warp, which sees up to 32 at a
time. Units of more sequences are numbered as work_units.py says, so some of them have no tokens.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sluice.backends.hopper.kernels.chunks_gates import Gates, add
from sluice.backends.hopper.kernels.constants import C
from sluice.backends.hopper.kernels.gluon_api import aggregate
from sluice.backends.hopper.kernels.work_units import counted_span, tail_span, unit_span


@aggregate
class Units:
    """What tells a program its units. Their number times GROUPS is that of all programs' work."""

    cu_seqlens_ptr: gl.tensor | gl.constexpr
    positions_ptr: gl.tensor | gl.constexpr
    every: gl.tensor | gl.constexpr
    N: gl.tensor
    T: gl.tensor
    M: gl.tensor | gl.constexpr
    units: gl.tensor  # chunks, at most
    rows: gl.tensor  # of the workspace
    o_ptr: gl.tensor  # where tokens of no sequence get zeros
    stride_o_t: gl.tensor | gl.constexpr
    GROUPS: gl.constexpr  # groups of heads, whose units follow one another
    WIDTH: gl.constexpr  # columns of o of a group
    WARPS: gl.constexpr
    TAILS: gl.constexpr


@gluon.jit
def find_unit(of, number):
    """The first of a program's units from ``number`` on that has tokens of a sequence.

    Returns its number, its sequence, its first token, where its results go, and how many tokens it
    has: 0 after the last unit. Stores zeros for units between that no sequence owns.
    """
    seq = number * 0
    row = seq
    made = seq
    count = seq
    searching = number >= 0
    while searching:
        unit = number // of.GROUPS
        seq, row, end, units = span_of(of, unit)
        made = row
        if of.TAILS:
            tails = of.N * of.M
            if unit >= units:
                tail = gl.minimum(unit - units, tails - 1)
                seq, row, end = tail_span(
                    tail, of.cu_seqlens_ptr, of.positions_ptr, of.every, of.T, of.M
                )
                made = of.rows - (tails - tail) * C
            units += tails
        count = gl.where(unit < units, gl.maximum(gl.minimum(end - row, C), 0), 0)
        if (count > 0) & (seq >= of.N):  # tokens after the last sequence
            o_ptr = of.o_ptr + row.to(gl.int64) * of.stride_o_t
            zero_output(o_ptr + number % of.GROUPS * of.WIDTH, count, of)
            count = seq * 0
        searching = (count == 0) & (unit < units)
        number += gl.where(searching, gl.num_programs(0), 0)
    return number, seq, row, made, count


@gluon.jit
def span_of(of, unit):
    """The sequence of a unit, its first token, its sequence's end, and how many units there are."""
    units = of.units
    if of.cu_seqlens_ptr is None:
        seq, start, chunk, end = unit_span(unit, None, of.N, of.T, C)
        row = start + chunk * C
    else:
        seq = unit * 0
        row = seq
        end = seq
        if of.N < 32:
            seq, row, end, units = close_span(unit, of.cu_seqlens_ptr, of.N, of.T, of.WARPS)
        else:
            if of.WARPS == 1:
                seq, start, chunk, end = counted_span(unit, of.cu_seqlens_ptr, of.N, of.T, C)
            else:
                seq, start, chunk, end = unit_span(unit, of.cu_seqlens_ptr, of.N, of.T, C)
            row = start + chunk * C
    return seq, row, end, units


@gluon.jit
def close_span(unit, cu_seqlens_ptr, N, T, WARPS: gl.constexpr):
    """The same of up to 31 sequences, whose units have no gaps. After the last unit it is empty.

    Tokens after the last sequence count as one more.
    """
    i = gl.arange(0, 32, gl.BlockedLayout([1], [32], [WARPS], [0]))  # the same in each warp
    begin = gl.load(cu_seqlens_ptr + gl.minimum(i, N)).to(gl.int32)
    end = gl.load(cu_seqlens_ptr + gl.minimum(i + 1, N)).to(gl.int32)
    end = gl.where(i == N, T, end)
    chunks = (end - begin + (C - 1)) // C
    after = gl.associative_scan(chunks, 0, add)
    seq = gl.sum((after <= unit).to(gl.int32), axis=0)
    row = begin + (unit - (after - chunks)) * C
    row = gl.max(gl.where(i == seq, row, 0), axis=0)
    end = gl.max(gl.where(i == seq, end, 0), axis=0)
    return seq, row, end, gl.max(after, axis=0)


@gluon.jit
def gates_from(gates, seq, row, of, stride_g_b, stride_beta_b):
    """The gates from a unit's first token on."""
    batch = seq * 0
    t = row
    if of.cu_seqlens_ptr is None:
        batch = seq
        t = row - seq * of.T
    beta_ptr = gates.beta_ptr + batch.to(gl.int64) * stride_beta_b
    beta_ptr += t.to(gl.int64) * gates.stride_beta_t
    if gates.g_ptr is None:
        g_ptr: gl.constexpr = None
    else:
        g_ptr = gates.g_ptr + batch.to(gl.int64) * stride_g_b
        g_ptr += t.to(gl.int64) * gates.stride_g_t
    return Gates(
        g_ptr=g_ptr, A_log_ptr=gates.A_log_ptr, dt_bias_ptr=gates.dt_bias_ptr, beta_ptr=beta_ptr,
        beta_scale=gates.beta_scale, stride_g_t=gates.stride_g_t, stride_g_h=gates.stride_g_h,
        stride_beta_t=gates.stride_beta_t, stride_beta_h=gates.stride_beta_h,
        RAW_BETA=gates.RAW_BETA,
    )  # fmt: skip


@gluon.jit
def prefetch_keys(k_ptr, row, count, stride_k_t, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Bring ``count`` tokens of WIDTH columns of 16 bits into the L2 cache."""
    LINES: gl.constexpr = WIDTH // 64  # of 128 bytes, per token
    i = gl.arange(0, C * LINES, gl.BlockedLayout([1], [32], [WARPS], [0]))
    token = row + gl.minimum(i // LINES, count - 1)
    at = token.to(gl.int64) * stride_k_t + i % LINES * 64
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l", [k_ptr + at], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def zero_output(o_ptr, count, of):
    """Store zeros for ``count`` tokens that no sequence owns."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [of.WARPS, 1], [1, 0])
    columns = gl.arange(0, 128, gl.SliceLayout(0, layout))
    zeros = gl.zeros([16, 128], o_ptr.dtype.element_ty, layout)
    for first in range(0, count, 16):
        rows = gl.arange(0, 16, gl.SliceLayout(1, layout)) + first
        at = gl.expand_dims(rows.to(gl.int64) * of.stride_o_t, 1) + gl.expand_dims(columns, 0)
        mask = gl.expand_dims(rows < count, 1) & gl.expand_dims(columns < 128, 0)
        for column in range(0, of.WIDTH, 128):
            gl.store(o_ptr + column + at, zeros, mask=mask)
