"""The items of hopper_state_kernel: what a program works on, one after another.

An item is a block of value columns of one head, in one sequence or in one segment of it. The
planner, one warp, takes the program's next item, looks it up while the state groups are still at
the one before, and describes it to the other roles: words of 32 bits, in a ring in shared memory.

A program's first item has the number of the program. Later items come from a counter in the
workspace, in order, as programs finish. So where sequences have different lengths, no program gets
two long ones while another has nothing left to do. A program takes an item when its loader reaches
the last chunk of the one before, so it never holds an item for long without working on it. Which
program makes an item changes no bit of the result.
"""

# ruff: noqa: SIM102 (constexpr branches stay apart)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from sluice.backends.hopper.kernels.constants import GROUP_V, C
from sluice.backends.hopper.kernels.gluon_api import aggregate, barrier
from sluice.backends.hopper.kernels.work_units import counted_span

RING = gl.constexpr(4)
WORDS = gl.constexpr(16)  # per item, at most; the fields:
ROW = gl.constexpr(0)  # first token
TOKENS = gl.constexpr(1)  # -1: there are no more items
FLAGS = gl.constexpr(2)
HEAD_V = gl.constexpr(3)
FIRST_V = gl.constexpr(4)  # first value column within the head
COLUMN_Q = gl.constexpr(5)
HEAD_K = gl.constexpr(6)
SOURCE = gl.constexpr(7)  # the slot of the state before the tokens
TARGET = gl.constexpr(8)  # the slot of the state after them; without OUTPUT the segment
SEGMENT = gl.constexpr(9)  # where the state before this segment lies; only in split sequences
RUN = gl.constexpr(10)  # ordinary chunks at the beginning, up to 256
SEQ = gl.constexpr(11)
BEFORE = gl.constexpr(12)  # tokens of the sequence before the first

LIVE = gl.constexpr(1)  # else: no chain to run; a sequence without a slot has zeros as output
HAS_SOURCE = gl.constexpr(2)  # else: zeros
WRITE = gl.constexpr(4)  # whether the state after the tokens is written
IS_SPLIT = gl.constexpr(8)
VALUES = gl.constexpr(16)  # else: a segment's transition, which has no values


@aggregate
class Items:
    """The ring, and its mbarriers: one per place unless stated."""

    words: gl.shared_memory_descriptor  # [RING * WORDS, 1]
    ready: gl.shared_memory_descriptor  # planner: the words but RUN are stored
    counted: gl.shared_memory_descriptor  # planner: RUN is stored
    free: gl.shared_memory_descriptor  # every state group: it is done with the item
    asked: gl.shared_memory_descriptor  # only one; loader: it is at the last chunk of its item


@gluon.jit
def allocate_items(GROUPS: gl.constexpr):
    """The ring and its mbarriers, initialised."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [RING * WORDS, 1], layout)
    ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    counted = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(RING):
        mbarrier.init(ready.index(place), count=1)
        mbarrier.init(counted.index(place), count=1)
        mbarrier.init(free.index(place), count=GROUPS)
    mbarrier.init(asked.index(0), count=1)
    return Items(words, ready, counted, free, asked)


@gluon.jit
def word(items, n, FIELD: gl.constexpr, WARPS: gl.constexpr):
    """A field of the program's n-th item."""
    return scalar(items.words.index(n % RING * WORDS + FIELD), WARPS)


@gluon.jit
def scalar(smem, WARPS: gl.constexpr):
    """The number in shared memory [1]."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(smem.load(layout), axis=0)


@gluon.jit
def put(smem, x):
    """Store a number into shared memory [1]; one warp."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    smem.store(gl.full([1], 0, gl.int32, layout) + x)


@gluon.jit
def wait_item(items, n):
    """Wait for the program's n-th item, all but RUN."""
    mbarrier.wait(items.ready.index(n % RING), n // RING % 2)


@gluon.jit
def first_run(items, n):
    """Wait for RUN of the program's n-th item."""
    mbarrier.wait(items.counted.index(n % RING), n // RING % 2)
    return word(items, n, RUN, 4)


@gluon.jit
def run_planner(args, sizes):
    """Take items until there are none."""
    gdc_wait()
    programs = gl.num_programs(0)
    number = gl.program_id(0)
    n = 0
    while number < args.number:
        write_item(args, sizes, number, n)
        mbarrier.wait(args.items.asked.index(0), n % 2)
        n += 1
        number = args.number
        if args.number > programs:
            number = programs + gl.atomic_add(args.taken_ptr, 1, sem="relaxed")
            if number == args.number + programs - 1:  # the last of all: zero again
                gl.store(args.taken_ptr, 0)
    mbarrier.wait(args.items.free.index(n % RING), n // RING % 2 ^ 1)
    put(args.items.words.index(n % RING * WORDS + TOKENS), -1)
    put(args.items.words.index(n % RING * WORDS + FLAGS), 0)
    barrier()
    mbarrier.arrive(args.items.ready.index(n % RING), count=1)


@gluon.jit
def write_item(args, sizes, number, n):
    """Write item ``number`` of the call as the program's n-th."""
    BLOCK_V: gl.constexpr = sizes.GROUPS * GROUP_V
    BLOCKS_V: gl.constexpr = sizes.V // BLOCK_V
    BLOCKS: gl.constexpr = BLOCKS_V if sizes.OUTPUT else BLOCKS_V + sizes.K // BLOCK_V
    block = number % BLOCKS
    head_v = (number // BLOCKS) % args.HV
    unit = number // (BLOCKS * args.HV)
    head_k = head_v // args.R_K
    seq, start, segment, end = counted_span(
        unit, args.cu_seqlens_ptr, args.N, args.T, args.segment_size
    )
    of = gl.minimum(seq, args.N - 1)
    # These loads run side by side: each needs the sequence, and none needs another load.
    source = of.to(gl.int64)
    if args.slots_ptr is not None:
        source = gl.load(args.slots_ptr + of).to(gl.int64)
    target = source
    if args.write_slots_ptr is not None:
        target = gl.load(args.write_slots_ptr + of).to(gl.int64)
    has_source = of >= 0
    if args.has_state_ptr is not None:
        has_source = gl.load(args.has_state_ptr + of) != 0
    row = start + segment * args.segment_size
    if seq >= args.N:
        end = row
    tokens = gl.maximum(gl.minimum(end - row, args.segment_size), 0)
    is_split = end - start > args.segment_size
    live = (seq < args.N) & ((tokens > 0) | (segment == 0))
    if args.slots_ptr is not None:
        live = live & (source > args.pad_slot)
    if sizes.OUTPUT:
        write = live & (target > args.pad_slot) & (row + tokens >= end)
        has_source = has_source & live
        if args.SPLIT:
            # A split sequence takes even its first state from the workspace: the program that has
            # its last segment may write to the pool before another program has begun.
            has_source = has_source & (end - start <= args.segment_size)
        target = target.to(gl.int32)
    else:
        if not args.EVERY:
            live = live & (end - row > args.segment_size)
        tokens = gl.where(live, tokens, 0)
        write = live
        target = unit
    flags = gl.where(live, LIVE, 0) | gl.where(has_source, HAS_SOURCE, 0)
    flags |= gl.where(write, WRITE, 0) | gl.where(is_split, IS_SPLIT, 0)
    flags |= gl.where(block < BLOCKS_V, VALUES, 0)  # the later blocks make transitions
    hard_ptr = args.hard_ptr + head_k.to(gl.int64) * args.stride_gates_h + row
    marks = load_marks(hard_ptr, gl.where(live, gl.cdiv(tokens, C), 0), 1)

    at = n % RING * WORDS
    words = args.items.words
    mbarrier.wait(args.items.free.index(n % RING), n // RING % 2 ^ 1)
    put(words.index(at + ROW), row)
    put(words.index(at + TOKENS), tokens)
    put(words.index(at + FLAGS), flags)
    put(words.index(at + HEAD_V), head_v)
    put(words.index(at + FIRST_V), block % BLOCKS_V * BLOCK_V)
    put(words.index(at + COLUMN_Q), head_v // args.R_Q * sizes.K)
    put(words.index(at + HEAD_K), head_k)
    put(words.index(at + SOURCE), source.to(gl.int32))
    put(words.index(at + TARGET), target)
    if args.SPLIT:
        before = gl.where(segment > 0, unit - 1, unit + (end - start - 1) // args.segment_size)
        put(words.index(at + SEGMENT), before)
    put(words.index(at + SEQ), seq)
    put(words.index(at + BEFORE), row - start)
    barrier()
    mbarrier.arrive(args.items.ready.index(n % RING), count=1)
    put(words.index(at + RUN), first_mark(marks, 1))  # the loader has no use for it
    barrier()
    mbarrier.arrive(args.items.counted.index(n % RING), count=1)
    if sizes.OUTPUT:
        if (n > 0) & has_source:
            state_ptr = args.state_ptr + head_v * (sizes.V * sizes.K)
            state_ptr += source * args.stride_state_p
            prefetch_state(state_ptr, block % BLOCKS_V * BLOCK_V, BLOCK_V, sizes)


@gluon.jit
def prefetch_state(state_ptr, first_v, BLOCK_V: gl.constexpr, sizes):
    """Bring the item's columns of a state into the L2 cache; one warp."""
    LINE: gl.constexpr = 1024 // state_ptr.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for first in range(0, BLOCK_V * sizes.K // LINE, 128):
        line = first + gl.arange(0, 128, layout)
        if sizes.STATE_KV:
            row = line // (BLOCK_V // LINE)
            at = row * sizes.V + line % (BLOCK_V // LINE) * LINE + first_v
        else:
            at = first_v * sizes.K + line * LINE
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l", [state_ptr + at], gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def load_marks(hard_ptr, chunks, WARPS: gl.constexpr):
    """Whether a chunk is hard, for the next 256; so are those after the last."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])  # the same in each warp
    number = gl.arange(0, 256, layout)
    return gl.load(hard_ptr + number * C, mask=number < chunks, other=1)


@gluon.jit
def first_mark(marks, WARPS: gl.constexpr):
    """The number of the first hard chunk, or 256."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    return gl.min(gl.where(marks != 0, gl.arange(0, 256, layout), 256), axis=0)
