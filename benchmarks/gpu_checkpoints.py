"""What checkpoints cost prefill and conv_qkv on a GPU: graph replays with and without, in one run.

PYTHONPATH=src python benchmarks/gpu_checkpoints.py
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

import sluice
from sluice.bench.machine import conditions

LENGTHS = ([2048], [8192], [32768], [1024] * 8, [4096] * 8)
ROWS = [(heads, lengths) for heads in ((16, 32), (16, 64), (2, 8)) for lengths in LENGTHS]
ROUNDS, REPLAYS = 7, 6


def graph_of(op: str, lengths: list[int], HK: int, HV: int, every: int | None) -> Any:
    """A captured call; its tensors live as long as the graph."""
    total, N = sum(lengths), len(lengths)
    columns = max(lengths) // every if every else 0
    slots = N * (1 + columns)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    call: dict[str, Any] = {
        "A_log": torch.zeros(HV, device="cuda"),
        "dt_bias": torch.zeros(HV, device="cuda"),
        "normalize_qk": True,
        "slots": torch.arange(N, device="cuda"),
        "cu_seqlens": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda"),
    }
    if op == "prefill":
        call |= {"q": randn(total, HK, 128), "k": randn(total, HK, 128), "v": randn(total, HV, 128)}
        call |= {"g": randn(total, HV), "beta": randn(total, HV)}
        call["state"] = torch.zeros(slots, HV, 128, 128, device="cuda")
    else:
        channels = (2 * HK + HV) * 128
        call |= {"x": randn(total, channels), "weight": randn(channels, 4)}
        call |= {"a": randn(total, HV), "b": randn(total, HV)}
        call |= {"num_k_heads": HK, "num_v_heads": HV, "state": randn(slots, channels, 3)}
        call |= {"head_k_dim": 128, "head_v_dim": 128}
    if every:
        kept = N + torch.arange(N * columns, device="cuda").view(N, columns)
        call["checkpoints"] = sluice.Checkpoints(kept, every=every)
    run = getattr(sluice, op)
    run(**call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(**call)
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
    for op in ("prefill", "conv_qkv"):
        print(f"\n{op} in microseconds: median (and ratio to no checkpoints) per distance")
        print(f"{'heads':>7} {'tokens':>9}" + "".join(f"{e or 'none':>16}" for e in distances))
        for heads, lengths in ROWS:
            print(row(op, heads, lengths, distances), flush=True)
            torch.cuda.empty_cache()


def row(
    op: str, heads: tuple[int, int], lengths: list[int], distances: Sequence[int | None]
) -> str:
    """A line of the table."""
    graphs = {every: graph_of(op, lengths, *heads, every) for every in distances}
    times: dict[int | None, list[float]] = {every: [] for every in distances}
    for _ in range(ROUNDS):
        for every, graph in graphs.items():
            times[every].append(microseconds(graph))
    found = {every: statistics.median(t) for every, t in times.items()}
    name = f"{len(lengths)}x{lengths[0]}" if len(lengths) > 1 else str(lengths[0])
    cells = (f"{t:9.1f} ({t / found[None]:.2f})" for t in found.values())
    return f"{heads[0]:>4}/{heads[1]:<2} {name:>9}" + "".join(f"{cell:>16}" for cell in cells)


if __name__ == "__main__":
    main()
