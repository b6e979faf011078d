"""A whole layer's decode after its input projections, in one launch.

One task is a key head of a sequence with its value heads: the convolution of their channels, whose
state nobody else touches, the l2 norm, the gates, the delta rule and the gated norm. Nothing is
rounded between them.
"""

from __future__ import annotations

from sluice.backends import Launch
from sluice.backends.cpu.addressing import NOWHERE, state_rows
from sluice.backends.cpu.conv_lines import (
    convolve,
    front_lines,
    load_lines,
    load_weights,
    load_window,
    make_lines,
    store_window,
)
from sluice.backends.cpu.decode import deal_keys, head_runner, is_one_token
from sluice.backends.cpu.delta import BLOCK_V, Function
from sluice.backends.cpu.jit import jit, jit_as, named
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import bind as bind_kernel
from sluice.backends.cpu.llvm import F32, LANES
from sluice.backends.cpu.memory import address_of, allocate, release
from sluice.backends.cpu.norm import gated_norm, load_norm_weight
from sluice.backends.cpu.operands import (
    finish_tokens,
    load_gates,
    make_operands,
    make_work,
    padded_tokens,
)
from sluice.backends.cpu.params import PARAMS
from sluice.backends.cpu.scratch_rows import (
    copy_row,
    fill,
    fill_tail,
    load_row,
    prefetch_row,
    round_up,
    store_row,
)
from sluice.backends.cpu.simd import get, pointer, put
from sluice.backends.cpu.state import block_floats
from sluice.backends.cpu.threads import tasks_of
from sluice.backends.cpu.tokens import has_one_token
from sluice.contract import values
from sluice.contract.spec import StepSpec

view = PARAMS.view


@jit
def _channels(p, key, part):
    """First channel, number and column of the q (0), k (1) or v (2) channels of a key head."""
    column = part * round_up(p.K, LANES)
    if part < 2:
        return (part * p.HK + key) * p.K, p.K, column
    count = p.HV // p.HK * p.V
    return 2 * p.HK * p.K + key * count, count, column


@jit
def _inputs_at(p, seq, key, part):
    """The element of x where those channels of the first token begin."""
    if p.interleaved:
        return seq * p.x_b + key * (2 * p.K + 2 * p.HV // p.HK * p.V) + part * p.K
    return seq * p.x_b + _channels(p, key, part)[0]


@jit
def _load_inputs(p, c, seq, key, read, write):
    """Windows and tokens of a key head's channels; the windows go on to their write slot."""
    for part in range(3):
        first, count, column = _channels(p, key, part)
        at = _inputs_at(p, seq, key, part)
        load_window(p, c, column, read, first, count, read == NOWHERE)
        load_lines(p, c, c.front, column, at, p.T, count)
        if write != NOWHERE:
            store_window(p, c, column, p.T, write, first, count)


@jit
def _prefetch_inputs(p, seq, slot, key):
    """Ask for the windows and tokens of the key head that comes next."""
    for part in range(3):
        first, count, _column = _channels(p, key, part)
        at = slot * p.conv_p + first * p.conv_d
        prefetch_row(p.conv, p.conv_code, at, count * p.L if p.conv_d != 1 else count)
        prefetch_row(p.x, p.io, _inputs_at(p, seq, key, part), count)


@jit
def _use_taps(p, c, taps, key):
    """Let the lines of a key head use its taps, which are loaded when first needed."""
    c.weight = taps + p.HK * LANES + key * (p.W + 1) * c.width
    c.bias = c.weight + p.W * c.width
    if get(taps, key * LANES) == 0.0:
        put(taps, key * LANES, 1.0)
        for part in range(3):
            first, count, column = _channels(p, key, part)
            load_weights(p, c, column, first, count)


@jit
def _outputs(p, w, z, weight, seq, head):
    """The gated norm of every token's output of one value head."""
    ld_v, ratio = round_up(p.V, BLOCK_V), p.HV // p.HK
    at = seq * p.z_b + p.z_offset + head // ratio * p.z_group + head % ratio * p.V
    for t in range(p.T):
        row = w.o + t * ld_v
        fill_tail(row, p.V)
        load_row(z, p.z, p.z_code, at + t * p.z_t, p.V)
        gated_norm(p, row, z, weight)
        store_row(p.y, p.io, seq * p.y_b + t * p.y_t + head * p.V, row, p.V)


@jit
def _gates_at(p, seq, head):
    """Elements of the first token's raw a and b."""
    ratio = p.HV // p.HK
    key, inside = head // ratio, head % ratio
    g_at = seq * p.g_b + p.a_offset + key * p.a_group + inside * p.g_h
    beta_at = seq * p.beta_b + key * p.b_group + inside * p.beta_h
    return g_at, beta_at


def _tasks(many: bool) -> Function:
    run_head = head_runner(many)

    @jit_as("step_task", many)
    def task(p, w, c, extra, taps, seq, key):
        """One key head of one sequence, with its value heads."""
        n, ld_v, ratio, m = round_up(p.K, LANES), round_up(p.V, BLOCK_V), p.HV // p.HK, p.T
        padding, read, write = state_rows(p, seq)
        if padding:
            fill(w.o, ld_v, 0.0)
            for head in range(key * ratio, (key + 1) * ratio):
                for t in range(m):
                    store_row(p.y, p.io, seq * p.y_b + t * p.y_t + head * p.V, w.o, p.V)
            return
        _use_taps(p, c, taps, key)
        _load_inputs(p, c, seq, key, read, write)
        if key + 1 < p.HK:
            _prefetch_inputs(p, seq, max(read, 0), key + 1)
        here = address_of(c.bias)  # nothing to ask for: the lines are short
        convolve(p, c, m, c.width, here, 0, here, 0)
        for t in range(m):
            q, k = w.kq + (padded_tokens(m) + t) * n, w.kq + t * n
            copy_row(q, c.y + t * c.width, n)
            copy_row(k, c.y + t * c.width + n, n)
            fill_tail(q, p.K)
            fill_tail(k, p.K)
        finish_tokens(p, w, m)
        deal_keys(p, w, m)
        for head in range(key * ratio, (key + 1) * ratio):
            g_at, beta_at = _gates_at(p, seq, head)
            load_gates(p, w, 0, g_at, beta_at, head, m)
            column = 2 * n + (head - key * ratio) * p.V
            for t in range(padded_tokens(m)):
                if t < m:
                    copy_row(w.v + t * ld_v, c.y + t * c.width + column, round_up(p.V, LANES))
                else:
                    fill(w.v + t * ld_v, ld_v, 0.0)
            make_operands(p, w, w.alpha, m, write != NOWHERE and not is_one_token(p, w, m))
            run_head(p, w, read, write, head, 0, m)
            _outputs(p, w, extra, extra + ld_v, seq, head)

    return task


def _kernel(name: str, many: bool) -> Kernel:
    task = _tasks(many)

    @named(name)
    def kernel(block):
        p = view(block)
        n, ld_v, ratio = round_up(p.K, LANES), round_up(p.V, BLOCK_V), p.HV // p.HK
        w, memory = make_work(p, 1, 1, block_floats(p))
        width = 2 * n + round_up(ratio * p.V, LANES) + LANES
        c, more = make_lines(width, front_lines(p), 1)
        last = allocate((2 * ld_v + p.HK * (LANES + (p.W + 1) * width)) * 4 + 64)
        extra = pointer(round_up(last, 64), F32)
        load_norm_weight(p, extra + ld_v)
        taps = extra + 2 * ld_v
        fill(taps, p.HK * LANES, 0.0)
        for i in tasks_of(p):
            task(p, w, c, extra, taps, i // p.HK, i % p.HK)
        release(last)
        release(more)
        release(memory)

    return Kernel(name, kernel)


KERNEL, KERNEL_ONE = _kernel("step", True), _kernel("step_one", False)


def bind(spec: StepSpec) -> Launch:
    """A launch of ``step``."""
    tasks = spec.N * spec.HK if spec.T > 0 else 0
    kernel = KERNEL_ONE if has_one_token(spec) else KERNEL
    return bind_kernel(kernel, spec, lambda threads: {"tasks": tasks}, values.step)
