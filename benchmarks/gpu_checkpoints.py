"""What checkpoints cost in prefill on a GPU: graph replays with and without, in one run.

PYTHONPATH=src python benchmarks/gpu_checkpoints.py
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import statistics
from itertools import accumulate
from typing import Any

import torch

import sluice
from sluice.bench.machine import conditions

LENGTHS = ([2048], [8192], [32768], [1024] * 8, [4096] * 8)
ROWS = [(heads, lengths) for heads in ((16, 32), (16, 64), (2, 8)) for lengths in LENGTHS]
ROUNDS, REPLAYS = 7, 6


def graph_of(lengths: list[int], HK: int, HV: int, every: int | None) -> torch.cuda.CUDAGraph:
    """A captured prefill; its tensors live as long as the graph."""
    total, N = sum(lengths), len(lengths)
    columns = max(lengths) // every if every else 0

    def randn(*shape: int, **kinds: Any) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", **{"dtype": torch.bfloat16, **kinds})

    call: dict[str, Any] = {
        "q": randn(total, HK, 128),
        "k": randn(total, HK, 128),
        "v": randn(total, HV, 128),
        "g": randn(total, HV),
        "beta": randn(total, HV),
        "A_log": torch.zeros(HV, device="cuda"),
        "dt_bias": torch.zeros(HV, device="cuda"),
        "state": torch.zeros(N * (1 + columns), HV, 128, 128, device="cuda"),
        "slots": torch.arange(N, device="cuda"),
        "cu_seqlens": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda"),
    }
    if every:
        slots = N + torch.arange(N * columns, device="cuda").view(N, columns)
        call["checkpoints"] = sluice.Checkpoints(slots, every=every)
    sluice.prefill(**call, normalize_qk=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sluice.prefill(**call, normalize_qk=True)
    graph.kept = call  # type: ignore[attr-defined]
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / REPLAYS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", default="64,256,1024,96", help="tokens between checkpoints")
    distances = [None, *(int(x) for x in parser.parse_args().every.split(",") if x)]
    print(conditions(torch.device("cuda"), 1))
    print("prefill in microseconds: median (and ratio to no checkpoints) per distance")
    print(f"{'heads':>7} {'tokens':>9}" + "".join(f"{e or 'none':>16}" for e in distances))
    for (HK, HV), lengths in ROWS:
        graphs = {every: graph_of(lengths, HK, HV, every) for every in distances}
        times: dict[int | None, list[float]] = {every: [] for every in distances}
        for _ in range(ROUNDS):
            for every, graph in graphs.items():
                times[every].append(microseconds(graph))
        found = {every: statistics.median(t) for every, t in times.items()}
        name = f"{len(lengths)}x{lengths[0]}" if len(lengths) > 1 else str(lengths[0])
        cells = (f"{t:9.1f} ({t / found[None]:.2f})" for t in found.values())
        print(f"{HK:>4}/{HV:<2} {name:>9}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
        del graphs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
