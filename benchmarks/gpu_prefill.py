"""Prefill of many head counts and mixes of lengths beside FlashInfer, by a CUDA graph and eager.

    PYTHONPATH=src:DIR:DIR/nvidia_cutlass_dsl/dsl_packages python benchmarks/gpu_prefill.py

Where FlashInfer is not installed, only sluice is timed. There is a process per head count. All
processes compile and check their rows at the same time, and then time them one after another.
Outputs and final states are compared with the ``chunked`` backend in float32; a side that is off is
not timed. The two sides take turns, and the table has medians. ``--heads 16/32 8/16`` and
``--lengths 8x1024`` choose rows. ``--per-key`` has one decay per key, as KDA layers have it, and
FLA's ``chunk_kda`` as the peer.
"""
# ruff: noqa: T201 (a table on the terminal)

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import in_turn
import torch
from torch import Tensor

import sluice
from sluice.bench import peer_environment
from sluice.bench.machine import conditions

HEADS = ("2/8", "16/32", "16/64", "16/16", "8/16", "8/24", "16/48", "4/16", "4/8", "1/4")
PER_KEY_HEADS = ("32/32", "4/4")  # Kimi Linear, on one GPU and on eight
FIFTEEN = ("2/8", "16/32", "16/64")  # with OF_FIFTEEN: the rows measured since the beginning
LENGTHS = {
    "32768": [32768],
    "8192": [8192],
    "2048": [2048],
    "8x4096": [4096] * 8,
    "8x1024": [1024] * 8,
    "16x512": [512] * 16,
    "64x128": [128] * 64,
    "ragged": [5000, 17, 1, 900, 2048, 333, 64, 3000, 129, 700],
}
OF_FIFTEEN = tuple(LENGTHS)[:5]
LIMIT = 1e-2
ROUNDS = 9


def drawn(hk: int, hv: int, lengths: list[int], *, per_key: bool = False) -> dict[str, Tensor]:
    gen, tokens = torch.Generator("cuda").manual_seed(0), sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device="cuda")

    q, k = (torch.nn.functional.normalize(normal(1, tokens, hk, 128), dim=-1) for _ in range(2))
    bounds = list(itertools.accumulate(lengths, initial=0))
    decays = (1, tokens, hv, 128) if per_key else (1, tokens, hv)
    return {
        "q": q.bfloat16(), "k": k.bfloat16(), "v": normal(1, tokens, hv, 128).bfloat16(),
        "g": -0.05 * normal(*decays).abs(), "beta": normal(1, tokens, hv).sigmoid(),
        "state": 0.1 * normal(len(lengths), hv, 128, 128),
        "cu_seqlens": torch.tensor(bounds, device="cuda", dtype=torch.int32),
    }  # fmt: skip


Run = Callable[[Tensor], tuple[Tensor, Tensor]]  # initial states in; output and final states out


def own(x: dict[str, Tensor]) -> Run:
    call = {name: y for name, y in x.items() if name != "state"}
    return lambda pool: sluice.prefill(**call, state=pool)


def flashinfer(x: dict[str, Tensor], longest: int) -> Run:
    chunk = importlib.import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule
    q, k, v, g, beta = (x[name][0] for name in ("q", "k", "v", "g", "beta"))
    alpha, slots = g.exp(), torch.arange(x["state"].shape[0], device="cuda", dtype=torch.int32)

    def run(pool: Tensor) -> tuple[Tensor, Tensor]:
        o = chunk(
            q, k, v, alpha, beta, initial_state=pool, output_state=pool, state_indices=slots,
            output_final_state=True, cu_seqlens=x["cu_seqlens"], max_seqlen=longest,
            output=torch.empty_like(v),
        )[0]  # fmt: skip
        return o[None], pool

    return run


def fla(x: dict[str, Tensor]) -> Run:
    chunk = importlib.import_module("fla.ops.kda").chunk_kda
    call = {name: y for name, y in x.items() if name not in ("state", "cu_seqlens")}
    bounds = x["cu_seqlens"].long()

    def run(pool: Tensor) -> tuple[Tensor, Tensor]:
        return chunk(
            **call, initial_state=pool, output_final_state=True, state_v_first=True,
            cu_seqlens=bounds,
        )  # fmt: skip

    return run


def wrong(run: Run, x: dict[str, Tensor], wanted: tuple[Tensor, Tensor]) -> str | None:
    """Which result is off, and by how much; None if none is."""
    found = run(x["state"].clone())
    for name, a, b in zip(("o", "state"), found, wanted, strict=True):
        off = float((a.float() - b).norm() / b.norm())
        if not off <= LIMIT:
            return f"{name} off by {off:.1e}"
    return None


def exact(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    pool = x["state"].clone()
    call = {n: y if n == "cu_seqlens" else y.float() for n, y in x.items() if n != "state"}
    told = x["cu_seqlens"].cpu()
    o, _ = sluice.prefill(**call, state=pool, cu_seqlens_cpu=told, backend="chunked")
    return o, pool


def timed(runs: dict[str, Run], x: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Microseconds of each side by a CUDA graph, and of an eager call with the host's part."""
    pool = x["state"].clone()
    graphs = {}
    for name, run in runs.items():
        for _ in range(2):
            run(pool)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            run(pool)
    times: dict[str, list[float]] = {name: [] for name in runs}
    eager: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            for _ in range(3):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 1000 / 3)
            start = time.perf_counter()
            runs[name](pool)
            torch.cuda.synchronize()
            eager[name].append((time.perf_counter() - start) * 1e6)
    return {n: (statistics.median(times[n]), statistics.median(eager[n])) for n in runs}


def child(heads: str, lengths: list[str], lock: Path, *, per_key: bool) -> None:
    """Compile and check the rows of one head count; then time them while no other process runs."""
    hk, hv = map(int, heads.split("/"))
    ready, peer = [], "FLA" if per_key else "FlashInfer"
    for name in lengths:
        x = drawn(hk, hv, LENGTHS[name], per_key=per_key)
        wanted = exact(x)
        sides, notes = {"sluice": own(x)}, {}
        try:
            sides[peer] = fla(x) if per_key else flashinfer(x, max(LENGTHS[name]))
        except ImportError as error:
            notes[peer] = str(error)
        for side, run in list(sides.items()):
            try:
                notes[side] = wrong(run, x, wanted)
            except Exception as error:
                notes[side] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            if notes[side]:
                del sides[side]
        ready.append((name, x, sides, {s: n for s, n in notes.items() if n}))
    with in_turn.turn(lock):
        for name, x, sides, notes in ready:
            in_turn.tell(
                {"heads": heads, "lengths": name, "times": timed(sides, x), "notes": notes}
            )


def table(rows: list[dict[str, Any]], peer: str) -> None:
    print(f"| heads | lengths | sluice | {peer} | ratio | eager: sluice | {peer} | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    ratios: dict[str, list[float]] = {"all rows": [], "the fifteen": [], "eager": []}
    for row in rows:
        cells = [row["heads"], row["lengths"]]
        for i in range(2):
            ours, theirs = (row["times"].get(n, (None, None))[i] for n in ("sluice", peer))
            ratio = ours / theirs if ours and theirs else None
            cells += ["-" if t is None else f"{t:.1f}" for t in (ours, theirs)]
            cells.append("-" if ratio is None else f"{ratio:.2f}")
            if ratio is None:
                continue
            ratios["eager" if i else "all rows"].append(ratio)
            if not i and row["heads"] in FIFTEEN and row["lengths"] in OF_FIFTEEN:
                ratios["the fifteen"].append(ratio)
        notes = "; ".join(f"{side}: {note}" for side, note in row["notes"].items())
        print(f"| {' | '.join(cells)} |" + (f" {notes}" if notes else ""))
    for name, found in ratios.items():
        if found:
            mean = math.exp(statistics.mean(map(math.log, found)))
            behind = sum(r > 1 for r in found)
            print(f"{name}: geometric mean {mean:.3f}, behind in {behind} of {len(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="*")
    parser.add_argument("--lengths", nargs="*", default=list(LENGTHS))
    parser.add_argument("--per-key", action="store_true", help="one decay per key, beside FLA")
    parser.add_argument("--child", metavar="LOCK", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        with torch.no_grad():
            child(given.heads[0], given.lengths, Path(given.child), per_key=given.per_key)
        return
    if given.per_key:
        peer_environment.for_peers()
    for name, value in conditions(torch.device("cuda"), torch.get_num_threads()).items():
        print(f"{name}: {value}")
    began = time.monotonic()
    line = [sys.executable, __file__, *["--per-key"] * given.per_key, "--lengths", *given.lengths]
    all_heads = given.heads or (PER_KEY_HEADS if given.per_key else HEADS)
    rows = list(in_turn.rows([[*line, "--heads", heads] for heads in all_heads]))
    table(rows, "FLA" if given.per_key else "FlashInfer")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
