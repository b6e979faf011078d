"""A kernel in which one group of warps writes and another reads, ordered as in the Hopper prefill.

    compute-sanitizer --tool racecheck --racecheck-report all python -m tests.gpu.race_probe

The writers store, meet at a barrier of their own, and one of them arrives at an mbarrier; the
readers wait for that mbarrier, and give the buffer back the same way. That is an order, so what
racecheck reports of it is no race. The result is checked as well.
"""
# ruff: noqa: T201

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sluice.backends.hopper.prefill_tiles import barrier

SIZE, ROUNDS, SLOTS = 64, 16, 2


@gluon.jit
def write(numbers, made, free, SIZE: gl.constexpr, ROUNDS: gl.constexpr, SLOTS: gl.constexpr):
    offs = gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [4], [0]))
    for n in range(ROUNDS):
        slot = n % SLOTS
        mbarrier.wait(free.index(slot), (n // SLOTS + 1) % 2, pred=n >= SLOTS)
        numbers.index(slot).store((offs + n).to(gl.float32))
        barrier()
        mbarrier.arrive(made.index(slot), count=1)


@gluon.jit
def read(
    numbers, made, free, out_ptr, SIZE: gl.constexpr, ROUNDS: gl.constexpr, SLOTS: gl.constexpr
):
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    offs = gl.arange(0, SIZE, layout)
    total = gl.zeros([SIZE], gl.float32, layout)
    for n in range(ROUNDS):
        slot = n % SLOTS
        mbarrier.wait(made.index(slot), (n // SLOTS) % 2)
        total += numbers.index(slot).load(layout)
        barrier()
        mbarrier.arrive(free.index(slot), count=1)
    gl.store(out_ptr + offs, total)


@gluon.jit
def probe_kernel(out_ptr, SIZE: gl.constexpr, ROUNDS: gl.constexpr, SLOTS: gl.constexpr):
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.float32, [SLOTS, SIZE], plain)
    made = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(made.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    gl.warp_specialize(
        [
            (read, (numbers, made, free, out_ptr, SIZE, ROUNDS, SLOTS)),
            (write, (numbers, made, free, SIZE, ROUNDS, SLOTS)),
        ],
        [4],
        [64],
    )


def main() -> None:
    out = torch.empty(SIZE, device="cuda")
    probe_kernel[(4,)](out, SIZE, ROUNDS, SLOTS, num_warps=4)
    expected = ROUNDS * torch.arange(SIZE) + sum(range(ROUNDS))
    print("right" if torch.equal(out.cpu(), expected.float()) else "wrong")


if __name__ == "__main__":
    main()
