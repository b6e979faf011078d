"""Milliseconds of prefill's forward and backward on a GPU, by a CUDA graph and eager.

python benchmarks/gpu_training.py            # one line per shape; FLA beside it if installed
python benchmarks/gpu_training.py --kernels  # and of each kernel of a step
python benchmarks/gpu_training.py --plans    # each kernel of the backward, cut in other ways
"""
# ruff: noqa: T201 (a table on the terminal)

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

import sluice

SHAPES = {
    "16/32, 8,192": (16, 32, 1, 8192),
    "16/32, 32,768": (16, 32, 1, 32768),
    "16/32, 4 x 2,048": (16, 32, 4, 2048),
    "8/16, 8,192": (8, 16, 1, 8192),
    "8/16, 32,768": (8, 16, 1, 32768),
}


def inputs(HK: int, HV: int, N: int, T: int) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """q, k, v, g, beta that want gradients, and the borders of packed sequences."""
    gen = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, device="cuda")

    tokens = N * T
    q, k = (drawn(1, tokens, HK, 128).bfloat16() for _ in range(2))
    v = drawn(1, tokens, HV, 128).bfloat16()
    g, beta = -0.05 * drawn(1, tokens, HV).abs(), drawn(1, tokens, HV).sigmoid()
    bounds = None
    if N > 1:
        bounds = torch.arange(N + 1, device="cuda", dtype=torch.int32) * T
    return [x.requires_grad_() for x in (q, k, v, g, beta)], bounds


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


def fla() -> Any:
    """FLA's function, or None."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except Exception:
        return None
    return chunk_gated_delta_rule


def kernels(run: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each kernel of a run."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return {e.key: e.self_device_time_total for e in seen.key_averages() if "kernel" in e.key}


PLANS = {
    # kernel: (warps, value columns, stages)
    "states": [(4, 64, 3), (4, 64, 2), (4, 64, 1)],
    "walk": [(4, 64, 2), (4, 64, 1)],
    "queries": [(4, 64, 2), (4, 32, 2), (4, 64, 1), (4, 128, 1)],
    "keys": [(4, 64, 2), (4, 32, 2), (4, 64, 1)],
}


def plans(name: str) -> None:
    """Microseconds of each kernel of the backward under several plans."""
    from sluice import calls
    from sluice.backends.triton import launch, prefill_backward
    from sluice.contract.backward import DeltaBackwardSpec

    leaves, bounds = inputs(*SHAPES[name])
    q, k, v, g, beta = (x.detach() for x in leaves)
    given = [q, k, v, g, beta, None, None, None, bounds, None, torch.randn_like(v), None]
    made = [torch.empty_like(x) for x in (q, k, v, g, beta)]
    tensors = [*given, *made, None, None, None]
    options = (None, True, False, "vk")
    spec = DeltaBackwardSpec.make("prefill_backward", tuple(map(calls.meta_of, tensors)), options)
    base, launches = prefill_backward.plan_of(spec), {}
    for kernel, choices in PLANS.items():
        for warps, columns, stages in choices:
            config = getattr(base, kernel)._replace(
                num_warps=warps, BLOCK_V=columns, num_stages=stages
            )
            plan = base._replace(**{kernel: config})
            if kernel in ("states", "walk"):
                plan = plan._replace(
                    states=plan.states._replace(BLOCK_V=columns),
                    walk=plan.walk._replace(BLOCK_V=columns),
                )
            launches[kernel, warps, columns, stages] = prefill_backward.planned_launches(spec, plan)
    print(f"{name}: plan {base}")
    launch.compile_and_load((c, spec.device) for x in launches.values() for c in x.calls)
    for key, launched in launches.items():
        try:
            run = launched.bound()
            run(tensors)
            seen = kernels(lambda run=run: run(tensors))
            us = sum(x for n, x in seen.items() if f"backward_{key[0]}_" in n)
            print(f"    {us:9.1f} us  {key}", flush=True)
        except Exception as error:
            print(f"    {key}: {str(error).splitlines()[0][:90]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    arguments = parser.parse_args()
    if arguments.plans:
        plans(arguments.shapes[0])
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds")
    print("| heads, tokens | forward | + backward, graph | + backward, eager | FLA, eager |")
    print("|---|---|---|---|---|")
    for name in arguments.shapes:
        leaves, bounds = inputs(*SHAPES[name])
        do = torch.randn_like(leaves[2])

        def step(leaves: Any = leaves, bounds: Any = bounds, do: Any = do) -> None:
            o, _ = sluice.prefill(*leaves, normalize_qk=True, cu_seqlens=bounds)
            torch.autograd.grad(o, leaves, do)

        def forward(leaves: Any = leaves, bounds: Any = bounds) -> None:
            with torch.no_grad():
                sluice.prefill(*leaves, normalize_qk=True, cu_seqlens=bounds)

        found = [milliseconds(forward, True), milliseconds(step, True), milliseconds(step, False)]
        cells = [f"{x:.3f}" for x in found]
        other = fla()
        if other is None:
            cells.append("not installed")
        else:

            def theirs(
                other: Any = other, leaves: Any = leaves, bounds: Any = bounds, do: Any = do
            ) -> None:
                options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": bounds}
                o, _ = other(*leaves, **options)
                torch.autograd.grad(o, leaves, do)

            try:
                cells.append(f"{milliseconds(theirs, False):.3f}")
            except Exception as error:
                cells.append(str(error).splitlines()[0][:60])
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        if arguments.kernels:
            for kernel, us in sorted(kernels(step).items(), key=lambda x: -x[1]):
                print(f"    {us:9.1f} us  {kernel[:70]}")


if __name__ == "__main__":
    main()
