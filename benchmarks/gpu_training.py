"""Milliseconds of prefill's forward and backward on a GPU, by a CUDA graph and eager.

python benchmarks/gpu_training.py            # one line per shape, checked before it is timed
python benchmarks/gpu_training.py --kernels  # and microseconds of each kernel of the backward
python benchmarks/gpu_training.py --plans    # each kernel of the backward, cut in other ways
python benchmarks/gpu_training.py --peers    # beside FLA and FlashQLA where they are installed
python benchmarks/gpu_training.py --backend triton  # any of these, on this backend alone

Gradients are compared with those of the chunked backward in float64: what is off by more than
LIMIT is not timed. Queries and keys come with length one, as in what FlashQLA publishes.
"""
# ruff: noqa: T201, TID251 (a table on the terminal; the environment of other processes)

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import in_turn
import torch
from torch import Tensor

import sluice
from sluice import calls
from sluice.bench import peer_environment
from sluice.contract.backward import DeltaBackwardSpec

NAMES = ("dq", "dk", "dv", "dg", "dbeta")
LIMIT = 1.2e-2


class Shape(NamedTuple):
    """HK key heads, HV value heads, N sequences of T tokens, and the goals in milliseconds."""

    HK: int
    HV: int
    N: int
    T: int
    both: float | None = None
    backward: float | None = None


SHAPES = {
    "16/32, 8,192": Shape(16, 32, 1, 8192, both=0.85),
    "16/32, 32,768": Shape(16, 32, 1, 32768, both=2.8),
    "16/32, 4 x 2,048": Shape(16, 32, 4, 2048, both=1.0),
    "8/16, 8,192": Shape(8, 16, 1, 8192, backward=0.40),
    "8/16, 32,768": Shape(8, 16, 1, 32768, backward=1.2),
}


class Inputs(NamedTuple):
    """q, k, v, g, beta that want gradients; the borders of packed sequences; dO."""

    leaves: list[Tensor]
    bounds: Tensor | None
    do: Tensor


def inputs(s: Shape) -> Inputs:
    gen = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device="cuda")

    tokens = s.N * s.T
    q, k = (torch.nn.functional.normalize(drawn(1, tokens, s.HK, 128), dim=-1) for _ in range(2))
    v, do = (drawn(1, tokens, s.HV, 128).bfloat16() for _ in range(2))
    g, beta = -0.05 * drawn(1, tokens, s.HV).abs(), drawn(1, tokens, s.HV).sigmoid()
    bounds = None
    if s.N > 1:
        bounds = torch.arange(s.N + 1, device="cuda", dtype=torch.int32) * s.T
    leaves = [x.requires_grad_() for x in (q.bfloat16(), k.bfloat16(), v, g, beta)]
    return Inputs(leaves, bounds, do)


def exact(x: Inputs) -> list[Tensor]:
    """The gradients by the chunked backward in float64."""
    wide = [y.detach().double().requires_grad_() for y in x.leaves]
    told = None if x.bounds is None else x.bounds.cpu()
    o, _ = sluice.prefill(*wide, cu_seqlens=x.bounds, cu_seqlens_cpu=told, backend="chunked")
    return [y.float() for y in torch.autograd.grad(o, wide, x.do.double())]


def errors(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> dict[str, float]:
    """Relative L2 errors of the five gradients."""
    pairs = zip(NAMES, found, wanted, strict=True)
    return {name: float((a.float() - b).norm() / b.norm()) for name, a, b in pairs}


def worst(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> tuple[float, str]:
    """The largest error, and how it reads."""
    off = errors(found, wanted)
    name = max(off, key=lambda n: (off[n] != off[n], off[n]))
    return off[name], f"{name} off by {off[name]:.1e}"


def milliseconds(run: Callable[[], Any], graph: bool, repeats: int = 20) -> float:
    """The median of several runs, each between two events."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    run()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def kernels(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """(kernel, microseconds) in the order in which a run launches them."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    found = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    found.sort(key=lambda e: e.time_range.start)
    if not found:  # a profiler without single events
        return [(e.key, e.self_device_time_total) for e in seen.key_averages()]
    return [(e.name, e.time_range.elapsed_us()) for e in found]


# -- sluice -------------------------------------------------------------------------------------


def step(x: Inputs) -> tuple[Tensor, ...]:
    """Forward and backward."""
    o, _ = sluice.prefill(*x.leaves, cu_seqlens=x.bounds)
    return torch.autograd.grad(o, x.leaves, x.do)


def forward(x: Inputs) -> None:
    with torch.no_grad():
        sluice.prefill(*x.leaves, cu_seqlens=x.bounds)


def arguments(x: Inputs) -> list[Tensor | None]:
    """The inputs of a backward call."""
    q, k, v, g, beta = (y.detach() for y in x.leaves)
    return [q, k, v, g, beta, None, None, None, x.bounds, None, x.do, None]


OPTIONS = (None, False, False, "vk")  # scale, normalize_qk, neg_eigval, state_layout


def backward(x: Inputs) -> None:
    torch.ops.sluice.prefill_backward(*arguments(x), *OPTIONS, None)


def own_rows(names: Sequence[str], with_kernels: bool) -> list[str]:
    """A line of the table per shape; prints the kernels' times as it goes."""
    lines = []
    for name in names:
        shape = SHAPES[name]
        x = inputs(shape)
        off, text = worst(step(x), exact(x))
        kept = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if not off <= LIMIT:
            lines.append(f"| {name} | wrong: {text} | | | | | |")
            print(lines[-1], flush=True)
            continue
        found = [
            milliseconds(partial(forward, x), True),
            milliseconds(partial(backward, x), True),
            milliseconds(partial(step, x), True),
            milliseconds(partial(step, x), False),
        ]
        peak = (torch.cuda.max_memory_allocated() - kept) / x.leaves[2].nbytes
        goal = f"both {shape.both}" if shape.both else f"backward {shape.backward}"
        cells = [*(f"{t:.3f}" for t in found), goal, f"{text}; {peak:.1f} v"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
        if with_kernels:
            for kernel, us in kernels(partial(backward, x)):
                print(f"    {us:9.1f} us  {kernel[:70]}", flush=True)
    return lines


# -- plans --------------------------------------------------------------------------------------

VARIANTS: dict[str, list[dict[str, int]]] = {
    "states": [{"num_stages": 2}, {"num_stages": 1}],
    "walk": [{"num_stages": 1}, {"num_stages": 2}],
    "serial": [{"BLOCK_V": 32}],  # of both walks
    "pairs": [{"num_stages": 2}, {"BLOCK_V": 128, "num_stages": 1}, {"maxnreg": 168}],
    "queries": [{"num_stages": 2}, {"BLOCK_V": 128, "num_stages": 1}, {"maxnreg": 168}],
    "keys": [
        {"num_stages": 2},
        {"PIECE_K": 128},
        {"PIECE_K": 128, "num_stages": 2},
        {"maxnreg": 168},
    ],
    "local": [{"maxnreg": 96}, {"maxnreg": 80}],
    "alongside": [{"on": 0}],  # on Hopper, like the next: walks one after the other
    "programs": [{"number": 10**6}, {"number": 66}],  # of gradients: one per chunk; half of the SMs
    "segment": [{"tokens": n} for n in (0, 1024, 2048, 4096, 8192, 16384)],
    "two per SM": [{"tokens": n} for n in (0, 1024, 2048, 4096)],
}
SKIPPED = {
    "hopper": ("states", "walk", "serial", "two per SM", "pairs", "queries", "keys"),
    "triton": ("alongside", "programs"),
}
"""Choices that a backend's plan does not have, or does not use."""
OWN = {"serial": ("states", "walk"), "alongside": ("walk",), "programs": ("gradients",)}
OWN |= dict.fromkeys(("plan", "segment", "two per SM"), ("",))
"""For a choice without the name of a kernel: the kernels whose times are printed beside it."""


def changed(plan: Any, kernel: str, change: dict[str, int]) -> Any:
    """A plan with one thing changed; "two per SM" has few enough tiles for two programs at once."""
    if kernel == "alongside":
        return plan._replace(alongside=bool(change["on"]))
    if kernel == "programs":
        return plan._replace(programs=change["number"])
    if kernel in ("segment", "two per SM"):
        plan = plan._replace(segment=change["tokens"])
        if kernel == "segment":
            return plan
        states, walk = plan.states._replace(num_stages=2), plan.walk._replace(num_stages=1)
        return plan._replace(states=states, walk=walk)
    touched = ("states", "walk") if kernel == "serial" else (kernel,)
    return plan._replace(**{name: getattr(plan, name)._replace(**change) for name in touched})


def plans(name: str, backend: str) -> None:
    """Microseconds of the backward by a CUDA graph, and of its kernels: by the plan, then with one
    thing changed at a time. Kernels may overlap, so their times may add up to more."""
    from sluice.backends.triton import launch

    prefill_backward = importlib.import_module(f"sluice.backends.{backend}.prefill_backward")
    x = inputs(SHAPES[name])
    wanted = exact(x)
    made = [torch.empty_like(y) for y in x.leaves]
    tensors = [*arguments(x), *made, None, None, None]
    metas = tuple(map(calls.meta_of, tensors))
    spec = DeltaBackwardSpec.make("prefill_backward", metas, OPTIONS)
    base = prefill_backward.plan_of(spec)
    choices = [("plan", {})]
    for kernel, changes in VARIANTS.items():
        choices += [(kernel, change) for change in changes if kernel not in SKIPPED[backend]]
    launches = []
    for kernel, change in choices:
        plan = base if kernel == "plan" else changed(base, kernel, change)
        launches.append(prefill_backward.planned_launches(spec, plan))
    print(f"{name}: {base}")
    launch.compile_and_load((c, spec.device) for y in launches for c in y.calls)
    for (kernel, change), launched in zip(choices, launches, strict=True):
        try:
            run = launched.bound()
            for y in made:
                y.fill_(float("nan"))
            run(tensors)
            off, text = worst(made, wanted)
            seen = kernels(partial(run, tensors))
            whole = 1000 * milliseconds(partial(run, tensors), True)
            parts = [(n, us) for n, us in seen if any(k in n for k in OWN.get(kernel, (kernel,)))]
            told = ", ".join(f"{n.removeprefix('backward_')[:-7]} {us:.0f}" for n, us in parts)
            mark = "" if off <= LIMIT else "WRONG "
            print(f"  {whole:8.1f} us  {kernel} {change}: {told}; {mark}{text}", flush=True)
        except Exception as error:
            print(f"  {kernel} {change}: {str(error).splitlines()[0][:110]}", flush=True)


# -- peers --------------------------------------------------------------------------------------


SIDES = {"sluice": None, "FLA": "fla.ops.gated_delta_rule", "FlashQLA": "flash_qla"}


def output_of(package: str | None, x: Inputs) -> Tensor:
    """A side's forward pass; sluice's own if no package is named."""
    if package is None:
        o, _ = sluice.prefill(*x.leaves, cu_seqlens=x.bounds)
        return o
    bounds = None if x.bounds is None else x.bounds.long()
    o, _ = importlib.import_module(package).chunk_gated_delta_rule(*x.leaves, cu_seqlens=bounds)
    return o


def gradients_of(o: Tensor, x: Inputs) -> tuple[Tensor, ...]:
    """A side's backward pass, which may be called again."""
    return torch.autograd.grad(o, x.leaves, x.do, retain_graph=True)


def both_of(package: str | None, x: Inputs) -> tuple[Tensor, ...]:
    return gradients_of(output_of(package, x), x)


def without_gradients(package: str | None, x: Inputs) -> None:
    with torch.no_grad():
        output_of(package, x)


def child(title: str, name: str, lock: Path) -> None:
    """One side of one row: it compiles beside the others, then it is checked and timed alone."""
    package, x, failed = SIDES[title], inputs(SHAPES[name]), ""
    try:
        both_of(package, x)
        torch.cuda.synchronize()
    except Exception as error:
        failed = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    torch.cuda.empty_cache()
    with in_turn.turn(lock):
        row: dict[str, Any] = {"side": title, "shape": name, "note": failed, "times": None}
        if not failed:
            o = output_of(package, x)
            off, row["note"] = worst(gradients_of(o, x), exact(x))
            if off <= LIMIT:
                row["times"] = [
                    milliseconds(partial(without_gradients, package, x), True),
                    milliseconds(partial(gradients_of, o, x), True),
                    milliseconds(partial(both_of, package, x), True),
                    milliseconds(partial(both_of, package, x), False),
                ]
        in_turn.tell(row)


def peer_rows(names: Sequence[str], fla_triton: str | None) -> None:
    """Every side of each row in a process of its own, checked before it is timed."""
    peer_environment.for_peers()
    sides = [(title, name) for name in names for title in SIDES]
    line = [sys.executable, __file__, "--side"]
    environments = []
    for title, _ in sides:
        path = os.environ.get("PYTHONPATH", "")
        first = f"{fla_triton}{os.pathsep}" if title == "FLA" and fla_triton else ""
        environments.append({**os.environ, "PYTHONPATH": first + path})
    print("| heads, tokens | by | forward | backward | both | both, eager | worst |")
    print("|---|---|---|---|---|---|---|")
    commands = [[*line, title, "--shapes", name] for title, name in sides]
    for row in in_turn.rows(commands, environments):
        cells = ["-"] * 4 if row["times"] is None else [f"{t:.3f}" for t in row["times"]]
        told = " | ".join([row["shape"], row["side"], *cells, row["note"]])
        print(f"| {told} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("kernels", "plans", "peers"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--backend", choices=("hopper", "triton"))
    parser.add_argument(
        "--fla-triton", metavar="DIR", help="another Triton for FLA: it refuses 3.4 to 3.7.0"
    )
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--child", metavar="LOCK", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    with sluice.use_backend(chosen.backend):
        if chosen.child:
            child(chosen.side, chosen.shapes[0], chosen.child)
        else:
            run(chosen)


def run(chosen: argparse.Namespace) -> None:
    """What the command line asks for."""
    began = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if chosen.plans:
        for name in chosen.shapes:
            plans(name, chosen.backend or "hopper")
    elif chosen.peers:
        peer_rows(chosen.shapes, chosen.fla_triton)
    else:
        lines = own_rows(chosen.shapes, chosen.kernels)
        print("\nmilliseconds; the first three by a CUDA graph")
        print("| heads, tokens | forward | backward | both | both, eager | goal | worst, peak |")
        print("|---|---|---|---|---|---|---|")
        print("\n".join(lines))
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
