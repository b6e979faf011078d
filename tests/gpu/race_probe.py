"""Kernels in which one warpgroup writes and another reads, ordered as in the Hopper prefill.

    compute-sanitizer --tool racecheck --racecheck-report all python -m tests.gpu.race_probe

The writers store, meet at their own barrier, and one of them arrives at an mbarrier; the readers
wait for that mbarrier, and release the buffer in the same way. This orders stores and reads, so
racecheck's reports about them are not races. There are three forms: stores of some numbers
("plain"), of numbers and a tile in a product's layout ("rows"), and of the end of a tile ("tile"),
with 1, 2 or 4 numbers per token. The results are checked too. On an H200 racecheck reports only
Triton's own hand-over for the first form, and thousands of hazards for the others
(benchmarks/results).
"""
# ruff: noqa: T201

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sluice.backends.hopper.kernels.gluon_api import barrier
from sluice.backends.hopper.kernels.state_products import zero_after

SIZE, ROUNDS, SLOTS = 64, 16, 2


@gluon.jit
def write(
    numbers, tiles, made, free, SIZE: gl.constexpr, ROUNDS: gl.constexpr, SLOTS: gl.constexpr,
    STORES: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    acc: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SIZE, 16]
    )
    plain: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    layout: gl.constexpr = gl.SliceLayout(1, acc) if FORM == "rows" else plain
    offs = gl.arange(0, SIZE, layout)
    for n in range(ROUNDS):
        slot = n % SLOTS
        mbarrier.wait(free.index(slot), (n // SLOTS + 1) % 2, pred=n >= SLOTS)
        for store in gl.static_range(STORES):
            numbers.index(slot * STORES + store).store((offs + n + store).to(gl.float32))
        if FORM == "tile":
            zero_after(tiles.index(slot), n)
        if FORM == "rows":
            tiles.index(slot).store(gl.full([SIZE, SIZE], 1.0, gl.float16, acc))
        barrier()
        mbarrier.arrive(made.index(slot), count=1)


@gluon.jit
def read(
    numbers, tiles, made, free, out_ptr, SIZE: gl.constexpr, ROUNDS: gl.constexpr,
    SLOTS: gl.constexpr, STORES: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    acc: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SIZE, 16]
    )
    layout: gl.constexpr = gl.SliceLayout(0, acc)
    offs = gl.arange(0, SIZE, layout)
    total = gl.zeros([SIZE], gl.float32, layout)
    for n in range(ROUNDS):
        slot = n % SLOTS
        mbarrier.wait(made.index(slot), (n // SLOTS) % 2)
        for store in gl.static_range(STORES):
            total += numbers.index(slot * STORES + store).load(layout)
        if FORM != "plain":
            tile = tiles.index(slot).load(acc).to(gl.float32)
            total += gl.sum(tile, axis=0) * 0.0
        barrier()
        mbarrier.arrive(free.index(slot), count=1)
    gl.store(out_ptr + offs, total)


@gluon.jit
def probe_kernel(
    out_ptr, SIZE: gl.constexpr, ROUNDS: gl.constexpr, SLOTS: gl.constexpr, STORES: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIZE, SIZE], gl.float16)
    numbers = gl.allocate_shared_memory(gl.float32, [SLOTS * STORES, SIZE], plain)
    tiles = gl.allocate_shared_memory(gl.float16, [SLOTS, SIZE, SIZE], square)
    if FORM == "tile":
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        for slot in gl.static_range(SLOTS):
            tiles.index(slot).store(gl.full([SIZE, SIZE], 1.0, gl.float16, layout))
    made = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(made.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    gl.warp_specialize(
        [
            (read, (numbers, tiles, made, free, out_ptr, SIZE, ROUNDS, SLOTS, STORES, FORM)),
            (write, (numbers, tiles, made, free, SIZE, ROUNDS, SLOTS, STORES, FORM)),
        ],
        [4],
        [128],
    )


def main() -> None:
    for form in sys.argv[1:] or ("plain", "rows", "tile"):
        for stores in (1, 2, 4):
            out = torch.empty(SIZE, device="cuda")
            probe_kernel[(1,)](out, SIZE, ROUNDS, SLOTS, stores, form, num_warps=4)
            one = ROUNDS * torch.arange(SIZE) + sum(range(ROUNDS))
            expected = sum((one + ROUNDS * store for store in range(stores)), torch.zeros(SIZE))
            found = "right" if torch.equal(out.cpu(), expected.float()) else "wrong"
            print(form, stores, found, flush=True)


if __name__ == "__main__":
    main()
