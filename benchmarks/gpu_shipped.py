"""Shipped kernels beside those that Triton compiles: graph replays, in microseconds.

    PYTHONPATH=src python benchmarks/gpu_shipped.py packages/kernels/sluice_kernels

The fifteen rows of prefill and the other operators of a layer, called as ``sluice warmup`` calls
them. Processes take turns: one has only shipped kernels and cannot import Triton, the other has
only Triton. It fails where a call on shipped kernels is not served by a GPU backend.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate
from typing import Any

LENGTHS = ([2048], [8192], [32768], [1024] * 8, [4096] * 8)
HEADS = ((16, 32), (16, 64), (2, 8))
ROUNDS, REPLAYS = 5, 6


def microseconds(call: Callable[[], Any]) -> float:
    """The median of replays of a captured call."""
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / REPLAYS)
    return statistics.median(times)


def once(triton: bool) -> None:
    """In a process of its own: every row, as JSON."""
    if not triton:
        sys.modules["triton"] = None  # type: ignore[assignment]  # an import of it fails
    import torch

    import sluice
    from sluice.layers import QwenShape
    from sluice.model_calls import ModelCalls

    torch.manual_seed(0)
    found: dict[str, tuple[float, str]] = {}
    for HK, HV in HEADS:
        m = ModelCalls(QwenShape("a model", 64, HK, HV, 4, (0, 1, 2)), device="cuda")
        for lengths in LENGTHS:
            (q, k, v, g, beta), options = m.prefill(
                len(lengths), sum(lengths) // len(lengths), True
            )
            for x in (q, k, v):
                x.normal_()
            q, k = (torch.nn.functional.normalize(x.float(), dim=-1).bfloat16() for x in (q, k))
            g.uniform_(-0.1, 0.0)
            beta.uniform_()
            options["slots"] = torch.arange(len(lengths), device="cuda")
            bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            options.update(cu_seqlens=bounds.cuda(), cu_seqlens_cpu=bounds)

            def call(given: Any = (q, k, v, g, beta), options: Any = options) -> Any:
                return sluice.prefill(*given, **options)

            by = sluice.explain("prefill", q, k, v, g, beta, **options).chosen or "-"
            count = f"{len(lengths)} x " if len(lengths) > 1 else ""
            found[f"prefill {HK}/{HV} {count}{lengths[0]}"] = microseconds(call), by
        sizes = {"decode": (64, 1), "step": (64, 1, True), "conv_qkv": (1, 8192, True)}
        for op, size in sizes.items():
            arguments, options = m.call(op, "", *size).make()
            if "slots" in options:
                options["slots"] = torch.arange(len(options["slots"]), device="cuda")

            def other(op: str = op, arguments: Any = arguments, options: Any = options) -> Any:
                return getattr(sluice, op)(*arguments, **options)

            by = sluice.explain(op, *arguments, **options).chosen or "-"
            found[f"{op} {HK}/{HV} {size[0]} x {size[1]}"] = microseconds(other), by
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="?", help="the folder of shipped kernels")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--once", choices=("shipped", "triton"), help="in this process")
    args = parser.parse_args()
    if args.once:
        once(args.once == "triton")
        return
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(args.turns):
        for side, folder in (("shipped", args.kernels), ("triton", "")):
            env = {**os.environ, "SLUICE_KERNELS": folder}  # noqa: TID251 (of the other process)
            command = [sys.executable, __file__, "--once", side]
            done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
            for row, (us, by) in json.loads(done.stdout.splitlines()[-1]).items():
                if by not in ("hopper", "triton"):
                    sys.exit(f"{row}: served by {by} with {side} kernels")
                times.setdefault(row, {}).setdefault(side, []).append(us)
    print(f"{'microseconds':28} {'shipped':>9} {'triton':>9} {'ratio':>7}")
    for row, sides in times.items():
        ours, other = (statistics.median(sides[side]) for side in ("shipped", "triton"))
        print(f"{row:28} {ours:9.2f} {other:9.2f} {ours / other:7.3f}")


if __name__ == "__main__":
    main()
