"""A quick look at the values of a call before its kernel starts, without Python.

What keeps the contract of ``sluice.contract.values`` in the plain way passes here. Anything else is
only suspicious (a sum may overflow, a padded row may hold NaN): Python's checks then decide, and
write the message.
"""

from __future__ import annotations

from sluice.backends.cpu.jit import jit, jit_inline
from sluice.backends.cpu.llvm import BF16, F16, F32, F64, LANES
from sluice.backends.cpu.operands import KEY_DECAY
from sluice.backends.cpu.scratch_rows import read_index
from sluice.backends.cpu.simd import get, load, pointer, splat
from sluice.backends.cpu.tiles import total

MOST_ROWS = 128  # rows whose slots are compared one by one; more are left to Python


@jit_inline
def _sum(x, stride, count):
    tail, acc = 0.0, splat(0.0)
    whole = count - count % LANES if stride == 1 else 0
    for i in range(0, whole, LANES):
        acc = acc + load(x, i)
    for i in range(whole, count):
        tail += get(x, i * stride)
    return tail + total(acc)


@jit
def _finite(address, code, at, stride, count):
    """Whether a sum is finite, which shows any NaN or infinity."""
    if code == F32:
        s = _sum(pointer(address, F32) + at, stride, count)
    elif code == BF16:
        s = _sum(pointer(address, BF16) + at, stride, count)
    elif code == F16:
        s = _sum(pointer(address, F16) + at, stride, count)
    else:
        s = _sum(pointer(address, F64) + at, stride, count)
    return s - s == 0.0


@jit
def _gates_finite(p, address, b, t, h, code, heads, width):
    """A gate of every token and head; of each `width` elements."""
    if address == 0 or heads == 0:
        return True
    rows = p.N if p.cu == 0 else 1
    row = heads * width
    if h == width and t == row and (rows == 1 or b == row * p.T):
        return _finite(address, code, 0, 1, rows * p.T * row)
    for i in range(rows):
        for j in range(p.T):
            for k in range(heads if width > 1 else 1):
                at = i * b + j * t + k * h
                step, count = (1, width) if width > 1 else (h, heads)
                if not _finite(address, code, at, step, count):
                    return False
    return True


@jit
def _all_finite(p):
    width = p.K if p.decay == KEY_DECAY else 1
    if p.A != 0 and not _finite(p.A, p.A_code, 0, p.A_h, p.HV):
        return False
    if p.dt != 0 and not _finite(p.dt, p.dt_code, 0, 1 if width > 1 else p.dt_h, p.HV * width):
        return False
    if p.makes_gates:
        return _gates_finite(p, p.a, p.a_b, p.a_t, p.a_h, p.a_code, p.g_count, 1) and _gates_finite(
            p, p.b, p.b_b, p.b_t, p.b_h, p.b_code, p.beta_count, 1
        )
    return _gates_finite(p, p.g, p.g_b, p.g_t, p.g_h, p.g_code, p.g_count, width) and _gates_finite(
        p, p.beta, p.beta_b, p.beta_t, p.beta_h, p.beta_code, p.beta_count, 1
    )


@jit
def _bounds_fit(p):
    """cu_seqlens rises from 0 to at most T, and no sequence is too long."""
    if p.cu == 0:
        return True
    before = 0
    for i in range(p.N + 1):
        bound = read_index(p.cu, p.cu_wide, i)
        if p.cu_host != 0 and read_index(p.cu_host, p.cu_host_wide, i) != bound:
            return False
        if i == 0 and bound != 0 or bound < before or bound > p.T:  # noqa: RUF021
            return False
        if p.most_tokens > 0 and bound - before > p.most_tokens:
            return False
        before = bound
    return True


@jit_inline
def _slots_of(p, i):
    read = i if p.slots == 0 else read_index(p.slots, p.slots_wide, i)
    return read, read if p.write == 0 else read_index(p.write, p.write_wide, i)


@jit
def _tokens(p, i):
    """Tokens of a sequence."""
    if p.cu == 0:
        return p.T
    return read_index(p.cu, p.cu_wide, i + 1) - read_index(p.cu, p.cu_wide, i)


@jit
def _state_used(p, i, t, slot):
    """Whether another state of the call goes to this slot, or another row reads it."""
    for j in range(p.N):
        if j != i and (j if p.slots == 0 else read_index(p.slots, p.slots_wide, j)) == slot:
            return True
        for s in range(_tokens(p, j)):
            if (j != i or s != t) and read_index(p.write, p.write_wide, j * p.states + s) == slot:
                return True
    return False


@jit
def _states_fit(p):
    """The same where each token has a write slot."""
    for i in range(p.N):
        if p.slots != 0 and read_index(p.slots, p.slots_wide, i) >= p.P:
            return False
        if _tokens(p, i) > p.states:
            return False
        for t in range(_tokens(p, i)):
            slot = read_index(p.write, p.write_wide, i * p.states + t)
            if slot >= p.P or slot > p.pad and _state_used(p, i, t, slot):  # noqa: RUF021
                return False
    return True


@jit
def _slots_fit(p):
    """Slots lie in the pool, and none that is written is used by another row."""
    if p.slots == 0 and p.write == 0:
        return True
    if p.N * max(p.states, 1) > MOST_ROWS:
        return False
    if p.states > 0:
        return _states_fit(p)
    for i in range(p.N):
        read, write = _slots_of(p, i)
        if read >= p.P or write >= p.P:
            return False
        if not p.owned or write <= p.pad or p.slots != 0 and read <= p.pad:  # noqa: RUF021
            continue
        for j in range(p.N):
            other, written = _slots_of(p, j)
            if j != i and (other == write or written == write):
                return False
    return True


@jit
def _accepted_fit(p):
    if p.accepted == 0:
        return True
    for i in range(p.N):
        length = p.T
        if p.cu != 0:
            length = read_index(p.cu, p.cu_wide, i + 1) - read_index(p.cu, p.cu_wide, i)
        count = read_index(p.accepted, p.accepted_wide, i)
        if count < 0 or count > length:
            return False
    return True


@jit
def _windows_fit(p):
    """Windows that start at a column lie in the state, before and after the call."""
    if p.window == 0:
        return True
    for i in range(p.N):
        start = read_index(p.window, p.window_wide, i)
        if start < 0 or start > p.L - p.W + 1:
            return False
        if not p.freeze and p.W - 2 + _tokens(p, i) > p.L:
            return False
    return True


@jit
def _drafts_fit(p):
    """Rows of draft buffers exist, have room, and belong to one sequence each."""
    if not p.buffered:
        return True
    if p.N > MOST_ROWS:
        return False
    for i in range(p.N):
        row = i if p.draft_slots == 0 else read_index(p.draft_slots, p.draft_slots_wide, i)
        if row >= p.S or p.accepted == 0 and _tokens(p, i) > p.draft_tokens:  # noqa: RUF021
            return False
        if p.draft_slots != 0 and row > p.pad:
            for j in range(i):
                if read_index(p.draft_slots, p.draft_slots_wide, j) == row:
                    return False
    return True


@jit
def plain(p):
    """Whether all values keep the contract in the plain way."""
    fit = _bounds_fit(p) and _slots_fit(p) and _accepted_fit(p)
    return fit and _windows_fit(p) and _drafts_fit(p) and _all_finite(p)
