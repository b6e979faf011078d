"""The command: ``python -m tests.load --minutes 10``, then 200,000 calls of changing shapes."""

from __future__ import annotations

import argparse
import sys

from sluice import calls
from tests.load import pool, shapes
from tests.load.measure import LIMIT

SIZES = (1024, 4096, 4608, 8192, 16384, 18432, 32768, 65536)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the pool (%(default)s)")
    parser.add_argument(
        "--calls", type=int, default=200_000, help="of changing shapes (%(default)s)"
    )
    parser.add_argument("--threads", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="on a GPU (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    given = parser.parse_args()
    bad = 0
    if given.minutes > 0:
        device = given.device
        seen, memory = pool.serve(given.minutes * 60, given.threads, given.streams, device)
        where = f"{given.threads} threads" + (f", {given.streams} streams" * (device != "cpu"))
        print(f"one pool, {where}, {given.minutes:g} minutes on {device}:")
        print(f"  {seen.scripts:,} lives, {seen.calls:,} calls, {seen.waits:,} waits for a slot")
        print(f"  step beside the other threads: {seen.times}")
        if device == "cpu":
            found = pool.control(min(given.minutes * 6, 30), given.threads)
            print(f"  torch.mul, twelve times, in as many threads (control): {found}")
        print(f"  memory: {memory}", flush=True)
        for fault in seen.faults:
            print(f"  FAULT: {fault}")
        bad += len(seen.faults) + (memory.growth > LIMIT)
    if given.calls > 0:
        times, memory = shapes.changing(given.calls, 2000, given.device)
        print(f"{given.calls:,} calls of 2,000 shapes, one thread:")
        for name, found in times.items():
            print(f"  {name}: {found}")
        print(f"  memory: {memory}", flush=True)
        bad += memory.growth > LIMIT
        print(f"rms_norm_gated, shapes in turn ({calls.BINDINGS.most:,} bindings are kept):")
        for size in SIZES:
            found, anew = shapes.walk(size, min(given.calls, 20_000), given.device)
            mean = found.total / found.number
            print(f"  {size:6,} shapes: {mean * 1e6:.1f} us a call, {anew:.0%} bound anew")
        shapes.mixed(min(given.calls, 2_000), given.device)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
