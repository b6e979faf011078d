"""Context parallel prefill on one GPU: NCCL with one rank, and R segments one after the other.

    PYTHONPATH=src python benchmarks/gpu_segments.py                  # an H200: under a minute
    PYTHONPATH=src python benchmarks/gpu_segments.py --device cpu --tokens 512

First every exchange of sluice.distributed runs over NCCL (gloo on a CPU) with world size 1. Then a
prompt is cut into R = 2, 4, 8 parts; what each rank would do runs here in turn, is compared with
the whole prefill (and, short, with the float64 oracle), and only then timed. Last comes the
scaling model of docs/distributed.md, from the figures just measured.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import sluice
from sluice.distributed import Ranks, Split, forward, move, parallelize, prefill_segments
from sluice.distributed.prefill import prefill as prefill_over_ranks
from sluice.distributed.rows import PoolRows
from sluice.distributed.scan import FAN, GATHERED
from sluice.distributed.share import Share
from sluice.distributed.transition import Call, join
from sluice.layers import GatedDeltaNet, QwenShape
from sluice.state_pool import PoolGeometry, StatePool
from sluice.testing import oracle

K = V = 128
MILLION = 1 << 20


class Figures(NamedTuple):
    """Measured microseconds of one rank's work, for ``tokens`` tokens per rank."""

    tokens: int
    begin: float  # the slower of the first rank and a middle one, before the exchange
    finish: float  # a middle rank, after it, without the states of a long chain
    join: float  # one map more in a chain of ranks


# ------------------------------------------------------------------------------------ the inputs


def inputs(T: int, HK: int, HV: int, device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Keys that agree in part and gates that remember thousands of tokens: borders matter."""
    gen = torch.Generator(device).manual_seed(T)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=gen, device=device)

    unit = torch.nn.functional.normalize
    k = unit(randn(1, 1, HK, K) + 2 * randn(1, T, HK, K), dim=-1)
    return {
        "q": unit(randn(1, T, HK, K), dim=-1).to(dtype),
        "k": k.to(dtype),
        "v": randn(1, T, HV, V).to(dtype),
        "g": -torch.logspace(-5, -1, HV, device=device) * torch.rand_like(randn(1, T, HV)),
        "beta": randn(1, T, HV).sigmoid(),
    }


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()


def require(name: str, value: float, limit: float) -> float:
    if not value <= limit:
        raise AssertionError(f"{name}: relative error {value:.2e} above {limit:.0e}")
    return value


def microseconds(device: str, call: Callable[[], Any]) -> float:
    """The median time of a call: replays of a CUDA graph of it, or by the host's clock."""
    call()
    run, finished = call, lambda: None
    if device == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        run, finished = graph.replay, torch.cuda.synchronize
        run()
    times = []
    for _ in range(20 if device == "cuda" else 1):
        finished()
        start = time.perf_counter()
        run()
        finished()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


# ------------------------------------------------------------------------- the exchanges, 1 rank


def exchanges(device: str) -> None:
    """Every exchange over the backend of this device, with world size 1."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    ranks = Ranks(timeout=30)
    x = torch.randn(4, 5, device=device)
    assert torch.equal(ranks.all_gather("gather", x)[0], x)
    assert torch.equal(ranks.all_reduce("reduce", x.clone()), x)
    args = inputs(300, 2, 8, device, dtype)
    split = Split.even(300, 1)
    o, state = prefill_over_ranks(**args, ranks=ranks, split=split, deliver="all")
    whole, after = sluice.prefill(**args)
    assert torch.equal(o, whole)
    assert torch.equal(state, after)
    torch.manual_seed(0)
    shape = QwenShape("s", 256, 2, 8, 1, (0,))
    layer = GatedDeltaNet(shape, device=device, dtype=dtype).requires_grad_(False)
    hidden = torch.randn(1, 100, 256, device=device, dtype=dtype)
    expected = layer(hidden)
    y = forward(layer, hidden, ranks=ranks, split=Split.even(100, 1))
    require("forward", error(y, expected), 1e-2)
    mesh = init_device_mesh(device, (1,), mesh_dim_names=("tp",))
    assert torch.equal(parallelize(layer, mesh["tp"])(hidden), expected)
    pool = StatePool(PoolGeometry.for_model(shape), slots=2, device=device)
    mine = pool.allocate(2)
    pool.recurrent.normal_()
    saved = pool.snapshot(mine)
    moved = move(saved, ranks=ranks, sources=[0], targets=[0], geometry=pool.geometry)
    assert moved is not None
    assert torch.equal(moved.recurrent, saved.recurrent)
    costs = ", ".join(
        f"{name} {1e6 * c.seconds / c.calls:.0f}" for name, c in ranks.costs().items()
    )
    print(f"{dist.get_backend()}, world size 1: every exchange matched; µs per call: {costs}")


# ---------------------------------------------------------------------------------- the segments


def against_the_oracle(device: str, dtype: torch.dtype, T: int) -> None:
    """Short, and exact: in parts, and unsplit."""
    args = inputs(T, 2, 4, device, dtype)
    exact, exact_state = oracle.delta(**args)
    half = dtype != torch.float32
    limit = 1e-2 if half else (1e-4 if device == "cuda" else 1e-5)
    o, state = sluice.prefill(**args)
    line = [f"unsplit {error(o, exact):.1e} {error(state, exact_state):.1e}"]
    o, state = prefill_segments(**args, split=Split.even(T, 4))
    errors = [error(o, exact), error(state, exact_state)]
    line.append("in parts " + " ".join(f"{require('in parts', e, limit):.1e}" for e in errors))
    print(f"{T} tokens in 4 parts against float64, {dtype}, o and state: {'; '.join(line)}")


def segments(device: str, T: int, R: int, heads: tuple[int, int], dtype: torch.dtype) -> Figures:
    """Check, then time what the ranks do, each by itself."""
    args = inputs(T, *heads, device, dtype)
    split = Split(tuple(T * r // R for r in range(R + 1)))
    whole, after = sluice.prefill(**args)
    limit = 1e-2 if dtype != torch.float32 else 1e-4
    o, state = prefill_segments(**args, split=split)
    errors = [require("o", error(o, whole), limit), require("state", error(state, after), limit)]
    del o, whole
    call = Call(*args.values(), None, None, {})  # type: ignore[arg-type]
    rows = PoolRows("segments", torch.zeros(1, heads[1], V, K, device=device), 1, *[None] * 3, -1)

    def share(rank: int) -> Share:
        part = split.part(rank)
        return Share(call.span(part.start, part.stop), split, rank, rows)

    middle = 1 if R > 2 else R - 1
    messages = torch.stack([share(rank).begin() for rank in range(R)])
    begun = share(middle)
    begun.begin()
    X = join(messages, split.part(middle).chain, V, True)
    begin = microseconds(device, lambda: share(middle).begin())
    first = microseconds(device, lambda: share(0).begin())
    finish = microseconds(device, lambda: begun.finish(X))
    unsplit = microseconds(device, lambda: sluice.prefill(**args))
    part = microseconds(device, lambda: call.span(0, T // R).run(X.clone()))
    many = messages[[middle] * 9]
    joined = (
        microseconds(device, lambda: join(many, tuple(range(9)), V, True))
        - microseconds(device, lambda: join(many, (0, 1), V, True))
    ) / 7
    path = max(first, begin) + joined * (R - 1) + finish
    print(
        f"{heads[0]}/{heads[1]} {T:>7} {R:>2}  {unsplit:>9.0f} {part:>8.0f} {first:>8.0f}"
        f" {begin:>8.0f} {finish:>8.0f} {joined:>6.1f} {unsplit / path:>5.2f}x "
        f" {messages[0].nbytes / 2**20:.2f}  " + " ".join(f"{e:.1e}" for e in errors),
        flush=True,
    )
    return Figures(T // R, max(first, begin), finish, joined)


# -------------------------------------------------------------------------------- the scaling model


def time_on(R: int, T: int, f: Figures, message: int, wire: float, latency: float) -> float:
    """Microseconds for T tokens on R > 1 ranks: the formula (X3) of docs/distributed.md."""
    scale, n = T / R / f.tokens, messages_of(R)
    steps = 1 if R <= GATHERED else math.ceil(math.log(R, FAN))
    exchange = steps * latency + n * message / wire * 1e6
    return (f.begin + f.finish) * scale + exchange + joins(R) * f.join


def joins(R: int) -> int:
    """Maps that the longest chain of R ranks is joined by, in a row."""
    more = 0 if R <= GATHERED else math.ceil(math.log(R, FAN)) - 1
    return messages_of(R) - 1 + more


def messages_of(R: int) -> int:
    """Messages a rank receives at most: all gathered, or those of a scan."""
    if R <= GATHERED:
        return R - 1
    reach = [FAN**i for i in range(math.ceil(math.log(R, FAN)))]
    return sum(min(FAN - 1, (R - 1) // r) for r in reach)


def model(
    figures: list[Figures], one: float, heads: tuple[int, int], wire: float, latency: float
) -> None:
    """The table: ``one`` device as measured, R ranks from the figures of the nearest length."""
    message = 4 * heads[1] * K * (V + K)
    print(
        f"\nModel, {MILLION:,} tokens, heads {heads[0]}/{heads[1]}, from the nearest "
        f"figures; {wire / 1e9:g} GB/s and {latency:g} µs an exchange"
    )
    print("| ranks | tokens per rank | received MiB | time µs | speed-up |\n|---|---|---|---|---|")
    print(f"| 1 | {MILLION:,} | - | {one:,.0f} (measured) | 1.0 |")
    for R in (2, 4, 8, 16, 32, 64):
        f = min(figures, key=lambda f, R=R: abs(math.log(f.tokens * R / MILLION)))  # type: ignore[misc]
        time_ = time_on(R, MILLION, f, message, wire, latency)
        mib = messages_of(R) * message / 2**20
        print(f"| {R} | {MILLION // R:,} | {mib:.1f} | {time_:,.0f} | {one / time_:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, default=131072, help="the longest prompt")
    parser.add_argument("--heads", default="2/8", help="key and value heads")
    parser.add_argument("--wire", type=float, default=50.0, help="GB/s between ranks, of the model")
    parser.add_argument("--latency", type=float, default=30.0, help="µs an exchange, of the model")
    parser.add_argument("--backend", help="the sluice backend to use (default: the fastest)")
    options = parser.parse_args()
    device, HK_HV = options.device, tuple(int(n) for n in options.heads.split("/"))
    heads = (HK_HV[0], HK_HV[1])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, sluice {sluice.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        store = Path(folder) / "store"
        name = "nccl" if device == "cuda" else "gloo"
        if device == "cuda":
            torch.cuda.set_device(0)
        dist.init_process_group(name, init_method=f"file://{store}", rank=0, world_size=1)
        with sluice.use_backend(options.backend):
            run(device, options.tokens, heads, dtype, options.wire * 1e9, options.latency)
        dist.destroy_process_group()


def run(
    device: str, T: int, heads: tuple[int, int], dtype: torch.dtype, wire: float, latency: float
) -> None:
    exchanges(device)
    against_the_oracle(device, dtype, min(2048, T))
    print(
        "\nheads  tokens  R  one device  a part | first rank, middle rank, after the exchange, "
        "a join | x, MiB a message | errors: o, state   (µs, CUDA graphs)"
    )
    lengths = [n for n in (T // 16, T // 4, T) if n >= 256] or [T]
    figures = [segments(device, n, R, heads, dtype) for n in lengths for R in (2, 4, 8)]
    longest = MILLION if device == "cuda" else T
    args = inputs(longest, *heads, device, dtype)
    one = microseconds(device, lambda: sluice.prefill(**args)) * MILLION / longest
    model(figures, one, heads, wire, latency)


if __name__ == "__main__":
    main()
