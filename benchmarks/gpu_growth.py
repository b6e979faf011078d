"""Prefill from 8 thousand to a million tokens: time per token, and memory beside the inputs.

    PYTHONPATH=src python benchmarks/gpu_growth.py                        # a GPU: under 40 seconds
    PYTHONPATH=src python benchmarks/gpu_growth.py --device cpu --lengths 256,1024 --tail 128

A line is printed only after its call was right. Up to ``--exact`` tokens the whole prompt is
compared with the float64 oracle. Longer ones are compared in two ways: the same tokens in two
calls, the second continuing from the first's state, give what one call gave; and over the last
``--tail`` tokens the output and the state are the oracle's, begun from that same state. Then the
median of the calls, one CUDA graph each; the memory a call takes beyond its outputs, as a multiple
of v, which may be 1.5 at the most; and how the time of a token compares with the shortest prompt.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import sluice
from sluice.testing import compare, oracle

K = V = 128
LENGTHS = "8192,32768,131072,524288,1048576"
MOST_WORKSPACE = 1.5  # of v's bytes
REPEATS = 20
SECONDS = 0.4  # of timing, for each line

Tensors = dict[str, torch.Tensor]


def inputs(T: int, heads: tuple[int, int], device: str, dtype: torch.dtype) -> Tensors:
    """Unit keys, and decays from a few tokens to many thousands; drawn where they are used."""
    gen = torch.Generator(device).manual_seed(T)
    Hk, Hv = heads

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=gen, device=device, dtype=torch.float32)

    def unit(*size: int) -> torch.Tensor:
        return torch.nn.functional.normalize(randn(*size), dim=-1).to(dtype)

    uniform = torch.rand(1, T, Hv, generator=gen, device=device)
    return {
        "q": unit(1, T, Hk, K),
        "k": unit(1, T, Hk, K),
        "v": randn(1, T, Hv, V).to(dtype),
        "g": -torch.logspace(-4, -0.5, Hv, device=device) * uniform,
        "beta": randn(1, T, Hv).sigmoid(),
    }


def span(args: Tensors, begin: int, end: int | None = None) -> Tensors:
    return {name: x[:, begin:end] for name, x in args.items()}


def check(args: Tensors, exact: int, tail: int, options: dict[str, Any]) -> float:
    """The largest relative error of what can be known about this prompt; raises if too large."""
    v = args["v"]
    T, device = v.shape[1], v.device
    limit = compare.tolerance(v.dtype, torch.float32, device)
    found: list[float] = []

    def same(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        per = 1 if name.endswith("state") else -2
        compare.assert_within(actual, expected, limit, name=f"{T} tokens: {name}", per=per)
        found.append(compare.relative_error(actual, expected))

    o, state = sluice.prefill(**args, **options)
    if exact >= T:
        right, after = oracle.delta(**args)
        same("o", o, right)
        same("state", state, after)
        return max(found)
    cut = T - tail
    head, between = sluice.prefill(**span(args, 0, cut), **options)
    begun = between.clone()
    rest, after = sluice.prefill(**span(args, cut), state=between, **options)
    same("o in two calls", torch.cat([head, rest], dim=1), o)
    same("state", after, state)
    del head
    right, exact_state = oracle.delta(**span(args, cut), state=begun)
    same("the tail's o", o[:, cut:], right)
    same("the tail's state", state, exact_state)
    return max(found)


def workspace(args: Tensors, options: dict[str, Any]) -> float | None:
    """Bytes at the peak of a call beyond inputs and outputs, over those of v; None on a CPU."""
    if args["v"].device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = sluice.prefill(**args, **options)
    torch.cuda.synchronize()
    outputs = sum(x.numel() * x.element_size() for x in result)
    peak = torch.cuda.max_memory_allocated() - before - outputs
    return peak / (args["v"].numel() * args["v"].element_size())


def microseconds(call: Callable[[], Any], device: str) -> tuple[float, int]:
    """The median of the calls, and how many: replays of a graph, or by the host's clock."""
    call()
    if device == "cpu":
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
        return statistics.median(times), len(times)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        kept = call()
    times = [_replay(graph) for _ in range(3)]
    count = max(5, min(REPEATS, int(SECONDS * 1e6 / times[-1])))
    times = [_replay(graph) for _ in range(count)]
    del kept
    return statistics.median(times), count


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def measure(
    lengths: list[int], heads: tuple[int, int], device: str, exact: int, tail: int
) -> list[str]:
    """Print the lines; what was over its limit comes back."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    first: dict[bool, float] = {}
    over = []
    print("batch_invariant  tokens          us   calls  ns/token  of first  workspace/v    error")
    for T in lengths:
        args = inputs(T, heads, device, dtype)
        for invariant in (False, True):
            options = {"batch_invariant": invariant}
            error = check(args, exact, tail, options)
            extra = workspace(args, options)
            us, calls = microseconds(lambda a=args, o=options: sluice.prefill(**a, **o), device)  # type: ignore[misc]
            token = us * 1e3 / T
            growth = token / first.setdefault(invariant, token)
            if extra is not None and extra > MOST_WORKSPACE:
                over.append(f"{T} tokens: {extra:.2f} times v, more than {MOST_WORKSPACE}")
            shown = "          -" if extra is None else f"{extra:11.2f}"
            print(
                f"{invariant!s:<15} {T:7d} {us:11.1f} {calls:7d} {token:9.2f} {growth:9.2f} "
                f"{shown} {error:8.1e}",
                flush=True,
            )
        del args
        if device == "cuda":
            torch.cuda.empty_cache()
    return over


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--lengths", default=LENGTHS, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--heads", default="2/8", help="key and value heads (%(default)s)")
    parser.add_argument("--exact", type=int, default=8192, help="oracle for all of it up to this")
    parser.add_argument("--tail", type=int, default=2048, help="oracle for the end beyond that")
    parser.add_argument("--backend", help="the sluice backend to use (default: the fastest)")
    options = parser.parse_args()
    Hk, Hv = (int(n) for n in options.heads.split("/"))
    lengths = [int(n) for n in options.lengths.split(",")]
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, sluice {sluice.__version__}, heads {Hk}/{Hv}, 128")
    begin = time.monotonic()
    with torch.inference_mode(), sluice.use_backend(options.backend):
        over = measure(lengths, (Hk, Hv), options.device, options.exact, options.tail)
    print(f"{time.monotonic() - begin:.0f} s")
    for line in over:
        print(line, file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
