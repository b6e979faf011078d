"""Seconds until an operator's first result on a GPU whose compiler has kept nothing.

    PYTHONPATH=src python benchmarks/gpu_first_call.py [--model Qwen3.5-35B-A3B] [--tp 1]

Each operator in a process of its own with an empty cache, ``--jobs`` of them at a time: the import
of torch and the start of CUDA, the import of sluice, the first call (compiling or loading included)
and the second. The calls are those of ``sluice warmup``. ``--without-triton``: Triton cannot be
imported, so only kernels that come compiled can serve.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def once(model: str, tp: int, name: str, cache: str, triton: bool) -> None:
    """In the process of its own."""
    os.environ["TRITON_CACHE_DIR"] = cache  # noqa: TID251 (of this process alone)
    if not triton:
        sys.modules["triton"] = None  # type: ignore[assignment]  # an import of it fails
    begin = time.perf_counter()
    import torch

    torch.zeros(1, device="cuda")
    started = time.perf_counter()
    import sluice
    from sluice.layers.qwen import preset
    from sluice.model_calls import ModelCalls

    imported = time.perf_counter() - started
    op, *sizes = CALLS[name]
    call = ModelCalls(preset(model, tp), device="cuda").call(op, "", *sizes)
    operator, times = getattr(sluice, op), []
    for _ in range(2):
        arguments, options = call.make()  # anew: a draft is committed once
        torch.cuda.synchronize()
        start = time.perf_counter()
        operator(*arguments, **options)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    arguments, options = call.make()
    by = sluice.explain(op, *arguments, **options).chosen
    cells = f"{started - begin:8.2f} {imported:8.2f} {times[0]:8.2f} {times[1]:10.5f}"
    print(f"{name:24} {cells}  {by}", flush=True)


CALLS: dict[str, tuple[Any, ...]] = {
    "decode 1 x 1": ("decode", 1, 1),
    "step 1 x 1": ("step", 1, 1, True),
    "verify 8 x 4": ("verify", 8, 4),
    "commit 8 x 4": ("commit", 8, 4),
    "causal_conv1d packed": ("causal_conv1d", 1, 130, True),
    "conv_qkv packed": ("conv_qkv", 1, 130, True),
    "rms_norm_gated": ("rms_norm_gated", 130),
    "prefill packed 1 x 130": ("prefill", 1, 130, True),
    "prefill packed 1 x 16384": ("prefill", 1, 16384, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen3.5-35B-A3B")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--without-triton", action="store_true", help="its import fails")
    parser.add_argument("--only", nargs=2, help="one operator, in this process, and its cache")
    args = parser.parse_args()
    if args.only:
        once(args.model, args.tp, *args.only, not args.without_triton)
        return
    import torch

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.model}, TP {args.tp}")
    print(f"{args.jobs} at a time")
    head = f"{'torch':>8} {'sluice':>8} {'first':>8} {'second':>10}"
    print(f"{'seconds':24} {head}  served by", flush=True)
    command = [sys.executable, __file__, "--model", args.model, "--tp", str(args.tp)]
    command += ["--without-triton"] * args.without_triton + ["--only"]

    def run(name: str) -> None:
        with tempfile.TemporaryDirectory() as cache:
            subprocess.run([*command, name, cache], check=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, CALLS))


if __name__ == "__main__":
    main()
