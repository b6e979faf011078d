"""Prefill by every sensible plan, by a CUDA graph: is the chosen plan the fastest?

    PYTHONPATH=src python benchmarks/gpu_prefill_plans.py [--portable] [--heads 16/32]

For each row of heads and lengths: the chosen plan, the other width, a program per item, other
segments, and the parallel half alone. Twelve processes compile; then this one checks each plan and
times it. The chosen plan is compared with the ``chunked`` backend in float32. A plan with the same
segments must have its bits, another one results within LIMIT of it. Plans take turns, calls take
turns with up to four sets of tensors, and the table has medians. ``--portable``: the plans of the
Triton kernels instead, for five rows.
"""
# ruff: noqa: T201 (a table on the terminal)

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from gpu_prefill import LENGTHS, LIMIT, drawn, exact
from torch import Tensor

import sluice
from sluice import calls
from sluice.backends.hopper import prefill as hopper
from sluice.backends.triton import gpu, launch
from sluice.backends.triton import prefill as portable
from sluice.backends.triton.configs import blocks
from sluice.backends.triton.prefill_arguments import units_of
from sluice.bench.machine import conditions

ROWS = {
    "16/16": ("8x1024", "8x4096", "16x512", "32768", "8192"),
    "8/16": ("8x1024", "8x4096", "16x512", "32768", "8192"),
    "8/24": ("32768", "8192", "2048"),
    "16/32": ("8x4096", "8x1024", "32768", "8192", "2048"),
    "16/64": ("8x4096", "8x1024", "32768", "8192", "2048"),
    "2/8": ("16x512", "32768", "8192", "8x4096", "8x1024", "2048"),
}
PORTABLE = {
    "16/32": ("8x4096", "32768"),
    "2/8": ("32768",),
    "16/16": ("8x1024",),
    "8/24": ("8192",),
}
ROUNDS, COMPILERS, CACHE = 9, 12, 100 << 20
PEER = Path(__file__).parent / "results" / "h200-prefill-flashinfer-2026-11-18.txt"


class Choice(NamedTuple):
    """A way to run the call."""

    name: str
    same_bits: bool  # as the chosen plan
    launches: Any
    whole: bool = True  # else only its parallel half


def spec_of(x: dict[str, Tensor]) -> Any:
    call = {name: y for name, y in x.items() if name != "state"}
    with calls.check_only() as found:
        sluice.prefill(**call, state=x["state"])
    return found[0].spec


def equal_segments(p: Any, chosen: int) -> Iterator[int]:
    """Other cuts of the longest sequence into equal parts, as long as the workspace allows."""
    longest = blocks(p.T, p.N)
    most = hopper.ROOM * p.T / hopper.STATE_TOKENS
    number = blocks(longest, chosen) if chosen else 1
    around = [number + i for i in (-3, -2, -1, 1, 2, 3)] + [2 * number]
    around += [number // 2, 2, 4]
    for parts in sorted({n for n in around if n > 1 and n != number}):
        segment = blocks(longest, 64 * parts) * 64
        if segment < longest and segment >= 512 and units_of(p, segment, tail=False) <= most:
            yield segment


def hopper_choices(p: Any) -> Iterator[Choice]:
    processors = gpu.processors(p.device)
    chosen = hopper.best_plan(p, processors)

    def of(name: str, same: bool = True, **change: Any) -> Choice:
        return Choice(name, same, hopper.planned_launches(p, chosen._replace(**change)))

    yield of("chosen")
    yield of(f"{192 - chosen.BLOCK_V} columns", BLOCK_V=192 - chosen.BLOCK_V)
    yield of("a program per item", programs=0)
    if chosen.segment:
        yield of("not split", False, segment=0, BLOCK_V=hopper.width(p, 1, processors))
    for segment in equal_segments(p, chosen.segment):
        width = hopper.width(p, blocks(blocks(p.T, p.N), segment), processors)
        yield of(f"{segment} tokens", False, segment=segment, BLOCK_V=width)
    alone = hopper.planned_launches(p, chosen)
    alone.calls = alone.calls[:1]
    yield Choice("chunks alone", True, alone, whole=False)


def portable_choices(p: Any) -> Iterator[Choice]:
    chosen = portable.best_plan(p, gpu.processors(p.device))
    narrow, wide = portable.widths(p)
    yield Choice("chosen", True, portable.planned_launches(p, chosen))
    other = wide if chosen.BLOCK_V == narrow.BLOCK_V else narrow
    plans = {
        f"{other.BLOCK_V} columns": other._replace(segment=chosen.segment),
        "2 stages": chosen._replace(stages=2),
        "4 warps": chosen._replace(num_warps=4),
    }
    if chosen.segment:
        plans["not split"] = wide._replace(segment=0)
    for segment in equal_segments(p, chosen.segment):
        plans[f"{segment} tokens"] = chosen._replace(segment=segment)
    for name, plan in plans.items():
        yield Choice(name, False, portable.planned_launches(p, plan))
    configs = {
        "products: 128 registers": ("PRODUCTS", {"maxnreg": 128}),
        "products: 80 registers": ("PRODUCTS", {"maxnreg": 80}),
        "products: 8 warps": ("PRODUCTS", {"num_warps": 8, "maxnreg": 64}),
        "inverse: 128 registers": ("INVERSE", {"maxnreg": 128}),
        "inverse: 168 registers": ("INVERSE", {"maxnreg": 168}),
        "inverse: 2 warps": ("INVERSE", {"num_warps": 2}),
    }
    for name, (which, change) in configs.items():
        config = getattr(portable, which)._replace(**change)
        with mock.patch.object(portable, which, config):
            yield Choice(name, False, portable.planned_launches(p, chosen))
    alone = portable.planned_launches(p, chosen)
    alone.calls = alone.calls[:2]
    yield Choice("chunks alone", True, alone, whole=False)


def rows_of(given: argparse.Namespace) -> Iterator[tuple[str, str]]:
    rows = PORTABLE if given.portable else ROWS
    for heads, lengths in rows.items():
        for name in lengths:
            if heads in (given.heads or rows) and name in (given.lengths or LENGTHS):
                yield heads, name


def described(heads: str, name: str) -> Any:
    """The spec of a row, without its tensors."""
    HK, HV = map(int, heads.split("/"))
    T, N = sum(LENGTHS[name]), len(LENGTHS[name])

    def like(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device="meta", dtype=dtype)

    q, v = like(1, T, HK, 128, dtype=torch.bfloat16), like(1, T, HV, 128, dtype=torch.bfloat16)
    x = {"q": q, "k": q, "v": v, "g": like(1, T, HV), "beta": like(1, T, HV)}
    bounds, state = like(N + 1, dtype=torch.int32), like(N, HV, 128, 128)
    return spec_of({**x, "state": state, "cu_seqlens": bounds}).on(torch.device("cuda", 0))


def compile_share(given: argparse.Namespace, choices: Callable[[Any], Iterator[Choice]]) -> None:
    number, of = map(int, given.compile.split("/"))
    every = []
    for heads, name in rows_of(given):
        p = described(heads, name)
        every += [(call, p.device) for c in choices(p) for call in c.launches.calls]
    launch.compile_and_load(every, (number, of))


class Tensors:
    """Up to four sets of tensors of a call, so that the cache does not hold the next one's."""

    def __init__(self, spec: Any, x: dict[str, Tensor]) -> None:
        out = torch.empty_like(x["v"])
        given = {**x, "out": out, "state": x["state"].clone()}
        bytes_ = sum(y.nbytes for y in given.values())
        self.first, self.spec = x["state"], spec
        copies = max(1, min(4, CACHE // bytes_))
        self.sets = [
            [given[n].clone() if n in given else None for n in spec.TENSORS] for _ in range(copies)
        ]

    def results(self, run: Any) -> tuple[Tensor, Tensor]:
        """What a call computes, on the first set."""
        names = self.spec.TENSORS
        o, state = self.sets[0][names.index("out")], self.sets[0][names.index("state")]
        o.fill_(float("nan"))
        state.copy_(self.first)
        run(self.sets[0])
        return o.clone(), state.clone()

    def graphs(self, run: Any) -> list[torch.cuda.CUDAGraph]:
        run(self.sets[0])
        torch.cuda.synchronize()
        made = []
        for tensors in self.sets:
            made.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(made[-1]):
                run(tensors)
        return made


def off(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def checked(
    choices: list[Choice], tensors: Tensors, wanted: tuple[Tensor, Tensor]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The graphs of each choice that is right, and what is wrong with the others."""
    graphs, wrong = {}, {}
    chosen: tuple[Tensor, Tensor] | None = None
    for choice in choices:
        try:
            run = choice.launches.bound()
            if choice.whole:
                found = tensors.results(run)
                error = off(found, wanted)
                if not error <= LIMIT:
                    raise ValueError(f"off by {error:.1e}")
                chosen = chosen or found
                if choice.same_bits and not all(map(torch.equal, found, chosen)):
                    raise ValueError("other bits")
            graphs[choice.name] = tensors.graphs(run)
        except Exception as error:
            wrong[choice.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    return graphs, wrong


def timed(graphs: dict[str, list[torch.cuda.CUDAGraph]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, sets in graphs.items():
            turns = sets * (1 if len(sets) > 2 else 3)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            sets[-1].replay()
            begin.record()
            for graph in turns:
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 1000 / len(turns))
    return {name: statistics.median(x) for name, x in times.items()}


def peer_times() -> dict[tuple[str, str], float]:
    """FlashInfer's microseconds, from an earlier run of gpu_prefill.py."""
    found = re.findall(r"^\| (\S+) \| (\S+) \| [\d.]+ \| ([\d.]+) \|", PEER.read_text(), re.M)
    return {(heads, name): float(us) for heads, name, us in found}


def table(rows: list[tuple[str, str, dict[str, float]]]) -> None:
    peer = peer_times()
    print("| heads | lengths | FlashInfer, earlier | chosen | best | its plan |")
    print("|---|---|---|---|---|---|")
    for heads, name, times in rows:
        whole = {n: us for n, us in times.items() if "alone" not in n}
        best = min(whole, key=whole.__getitem__) if whole else "-"
        cells = [peer.get((heads, name)), *(whole.get(n) for n in ("chosen", best))]
        text = ["-" if us is None else f"{us:.1f}" for us in cells]
        print(f"| {heads} | {name} | {' | '.join(text)} | {best} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--portable", action="store_true")
    parser.add_argument("--heads", nargs="*")
    parser.add_argument("--lengths", nargs="*")
    parser.add_argument("--compile", metavar="I/N", help=argparse.SUPPRESS)
    given = parser.parse_args()
    choices = portable_choices if given.portable else hopper_choices
    if given.compile:
        compile_share(given, choices)
        return
    began = time.monotonic()
    for name, value in conditions(torch.device("cuda"), torch.get_num_threads()).items():
        print(f"{name}: {value}")
    line = [sys.executable, *sys.argv]
    compilers = [
        subprocess.Popen([*line, "--compile", f"{i}/{COMPILERS}"]) for i in range(COMPILERS)
    ]
    for process in compilers:
        process.wait()
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    rows = []
    for heads, name in rows_of(given):
        x = drawn(*map(int, heads.split("/")), LENGTHS[name])
        p = spec_of(x)
        graphs, wrong = checked(list(choices(p)), Tensors(p, x), exact(x))
        times = timed(graphs)
        rows.append((heads, name, times))
        plan = (portable if given.portable else hopper).best_plan(p, gpu.processors(p.device))
        told = json.dumps({which: round(us, 1) for which, us in times.items()})
        print(f"{heads} {name} {tuple(plan)[:2]}: {told}")
        for which, text in wrong.items():
            print(f"  {which}: {text}")
        sys.stdout.flush()
    table(rows)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    with torch.no_grad():
        main()
